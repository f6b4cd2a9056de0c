// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/starts.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "torch/probe/blocks.h"
#include "torch/probe/gains.h"
#include "torch/probe/rankings.h"

namespace backfold::torch_layer {
namespace {

using torch::autograd::variable_list;

constexpr std::int64_t kMostCoordinates = 1 << 16;

// Not a divisor of the rows' length, or the same few columns would be read of each.
std::int64_t stride_for(const at::Tensor& leaf) {
  const std::int64_t row = leaf.dim() > 0 ? leaf.size(-1) : 1;
  std::int64_t stride = (leaf.numel() + kMostCoordinates - 1) / kMostCoordinates;
  while (stride > 1 && std::gcd(stride, row) > 1) ++stride;
  return std::max<std::int64_t>(stride, 1);
}

at::Tensor coordinates(const at::Tensor& gradient, std::int64_t stride) {
  const at::Tensor flat = gradient.detach().reshape({-1});
  return as_float(flat.slice(0, 0, flat.numel(), stride)).clone();
}

}  // namespace

// Not by register_hook(), which would drop hooks of other kinds.
class Starts::LeafHook : public torch::autograd::FunctionPreHook {
 public:
  LeafHook(std::weak_ptr<Starts> starts, std::size_t leaf)
      : starts_(std::move(starts)), leaf_(leaf) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto starts = starts_.lock()) starts->leaf_arrived(leaf_, gradients[0]);
    return gradients;
  }

 private:
  const std::weak_ptr<Starts> starts_;
  const std::size_t leaf_;
};

class Starts::StartHook : public torch::autograd::FunctionPreHook {
 public:
  StartHook(std::weak_ptr<Starts> starts, std::size_t start, std::size_t result)
      : starts_(std::move(starts)), start_(start), result_(result) {}
  variable_list operator()(const variable_list& gradients) override {
    variable_list sent = gradients;
    if (const auto starts = starts_.lock()) {
      const at::Tensor instead = starts->arrived(start_, gradients[result_]);
      if (instead.defined()) sent[result_] = instead;
    }
    return sent;
  }

 private:
  const std::weak_ptr<Starts> starts_;
  const std::size_t start_, result_;  // of the node that made it
};

Starts::~Starts() {
  for (const Leaf& leaf : leaves_)
    std::erase_if(torch::autograd::impl::hooks(leaf.tensor), [](const auto& hook) {
      return dynamic_cast<const LeafHook*>(hook.get()) != nullptr;
    });
}

void Starts::begin(Pass pass, int bits) {
  const std::lock_guard lock(mutex_);
  if (pass != Pass::kMoved) differs_ |= next_ != starts_.size();
  pass_ = pass;
  bits_ = bits;
  next_ = 0;
  reading_ = false;
  segment_.clear();
  for (Leaf& leaf : leaves_) {
    if (pass == Pass::kFolded) differs_ |= leaf.arrivals != leaf.clean.size();
    leaf.arrivals = 0;
  }
}

void Starts::watch(const std::vector<at::Tensor>& leaves) {
  for (const at::Tensor& leaf : leaves) {
    const std::size_t number = leaves_.size();
    leaves_.push_back({.tensor = leaf, .stride = stride_for(leaf)});
    torch::autograd::impl::hooks(leaf).push_back(
        std::make_unique<LeafHook>(weak_from_this(), number));
  }
}

std::optional<std::size_t> Starts::add(const at::Tensor& tensor, Site& site) {
  if (pass_ == Pass::kMoved) {
    starts_.push_back({.site = &site,
                       .moved = tensor.tensor_data(),
                       .version = static_cast<std::uint32_t>(tensor._version()),
                       .sizes = tensor.sizes().vec(),
                       .elements = static_cast<double>(tensor.numel())});
    return next_++;
  }
  const std::size_t number = next_++;
  if (number >= starts_.size() || starts_[number].site != &site ||
      tensor.sizes() != at::IntArrayRef(starts_[number].sizes)) {
    differs_ = true;
    return std::nullopt;
  }
  Start& start = starts_[number];
  if (pass_ == Pass::kClean) {
    const at::Tensor moved = std::exchange(start.moved, at::Tensor());
    differs_ |= moved._version() != start.version;
    const bool wide = tensor.scalar_type() == at::kDouble;
    start.tangent = difference(moved, tensor.tensor_data())
                        .to(wide ? at::kFloat : at::kBFloat16)
                        .nan_to_num_(0, 0, 0);
  }
  if (const auto& node = tensor.grad_fn())
    node->add_tensor_pre_hook(
        std::make_unique<StartHook>(weak_from_this(), number, tensor.output_nr()));
  return number;
}

