// SPDX-License-Identifier: Apache-2.0

#ifndef BACKFOLD_PYTHON_CONTROLLER_H_
#define BACKFOLD_PYTHON_CONTROLLER_H_

#include <torch/csrc/utils/pybind.h>

namespace backfold::python {

// Adds Controller and Report, which python/backfold wraps.
void add_controller(pybind11::module_& module);

}  // namespace backfold::python

#endif  // BACKFOLD_PYTHON_CONTROLLER_H_
