// SPDX-License-Identifier: Apache-2.0
//
// Decoding with a program: on every backend what its steps say, operation by operation.

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "backfold/epilogue.h"
#include "core/epilogue_data.h"
#include "core/group_data.h"
#include "core/support.h"

namespace backfold::testing {
namespace {

using Kind = Step::Kind;
using From = Step::From;

// A step whose tensor is on the host, and what it does to one value in double precision, or to one
// of fp32 as it must round.
struct Planned {
  Step step;
  Elements tensor{ElementType::kF32, {}};
};

Planned with_tensor(Kind kind, ElementType type, std::int64_t run, std::int64_t entries,
                    float factor = 1.0f) {
  Planned planned{{.kind = kind,
                   .from = From::kTensor,
                   .factor = factor,
                   .type = type,
                   .run = run,
                   .entries = entries}};
  planned.tensor = make_elements(testing::Kind::kNormal, type, entries, false,
                                 static_cast<std::uint64_t>(entries));
  return planned;
}

template <typename Number>
Number followed(const std::vector<Planned>& program, const Given& given, Number x,
                std::int64_t element) {
  Number slots[kSlots] = {};
  for (const auto& [step, tensor] : program) {
    Number operand = step.factor;
    if (step.from == From::kSlot) operand = operand * slots[step.slot];
    if (step.from == From::kTensor)
      operand = operand * static_cast<Number>(tensor.at(element / step.run % step.entries));
    switch (step.kind) {
      case Kind::kAdd:
        x = x + operand;
        break;
      case Kind::kMultiply:
        x = x * operand;
        break;
      case Kind::kSquare:
        x = x * x;
        break;
      case Kind::kCube: {
        const Number square = x * x;
        x = square * x;
        break;
      }
      case Kind::kActivate:
        x = static_cast<Number>(exact(step.activation, x));
        break;
      case Kind::kMask:
        x = given.keep[static_cast<std::size_t>(element)] != std::byte{0} ? x * step.factor : 0;
        break;
      case Kind::kKeep:
        slots[step.slot] = x;
        break;
      case Kind::kTake:
        x = slots[step.slot];
        break;
    }
  }
  return x;
}

bool is_exact(const std::vector<Planned>& program) {
  for (const Planned& one : program)
    if (one.step.kind == Kind::kActivate && !testing::is_exact(one.step.activation)) return false;
  return true;
}

Elements stepped(const Given& given, const std::vector<Planned>& program, const Place& place,
                 std::size_t offset) {
  const Backend backend = place.execution.backend;
  std::vector<std::unique_ptr<Memory>> tensors;
  std::vector<Step> steps;
  for (const Planned& one : program) {
    steps.push_back(one.step);
    const Bytes& bytes = one.step.kind == Kind::kMask ? given.mask : one.tensor.bytes;
    const std::size_t past = one.step.kind == Kind::kMask ? 0 : offset * size_of(one.tensor.type);
    tensors.push_back(std::make_unique<Memory>(backend, bytes.size(), past));
    tensors.back()->write(bytes);
    if (one.step.kind == Kind::kMask)
      steps.back().mask = {tensors.back()->data(), bytes.size()};
    else if (one.step.from == From::kTensor)
      steps.back().tensor = tensors.back()->data();
  }
  return finished(given, place, offset, steps);
}

void expect_followed(const GroupFormat& format, const Stages& stages,
                     const std::vector<Planned>& program, std::int64_t count, std::int64_t columns,
                     std::size_t offset = 0) {
  const Given given(format, stages, count, columns);
  const bool exact = is_exact(program);
  for (const Place& place : places()) {
    SCOPED_TRACE(describe(given.format) + " to " + backfold::name_of(stages.result) + " on " +
                 place.name);
    const Elements result = stepped(given, program, place, offset);
    for (std::int64_t i = 0; i < count; ++i) {
      const float x = given.before_activation(i);
      const double value =
          exact ? followed<float>(program, given, x, i) : followed<double>(program, given, x, i);
      const double expected = elements_of(stages.result, {&value, 1}).at(0);
      if (exact) {
        ASSERT_EQ(result.at(i), expected) << i;
      } else {
        const double spacing = stages.result == ElementType::kF32   ? 0x1p-19
                               : stages.result == ElementType::kF16 ? 0x1p-10
                                                                    : 0x1p-7;
        ASSERT_NEAR(result.at(i), expected, spacing * (0.1 + std::fabs(expected))) << i;
      }
    }
  }
}

void expect_everywhere(const Stages& stages, const std::vector<Planned>& program, std::int64_t rows,
                       std::int64_t columns) {
  for (const ElementType type : {ElementType::kF32, ElementType::kF16, ElementType::kBF16})
    for (const ElementType result : {ElementType::kF32, ElementType::kF16, ElementType::kBF16})
      for (const Layout layout : {Layout::kFlat, Layout::kStrided}) {
        Stages to = stages;
        to.result = result;
        ASSERT_NO_FATAL_FAILURE(expect_followed({.type = type, .bits = 4, .layout = layout}, to,
                                                program, rows * columns, columns));
      }
}

// The GELU of GPT-2: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))).
TEST(Steps, GeluByHand) {
  const std::vector<Planned> gelu = {
      {{.kind = Kind::kKeep}},
      {{.kind = Kind::kMultiply, .factor = 0.5f}},
      {{.kind = Kind::kKeep, .slot = 1}},
      {{.kind = Kind::kTake}},
      {{.kind = Kind::kCube}},
      {{.kind = Kind::kMultiply, .factor = 0.044715f}},
      {{.kind = Kind::kAdd, .from = From::kSlot}},
      {{.kind = Kind::kMultiply, .factor = 0.79788456f}},
      {{.kind = Kind::kActivate, .activation = Activation::kTanh}},
      {{.kind = Kind::kAdd}},
      {{.kind = Kind::kMultiply, .from = From::kSlot, .slot = 1}},
  };
  expect_everywhere({}, gelu, 150, 40);
  expect_everywhere({.rows = Runs{40, 30}, .columns = Runs{1, 40}}, gelu, 150, 40);
}

// Formulas with what may follow them, and tensors before one, with which it is none.
TEST(Steps, FormulasAmongOthers) {
  const Planned tanh{{.kind = Kind::kActivate, .activation = Activation::kTanh}};
  const Planned by_tensor = with_tensor(Kind::kMultiply, ElementType::kBF16, 1, 150 * 40);
  const std::vector<Planned> scaled = {{{.kind = Kind::kMultiply, .factor = 1.7f}},
                                       tanh,
                                       {{.kind = Kind::kAdd}}},
                             mask = {{{.kind = Kind::kMask, .factor = 1.25f}}};
  const auto joined = [](auto... parts) {
    std::vector<Planned> program;
    (program.insert(program.end(), parts.begin(), parts.end()), ...);
    return program;
  };
  const std::vector<Planned> tensor = {by_tensor},
                             half = {{{.kind = Kind::kMultiply, .factor = 0.5f}}};
  expect_everywhere({}, joined(scaled, tensor, mask), 150, 40);
  expect_everywhere({}, joined(tensor, scaled, mask), 150, 40);
  expect_everywhere({.rows = Runs{40, 30}}, joined(scaled, mask), 150, 40);
  expect_everywhere({}, half, 150, 40);
  expect_everywhere({.rows = Runs{40, 30}, .columns = Runs{1, 40}}, joined(half, mask), 150, 40);
}

// An RMS norm by hand: times a number for each row, times one for each column.
TEST(Steps, OperandsByRowAndColumn) {
  for (const std::int64_t columns : {40, 45, 128})
    for (const ElementType type : {ElementType::kF32, ElementType::kF16, ElementType::kBF16})
      expect_everywhere({},
                        {with_tensor(Kind::kMultiply, type, columns, 140),
                         with_tensor(Kind::kMultiply, type, 1, columns, -0.75f),
                         with_tensor(Kind::kAdd, ElementType::kF32, 3, 7)},
                        140, columns);
}

// A residual block: norm, plus another tensor, a ReLU's mask, and what follows it.
TEST(Steps, SumWithATensorAndAMask) {
  for (const std::int64_t columns : {48, 43})
    for (const ElementType type : {ElementType::kF32, ElementType::kF16, ElementType::kBF16})
      expect_everywhere({.rows = Runs{1, columns}, .columns = Runs{1, columns}},
                        {with_tensor(Kind::kAdd, type, 1, 131 * columns),
                         {{.kind = Kind::kMask, .factor = 1.5f}},
                         {{.kind = Kind::kSquare}},
                         with_tensor(Kind::kAdd, type, 1, 131 * columns, 2.0f)},
                        131, columns);
}

TEST(Steps, EveryWidth) {
  const std::vector<Planned> program = {{{.kind = Kind::kKeep, .slot = 1}},
                                        {{.kind = Kind::kSquare}},
                                        {{.kind = Kind::kAdd, .from = From::kSlot, .slot = 1}},
                                        with_tensor(Kind::kMultiply, ElementType::kBF16, 1, 40)};
  for (const int bits : kCodeWidths)
    for (const bool zero_exact : {false, true})
      for (const Layout layout : {Layout::kFlat, Layout::kStrided})
        if (!zero_exact || bits > 1) {
          ASSERT_NO_FATAL_FAILURE(
              expect_followed({.bits = bits, .layout = layout, .zero_exact = zero_exact}, {},
                              program, 260 * 40, 40));
        }
}

TEST(Steps, EverySizeAndAlignment) {
  for (std::int64_t count = 1; count <= 300; ++count)
    ASSERT_NO_FATAL_FAILURE(
        expect_followed({.bits = 3}, {.result = count % 2 ? ElementType::kBF16 : ElementType::kF32},
                        {with_tensor(Kind::kAdd, ElementType::kBF16, 1, count),
                         {{.kind = Kind::kMask}},
                         with_tensor(Kind::kMultiply, ElementType::kF32, 8, 5)},
                        count, 0, static_cast<std::size_t>(count % 5)));
  for (const std::int64_t columns : {1, 3, 8, 17, 33, 64, 130})
    for (const std::int64_t rows : {1, 127, 128, 129, 300})
      ASSERT_NO_FATAL_FAILURE(
          expect_followed({.bits = 2, .layout = Layout::kStrided}, {},
                          {with_tensor(Kind::kAdd, ElementType::kF32, columns, rows),
                           {{.kind = Kind::kMask}},
                           with_tensor(Kind::kMultiply, ElementType::kBF16, 1, columns)},
                          rows * columns, columns, static_cast<std::size_t>(columns % 5)));
}

// Groups that have no grid are decoded one element at a time.
TEST(Steps, SpecialElements) {
  for (const testing::Kind kind : kAllKinds)
    for (const Layout layout : {Layout::kFlat, Layout::kStrided}) {
      const Given given({.bits = 4, .layout = layout}, {}, 140 * 35, 35, kind);
      const std::vector<Planned> program = {
          {{.kind = Kind::kKeep}},
          with_tensor(Kind::kMultiply, ElementType::kF32, 35, 140),
          {{.kind = Kind::kAdd, .from = From::kSlot, .factor = 0.5f}},
          {{.kind = Kind::kMask}}};
      const Elements first = stepped(given, program, reference(), 0);
      for (const Place& place : places())
        EXPECT_TRUE(stepped(given, program, place, 0).bytes == first.bytes)
            << name_of(kind) << " on " << place.name;
      for (std::int64_t i = 0; i < first.count(); ++i) {
        const double expected = followed<float>(program, given, given.before_activation(i), i);
        if (std::isnan(expected))
          ASSERT_TRUE(std::isnan(first.at(i))) << name_of(kind) << ", " << i;
        else
          ASSERT_EQ(first.at(i), expected) << name_of(kind) << ", " << i;
      }
    }
}

}  // namespace
}  // namespace backfold::testing