void Starts::read(std::size_t start) {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(reading_, true)) segment_.clear();
  segment_.push_back(start);
}

void Starts::measure(std::size_t start, const at::Tensor& norm, double factor) {
  Site* const site = starts_[start].site;
  measured_.push_back({.site = site,
                       .bits = {bits_},
                       .estimate = Sensitivity::Estimate::kRecomputed,
                       .values = norm,
                       .factor = factor,
                       .root = &root_of(*site)});
}

void Starts::leaf_arrived(std::size_t number, const at::Tensor& gradient) {
  const at::AutoGradMode no_grad(false);
  const std::lock_guard lock(mutex_);
  reading_ = false;
  Leaf& leaf = leaves_[number];
  const std::size_t arrival = leaf.arrivals++;
  if (!gradient.defined() || gradient.layout() != at::kStrided || pass_ == Pass::kMoved) return;
  if (pass_ == Pass::kClean) {
    leaf.clean.resize(arrival);
    leaf.clean.push_back(coordinates(gradient, leaf.stride));
    return;
  }
  if (arrival >= leaf.clean.size() || !leaf.clean[arrival].defined() || segment_.empty()) return;
  const at::Tensor norm = norm_of(coordinates(gradient, leaf.stride) - leaf.clean[arrival]);
  double elements = 0;
  for (const std::size_t start : segment_) elements += starts_[start].elements;
  for (const std::size_t start : segment_)
    measure(start, norm,
            std::sqrt(weights_.of(leaf.tensor) * static_cast<double>(leaf.stride) *
                      starts_[start].elements / elements));
}

at::Tensor Starts::arrived(std::size_t number, const at::Tensor& gradient) {
  const at::AutoGradMode no_grad(false);
  const std::lock_guard lock(mutex_);
  reading_ = false;
  Start& start = starts_[number];
  if (!gradient.defined() || pass_ == Pass::kMoved) return {};
  if (pass_ == Pass::kClean) {
    start.gradient = gradient.detach();
    return {};
  }
  if (!start.gradient.defined() || !start.gradient.is_same_size(gradient)) {
    differs_ = true;
    return {};
  }
  const at::Tensor sums =
      block_sums(difference(gradient, start.gradient), start.tangent, Blocks::kRows);
  // Independent rows exceed twice the norm of their sums one time in 20.
  measure(number, at::maximum(norm_of(sums), sums.sum().abs() / 2), 1 / epsilon_);
  return start.gradient;
}

c10::SmallVector<int, 4> Starts::widths_of(const Footprint& packet) {
  c10::SmallVector<int, 4> widths{4, 8};
  if (packet.element_bytes > 2) widths.push_back(16);
  return widths;
}

c10::SmallVector<int, 4> Starts::widths() const {
  c10::SmallVector<int, 4> widths;
  if (differs_) return widths;
  for (const Start& start : starts_) {
    const auto own = widths_of(root_of(*start.site).reference);
    if (own.size() > widths.size()) widths = own;
  }
  return widths;
}

void Starts::forget() {
  for (const Start& start : starts_) start.site->sensitivity = {};
  measured_.clear();
}

std::vector<Measurement> Starts::take() {
  std::vector<Measurement> measured = std::exchange(measured_, {});
  if (next_ != starts_.size() || differs_) measured.clear();
  forget();
  return measured;
}

}  // namespace backfold::torch_layer
