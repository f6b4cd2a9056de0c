// SPDX-License-Identifier: Apache-2.0
//
// Programs as formulas: which have one, and that it says what the steps say.

#include "group/closed_form.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "core/epilogue_data.h"

namespace backfold::testing {
namespace {

using Kind = Step::Kind;
using From = Step::From;

Step activate(Activation activation) { return {.kind = Kind::kActivate, .activation = activation}; }

double followed(const std::vector<Step>& program, double x) {
  double slots[kSlots] = {};
  for (const Step& step : program) {
    const double operand = step.from == From::kSlot ? step.factor * slots[step.slot] : step.factor;
    switch (step.kind) {
      case Kind::kAdd:
        x += operand;
        break;
      case Kind::kMultiply:
        x *= operand;
        break;
      case Kind::kSquare:
        x *= x;
        break;
      case Kind::kCube:
        x = x * x * x;
        break;
      case Kind::kActivate:
        x = exact(step.activation, x);
        break;
      case Kind::kKeep:
        slots[step.slot] = x;
        break;
      default:
        x = slots[step.slot];
    }
  }
  return x;
}

double evaluated(const core::ClosedForm& form, float x) {
  const auto y = static_cast<float>(exact(form.activation, core::argument(form, x)));
  return core::completed(form, x, y);
}

std::vector<Step> gelu_by_hand() {
  return {{.kind = Kind::kKeep},
          {.kind = Kind::kMultiply, .factor = 0.5f},
          {.kind = Kind::kKeep, .slot = 1},
          {.kind = Kind::kTake},
          {.kind = Kind::kCube},
          {.kind = Kind::kMultiply, .factor = 0.044715f},
          {.kind = Kind::kAdd, .from = From::kSlot},
          {.kind = Kind::kMultiply, .factor = 0.79788456f},
          activate(Activation::kTanh),
          {.kind = Kind::kAdd},
          {.kind = Kind::kMultiply, .from = From::kSlot, .slot = 1}};
}

TEST(ClosedForm, OfAGeluByHand) {
  const auto form = core::closed_form(gelu_by_hand());
  ASSERT_TRUE(form);
  // x times the logistic function of 2u, u being tanh's argument.
  EXPECT_EQ(form->activation, Activation::kSigmoid);
  EXPECT_TRUE(form->is_cubic);
  EXPECT_FLOAT_EQ(form->inner[1], 2 * 0.79788456f);
  EXPECT_EQ(form->inner[2], 0.0f);
  EXPECT_FLOAT_EQ(form->inner[3], 2 * 0.79788456f * 0.044715f);
  EXPECT_EQ(form->factor.slope, 1.0f);
  EXPECT_EQ(form->factor.constant, 0.0f);
  EXPECT_EQ(form->offset.slope, 0.0f);
}

TEST(ClosedForm, OfAGeluByHandBeforeItsProduct) {
  auto program = gelu_by_hand();
  program.resize(program.size() - 2);
  const auto form = core::closed_form(program);
  ASSERT_TRUE(form);
  EXPECT_EQ(form->activation, Activation::kTanh);
  EXPECT_FLOAT_EQ(form->inner[1], 0.79788456f);
  EXPECT_EQ(form->factor.constant, 1.0f);
  EXPECT_EQ(form->offset.constant, 0.0f);
}

// Infinities meet no term that the steps do not have.
TEST(ClosedForm, KeepsInfinities) {
  const auto infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(evaluated(*core::closed_form(gelu_by_hand()), infinity), infinity);
  const std::vector<Step> silu = {{.kind = Kind::kKeep},
                                  activate(Activation::kSigmoid),
                                  {.kind = Kind::kMultiply, .from = From::kSlot}};
  EXPECT_EQ(evaluated(*core::closed_form(silu), infinity), infinity);
  const std::vector<Step> one_less = {activate(Activation::kTanh), {.factor = -1.0f}};
  EXPECT_EQ(evaluated(*core::closed_form(one_less), -infinity), -2.0);
}

TEST(ClosedForm, NoneForWhatIsNotOne) {
  const auto has_form = [](std::vector<Step> program) {
    return core::closed_form(program).has_value();
  };
  const Step tanh = activate(Activation::kTanh), add{.factor = 2.0f}, square{.kind = Kind::kSquare};
  EXPECT_TRUE(has_form({add, tanh}));
  EXPECT_FALSE(has_form({}));
  EXPECT_FALSE(has_form({add, square}));                       // rounds as it says
  EXPECT_FALSE(has_form({activate(Activation::kRelu), add}));  // so does this
  EXPECT_FALSE(has_form({tanh, tanh}));
  EXPECT_FALSE(has_form({tanh, square}));
  EXPECT_FALSE(has_form({square, tanh}));
  EXPECT_FALSE(has_form({square, square, tanh}));
  EXPECT_FALSE(has_form({{.kind = Kind::kMultiply, .factor = 0.0f}, tanh}));
  EXPECT_FALSE(has_form({tanh, {.kind = Kind::kMask}}));
  EXPECT_FALSE(has_form({tanh, {.from = From::kTensor}}));
  EXPECT_FALSE(has_form({{.kind = Kind::kKeep},
                         square,
                         {.kind = Kind::kKeep, .slot = 1},
                         {.kind = Kind::kTake},
                         tanh,
                         {.kind = Kind::kMultiply, .from = From::kSlot, .slot = 1}}));
}

TEST(ClosedForm, SaysWhatTheStepsSay) {
  std::mt19937 random(7);
  const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  const Activation activations[] = {Activation::kGelu, Activation::kGeluTanh, Activation::kSilu,
                                    Activation::kSigmoid, Activation::kTanh};
  int found = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<Step> program = {{.kind = Kind::kKeep}, {.kind = Kind::kKeep, .slot = 1}};
    const int length = 2 + below(8);
    for (int i = 0; i < length; ++i) {
      Step step{.kind = static_cast<Kind>(below(8)), .slot = below(kSlots)};
      if (step.kind == Kind::kMask) step.kind = Kind::kActivate;
      step.activation = activations[below(5)];
      step.from = below(2) ? From::kSlot : From::kNumber;
      step.factor = 0.25f * static_cast<float>(below(13) - 6);
      program.push_back(step);
    }
    const auto form = core::closed_form(program);
    if (!form) continue;
    ++found;
    for (const float x : {-3.0f, -0.7f, 0.0f, 0.1f, 1.3f, 4.0f}) {
      const double expected = followed(program, x);
      // The argument of the activation may be large, its terms of either sign.
      ASSERT_NEAR(evaluated(*form, x), expected, 1e-4 * (1 + std::fabs(expected)))
          << "trial " << trial << ", x = " << x;
    }
  }
  EXPECT_GT(found, 1000);
}

}  // namespace
}  // namespace backfold::testing
