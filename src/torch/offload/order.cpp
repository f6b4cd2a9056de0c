// SPDX-License-Identifier: Apache-2.0

#include "torch/offload/order.h"

#include <algorithm>

namespace backfold::torch_layer {
namespace {

constexpr std::size_t kMostAsks = 1 << 16;
constexpr std::int64_t kPart = 16;

}  // namespace

void Order::add(ParcelKey key, std::int64_t bytes) {
  if (asks_.size() == kMostAsks) return;
  places_[key].push_back(asks_.size());
  asks_.push_back({key, total_});
  total_ += bytes;
  largest_ = std::max(largest_, bytes);
}

std::int64_t Order::bytes_between(std::size_t from, std::size_t to) const {
  const auto before = [&](std::size_t at) { return at < asks_.size() ? asks_[at].before : total_; };
  return before(to) - before(from);
}

std::optional<std::size_t> Order::find(ParcelKey key, std::size_t from) const {
  const auto places = places_.find(key);
  if (places == places_.end()) return std::nullopt;
  const auto at = std::lower_bound(places->second.begin(), places->second.end(), from);
  return at == places->second.end() ? std::nullopt : std::optional(*at);
}

std::int64_t Order::window() const { return std::max(2 * largest_, total_ / kPart); }

}  // namespace backfold::torch_layer
