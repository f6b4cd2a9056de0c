// SPDX-License-Identifier: Apache-2.0

#include "torch/store/saved.h"

#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "torch/capture/node_name.h"

namespace backfold::torch_layer {
namespace {

// Whether a node runs, or will, what others wrote: it is the current node for them as well.
bool has_hooks(torch::autograd::Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() ||
         !node.retains_grad_hooks().empty() || !node.post_hooks().empty();
}

// Bytes that were allocated for the reader: by a packet or a recipe, which may keep it for the next
// reader, unless the memory is the program's own.
std::int64_t made_for_reader(const at::Tensor& tensor, const Saved::Kept& kept) {
  if (!tensor.has_storage()) return 0;
  const bool derived = std::holds_alternative<std::shared_ptr<Derived>>(kept);
  const bool alive = tensor.storage().use_count() > (derived ? 2u : 1u);
  return alive ? 0 : static_cast<std::int64_t>(tensor.storage().nbytes());
}

// An operation in place on a view has its backward inside the node that puts the view back into its
// base, and only that one is ever the current node.
const torch::autograd::Node& reader_in(const torch::autograd::Node& node) {
  const auto* slices = dynamic_cast<const torch::autograd::CopySlices*>(&node);
  return slices && slices->fn ? *slices->fn : node;
}

thread_local bool running_again = false;

}  // namespace

RunningAgain::RunningAgain() { running_again = true; }
RunningAgain::~RunningAgain() { running_again = false; }

SavingNode SavingNode::newest() {
  return {at::sequence_number::peek() - 1, at::RecordFunction::currentThreadId()};
}

bool SavingNode::reads_for_the_last_time() const {
  const auto node = torch::autograd::get_current_node();
  if (!node || node->sequence_nr() != number || node->thread_id() != thread) return false;
  return !torch::autograd::get_current_graph_task_keep_graph() && is_builtin(*node) &&
         !has_hooks(*node);
}

Saved::Saved(const at::Tensor& tensor, const Site& site, SitesAlive sites, View view, Kept kept,
             const Rule* rule)
    : site_(site),
      sites_(std::move(sites)),
      counter_(tensor),
      type_(tensor.scalar_type()),
      view_(std::move(view)),
      kept_(std::move(kept)),
      rule_(rule) {}

void Saved::check_unmodified() const {
  if (!counter_.moved()) return;
  const std::string& path = sites_->path(site_.path).name;
  TORCH_CHECK(false,
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation: [",
              type_, " ", at::IntArrayRef(view_.sizes), "], saved by ", site_.op->name, " (",
              site_.slot, ")", path.empty() ? "" : " in ", path, ", is at version ", counter_.now(),
              "; expected version ", counter_.stood_at,
              " instead. Hint: enable anomaly detection to find the operation that failed to "
              "compute its gradient, with torch.autograd.set_detect_anomaly(True).");
}

void Saved::check_reader() const {
  if (!rule_) return;
  const char* kept = rule_->reads == Reads::kGeometry ? "sizes and strides" : "one bit per element";
  const auto node = torch::autograd::get_current_node();
  TORCH_CHECK(node, "backfold: of the tensor that ", site_.op->name, " saved (", site_.slot,
              ") only ", kept, " was kept, which is all that its backward (", rule_->nodes,
              ") reads. It cannot be read outside of backward; name its module in keep= to have it "
              "there.");
  const std::string name = reader_in(*node).name();
  TORCH_CHECK(is_one_of(name, rule_->nodes), "backfold: of the tensor that ", site_.op->name,
              " saved (", site_.slot, ") only ", kept, " was kept for ", rule_->nodes, ", but ",
              name, " asks for it. Name its module in keep= to keep all of it.");
}

at::Tensor Saved::unpack() {
  if (given_) {
    auto storage = given_->storage.lock();
    TORCH_CHECK(storage, torch::autograd::ERR_BACKWARD_TWICE);
    return tensor_at(c10::Storage(std::move(storage)), given_->view, type_);
  }
  check_unmodified();
  if (stand_in_ && stand_in_->tensor.defined()) return stand_in_->tensor;
  if (!running_again) check_reader();
  struct Restore {
    const Saved& saved;
    at::Tensor operator()(const at::Tensor& tensor) const { return tensor; }
    at::Tensor operator()(const at::Device& device) const {
      return at::empty_strided(saved.view_.sizes, saved.view_.strides,
                               at::TensorOptions(saved.type_).device(device));
    }
    at::Tensor operator()(const std::shared_ptr<Hold>& hold) const {
      return tensor_at(hold->storage(), saved.view_, saved.type_);
    }
    at::Tensor operator()(const std::shared_ptr<SharedPacket>& packet) const {
      // What a Python function does to its saved tensors is its own business: it gets its own.
      return packet->restore(saved.view_, !saved.site_.op->opaque);
    }
    at::Tensor operator()(const std::shared_ptr<ParameterCopy>& copy) const {
      return tensor_at(copy->storage(), saved.view_, saved.type_);
    }
    at::Tensor operator()(const std::shared_ptr<Derived>& derived) const {
      return derived->restore(saved.view_, !saved.site_.op->opaque);
    }
    at::Tensor operator()(const std::shared_ptr<Reader>& reader) const { return reader->read(); }
  };
  at::Tensor tensor = std::visit(Restore{*this}, kept_);
  if (plain_) plain_->timeline().read(site_, made_for_reader(tensor, kept_));
  const bool makes = std::holds_alternative<std::shared_ptr<SharedPacket>>(kept_) ||
                     std::holds_alternative<std::shared_ptr<Derived>>(kept_);
  if (makes && !stand_in_ && node_.reads_for_the_last_time()) {
    given_.emplace(tensor.storage().getWeakStorageImpl(), view_in_span(tensor, 0));
    kept_ = std::shared_ptr<SharedPacket>();
  }
  return tensor;
}

}  // namespace backfold::torch_layer
