// SPDX-License-Identifier: Apache-2.0
//
// Hooks for use with Python: autograd's engine hands out ours without a Python object or frame for
// a saved tensor. A pair of C functions is for torch's module hooks.

#ifndef BACKFOLD_PYTHON_HOOKS_H_
#define BACKFOLD_PYTHON_HOOKS_H_

#include <torch/csrc/utils/pybind.h>

#include "python/saved.h"

namespace backfold::python {

// During its lifetime, blocks that are entered on this thread put a pair of torch.fx.GraphModules
// on autograd's stack of hooks instead of our C functions. Compilers look there and inline them;
// autograd itself is handed the same C++ hooks with either pair.
class GraphHooks {
 public:
  // Of None: our functions after all. The caller keeps the pair alive.
  explicit GraphHooks(const pybind11::object& pair);
  ~GraphHooks();
  GraphHooks(const GraphHooks&) = delete;
  GraphHooks& operator=(const GraphHooks&) = delete;

  const HookFunctions& pair() const { return pair_; }

 private:
  HookFunctions pair_ = {};
  const GraphHooks* outer_;
};

// Makes the hooks and registers them with the torch layer as its hook installer. Adds module_begins
// and module_ends to the module.
void add_hooks(pybind11::module_& module);

}  // namespace backfold::python

#endif  // BACKFOLD_PYTHON_HOOKS_H_
