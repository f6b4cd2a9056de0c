// SPDX-License-Identifier: Apache-2.0
//
// Hooks for use with Python: a pair of C functions for saved_tensors_hooks, and a pair for torch's
// module hooks. No Python frame runs for a saved tensor.

#ifndef BACKFOLD_PYTHON_HOOKS_H_
#define BACKFOLD_PYTHON_HOOKS_H_

#include <torch/csrc/utils/pybind.h>

namespace backfold::python {

// Makes the hooks and registers them with the torch layer as its hook installer. Adds module_begins
// and module_ends to the module.
void add_hooks(pybind11::module_& module);

}  // namespace backfold::python

#endif  // BACKFOLD_PYTHON_HOOKS_H_
