// SPDX-License-Identifier: Apache-2.0

#include "python/options.h"

#include <pybind11/stl.h>

#include "python/codecs.h"
#include "torch/options.h"
#include "torch/turns.h"

namespace backfold::python {

namespace py = pybind11;

ControllerOptions options_of(const py::dict& given) {
  ControllerOptions options;
  const auto take = [&](const char* name, auto& field) {
    if (given.contains(name)) field = given[name].cast<std::decay_t<decltype(field)>>();
  };
  take("bits", options.bits);
  take("ratio", options.ratio);
  take("budget", options.budget);
  take("peak", options.peak);
  take("level", options.level);
  take("adaptive", options.adaptive);
  take("min_bytes", options.min_bytes);
  take("seed", options.seed);
  take("probe_steps", options.probe_steps);
  take("probe_every", options.probe_every);
  take("probe_fraction", options.probe_fraction);
  take("replay", options.replay);
  take("derive", options.derive);
  take("offload", options.offload);
  take("defragment", options.defragment);
  if (given.contains("codec"))
    for (const PyRule& rule : given["codec"].cast<std::vector<PyRule>>())
      options.codec.push_back(rule_of(rule));
  if (given.contains("menu"))
    for (const auto& [name, arguments] :
         given["menu"].cast<std::vector<std::pair<std::string, py::dict>>>())
      options.menu.push_back(codec_of(name, arguments));
  return options;
}

py::object from_json(const std::string& text) {
  return py::module_::import("json").attr("loads")(text);
}

std::string to_json(const py::handle& object) {
  return py::module_::import("json").attr("dumps")(object).cast<std::string>();
}

// (kind, value, whether widths are planned) of the target in the options.
static py::tuple target_of(const py::dict& given) {
  using torch_layer::Target;
  const torch_layer::Wanted wanted = torch_layer::wanted_by(options_of(given));
  if (!wanted.target) return py::make_tuple("exact", 0.0, false);
  const Target::Kind kind = wanted.target->kind;
  return py::make_tuple(torch_layer::name_of(kind), wanted.target->value, wanted.adaptive);
}

void add_options(py::module_& module) {
  module.def("parse_bytes", [](const std::string& text, const std::string& argument) {
    return parse_bytes(text, argument);
  });
  module.def("target_of", &target_of);
  py::class_<torch_layer::ProbeSchedule>(module, "ProbeSchedule")
      .def(py::init(&torch_layer::make_schedule))
      .def("includes", &torch_layer::ProbeSchedule::includes);
}

}  // namespace backfold::python
