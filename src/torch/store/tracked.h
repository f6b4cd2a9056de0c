// SPDX-License-Identifier: Apache-2.0
//
// What the store knows of the storages that a block uses, and of the values that were written to
// them. Nothing here keeps a tensor of more than one element alive.

#ifndef BACKFOLD_TORCH_STORE_TRACKED_H_
#define BACKFOLD_TORCH_STORE_TRACKED_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <vector>

#include "torch/capture/calls.h"
#include "torch/capture/lap.h"
#include "torch/capture/site.h"
#include "torch/store/derived.h"
#include "torch/store/geometry.h"
#include "torch/store/shared_packet.h"

namespace backfold::torch_layer {

struct Tracked;

// What one write left in a storage. Operations in place end a value and begin another; views are
// views of the value. Lives as long as the store.
struct Value {
  // An argument, or a companion, of the call that made a value.
  struct Input {
    Value* value = nullptr;
    View view;  // in its storage
    at::ScalarType type = at::kFloat;
    Counter counter;
    int position = 0;     // among the arguments, or past them the index of a result
    c10::Storage number;  // of a single element, which is kept
  };

  explicit Value(std::pmr::memory_resource* memory) : inputs(memory) {}

  Tracked* home = nullptr;
  std::uint64_t write = 0;  // to its storage
  std::uint32_t version = 0;
  bool parameter = false, buffer = false;  // of the model
  bool in_graph = false;
  const Operator* op = nullptr;  // that made it, if it has a recipe
  at::ScalarType type = at::kFloat;
  at::Device device = at::kCPU;
  View view;  // of the result, which fills its storage
  std::pmr::vector<Input> inputs;
  std::vector<c10::IValue> arguments;  // without the tensors among the inputs
  std::weak_ptr<Derived> derived;      // while somebody keeps it so
  bool spared = false;                 // it was saved, and no packet was made for it
  bool saved = false;                  // itself, and made again
  std::shared_ptr<Lap> lap;            // of a product that made it, while products are timed

  bool is_current() const;
};

// What is known of one storage.
struct Tracked {
  explicit Tracked(const c10::Storage& storage) : storage(storage.getWeakStorageImpl()) {}

  WeakStorage storage;
  std::uint64_t writes = 0;  // by calls of this thread, as far as they were seen
  Value* value = nullptr;    // that it holds now, if anybody asked
  std::weak_ptr<Hold> hold;
  struct Part {
    View original, view;  // in the storage, in the copy
    std::weak_ptr<Hold> copy;
  };
  std::vector<Part> parts;  // that the plan keeps without the rest
  struct Packed {
    std::weak_ptr<SharedPacket> packet;
    std::uint64_t write = 0;  // that it holds
  };
  c10::SmallVector<Packed, 2> packets;
  // That would be made again from this memory itself.
  c10::SmallVector<std::weak_ptr<Derived>, 1> dependents;
  std::shared_ptr<ParameterCopy> copy;
  std::uint32_t copy_version = 0;
  std::uint32_t copy_landmark = 0;
  Site* site = nullptr;  // of the first save
  std::weak_ptr<const Charge> plain;
};

inline bool Value::is_current() const { return home->value == this; }

}  // namespace backfold::torch_layer

#endif  // BACKFOLD_TORCH_STORE_TRACKED_H_
