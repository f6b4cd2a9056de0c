// SPDX-License-Identifier: Apache-2.0
//
// Somewhere to send bytes to. Copies end when a test says so or they are waited for, in any order,
// and fail when it says so.

#ifndef BACKFOLD_TESTS_TORCH_FAKE_BACKING_H_
#define BACKFOLD_TESTS_TORCH_FAKE_BACKING_H_

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "torch/offload/backing.h"

namespace backfold::torch_layer {

class HeapSlab : public Slab {
 public:
  explicit HeapSlab(std::size_t bytes) : Slab(std::malloc(bytes), bytes) {}
  ~HeapSlab() override { std::free(data()); }
};

inline Arena::MakeSlab heap() {
  return [](std::size_t bytes) { return std::make_unique<HeapSlab>(bytes); };
}

class FakeBacking : public Backing {
 public:
  struct Copy : Transfer {
    bool has_ended() override { return ended; }
    void wait() override { end(); }
    void deliver() override { end(); }
    std::string failure() override { return why; }
    void end() {
      if (ended) return;
      if (why.empty()) work();
      ended = true;
    }
    std::function<void()> work;
    bool ended = false, reads = false;
    std::string why;
  };

  explicit FakeBacking(std::size_t most) : Backing(heap(), most) {}

  std::shared_ptr<Transfer> write(const at::Tensor& from, const std::optional<c10::Stream>&,
                                  const Room& to) override {
    TORCH_CHECK(!refuses, "refused");
    auto copy = begin(false, fails_to_write);
    copy->work = [bytes = static_cast<const char*>(from.const_data_ptr()), left = from.nbytes(),
                  to]() mutable {
      for (const Extent& extent : to) {
        const std::size_t count = std::min(left, extent.bytes);
        std::memcpy(extent.data(), bytes, count);
        bytes += count;
        left -= count;
      }
    };
    return copy;
  }
  std::shared_ptr<Transfer> read(const Room& from, const at::Tensor& into) override {
    TORCH_CHECK(!refuses, "refused");
    auto copy = begin(true, fails_to_read);
    copy->work = [bytes = static_cast<char*>(into.mutable_data_ptr()), left = into.nbytes(),
                  from]() mutable {
      for (const Extent& extent : from) {
        const std::size_t count = std::min(left, extent.bytes);
        std::memcpy(bytes, extent.data(), count);
        bytes += count;
        left -= count;
      }
    };
    return copy;
  }
  std::string name() const override { return "a test"; }

  void end_all() {
    for (const auto& copy : copies) copy->end();
  }
  std::size_t under_way() const {
    return static_cast<std::size_t>(
        std::count_if(copies.begin(), copies.end(), [](const auto& one) { return !one->ended; }));
  }
  std::size_t reads() const {
    return static_cast<std::size_t>(
        std::count_if(copies.begin(), copies.end(), [](const auto& one) { return one->reads; }));
  }

  std::vector<std::shared_ptr<Copy>> copies;
  bool refuses = false, fails_to_write = false, fails_to_read = false;

 private:
  std::shared_ptr<Copy> begin(bool reads, bool fails) {
    copies.push_back(std::make_shared<Copy>());
    copies.back()->reads = reads;
    if (fails) copies.back()->why = "it was told to";
    return copies.back();
  }
};

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TESTS_TORCH_FAKE_BACKING_H_
