// SPDX-License-Identifier: Apache-2.0

#include "torch/probe/graphs.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "torch/capture/undisturbed.h"
#include "torch/probe/rankings.h"

namespace backfold::torch_layer {
namespace {

constexpr int kRankedAt = 4;  // bits

// All elements of a dense tensor, in the order of memory.
at::Tensor flat(const at::Tensor& dense) {
  return tensor_at(dense.storage(), {{dense.numel()}, {1}, dense.storage_offset()},
                   dense.scalar_type());
}

// A tensor as it may have been before it was rounded: each value somewhere within one step of its
// group, and zeros that are exact where they are. Its packet is of flat groups.
at::Tensor unrounded(const GraphPacket& packet, const GroupFormat& format, const Key& key) {
  const at::Tensor tensor = packet.unpack();
  const std::int64_t count = tensor.numel();
  const std::int64_t groups = (count + format.group - 1) / format.group;
  // The upper half of a header is a step in bf16, whose sign is a flag (base/arithmetic.h).
  const at::Tensor steps = packet.payload()
                               .narrow(0, 0, 4 * groups)
                               .view(at::kInt)
                               .bitwise_and(0x7fff'0000)
                               .view(at::kFloat)
                               .unsqueeze(1)
                               .expand({groups, format.group})
                               .reshape({-1})
                               .narrow(0, 0, count);
  at::Generator generator = at::globalContext().defaultGenerator(tensor.device()).clone();
  generator.set_current_seed(key.seed ^ key.stream);
  const at::Tensor values = flat(tensor);
  const at::Tensor offsets = at::empty_like(steps, at::MemoryFormat::Contiguous)
                                 .uniform_(-0.5, 0.5, generator)
                                 .mul_(steps);
  const at::Tensor moved = values.to(at::kFloat).add_(offsets);
  if (format.zero_exact)
    values.copy_(at::where(values.eq(0), 0.0f, moved.clamp_min_(1e-30)));
  else
    values.copy_(moved);
  return tensor;
}

bool were_taken(const std::vector<GraphRun>& runs, const std::vector<std::size_t>& order) {
  return runs.empty() && !order.empty();
}

}  // namespace

GraphRun& GraphRuns::run_of(const GraphPacket& packet) {
  const std::pair key(packet.graph() & 0xffff'ffff, static_cast<int>(packet.graph() >> 32));
  const auto [known, added] = index_.try_emplace(key, runs_.size());
  if (added) runs_.push_back({.graph = key.first, .run = key.second});
  return runs_[known->second];
}

void GraphRuns::read(std::shared_ptr<GraphPacket> packet) {
  const std::lock_guard lock(mutex_);
  if (were_taken(runs_, order_)) return;
  run_of(*packet).packets.try_emplace(packet->site().slot, packet);
}

void GraphRuns::arrived(const GraphPacket& packet, at::TensorList tensors, at::IntArrayRef sizes,
                        std::int64_t lasting) {
  const std::lock_guard lock(mutex_);
  if (were_taken(runs_, order_)) return;
  GraphRun& run = run_of(packet);
  if (!run.tensors.empty() || !run.sizes.empty()) return;  // a graph that is kept runs again
  run.sizes = sizes.vec();
  try {
    for (const at::Tensor& tensor : tensors)
      run.tensors.push_back(std::ssize(run.tensors) < lasting ? tensor : tensor.clone());
  } catch (const c10::OutOfMemoryError&) {
    run.tensors.clear();
    return;
  }
  order_.push_back(static_cast<std::size_t>(&run - runs_.data()));
}

bool GraphRuns::began() const {
  const std::lock_guard lock(mutex_);
  return !order_.empty();
}

std::vector<GraphRun> GraphRuns::take() {
  const std::lock_guard lock(mutex_);
  std::vector<GraphRun> taken;
  if (runs_.empty()) return taken;
  for (auto i = order_.rbegin(); i != order_.rend(); ++i) taken.push_back(std::move(runs_[*i]));
  runs_.clear();  // the order stays, and says that they were there
  return taken;
}

void GraphRuns::measure(const GraphPacket& packet, const at::Tensor& derivative) {
  const auto* format = packet.format() ? std::get_if<GroupFormat>(&*packet.format()) : nullptr;
  if (!format || format->layout != Layout::kFlat) return;
  const Undisturbed undisturbed;
  const auto next_key = [&] { return Key{seed_, ++draws_, nullptr}; };
  const at::Tensor tensor = unrounded(packet, *format, next_key());
  Site& site = packet.site();
  const bool zero_exact = format->zero_exact;
  const auto energy_at = [&](const Choice& choice) {
    const Format other = group_format(tensor, format->type, choice, zero_exact);
    return difference(round_trip(tensor, other, next_key()), tensor)
        .mul_(derivative)
        .square_()
        .sum(at::kDouble);
  };
  Measured found{.site = &site};
  const auto groups = groups_of(tensor);
  double least = INFINITY;
  for (std::size_t i = 0; i < kGroupings.size(); ++i) {
    if (groups[i] == 0) continue;
    const double cost = energy_at({kRankedAt, kGroupings[i]}).item<double>() *
                        relative_time(kGroupings[i].layout, tensor.device().type());
    if (cost < least) found.grouping = kGroupings[i];
    least = std::min(least, cost);
  }
  if (!std::isfinite(least)) return;
  std::vector<at::Tensor> energies;
  std::set<int> widths = {least_, 2, 4, 8, site.floor};
  for (const int bits : widths) {
    if (bits < std::max({least_, site.floor, zero_exact ? 2 : 1}) ||
        bits >= static_cast<int>(8 * tensor.element_size()))
      continue;
    found.bits.push_back(bits);
    energies.push_back(energy_at({bits, found.grouping}));
  }
  if (energies.empty()) return;
  found.energies = at::stack(energies);
  measured_.push_back(std::move(found));
}

int GraphRuns::write_tables() {
  std::set<const Site*> written;
  for (const Measured& one : measured_) {
    const at::Tensor energies = one.energies.to(at::kCPU);
    const double* values = energies.const_data_ptr<double>();
    Sensitivity table;
    table.estimate = Sensitivity::Estimate::kDerivative;
    table.grouping = one.grouping;
    bool finite = true;
    for (std::size_t i = 0; i < one.bits.size(); ++i) {
      finite &= std::isfinite(values[i]);
      table.errors.emplace_back(one.bits[i], values[i]);
    }
    if (!finite) continue;
    one.site->sensitivity = std::move(table);
    written.insert(one.site);
  }
  measured_.clear();
  return static_cast<int>(written.size());
}

}  // namespace backfold::torch_layer
