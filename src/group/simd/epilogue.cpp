// SPDX-License-Identifier: Apache-2.0
//
// Decoding with an epilogue, SIMD: groups are decoded into memory that stays in the first-level
// cache, and each stage passes over it.

#include "group/simd/epilogue.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "group/simd/epilogue.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "base/targets.h"

// After foreach_target.h: compiled again for each target.
#include "group/simd/activations-inl.h"
#include "group/simd/rows-inl.h"
#include "group/simd/unpack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace backfold::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

// Never chosen (targets.cpp): the reference serves machines without SIMD.
EpilogueKernels epilogue_kernel_table() { return {}; }

#else
namespace {

// Neighbouring values that an epilogue works on, number `element` the first.
struct Stretch {
  float* values;  // aligned, with room for whole vectors
  std::int64_t element;
  int count;
};

void raise(const Stretch& stretch) {
  const DF d;
  const VF zero = hn::Zero(d), least = hn::Set(d, core::smallest_positive<core::Half>());
  for (int i = 0; i < stretch.count; i += static_cast<int>(hn::Lanes(d))) {
    const VF x = hn::Load(d, stretch.values + i);
    const auto low = hn::And(hn::Gt(x, zero), hn::Lt(x, least));
    hn::Store(hn::IfThenElse(low, least, x), d, stretch.values + i);
  }
}

void mask(const Stretch& stretch, ConstPayload bits, float factor) {
  const DF d;
  const VF factors = hn::Set(d, factor);
  const auto* bytes = static_cast<const std::uint8_t*>(bits.data);
  for (int i = 0; i < stretch.count; i += static_cast<int>(hn::Lanes(d))) {
    // Eight bytes that hold the vector's bits, none past the end.
    const std::int64_t bit = stretch.element + i;
    const auto first = std::min<std::int64_t>(bit / 8, static_cast<std::int64_t>(bits.bytes) - 8);
    std::uint64_t window;
    std::memcpy(&window, bytes + first, sizeof(window));
    window >>= bit - 8 * first;
    std::uint8_t lane_bits[8];
    std::memcpy(lane_bits, &window, sizeof(window));
    const VF x = hn::Mul(hn::Load(d, stretch.values + i), factors);
    hn::Store(hn::IfThenElseZero(hn::LoadMaskBits(d, lane_bits), x), d, stretch.values + i);
  }
}

template <typename T>
void store(const Stretch& stretch, T* destination) {
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  int i = 0;
  for (; i + lanes <= stretch.count; i += lanes)
    put_restored(d, one_nan(hn::Load(d, stretch.values + i)), destination + i);
  for (; i < stretch.count; ++i)
    destination[i] = core::from_float<T>(core::one_nan(stretch.values[i]));
}

// What with_element() gives, for types that an epilogue takes.
template <typename Work>
void with_result(ElementType type, Work work) {
  core::with_element(type, [&]<typename T>() {
    if constexpr (sizeof(T) < 8) work.template operator()<T>();
  });
}

// The slots of a program, each with room for a stretch.
constexpr int kLongest = std::max(128, kTileColumns);
struct Slots {
  HWY_ALIGN float values[kSlots][kLongest];
};

// The operands of a step with a tensor.
template <typename T>
void gather(const Step& step, const Stretch& stretch, float* operands) {
  const auto* tensor = static_cast<const T*>(step.tensor);
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < stretch.count;) {
    const std::int64_t run = (stretch.element + i) / step.run, entry = run % step.entries;
    // Neighbours that share an entry, or whose entries are neighbours.
    const std::int64_t together =
        step.run > 1 ? (run + 1) * step.run - (stretch.element + i) : step.entries - entry;
    const int end = static_cast<int>(std::min<std::int64_t>(stretch.count, i + together));
    if (step.run > 1) {
      std::fill(operands + i, operands + end, core::to_float(tensor[entry]));
    } else {
      const T* from = tensor + entry;
      int k = i;
      for (; k + lanes <= end; k += lanes)
        hn::StoreU(load_floats(d, from + (k - i)), d, operands + k);
      for (; k < end; ++k) operands[k] = core::to_float(from[k - i]);
    }
    i = end;
  }
}

