// SPDX-License-Identifier: Apache-2.0

#include "python/codecs.h"

namespace backfold::python {

namespace py = pybind11;

Codec codec_of(const std::string& name, const py::dict& arguments) {
  const auto number = [&](const char* key) { return arguments[key].cast<int>(); };
  if (name == "Quantize")
    return codecs::Quantize{number("bits"), arguments["per_sample"].cast<bool>()};
  if (name == "Pool") return codecs::Pool{number("block")};
  if (name == "PoolResidual") return codecs::PoolResidual{number("block"), number("bits")};
  if (name == "Project") return codecs::Project{number("ratio"), number("bits")};
  if (name == "RunningRange")
    return codecs::RunningRange{number("bits"), arguments["decay"].cast<double>()};
  if (name == "FewBit") return codecs::FewBit{number("bits")};
  if (name == "Exact") return codecs::Exact{};
  TORCH_CHECK_VALUE(name == "Keep", "codec must be one of backfold.codecs, got ", name);
  return codecs::Keep{};
}

CodecRule rule_of(const PyRule& rule) {
  const auto& [name, arguments, by_place, op, type, min_bytes] = rule;
  return {{.path = {}, .op = op, .type = type, .min_bytes = min_bytes}, codec_of(name, arguments)};
}

void add_codecs(py::module_& module) {
  module.def("check_codec", [](const std::string& name, const py::dict& arguments) {
    check_codec(codec_of(name, arguments));
  });
  module.def("check_selector",
             [](const std::string& path, const std::string& op, std::int64_t min_bytes) {
               check_selector({.path = path, .op = op, .min_bytes = min_bytes});
             });
}

}  // namespace backfold::python
