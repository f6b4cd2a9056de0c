// SPDX-License-Identifier: Apache-2.0
//
// A saved tensor as a program in Python may see it: tensors of subclasses and tensors with
// attributes come back as the objects that they were.

#ifndef BACKFOLD_PYTHON_SAVED_H_
#define BACKFOLD_PYTHON_SAVED_H_

#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>

#include "torch/store/saved.h"
#include "torch/store/small_objects.h"

namespace backfold::python {

class PackedTensor {
 public:
  // Called without the GIL or with it.
  explicit PackedTensor(const at::Tensor& tensor);
  ~PackedTensor();
  PackedTensor(const PackedTensor&) = delete;
  PackedTensor& operator=(const PackedTensor&) = delete;

  at::Tensor unpack();

 private:
  PyObject* original_ = nullptr;  // what is returned instead; null for plain tensors
  std::optional<torch_layer::Saved> saved_;
};

// Whether a tensor, or what it is a view of, is a torch.nn.Parameter in Python.
bool is_parameter_object(const at::Tensor& tensor);

// The pair of C functions that autograd's stack of hooks has while a block is entered.
struct HookFunctions {
  PyObject* pack;
  PyObject* unpack;
};
const HookFunctions& hook_functions();

// What autograd keeps for one saved tensor while they are on top. Makes no Python object.
class SavedHooks : public torch::autograd::SavedVariableHooks {
 public:
  static void* operator new(std::size_t bytes) { return torch_layer::allocate_small(bytes); }
  static void operator delete(void* memory, std::size_t bytes) {
    torch_layer::release_small(memory, bytes);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    packed_ = torch_layer::make_small<PackedTensor>(tensor);
  }
  at::Tensor call_unpack_hook() override { return packed_->unpack(); }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override;

 private:
  std::shared_ptr<PackedTensor> packed_;
};

}  // namespace backfold::python

#endif  // BACKFOLD_PYTHON_SAVED_H_
