// SPDX-License-Identifier: Apache-2.0
//
// Recipes that one kernel runs while it decodes a packet.
//
// Read from the result down, recipes join one pass as long as they work element by element, in the
// memory order of a single packet: casts, sums, products, small powers, activations and masks, and
// below all of them perhaps a norm. What they take besides (another tensor, a row of weights) is
// made first. Branches that meet again, as those of a GELU written out by hand do, begin with the
// same values, which the kernel keeps. Everything else is left to torch's operators.

#include "torch/capture/undisturbed.h"
#include "torch/reads/norms.h"
#include "torch/reads/recipes.h"
#include "torch/store/derived.h"

namespace backfold::torch_layer {
namespace {

using Fused = Recipe::Fused;

bool is_narrow_float(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

bool is_contiguous(const View& view) {
  std::int64_t stride = 1;
  for (std::size_t i = view.sizes.size(); i-- > 0;) {
    if (view.sizes[i] != 1 && view.strides[i] != stride) return false;
    stride *= view.sizes[i];
  }
  return true;
}

// A number among the arguments, which may be wrapped as a tensor.
std::optional<double> number_in(const c10::IValue& argument) {
  if (argument.isScalar()) {
    const at::Scalar scalar = argument.toScalar();
    return scalar.isComplex() ? std::nullopt : std::optional(scalar.toDouble());
  }
  if (!argument.isTensor() || !argument.toTensor().defined()) return std::nullopt;
  const at::Tensor& tensor = argument.toTensor();
  if (tensor.dim() != 0 || !tensor.is_cpu() || tensor.is_complex()) return std::nullopt;
  return tensor.item<double>();
}

Step by_number(Step::Kind kind, double number) {
  return {.kind = kind, .factor = static_cast<float>(number)};
}

Activation activation_of(Fused fused, const Call& call) {
  switch (fused) {
    case Fused::kGelu:
      return call["approximate"].toStringRef() == "tanh" ? Activation::kGeluTanh
                                                         : Activation::kGelu;
    case Fused::kSilu:
      return Activation::kSilu;
    case Fused::kSigmoid:
      return Activation::kSigmoid;
    case Fused::kTanh:
      return Activation::kTanh;
    default:
      return Activation::kNone;
  }
}

// How the elements of a broadcast operand go with those of a contiguous result: leading dimensions
// of 1, those that are there, trailing ones of 1.
std::optional<Step> broadcast(const View& operand, const View& result) {
  Step step{.from = Step::From::kTensor, .entries = 1};
  if (!is_contiguous(result) || operand.sizes.size() > result.sizes.size()) return std::nullopt;
  enum { kTrailing, kThere, kLeading } part = kTrailing;
  for (std::size_t back = 1; back <= result.sizes.size(); ++back) {
    const std::int64_t size = result.sizes[result.sizes.size() - back];
    const std::int64_t own =
        back <= operand.sizes.size() ? operand.sizes[operand.sizes.size() - back] : 1;
    if (size == 1) continue;
    if (own == 1) {
      if (part == kThere) part = kLeading;
      if (part == kTrailing) step.run *= size;
    } else if (own == size && part != kLeading) {
      part = kThere;
      step.entries *= size;
    } else {
      return std::nullopt;
    }
  }
  return step;
}

}  // namespace

bool Derived::OnePass::add(const Step& step) {
  if (steps.size() + 1 >= kMaxSteps) return false;  // one may come first
  steps.push_back({step, {}, nullptr, false, {}});
  return true;
}

// What the program began with, once more.
bool Derived::OnePass::start_again() {
  starts_again = true;
  return add({.kind = Step::Kind::kTake});
}

bool Derived::in_same_order(const View& view) const {
  return view.offset == 0 && view.sizes == making_.view.sizes &&
         view.strides == making_.view.strides;
}

bool Derived::join(OnePass& pass) {
  const std::lock_guard lock(mutex_);
  if (kept_ || made_.get(current_stream(making_.device))) return false;  // there already
  return add_to(pass);
}

bool Derived::OnePass::begins_with(const Source& source) const {
  if (const auto* derived = std::get_if<std::shared_ptr<Derived>>(&source.kept))
    return start == derived->get();
  const auto* packet = std::get_if<std::shared_ptr<SharedPacket>>(&source.kept);
  return packet && start == packet->get();
}

// Goes on to what this recipe takes its values from.
bool Derived::follow(const Source& source, OnePass& pass) const {
  if (!in_same_order(source.view) || !is_narrow_float(source.type)) return false;
  if (pass.start && pass.begins_with(source)) return pass.start_again();
  if (const auto* derived = std::get_if<std::shared_ptr<Derived>>(&source.kept))
    return (*derived)->join(pass);
  const auto* packet = std::get_if<std::shared_ptr<SharedPacket>>(&source.kept);
  if (!packet || pass.packet ||
      (*packet)->span().count != c10::multiply_integers(source.view.sizes))
    return false;
  pass.packet = *packet;
  pass.start = packet->get();
  return true;
}

// What a recipe takes beside the values of its chain: an element for each of the result's.
bool Derived::add_operand(const Source& source, Step step, OnePass& pass) const {
  if (!is_narrow_float(source.type)) return false;
  std::optional<Step> spread = Step{.from = Step::From::kTensor};
  const bool whole = in_same_order(source.view);
  if (whole)
    spread->entries = c10::multiply_integers(making_.view.sizes);
  else
    spread = broadcast(source.view, making_.view);
  if (!spread) return false;
  step.from = Step::From::kTensor;
  step.run = spread->run;
  step.entries = spread->entries;
  if (!pass.add(step)) return false;
  OnePass::Planned& planned = pass.steps.back();
  planned.operand = source;
  planned.maker = this;
  planned.spread = !whole;
  return true;
}

// A sum of two tensors times these factors, or of one and a number; or a product, with factors
// of 1.
bool Derived::add_pair(Step::Kind kind, double of_self, double of_other, OnePass& pass) const {
  const double factors[] = {of_self, of_other};
  const auto scale = [&](double by, OnePass& to) {
    return by == 1 || to.add(by_number(Step::Kind::kMultiply, by));
  };
  if (making_.sources.size() == 1) {
    const int chain = making_.sources[0].position;
    if (chain > 1) return false;
    const auto number = number_in(making_.arguments[static_cast<std::size_t>(1 - chain)]);
    return number && follow(making_.sources[0], pass) && scale(factors[chain], pass) &&
           pass.add(by_number(kind, *number * factors[1 - chain]));
  }
  if (making_.sources.size() != 2) return false;
  // A branch of its own over the same packet first, another tensor where there is none.
  for (const bool with_tensor : {false, true})
    for (const std::size_t chain : {0, 1}) {
      const Source &first = making_.sources[chain], &second = making_.sources[1 - chain];
      OnePass attempt = pass;
      if (!follow(first, attempt) || !scale(factors[chain], attempt)) continue;
      const double of_second = factors[1 - chain];
      const bool added = with_tensor ? add_operand(second, by_number(kind, of_second), attempt)
                                     : add_branch(second, by_number(kind, of_second), attempt);
      if (!added) continue;
      pass = std::move(attempt);
      return true;
    }
  return false;
}

// What the chain began with, as it is or at the end of a branch.
bool Derived::add_branch(const Source& source, Step step, OnePass& pass) const {
  if (!in_same_order(source.view)) return false;
  step.from = Step::From::kSlot;
  if (pass.begins_with(source)) {
    pass.starts_again = true;
    return pass.add(step);
  }
  if (pass.keeps_other || !pass.add({.kind = Step::Kind::kKeep, .slot = 1})) return false;
  pass.keeps_other = true;
  if (!follow(source, pass)) return false;
  pass.keeps_other = false;
  if (step.factor != 1 && !pass.add(by_number(Step::Kind::kMultiply, step.factor))) return false;
  step.factor = 1;
  step.slot = 1;
  return pass.add(step);
}

bool Derived::add_mask(OnePass& pass) const {
  const Source* mask = making_.bits ? &*making_.bits : &making_.sources.back();
  const auto* packet = std::get_if<std::shared_ptr<SharedPacket>>(&mask->kept);
  if (!packet || !in_same_order(mask->view)) return false;
  const auto bits = (*packet)->bits();
  if (!bits || !follow(making_.sources[0], pass)) return false;
  const double factor =
      making_.bits ? 1 : dropout_scale(Call(*making_.op->schema, making_.arguments), making_.type);
  if (!pass.add(by_number(Step::Kind::kMask, factor))) return false;
  pass.steps.back().mask = *bits;
  return true;
}

bool Derived::add_norm(OnePass& pass) const {
  if (pass.packet) return false;  // tables come first
  const Operator& op = *making_.op;
  const auto call =
      op.norm ? norm_call(*op.norm, Call(*op.schema, making_.arguments)) : std::nullopt;
  if (!call) return false;
  const NormRows rows = rows_of(*call, making_.view.sizes, making_.view.strides);
  const Norm::Rows kind = call->norm->rows;
  if (kind != Norm::Rows::kChannels && !is_contiguous(making_.view)) return false;
  if (!follow(making_.sources[0], pass) || !pass.steps.empty()) return false;
  const auto& sizes = making_.view.sizes;
  std::vector<c10::IValue> results(4);
  const auto count = static_cast<int>(making_.arguments.size());
  for (const Source& source : making_.sources) {
    if (source.position >= count) {
      results[static_cast<std::size_t>(source.position - count)] = checked(source);
      continue;
    }
    const std::string& slot = op.slots[static_cast<std::size_t>(source.position)];
    if (slot == "weight") pass.finish.weight = checked(source).to(at::kFloat).contiguous();
    if (slot == "bias") pass.finish.bias = checked(source).to(at::kFloat).contiguous();
  }
  pass.finish.norm = normalisation_of(*call, rows, results);
  if (!pass.finish.norm || (pass.finish.bias.defined() && !pass.finish.weight.defined()))
    return false;
  pass.finish.columns = pass.finish.weight.defined() ? pass.finish.weight.numel() : 0;
  if (kind == Norm::Rows::kChannels) pass.finish.run = rows.run;
  if (kind == Norm::Rows::kGroups)
    pass.finish.run = c10::multiply_integers(sizes.begin() + 2, sizes.end());
  pass.start = this;
  return true;
}

bool Derived::add_to(OnePass& pass) const {
  if (!is_narrow_float(making_.type)) return false;
  const Call call(*making_.op->schema, making_.arguments);
  const Fused fused = making_.op->recipe->fused;
  const Source& first = making_.sources[0];
  const auto alpha = [&] { return number_in(call["alpha"]).value_or(1); };
  switch (fused) {
    case Fused::kNone:
      return false;
    case Fused::kNorm:
      return add_norm(pass);
    case Fused::kCast:
      return follow(first, pass);
    case Fused::kMask:
      return add_mask(pass);
    case Fused::kSum:
      return add_pair(Step::Kind::kAdd, 1, alpha(), pass);
    case Fused::kDifference:
      return add_pair(Step::Kind::kAdd, 1, -alpha(), pass);
    case Fused::kReverseDifference:
      return add_pair(Step::Kind::kAdd, -alpha(), 1, pass);
    case Fused::kProduct:
      return add_pair(Step::Kind::kMultiply, 1, 1, pass);
    case Fused::kQuotient: {
      const auto divisor = number_in(call["other"]);
      return making_.sources.size() == 1 && divisor && call["rounding_mode"].isNone() &&
             follow(first, pass) && pass.add(by_number(Step::Kind::kMultiply, 1 / *divisor));
    }
    case Fused::kNegative:
      return follow(first, pass) && pass.add(by_number(Step::Kind::kMultiply, -1));
    case Fused::kPower:
      return follow(first, pass) &&
             pass.add({.kind = number_in(call["exponent"]) == 3 ? Step::Kind::kCube
                                                                : Step::Kind::kSquare});
    case Fused::kGelu:
    case Fused::kSilu:
    case Fused::kSigmoid:
    case Fused::kTanh:
      return follow(first, pass) &&
             pass.add({.kind = Step::Kind::kActivate, .activation = activation_of(fused, call)});
  }
  return false;
}

std::optional<c10::Storage> Derived::run_in_one_pass() const {
  const Undisturbed undisturbed;
  OnePass pass;
  if (!add_to(pass)) return std::nullopt;
  if (pass.starts_again) pass.finish.steps.push_back({{.kind = Step::Kind::kKeep}, {}});
  for (const OnePass::Planned& planned : pass.steps) {
    at::Tensor tensor = planned.mask;
    if (planned.operand) {
      tensor = planned.maker->checked(*planned.operand);
      if (planned.spread) tensor = tensor.contiguous();
    }
    pass.finish.steps.push_back({planned.step, std::move(tensor)});
  }
  const auto made = pass.packet->finish(pass.finish, making_.type);
  if (!made) return std::nullopt;
  return made->storage();
}

}  // namespace backfold::torch_layer
