// SPDX-License-Identifier: Apache-2.0

#include "table/reference.h"

#include <cstring>

namespace backfold::core {

void reference_pack_table(const TableCode& table, ElementType type, const void* source,
                          std::int64_t count, std::uint8_t* low, std::uint8_t* high) {
  const TablePlanes planes(table.bits, count);
  with_element(type, [&]<typename T>() {
    const T* elements = static_cast<const T*>(source);
    const auto code_at = [&](std::int64_t i) { return cell_of(table, to_float(elements[i])); };
    put_codes(planes.low, count, code_at, low);
    if (planes.high != 0)
      put_codes(
          planes.high, count, [&](std::int64_t i) { return code_at(i) >> planes.low; }, high);
  });
}

void reference_unpack_table(const TableCode& table, ElementType type, const std::uint8_t* low,
                            const std::uint8_t* high, std::int64_t count, void* destination) {
  const TablePlanes planes(table.bits, count);
  with_element(type, [&]<typename T>() {
    T* elements = static_cast<T*>(destination);
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t code = get_code(planes.low, low, i);
      if (planes.high != 0) code |= get_code(planes.high, high, i) << planes.low;
      std::memcpy(elements + i, &table.values[code], sizeof(T));
    }
  });
}

}  // namespace backfold::core
