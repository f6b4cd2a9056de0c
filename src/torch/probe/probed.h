// SPDX-License-Identifier: Apache-2.0
//
// What a probe keeps of a call that saved something foldable, and what autograd holds in place of
// the saved tensors while a probe runs.

#ifndef BACKFOLD_TORCH_PROBE_PROBED_H_
#define BACKFOLD_TORCH_PROBE_PROBED_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/site.h"
#include "torch/probe/comeback.h"
#include "torch/probe/outside.h"
#include "torch/reads/norms.h"
#include "torch/store/saved.h"

namespace backfold::torch_layer {

class Probe;
class Probed;

// An input of a call, identified by the edge that its gradient leaves through.
struct ProbedInput {
  const torch::autograd::Node* function = nullptr;
  std::uint32_t number = 0;
  int slot = 0;
  at::Tensor tangent;  // undefined if unknown
};

// A call that saved something foldable.
struct ProbedCall {
  const Operator* op = nullptr;
  bool closed_form = false;            // needs neither tangents nor a second run
  std::vector<c10::IValue> arguments;  // only if the closed form reads them
  std::vector<ProbedInput> inputs;
  std::vector<std::weak_ptr<Probed>> saved;  // owned by the graph
  std::vector<OutsideSaved> outside;         // in the user's own step
  // For a norm: its input, until its statistics are known, and then how it normalises.
  std::optional<NormCall> norm;
  at::Tensor norm_input;
  Site* norm_site = nullptr;
  std::optional<Normalisation> by;
  std::optional<std::int64_t> shares_along;  // of what it makes
  const torch::autograd::Node* node = nullptr;
};

// Error energies of one tensor, shared by all calls that save it.
struct FoldedErrors {
  at::Tensor tensor;  // keeps its memory from being reused
  at::Tensor energies;
};

// A foldable tensor, kept unfolded. Reads while its node is run again may return it folded.
class Probed : public Reader {
 public:
  Probed(std::weak_ptr<Probe> probe, std::shared_ptr<ProbedCall> call, Site& site,
         Comeback comeback, std::vector<std::shared_ptr<FoldedErrors>> errors)
      : probe_(std::move(probe)),
        call_(std::move(call)),
        site_(site),
        comeback_(std::move(comeback)),
        roots_(comeback_.roots()),
        errors_(std::move(errors)) {}

  // For a call with a closed form: error energies by width and row, for the packet of one of its
  // roots. Computed once.
  const at::Tensor& error_energies(const Site* root);

  at::Tensor read() override;

  Site& site() const { return site_; }
  const Comeback& comeback() const { return comeback_; }
  const std::vector<const Site*>& roots() const { return roots_; }
  // Brackets a second run of its node. In between, read() returns what fold() was last given, or
  // the tensor itself.
  void begin_again() { again_ = true; }
  void fold(at::Tensor folded) { folded_ = std::move(folded); }
  void end_again() {
    again_ = false;
    folded_.reset();
  }

 private:
  const std::weak_ptr<Probe> probe_;
  const std::shared_ptr<ProbedCall> call_;
  Site& site_;
  const Comeback comeback_;
  const std::vector<const Site*> roots_;
  const std::vector<std::shared_ptr<FoldedErrors>> errors_;  // by root; empty without closed form
  bool again_ = false;
  at::Tensor folded_;
};

// Stands in for a tensor of the first pass, which keeps nothing and ends where backward begins.
class NotKept : public Reader {
 public:
  explicit NotKept(std::weak_ptr<Probe> probe) : probe_(std::move(probe)) {}
  at::Tensor read() override;

 private:
  const std::weak_ptr<Probe> probe_;
};

// A tensor that cannot be folded. Tells the probe that backward has begun.
class Watched : public Reader {
 public:
  Watched(std::weak_ptr<Probe> probe, at::Tensor tensor, std::shared_ptr<Hold> reference)
      : probe_(std::move(probe)), tensor_(std::move(tensor)), reference_(std::move(reference)) {}
  at::Tensor read() override;

 private:
  const std::weak_ptr<Probe> probe_;
  const at::Tensor tensor_;
  const std::shared_ptr<Hold> reference_;  // for derivations
};

// A tensor that a checkpoint starts again from.
class StartedFrom : public Reader {
 public:
  StartedFrom(std::weak_ptr<Probe> probe, const Site& site, at::Tensor tensor, std::size_t number)
      : probe_(std::move(probe)), site_(site), tensor_(std::move(tensor)), number_(number) {}
  at::Tensor read() override;

 private:
  const std::weak_ptr<Probe> probe_;
  const Site& site_;
  const at::Tensor tensor_;
  const std::size_t number_;  // in its pass
};

// A tensor that is folded when it is read, by which time its call has ended.
class FoldedLater : public Reader {
 public:
  FoldedLater(std::weak_ptr<Probe> probe, Comeback comeback)
      : probe_(std::move(probe)), comeback_(std::move(comeback)) {}
  at::Tensor read() override;

 private:
  const std::weak_ptr<Probe> probe_;
  const Comeback comeback_;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_PROBE_PROBED_H_