// x = operation(x, operand) for each value.
template <typename Operation>
HWY_INLINE void combine(const Step& step, const Stretch& stretch, const Slots& slots,
                        Operation operation) {
  const DF d;
  HWY_ALIGN float gathered[kLongest];
  const float* operands = slots.values[step.slot];
  if (step.from == Step::From::kTensor) {
    with_result(step.type, [&]<typename T>() { gather<T>(step, stretch, gathered); });
    operands = gathered;
  }
  const VF factor = hn::Set(d, step.factor);
  for (int i = 0; i < stretch.count; i += static_cast<int>(hn::Lanes(d))) {
    const VF operand =
        step.from == Step::From::kNumber ? factor : hn::Mul(factor, hn::Load(d, operands + i));
    hn::Store(operation(hn::Load(d, stretch.values + i), operand), d, stretch.values + i);
  }
}

void copy(const float* from, int count, float* to) {
  const DF d;
  for (int i = 0; i < count; i += static_cast<int>(hn::Lanes(d)))
    hn::Store(hn::Load(d, from + i), d, to + i);
}

void take_step(const Step& step, const Stretch& stretch, Slots& slots) {
  const auto product = [](VF a, VF b) HWY_ATTR { return hn::Mul(a, b); };
  switch (step.kind) {
    case Step::Kind::kAdd:
      return combine(step, stretch, slots, [](VF a, VF b) HWY_ATTR { return hn::Add(a, b); });
    case Step::Kind::kMultiply:
      return combine(step, stretch, slots, product);
    case Step::Kind::kSquare:
      return apply([&](VF x) HWY_ATTR { return product(x, x); }, stretch.values, stretch.count);
    case Step::Kind::kCube:
      return apply([&](VF x) HWY_ATTR { return product(product(x, x), x); }, stretch.values,
                   stretch.count);
    case Step::Kind::kActivate:
      return activate(step.activation, stretch.values, stretch.count);
    case Step::Kind::kMask:
      return mask(stretch, step.mask, step.factor);
    case Step::Kind::kKeep:
      return copy(stretch.values, stretch.count, slots.values[step.slot]);
    case Step::Kind::kTake:
      return copy(slots.values[step.slot], stretch.count, stretch.values);
  }
}

void finish(const GroupFormat& format, const Epilogue& epilogue, const Stretch& stretch,
            void* destination) {
  const auto [values, element, count] = stretch;
  if (core::raises(format)) raise(stretch);
  if (epilogue.packed_rows.scale != nullptr)
    restore_elements<true>(epilogue.packed_rows, values, element, count, values);
  if (epilogue.rows.scale != nullptr) scale_elements(epilogue.rows, values, element, count, values);
  if (epilogue.columns.weight != nullptr)
    restore_elements<false>(core::columns_as_rows(epilogue.columns), values, element, count,
                            values);
  Slots slots;
  for (const Step& step : epilogue.steps) take_step(step, stretch, slots);
  with_result(epilogue.result_type, [&]<typename T>() {
    store(stretch, static_cast<T*>(destination) + stretch.element);
  });
}

void unpack_finished(const GroupFormat& format, const Epilogue& epilogue, const void* payload,
                     void* destination, std::int64_t begin, std::int64_t end) {
  for_values(format, run_of(format, payload), begin, end,
             [&](float* values, std::int64_t element, int count) {
               finish(format, epilogue, {values, element, count}, destination);
             });
}

}  // namespace

EpilogueKernels epilogue_kernel_table() { return {HWY_TARGET, &unpack_finished}; }

#endif  // HWY_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace backfold::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace backfold::cpu {

HWY_EXPORT(epilogue_kernel_table);

EpilogueKernels epilogue_kernels(std::int64_t target_bit) {
  return BACKFOLD_KERNELS_FOR(epilogue_kernel_table, target_bit)();
}

}  // namespace backfold::cpu
#endif  // HWY_ONCE
