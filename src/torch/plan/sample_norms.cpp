// SPDX-License-Identifier: Apache-2.0

#include "torch/plan/sample_norms.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include "torch/probe/gains.h"

namespace backfold::torch_layer {
namespace {

class NormHook : public torch::autograd::FunctionPreHook {
 public:
  NormHook(std::vector<std::shared_ptr<CodecMemory>> memories, SampleIds samples)
      : memories_(std::move(memories)), samples_(std::move(samples)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    const at::AutoGradMode no_grad(false);
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.dim() < 1 ||
          gradient.size(0) != samples_.ids.numel())
        continue;
      const at::Tensor norms =
          norm_by_row(gradient.dim() == 1 ? gradient.unsqueeze(1) : gradient.flatten(1));
      const at::Tensor ids = samples_.ids.to(gradient.device());
      for (const auto& memory : memories_) {
        at::Tensor& known = memory->norms;
        if (!known.defined() || known.numel() != samples_.count)
          known = at::zeros({samples_.count}, norms.options());
        known = known.to(norms.device());  // a loaded state is on the CPU
        known.index_copy_(0, ids, norms);
      }
      break;
    }
    return gradients;
  }

 private:
  static at::Tensor norm_by_row(const at::Tensor& rows) {
    return at::linalg_vector_norm(as_float(rows), 2, at::IntArrayRef{1}, false, at::kFloat);
  }

  const std::vector<std::shared_ptr<CodecMemory>> memories_;
  const SampleIds samples_;
};

}  // namespace

bool weigh_samples(CodecMemory& memory, const SampleIds& samples, const at::Tensor& tensor) {
  memory.weights.reset();
  if (!samples.ids.defined() || samples.ids.numel() != tensor.size(0)) return false;
  if (!memory.norms.defined()) return true;
  const at::AutoGradMode no_grad(false);
  memory.norms = memory.norms.to(tensor.device());
  const at::Tensor weights = memory.norms.index_select(0, samples.ids.to(tensor.device())).square();
  const at::Tensor known = weights.gt(0);
  const at::Tensor mean = weights.sum().div(known.sum().clamp_min(1));
  memory.weights = at::where(known, weights, at::where(mean.gt(0), mean, at::ones_like(mean)));
  return true;
}

void watch_norms(const at::Tensor& result, std::vector<std::shared_ptr<CodecMemory>> memories,
                 const SampleIds& samples) {
  if (!result.defined() || !result.grad_fn()) return;
  result.grad_fn()->add_pre_hook(std::make_unique<NormHook>(std::move(memories), samples));
}

}  // namespace backfold::torch_layer
