// SPDX-License-Identifier: Apache-2.0
//
// Chains of recipes that one kernel runs while it decodes a packet.
//
// Read from the result down, a chain may be a cast, a mask, a product, an activation and a norm, in
// this order, each at most once, all in the memory order of the packet below. Everything else is
// left to torch's operators.

#include "torch/capture/undisturbed.h"
#include "torch/reads/norms.h"
#include "torch/reads/recipes.h"
#include "torch/store/derived.h"

namespace backfold::torch_layer {
namespace {

using Fused = Recipe::Fused;

int stage_of(Fused fused) {
  switch (fused) {
    case Fused::kCast:
      return 6;
    case Fused::kMask:
      return 5;
    case Fused::kProduct:
      return 4;
    case Fused::kGelu:
    case Fused::kSilu:
    case Fused::kSigmoid:
    case Fused::kTanh:
      return 3;
    case Fused::kNorm:
      return 2;
    case Fused::kNone:
      return 0;
  }
  return 0;
}

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

}  // namespace

bool Derived::in_same_order(const View& view) const {
  return view.offset == 0 && view.sizes == making_.view.sizes &&
         view.strides == making_.view.strides;
}

bool Derived::join(OnePass& pass) {
  const std::lock_guard lock(mutex_);
  if (kept_ || made_.get(current_stream(making_.device))) return false;  // there already
  return add_to(pass);
}

// Goes on to what this recipe takes its values from.
bool Derived::follow(const Source& source, OnePass& pass) const {
  if (!in_same_order(source.view) || !is_narrow_float(source.type)) return false;
  if (const auto* derived = std::get_if<std::shared_ptr<Derived>>(&source.kept))
    return (*derived)->join(pass);
  const auto* packet = std::get_if<std::shared_ptr<SharedPacket>>(&source.kept);
  if (!packet || (*packet)->span().count != c10::multiply_integers(source.view.sizes)) return false;
  pass.packet = *packet;
  return true;
}

bool Derived::add_norm(OnePass& pass) const {
  const Operator& op = *making_.op;
  const auto call =
      op.norm ? norm_call(*op.norm, Call(*op.schema, making_.arguments)) : std::nullopt;
  if (!call) return false;
  const NormRows rows = rows_of(*call, making_.view.sizes, making_.view.strides);
  const Norm::Rows kind = call->norm->rows;
  if (kind != Norm::Rows::kChannels && !is_contiguous(making_.view)) return false;
  if (!follow(making_.sources[0], pass)) return false;
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
  return true;
}

bool Derived::add_to(OnePass& pass) const {
  const Recipe& recipe = *making_.op->recipe;
  const int stage = stage_of(recipe.fused);
  if (stage == 0 || stage >= pass.stage || !is_narrow_float(making_.type)) return false;
  pass.stage = stage;
  Finish& finish = pass.finish;
  const Source& first = making_.sources[0];
  switch (recipe.fused) {
    case Fused::kCast:
      return follow(first, pass);
    case Fused::kMask: {
      const Source* mask = making_.bits ? &*making_.bits : &making_.sources.back();
      const auto* packet = std::get_if<std::shared_ptr<SharedPacket>>(&mask->kept);
      if (!packet || !in_same_order(mask->view)) return false;
      const auto bits = (*packet)->bits();
      if (!bits) return false;
      finish.mask = *bits;
      if (!making_.bits)
        finish.factor = dropout_scale(Call(*making_.op->schema, making_.arguments), making_.type);
      return follow(first, pass);
    }
    case Fused::kProduct: {
      if (making_.sources.size() != 2) return false;
      for (const std::size_t chain : {0, 1}) {
        const Source& factor = making_.sources[1 - chain];
        OnePass attempt = pass;
        if (!in_same_order(factor.view) || !is_narrow_float(factor.type) ||
            !follow(making_.sources[chain], attempt))
          continue;
        pass = std::move(attempt);
        finish.product = checked(factor);
        return true;
      }
      return false;
    }
    case Fused::kGelu: {
      const Call call(*making_.op->schema, making_.arguments);
      finish.activation =
          call["approximate"].toStringRef() == "tanh" ? Activation::kGeluTanh : Activation::kGelu;
      return follow(first, pass);
    }
    case Fused::kSilu:
      finish.activation = Activation::kSilu;
      return follow(first, pass);
    case Fused::kSigmoid:
      finish.activation = Activation::kSigmoid;
      return follow(first, pass);
    case Fused::kTanh:
      finish.activation = Activation::kTanh;
      return follow(first, pass);
    case Fused::kNorm:
      return add_norm(pass);
    case Fused::kNone:
      return false;
  }
  return false;
}

std::optional<c10::Storage> Derived::run_in_one_pass() const {
  const Undisturbed undisturbed;
  OnePass pass;
  if (!add_to(pass)) return std::nullopt;
  const auto made = pass.packet->finish(pass.finish, making_.type);
  if (!made) return std::nullopt;
  return made->storage();
}

}  // namespace backfold::torch_layer
