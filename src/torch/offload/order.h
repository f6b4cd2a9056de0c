// SPDX-License-Identifier: Apache-2.0
//
// The order in which a backward asked for payloads: written down in one step, followed in the next.

#ifndef BACKFOLD_TORCH_OFFLOAD_ORDER_H_
#define BACKFOLD_TORCH_OFFLOAD_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace backfold::torch_layer {

// Tells a payload from the others of its step, and finds it in the next step: the place that saved
// it, and how many that place had before.
using ParcelKey = std::uint64_t;

class Order {
 public:
  // Past 65,536 asks, as of a graph that is kept and read again and again, nothing is added.
  void add(ParcelKey key, std::int64_t bytes);

  bool empty() const { return asks_.empty(); }
  std::size_t size() const { return asks_.size(); }
  ParcelKey key(std::size_t at) const { return asks_[at].key; }
  // Bytes of the asks in [from, to).
  std::int64_t bytes_between(std::size_t from, std::size_t to) const;
  // The first time, from `from` on, that the key was asked for.
  std::optional<std::size_t> find(ParcelKey key, std::size_t from) const;

  // How far to look ahead, in bytes: enough that two copies of the largest can be under way, and
  // not more than a part of the whole.
  std::int64_t window() const;

 private:
  struct Ask {
    ParcelKey key;
    std::int64_t before;  // bytes of earlier ones
  };
  std::vector<Ask> asks_;
  std::unordered_map<ParcelKey, std::vector<std::size_t>> places_;
  std::int64_t total_ = 0, largest_ = 0;
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_OFFLOAD_ORDER_H_
