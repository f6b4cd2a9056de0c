// SPDX-License-Identifier: Apache-2.0
//
// Decoding with an epilogue: on every backend the stages of backfold/epilogue.h applied to the
// packet's values, bit for bit without a transcendental activation and within its stated error
// with one.

#include "backfold/epilogue.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/epilogue_data.h"
#include "core/group_data.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

constexpr Activation kActivations[] = {
    Activation::kNone,    Activation::kGelu, Activation::kGeluTanh, Activation::kSilu,
    Activation::kSigmoid, Activation::kTanh, Activation::kRelu};
constexpr ElementType kTypes[] = {ElementType::kF32, ElementType::kF16, ElementType::kBF16};

double spacing(ElementType type) {
  return type == ElementType::kF32 ? 0x1p-23 : type == ElementType::kF16 ? 0x1p-10 : 0x1p-7;
}

// Backends that fuse, skip or reorder a stage without an activation are off in the last bit of
// every second element; a mask or table off by one is off by whole values.
void expect_finished(const GroupFormat& format, const Stages& stages, std::int64_t count,
                     std::int64_t columns, Kind kind = Kind::kNormal, std::size_t offset = 0) {
  const Given given(format, stages, count, columns, kind);
  const Bytes first = finished(given, reference(), offset).bytes;
  for (const Place& place : places()) {
    SCOPED_TRACE(describe(given.format) + ", " + name_of(kind) + ", " + name_of(stages.activation) +
                 " to " + backfold::name_of(stages.result) + " on " + place.name);
    const Elements result = finished(given, place, offset);
    if (is_exact(stages.activation)) {
      ASSERT_TRUE(result.bytes == first);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const double value = exact(stages.activation, given.before_activation(i));
      const double later = given.product_at(i) * (stages.mask ? given.mask_factor : 1.0f);
      double number = value * later;
      if (is_exact(stages.activation)) {  // every operation rounds to fp32
        number = static_cast<float>(value) * given.product_at(i);
        if (stages.mask) number = static_cast<float>(number) * given.mask_factor;
      }
      if (!given.keeps(i)) number = 0.0;
      const double expected = elements_of(stages.result, {&number, 1}).at(0);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(result.at(i))) << i;
      } else if (is_exact(stages.activation) || std::isinf(expected) || !given.keeps(i)) {
        ASSERT_EQ(result.at(i), expected) << i;
      } else {
        const double error = allowed(stages.activation, value) * std::fabs(later) +
                             spacing(stages.result) * std::fabs(expected) + 0x1p-24;
        ASSERT_NEAR(result.at(i), expected, error) << i;
      }
    }
  }
}

TEST(Epilogue, WithoutStagesIsPlainDecoding) {
  for (const GroupFormat& format : all_formats()) {
    if (!validate(format, Epilogue{}).ok()) continue;
    for (const Kind kind : kAllKinds) {
      const Given given(format, {.result = format.type}, 300 * 3, 3, kind);
      const Bytes plain = unpacked(given.format, given.payload, reference());
      for (const Place& place : places())
        ASSERT_TRUE(finished(given, place).bytes == plain)
            << describe(given.format) << ", " << name_of(kind) << ", on " << place.name;
    }
  }
}

// The decoded values of a fine packet are the inputs, so the error is the activation's alone.
// They score 0.21 at most; tanh(x) as 2 * sigmoid(2 * x) - 1, which cancels, scores 1.04.
TEST(Epilogue, ActivationsAreWithinTheirStatedError) {
  for (const Activation activation : kActivations) {
    if (is_exact(activation)) continue;
    std::vector<float> x;
    for (const float reach : {0.001f, 1.0f, 15.0f, 200.0f})
      for (float place = -1.0f; place < 1.0f; place += 1e-4f) x.push_back(reach * place);
    Given given({.bits = 16}, {.activation = activation}, std::ssize(x), 0);
    given.pack_values(x);
    for (const Place& place : places()) {
      const Elements result = finished(given, place);
      double worst = 0.0;
      for (std::int64_t i = 0; i < result.count(); ++i) {
        const double truth = exact(activation, given.decoded[static_cast<std::size_t>(i)]);
        worst = std::max(worst, std::fabs(result.at(i) - truth) / allowed(activation, truth));
      }
      EXPECT_LT(worst, 1.0) << name_of(activation) << " on " << place.name;
      RecordProperty(name_of(activation) + std::string(" on ") + place.name, std::to_string(worst));
    }
  }
}

