// SPDX-License-Identifier: Apache-2.0
//
// The effect of folding on one node: how the gradients change that it passes on.

#ifndef BACKFOLD_TORCH_PROBE_EFFECT_H_
#define BACKFOLD_TORCH_PROBE_EFFECT_H_

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>

#include "torch/probe/probe.h"

namespace backfold::torch_layer {

// Runs after a node, while its saved tensors are still there. Measures the effects of the given
// call, if any, and records energies if signal gains are needed. A failed measurement warns, and
// the backward goes on.
class EffectHook : public torch::autograd::FunctionPostHook {
 public:
  EffectHook(std::weak_ptr<Probe> probe, torch::autograd::Node& node,
             std::shared_ptr<ProbedCall> call)
      : probe_(std::move(probe)), node_(node), call_(std::move(call)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override;

 private:
  void observe(Probe& probe, const torch::autograd::variable_list& outputs,
               const torch::autograd::variable_list& inputs);

  const std::weak_ptr<Probe> probe_;
  torch::autograd::Node& node_;  // owns this hook
  const std::shared_ptr<ProbedCall> call_;
};

// Whether a node gives the same result when it is run again, without side effects.
bool can_run_again(const torch::autograd::Node& node);

// Whether an operator's calls can be measured by running their nodes again, as far as the operator
// alone tells.
bool can_run_again(const Operator& op);

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_EFFECT_H_
