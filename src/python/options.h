// SPDX-License-Identifier: Apache-2.0
//
// Options, targets and JSON, to and from their Python form.

#ifndef BACKFOLD_PYTHON_OPTIONS_H_
#define BACKFOLD_PYTHON_OPTIONS_H_

#include <torch/csrc/utils/pybind.h>

#include <string>

#include "backfold/controller.h"

namespace backfold::python {

// Options by field name; those left out have their defaults.
ControllerOptions options_of(const pybind11::dict& options);

// JSON as Python's own module reads and writes it.
pybind11::object from_json(const std::string& text);
std::string to_json(const pybind11::handle& object);

void add_options(pybind11::module_& module);

}  // namespace backfold::python

#endif  // BACKFOLD_PYTHON_OPTIONS_H_
