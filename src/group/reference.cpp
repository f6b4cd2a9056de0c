// SPDX-License-Identifier: Apache-2.0

#include "group/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/arithmetic.h"
#include "group/geometry.h"
#include "group/row_affine.h"

namespace backfold::core {
namespace {

constexpr int kMaxGroup = 256;

// How a group is stored, decided from its elements.
struct Plan {
  enum class Form { kGrid, kRotatedGrid, kConstant, kFullRange, kMean };
  Form form;
  Kind kind;
  Levels levels;
  Range range;  // header for every form; base and inverse for the grids
};

struct Statistics {
  float low = INFINITY;  // of the finite elements; of the positive ones in zero-exact mode
  float high = -INFINITY;
  float largest = 0.0f;  // magnitude of the finite elements
  Kind kind = kFinite;
  int finite = 0;
};

// Elements as fp32; in zero-exact mode positive ones stay positive and the others become 0.
template <typename T>
void load(const GroupFormat& format, const T* source, std::int64_t stride, int count,
          float* values) {
  for (int i = 0; i < count; ++i) {
    const T element = source[i * stride];
    values[i] = to_float(element);
    if (!format.zero_exact || kind_of(values[i]) != kFinite) continue;
    values[i] = is_positive(element) ? std::max(values[i], 0x1p-126f) : 0.0f;
  }
}

Statistics measure(const GroupFormat& format, const float* values, int count) {
  Statistics found;
  for (int i = 0; i < count; ++i) {
    const Kind kind = kind_of(values[i]);
    found.kind = join(found.kind, kind);
    if (kind != kFinite) continue;
    ++found.finite;
    found.largest = std::max(found.largest, std::fabs(values[i]));
    if (format.zero_exact && values[i] == 0.0f) continue;
    found.low = std::min(found.low, values[i]);
    found.high = std::max(found.high, values[i]);
  }
  if (found.low > found.high) found.low = found.high = 0.0f;
  return found;
}

template <typename T>
bool is_constant(const T* source, std::int64_t stride, int count) {
  for (int i = 1; i < count; ++i)
    if (std::memcmp(&source[i * stride], source, sizeof(T)) != 0) return false;
  return true;
}

// values[0..128) becomes H values. The last group's missing elements are zeros.
void hadamard(float* values) {
  for (int stride = 1; stride < kRotation; stride *= 2) {
    for (int i = 0; i < kRotation; ++i) {
      if ((i & stride) != 0) continue;
      const float a = values[i], b = values[i + stride];
      values[i] = a + b;
      values[i + stride] = a - b;
    }
  }
}

void flip_signs(float* values) {
  for (int i = 0; i < kRotation; ++i)
    if ((rotation_signs(i / 32) >> sign_bit(i) & 1u) != 0) values[i] = -values[i];
}

// Decides how a group is stored. Rotates `values` if the form is kRotatedGrid.
template <typename T>
Plan plan_group(const GroupFormat& format, const T* source, std::int64_t stride, int count,
                float* values) {
  using Form = Plan::Form;
  const Statistics found = measure(format, values, count);
  const Levels levels = levels_for(format.bits, format.zero_exact, found.kind != kFinite);
  if (is_constant(source, stride, count))
    return {Form::kConstant, kFinite, levels, {kExponentMask}};
  if (levels.steps == 0) {
    std::int64_t sum = 0;
    for (int i = 0; i < count; ++i)
      if (kind_of(values[i]) == kFinite) sum += mean_term(values[i], found.largest);
    return {Form::kMean,
            found.kind,
            levels,
            {mean_header(sum, found.finite, found.largest, found.kind)}};
  }
  if (format.layout == Layout::kRotated && found.kind == kFinite) {
    float rotated[kRotation] = {};
    std::copy(values, values + count, rotated);
    flip_signs(rotated);
    hadamard(rotated);
    const Statistics turned = measure(format, rotated, kRotation);
    if (turned.kind == kFinite && turned.low >= -kHuge && turned.high <= kHuge) {
      std::copy(rotated, rotated + kRotation, values);
      return {Form::kRotatedGrid, kFinite, levels,
              round_outward_rotated(turned.low, turned.high, levels)};
    }
  }
  if (found.low < -kHuge || found.high > kHuge)
    return {Form::kFullRange,
            found.kind,
            levels,
            {kExponentMask | kFullRange | static_cast<std::uint32_t>(found.kind) << 16}};

  const bool unrotated = format.layout == Layout::kRotated;
  return {Form::kGrid, found.kind, levels,
          round_outward(found.low, found.high, levels, found.kind, unrotated)};
}

void put(const GroupFormat& format, int i, std::uint32_t code, std::uint8_t* codes) {
  const Planes planes = planes_of(format.bits);
  const auto put_plane = [&](int width, std::uint32_t part, std::uint8_t* plane) {
    const int bit = width * position_of(i, format.group);
    part &= (1u << width) - 1u;
    plane[bit / 8] |= static_cast<std::uint8_t>(part << bit % 8);
    if (width == 16) plane[bit / 8 + 1] |= static_cast<std::uint8_t>(part >> 8);
  };
  put_plane(planes.low, code, codes);
  if (planes.high != 0)
    put_plane(planes.high, code >> planes.low, codes + format.group * planes.low / 8);
}

std::uint32_t get(const GroupFormat& format, int i, const std::uint8_t* codes) {
  const Planes planes = planes_of(format.bits);
  const auto get_plane = [&](int width, const std::uint8_t* plane) {
    const int bit = width * position_of(i, format.group);
    std::uint32_t part = plane[bit / 8];
    if (width == 16) part |= static_cast<std::uint32_t>(plane[bit / 8 + 1]) << 8;
    return part >> bit % 8 & ((1u << width) - 1u);
  };
  std::uint32_t code = get_plane(planes.low, codes);
  if (planes.high != 0)
    code |= get_plane(planes.high, codes + format.group * planes.low / 8) << planes.low;
  return code;
}

template <typename T>
void pack_group(const GroupFormat& format, const T* source, std::int64_t stride, int count,
                MixedKey key, std::uint64_t group, std::uint32_t* header, std::uint8_t* codes) {
  using Form = Plan::Form;
  float values[kMaxGroup] = {};
  load(format, source, stride, count, values);
  const Plan plan = plan_group(format, source, stride, count, values);
  *header = plan.range.header;
  std::memset(codes, 0, static_cast<std::size_t>(format.group * format.bits / 8));
  if (plan.form == Form::kConstant) {
    const double value = to_double(source[0]);
    std::memcpy(codes, &value, sizeof(value));
    return;
  }

  const std::uint64_t first_block = group * static_cast<std::uint64_t>(format.group / kRandomBlock);
  const std::uint32_t offset = block_offset(key, first_block);
  const int drawn = plan.form == Form::kRotatedGrid ? format.group : count;
  for (int i = 0; i < drawn; ++i) {
    if (kind_of(values[i]) != kFinite) {
      put(format, i, reserved_code(format.bits), codes);
      continue;
    }
    if (plan.form == Form::kMean) continue;
    if (format.zero_exact && values[i] == 0.0f) continue;
    const int position = position_of(i, format.group);
    const std::uint32_t hash = block_hash(offset, key.second,
                                          static_cast<std::uint32_t>(first_block) +
                                              static_cast<std::uint32_t>(position / kRandomBlock));
    const float uniform = unit_interval(hash * element_multiplier(position % kRandomBlock));
    const std::uint32_t code =
        plan.form == Form::kFullRange
            ? full_range_draw(values[i], uniform, plan.levels)
            : draw(values[i], plan.range.base, plan.range.inverse, uniform, plan.levels);
    put(format, i, code + static_cast<std::uint32_t>(plan.levels.first), codes);
  }
}

template <typename T>
void unpack_group(const GroupFormat& format, std::uint32_t header, const std::uint8_t* codes,
                  T* destination, std::int64_t stride, int count) {
  const bool special = (header & kExponentMask) == kExponentMask;
  const bool extended = (header & kExtended) != 0;
  if (special && !extended && (header & kFullRange) == 0) {
    double value;
    std::memcpy(&value, codes, sizeof(value));
    for (int i = 0; i < count; ++i) destination[i * stride] = from_double<T>(value);
    return;
  }

  const Kind kind = kind_in(header);
  const Levels levels = levels_for(format.bits, format.zero_exact, kind != kFinite);
  const Grid grid = grid_in(header, levels);
  const auto value_at = [&](std::uint32_t code) {
    if (special) return extended ? mean_in(header) : full_range_value(code, levels);
    return value_of(code, grid);
  };

  if (format.layout == Layout::kRotated && !special && !extended) {
    const Grid scaled = scaled_for_rotation(grid);
    float values[kRotation];
    for (int i = 0; i < kRotation; ++i) values[i] = value_of(get(format, i, codes), scaled);
    hadamard(values);
    flip_signs(values);
    for (int i = 0; i < count; ++i) destination[i * stride] = from_float<T>(values[i]);
    return;
  }

  for (int i = 0; i < count; ++i) {
    const std::uint32_t code = get(format, i, codes);
    T& element = destination[i * stride];
    if (kind != kFinite && code == reserved_code(format.bits)) {
      element = element_of<T>(kind);
    } else if (!format.zero_exact) {
      element = from_float<T>(value_at(code));
    } else if (code == 0) {
      element = from_float<T>(0.0f);
    } else {
      element = from_float<T>(std::max(value_at(code - 1), smallest_positive<T>()));
    }
  }
}

template <typename T>
double group_error(const GroupFormat& format, const T* source, std::int64_t stride, int count) {
  using Form = Plan::Form;
  float values[kMaxGroup] = {};
  load(format, source, stride, count, values);
  const Plan plan = plan_group(format, source, stride, count, values);
  if (plan.form == Form::kConstant) return 0.0;
  const int drawn = plan.form == Form::kRotatedGrid ? format.group : count;
  double error = 0.0;
  for (int i = 0; i < drawn; ++i) {
    if (kind_of(values[i]) != kFinite || (format.zero_exact && values[i] == 0.0f)) continue;
    if (plan.form == Form::kMean) {
      const double distance = static_cast<double>(values[i]) - mean_in(plan.range.header);
      error += distance * distance;
      continue;
    }
    const bool full = plan.form == Form::kFullRange;
    const double inverse = plan.range.inverse;
    const double step = full ? (plan.levels.first != 0 ? 1.0 : 2.0) * FLT_MAX / plan.levels.steps
                             : float_of(plan.range.header & kStepMask);
    const double position = full ? full_range_position(values[i], plan.levels)
                                 : (static_cast<double>(values[i]) - plan.range.base) * inverse;
    const double fraction = position - std::floor(position);
    error += step * step * fraction * (1.0 - fraction);
  }
  // H / 128 is orthogonal up to a factor: the sum of squares of the result is 1/128 of the codes'.
  // A short group loses the share of its missing elements.
  if (plan.form == Form::kRotatedGrid) error *= static_cast<double>(count) / kRotation / kRotation;
  return error;
}

}  // namespace

void reference_pack_group(const GroupFormat& format, const void* first, std::int64_t stride,
                          int count, MixedKey key, std::uint64_t group, std::uint32_t* header,
                          std::uint8_t* codes) {
  with_element(format.type, [&]<typename T>() {
    pack_group(format, static_cast<const T*>(first), stride, count, key, group, header, codes);
  });
}

void reference_unpack_group(const GroupFormat& format, std::uint32_t header,
                            const std::uint8_t* codes, void* first, std::int64_t stride,
                            int count) {
  with_element(format.type, [&]<typename T>() {
    unpack_group(format, header, codes, static_cast<T*>(first), stride, count);
  });
}

double reference_group_error(const GroupFormat& format, const void* first, std::int64_t stride,
                             int count) {
  return with_element(format.type, [&]<typename T>() {
    return group_error(format, static_cast<const T*>(first), stride, count);
  });
}

void reference_pack_group(const GroupFormat& format, const RowAffine& rows, const void* first,
                          std::int64_t element, std::int64_t stride, int count, MixedKey key,
                          std::uint64_t group, std::uint32_t* header, std::uint8_t* codes) {
  float values[128];
  with_element(format.type, [&]<typename T>() {
    for (int i = 0; i < count; ++i) {
      const std::int64_t row = row_place(rows, element + i * stride).row;
      values[i] = scaled(to_float(static_cast<const T*>(first)[i * stride]), shift_of(rows, row),
                         rows.scale[row]);
    }
  });
  reference_pack_group(format_of_values(format), values, 1, count, key, group, header, codes);
}

void reference_unpack_group(const GroupFormat& format, const RowAffine& rows, std::uint32_t header,
                            const std::uint8_t* codes, void* first, std::int64_t element,
                            std::int64_t stride, int count) {
  float values[128];
  reference_unpack_group(format_of_values(format), header, codes, values, 1, count);
  with_element(format.type, [&]<typename T>() {
    for (int i = 0; i < count; ++i) {
      const std::int64_t row = row_place(rows, element + i * stride).row;
      static_cast<T*>(first)[i * stride] =
          from_float<T>(restored(values[i], shift_of(rows, row), 1.0f / rows.scale[row]));
    }
  });
}

}  // namespace backfold::core
