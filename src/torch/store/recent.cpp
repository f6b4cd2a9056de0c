// SPDX-License-Identifier: Apache-2.0

#include "torch/store/recent.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace backfold::torch_layer {
namespace {

constexpr std::ptrdiff_t kMost = 2;  // of a device

struct Recent {
  const void* owner = nullptr;
  c10::Storage storage;
};

struct All {
  std::mutex mutex;
  std::vector<Recent> entries;  // oldest first
};
All& all() {
  static All& instance = *new All;  // engine threads may outlive static destructors
  return instance;
}

// Takes the first entry that is asked for out of the list. Memory is freed by the caller, after the
// lock is: an allocator may call back.
template <typename Which>
Recent take(All& all, Which which) {
  const auto at = std::find_if(all.entries.begin(), all.entries.end(), which);
  if (at == all.entries.end()) return {};
  Recent taken = std::move(*at);
  all.entries.erase(at);
  return taken;
}

}  // namespace

void keep_recent(const void* owner, const c10::Storage& storage) {
  Recent same, oldest;
  // Copied before the lock is taken: a copy of what Python has seen may wait for Python's lock,
  // whose owner may be collecting garbage, and wait in drop_recent().
  Recent added{owner, storage};
  const std::lock_guard lock(all().mutex);
  same = take(all(), [&](const Recent& one) { return one.owner == owner; });
  all().entries.push_back(std::move(added));
  const auto of_device = [&](const Recent& one) {
    return one.storage.device() == storage.device();
  };
  if (std::count_if(all().entries.begin(), all().entries.end(), of_device) > kMost)
    oldest = take(all(), of_device);
}

void drop_recent(const void* owner) {
  Recent dropped;
  const std::lock_guard lock(all().mutex);
  dropped = take(all(), [&](const Recent& one) { return one.owner == owner; });
}

}  // namespace backfold::torch_layer