// All stages, in double precision from the decoded value on.
TEST(Epilogue, ReferenceFollowsTheFormula) {
  for (const Activation activation : kActivations) {
    const Stages stages{.packed_rows = Runs{96, 9},
                        .rows = Runs{49, 7},
                        .columns = Runs{1, 33},
                        .activation = activation,
                        .product = ElementType::kBF16,
                        .mask = true};
    const Given given({.type = ElementType::kBF16, .bits = 5}, stages, 5'003, 0, Kind::kNormal);
    const Elements result = finished(given, reference());
    for (std::int64_t i = 0; i < result.count(); ++i) {
      double x = given.decoded[static_cast<std::size_t>(i)];
      x = x / entry(given.packed_scale, {96, 9}, i) + entry(given.packed_shift, {96, 9}, i);
      x = (x - entry(given.mean, {49, 7}, i)) * entry(given.scale, {49, 7}, i);
      x = x * entry(given.weight, {1, 33}, i) + entry(given.bias, {1, 33}, i);
      const double y = exact(activation, x) * given.product.at(i) *
                       (given.keeps(i) ? static_cast<double>(given.mask_factor) : 0.0);
      // A stage left out or out of order is off by its own size.
      ASSERT_NEAR(result.at(i), y, 1e-5 * (1 + std::fabs(x * given.product.at(i)))) << i;
    }
  }
}

const Stages kEachStage[] = {
    {.packed_rows = Runs{96, 9}},
    {.packed_rows = Runs{16, 9}},
    {.rows = Runs{1, 33}},
    {.rows = Runs{3, 5}},
    {.rows = Runs{130, 4}},
    {.columns = Runs{1, 36}},
    {.columns = Runs{1, 3}},
    {.columns = Runs{49, 7}, .bias = false},
    {.activation = Activation::kRelu},
    {.product = ElementType::kF32},
    {.product = ElementType::kF16},
    {.product = ElementType::kBF16},
    {.mask = true},
};

TEST(Epilogue, EachStageAlone) {
  for (const ElementType type : kTypes)
    for (Stages stages : kEachStage)
      for (const ElementType result : kTypes) {
        stages.result = result;
        ASSERT_NO_FATAL_FAILURE(expect_finished({.type = type, .bits = 4}, stages, 3'077, 0));
        ASSERT_NO_FATAL_FAILURE(expect_finished(
            {.type = type, .bits = 4, .layout = Layout::kStrided}, stages, 300 * 49, 49));
      }
}

TEST(Epilogue, EveryWidth) {
  for (const Layout layout : {Layout::kFlat, Layout::kStrided})
    for (const int bits : kCodeWidths)
      for (const bool zero_exact : {false, true})
        for (const ElementType result : kTypes) {
          if (zero_exact && bits == 1) continue;
          const Stages stages{
              .rows = Runs{1, 40}, .columns = Runs{40, 3}, .mask = true, .result = result};
          ASSERT_NO_FATAL_FAILURE(expect_finished(
              {.bits = bits, .layout = layout, .zero_exact = zero_exact}, stages, 260 * 40, 40));
        }
}

// What torch saves: a norm with its ReLU's mask, channels first and last; a gated unit; dropout
// after a gelu.
TEST(Epilogue, Combinations) {
  const Stages combinations[] = {
      {.rows = Runs{49, 8}, .columns = Runs{49, 8}, .activation = Activation::kRelu},
      {.rows = Runs{1, 24}, .columns = Runs{1, 24}, .mask = true},
      {.packed_rows = Runs{96, 30}, .columns = Runs{1, 96}, .activation = Activation::kSilu},
      {.activation = Activation::kSilu, .product = ElementType::kBF16},
      {.rows = Runs{64, 50}, .columns = Runs{1, 64}, .activation = Activation::kGelu, .mask = true},
      {.columns = Runs{1, 7}, .activation = Activation::kGeluTanh, .product = ElementType::kF16},
      {.activation = Activation::kTanh, .product = ElementType::kF32, .mask = true},
      {.columns = Runs{7, 9}, .activation = Activation::kSigmoid, .mask = true},
  };
  for (const ElementType type : kTypes)
    for (Stages stages : combinations)
      for (const ElementType result : kTypes)
        for (const Layout layout : {Layout::kFlat, Layout::kStrided}) {
          stages.result = result;
          const std::int64_t columns = stages.mask ? 48 : 45;
          ASSERT_NO_FATAL_FAILURE(expect_finished({.type = type, .bits = 4, .layout = layout},
                                                  stages, 201 * columns, columns));
        }
}

TEST(Epilogue, EverySizeAndAlignment) {
  const Stages stages{.rows = Runs{5, 7},
                      .product = ElementType::kBF16,
                      .mask = true,
                      .result = ElementType::kBF16};
  for (std::int64_t count = 0; count <= 520; ++count)
    ASSERT_NO_FATAL_FAILURE(
        expect_finished({.bits = 3}, stages, count, 0, Kind::kNormal, count % 5));
  for (const std::int64_t columns : {1, 3, 8, 17, 33, 64, 130})
    for (const std::int64_t rows : {1, 127, 128, 129, 300})
      ASSERT_NO_FATAL_FAILURE(expect_finished({.bits = 2, .layout = Layout::kStrided}, stages,
                                              rows * columns, columns, Kind::kNormal,
                                              static_cast<std::size_t>(columns % 5)));
}

TEST(Epilogue, ManyThreads) {
  const Stages stages{.columns = Runs{1, 129}, .activation = Activation::kRelu, .mask = true};
  for (const Layout layout : {Layout::kFlat, Layout::kStrided})
    ASSERT_NO_FATAL_FAILURE(
        expect_finished({.bits = 4, .layout = layout}, stages, 1'537 * 129, 129));
}

TEST(Epilogue, SpecialElements) {
  for (const Kind kind : kAllKinds)
    for (const ElementType type : kTypes)
      for (const Activation activation : kActivations)
        for (const Layout layout : {Layout::kFlat, Layout::kStrided}) {
          const Stages stages{.columns = Runs{1, 35},
                              .activation = activation,
                              .mask = type == ElementType::kF32,
                              .result = type};
          ASSERT_NO_FATAL_FAILURE(expect_finished({.type = type, .bits = 4, .layout = layout},
                                                  stages, 140 * 35, 35, kind));
        }
}

TEST(Epilogue, RefusesWhatItIsNotFor) {
  const auto invalid = StatusCode::kInvalidArgument;
  const float one = 1;
  const GroupFormat format{.count = 256};
  EXPECT_TRUE(validate(format, Epilogue{}).ok());
  expect_error(validate({.type = ElementType::kF64}, Epilogue{}), invalid,
               "type of a packet with an epilogue must be fp32, fp16 or bf16, got fp64");
  expect_error(validate({.layout = Layout::kRotated}, Epilogue{}), invalid, "flat or strided");
  expect_error(validate({.group = 256}, Epilogue{}), invalid, "of 128");
  expect_error(validate({.bits = 7}, Epilogue{}), invalid, "bits must be one of");

  Epilogue packed_rows{.packed_rows = {nullptr, &one, 1, 1}};
  EXPECT_TRUE(validate(format, packed_rows).ok());
  expect_error(validate({.zero_exact = true}, packed_rows), invalid, "not zero_exact");
  expect_error(validate(format, Epilogue{.rows = {nullptr, &one, 0, 4}}), invalid,
               "run and rows of rows must be at least 1, got 0 and 4");
  expect_error(validate(format, Epilogue{.columns = {&one, nullptr, 4, 0}}), invalid,
               "run and columns of columns must be at least 1, got 4 and 0");
  expect_error(validate(format, Epilogue{.result_type = ElementType::kF64}), invalid,
               "result_type must be fp32, fp16 or bf16, got fp64");
}

TEST(Epilogue, RefusesStepsThatMeanNothing) {
  const auto invalid = StatusCode::kInvalidArgument;
  const GroupFormat format{.count = 256};
  const auto checked = [&](const std::vector<Step>& steps) {
    return validate(format, Epilogue{.steps = steps});
  };
  using Kind = Step::Kind;
  using From = Step::From;
  const float one = 1;
  EXPECT_TRUE(checked({{.kind = Kind::kKeep}, {.from = From::kSlot}}).ok());
  EXPECT_TRUE(checked(std::vector<Step>(kMaxSteps)).ok());
  expect_error(checked(std::vector<Step>(kMaxSteps + 1)), invalid,
               "steps must be at most 16, got 17");
  expect_error(checked({{.kind = static_cast<Kind>(8)}}), invalid,
               "kind of a step must be 0 to 7, got 8");
  expect_error(checked({{.from = static_cast<From>(3)}}), invalid,
               "operand of a step must be a number, a tensor or a slot, got 3");
  expect_error(checked({{.kind = Kind::kActivate, .activation = static_cast<Activation>(7)}}),
               invalid,
               "activation must be none, gelu, gelu_tanh, silu, sigmoid, tanh or relu, got 7");
  expect_error(checked({{.kind = Kind::kKeep, .slot = 2}}), invalid,
               "slot must be between 0 and 1, got 2");
  expect_error(checked({{.kind = Kind::kTake, .slot = 1}}), invalid,
               "slot 1 is read before it is filled");
  expect_error(checked({{.kind = Kind::kKeep}, {.from = From::kSlot, .slot = 1}}), invalid,
               "slot 1 is read before it is filled");
  expect_error(checked({{.from = From::kTensor, .tensor = &one, .type = ElementType::kI32}}),
               invalid, "type of a step's tensor must be fp32, fp16 or bf16, got int32");
  expect_error(checked({{.from = From::kTensor, .tensor = &one, .run = 4, .entries = 0}}), invalid,
               "run and entries of a step must be at least 1, got 4 and 0");
  expect_error(checked({{.from = From::kTensor, .entries = 3}}), invalid,
               "tensor of a step must not be null for 3 elements");
  alignas(16) const std::byte bits[48] = {};
  const auto masked = [&](ConstPayload mask) {
    return checked({{.kind = Kind::kMask, .mask = mask}});
  };
  expect_error(masked({bits, 31}), StatusCode::kShortPayload, "mask must hold 32 bytes, got 31");
  expect_error(masked({}), StatusCode::kShortPayload, "mask must hold 32 bytes, got 0");
  expect_error(masked({bits + 1, 32}), invalid, "mask must be 16-byte aligned");
  EXPECT_TRUE(masked({bits, 32}).ok());
}

}  // namespace
}  // namespace backfold::testing
