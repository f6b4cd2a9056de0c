// SPDX-License-Identifier: Apache-2.0
//
// Hooks for use with Python: autograd's engine hands out ours without a Python object or frame for
// a saved tensor. A pair of C functions is for torch's module hooks.

#ifndef BACKFOLD_PYTHON_HOOKS_H_
#define BACKFOLD_PYTHON_HOOKS_H_

#include <torch/csrc/utils/pybind.h>

namespace backfold::python {

// Makes the hooks and registers them with the torch layer as its hook installer. Adds module_begins
// and module_ends to the module.
void add_hooks(pybind11::module_& module);

}  // namespace backfold::python

#endif  // BACKFOLD_PYTHON_HOOKS_H_
