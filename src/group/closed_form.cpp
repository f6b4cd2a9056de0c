// SPDX-License-Identifier: Apache-2.0

#include "group/closed_form.h"

#include <array>

namespace backfold::core {
namespace {

// Coefficients by power of x.
using Cubic = std::array<double, 4>;

std::optional<Cubic> product(const Cubic& a, const Cubic& b) {
  Cubic c{};
  for (std::size_t i = 0; i < 4; ++i)
    for (std::size_t j = 0; j < 4; ++j) {
      const double term = a[i] * b[j];
      if (term == 0) continue;
      if (i + j > 3) return std::nullopt;
      c[i + j] += term;
    }
  return c;
}

Cubic scaled(Cubic a, double by) {
  for (double& term : a) term *= by;
  return a;
}

Cubic sum(Cubic a, const Cubic& b) {
  for (std::size_t i = 0; i < 4; ++i) a[i] += b[i];
  return a;
}

bool is_zero(const Cubic& a) { return a == Cubic{}; }
bool is_line(const Cubic& a) { return a[2] == 0 && a[3] == 0; }

// offset(x) + factor(x) * f(inner(x)), with one f and one inner for all values of a program.
struct Value {
  Cubic offset{}, factor{};
};

class Program {
 public:
  bool take(const Step& step) {
    switch (step.kind) {
      case Step::Kind::kAdd:
        return step.from != Step::From::kTensor && add(operand(step));
      case Step::Kind::kMultiply:
        return step.from != Step::From::kTensor && multiply(operand(step));
      case Step::Kind::kSquare:
        return multiply(now_);
      case Step::Kind::kCube: {
        const Value x = now_;
        return multiply(x) && multiply(x);
      }
      case Step::Kind::kActivate:
        return activate(step.activation);
      case Step::Kind::kKeep:
        slots_[static_cast<std::size_t>(step.slot)] = now_;
        return true;
      case Step::Kind::kTake:
        now_ = slots_[static_cast<std::size_t>(step.slot)];
        return true;
      case Step::Kind::kMask:
        return false;
    }
    return false;
  }

  std::optional<ClosedForm> formula() const {
    if (form_.activation == Activation::kNone || !is_line(now_.offset) || !is_line(now_.factor))
      return std::nullopt;
    ClosedForm form = form_;
    form.factor = line(now_.factor);
    form.offset = line(now_.offset);
    // 1 + tanh(u) is twice the logistic function of 2u, with less work, and nothing cancels.
    if (form.activation == Activation::kTanh && now_.offset == now_.factor) {
      form.activation = Activation::kSigmoid;
      for (float& term : form.inner) term *= 2.0f;
      form.factor = {2.0f * form.factor.constant, 2.0f * form.factor.slope};
      form.offset = {};
    }
    return form;
  }

 private:
  static ClosedForm::Line line(const Cubic& a) {
    return {static_cast<float>(a[0]), static_cast<float>(a[1])};
  }

  Value operand(const Step& step) const {
    if (step.from == Step::From::kNumber) return {.offset = {step.factor}};
    const Value& kept = slots_[static_cast<std::size_t>(step.slot)];
    return {scaled(kept.offset, step.factor), scaled(kept.factor, step.factor)};
  }

  bool add(const Value& other) {
    now_ = {sum(now_.offset, other.offset), sum(now_.factor, other.factor)};
    return true;
  }

  bool multiply(const Value& other) {
    if (!is_zero(now_.factor) && !is_zero(other.factor)) return false;
    const auto offset = product(now_.offset, other.offset);
    const auto factor = is_zero(other.factor) ? product(now_.factor, other.offset)
                                              : product(now_.offset, other.factor);
    if (!offset || !factor) return false;
    now_ = {*offset, *factor};
    return true;
  }

  // A constant, and a square without a cube, would meet infinities as 0 times one.
  bool activate(Activation activation) {
    if (activation == Activation::kNone) return true;
    const Cubic& inner = now_.offset;
    if (activation == Activation::kRelu || form_.activation != Activation::kNone ||
        (is_line(inner) ? inner[1] : inner[3]) == 0)
      return false;
    form_.activation = activation;
    for (std::size_t i = 0; i < 4; ++i) form_.inner[i] = static_cast<float>(inner[i]);
    form_.is_cubic = !is_line(inner);
    now_ = {.factor = {1}};
    return true;
  }

  Value now_{.offset = {0, 1}};
  std::array<Value, kSlots> slots_;
  ClosedForm form_;
};

}  // namespace

std::optional<ClosedForm> closed_form(std::span<const Step> steps) {
  Program program;
  for (const Step& step : steps)
    if (!program.take(step)) return std::nullopt;
  return program.formula();
}

}  // namespace backfold::core
