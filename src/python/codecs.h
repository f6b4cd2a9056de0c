// SPDX-License-Identifier: Apache-2.0
//
// Codecs and rules, from their Python form.

#ifndef BACKFOLD_PYTHON_CODECS_H_
#define BACKFOLD_PYTHON_CODECS_H_

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>

#include <pybind11/stl.h>

#include "backfold/codecs.h"

namespace backfold::python {

// The codec of this class name and these arguments.
Codec codec_of(const std::string& name, const pybind11::dict& arguments);

// Codec and arguments; whether listed modules select places; operator, type and least size.
using PyRule = std::tuple<std::string, pybind11::dict, bool, std::string,
                          std::optional<at::ScalarType>, std::int64_t>;
CodecRule rule_of(const PyRule& rule);
inline bool is_by_place(const PyRule& rule) { return std::get<2>(rule); }

void add_codecs(pybind11::module_& module);

}  // namespace backfold::python

#endif  // BACKFOLD_PYTHON_CODECS_H_
