// SPDX-License-Identifier: Apache-2.0

#include "python/graphs.h"

#include <string>

#include "torch/capture/entry.h"

namespace backfold::python {
namespace {

// The path of a module by its identity, in the model of the block of this thread.
std::optional<std::string> module_path(std::uintptr_t identity) {
  torch_layer::Entry* entry = torch_layer::Entry::current();
  if (!entry) return std::nullopt;
  const auto& modules = entry->state().model.modules;
  const auto found = modules.find(reinterpret_cast<const void*>(identity));
  if (found == modules.end()) return std::nullopt;
  return entry->state().sites->path(found->second).name;
}

}  // namespace

const std::shared_ptr<torch_layer::GraphPacket>& PyGraphRun::packet(const std::string& name) const {
  const auto found = run.packets.find(name);
  TORCH_CHECK(found != run.packets.end(), "backward has not read ", name);
  return found->second;
}

std::vector<std::shared_ptr<PyGraphRun>> graph_runs(torch_layer::State& state) {
  std::vector<std::shared_ptr<PyGraphRun>> found;
  if (const auto& probe = state.probing.waiting)
    for (torch_layer::GraphRun& run : probe->graphs()->take())
      found.push_back(std::make_shared<PyGraphRun>(probe->graphs(), std::move(run)));
  return found;
}

void add_graphs(pybind11::module_& module) {
  module.attr("LEAST_OFFLOADED") = torch_layer::Offloader::kLeastBytes;
  module.def("module_path", &module_path);
  using torch_layer::LeafWeights;
  pybind11::class_<LeafWeights>(module, "LeafWeights")
      .def(pybind11::init<>())
      .def("of",
           [](const LeafWeights& self, const std::vector<std::pair<double, std::int64_t>>& leaves) {
             std::vector<torch_layer::LeafEnergy> energies;
             for (const auto& [energy, elements] : leaves) energies.push_back({energy, elements});
             return self.of(energies);
           });
  pybind11::class_<PyGraphRun, std::shared_ptr<PyGraphRun>>(module, "GraphRun")
      .def_property_readonly("graph", [](const PyGraphRun& self) { return self.run.graph; })
      .def_property_readonly("tensors", [](const PyGraphRun& self) { return self.run.tensors; })
      .def_property_readonly("sizes", [](const PyGraphRun& self) { return self.run.sizes; })
      .def("value", [](const PyGraphRun& self,
                       const std::string& name) { return self.packet(name)->unpack(); })
      .def("measure",
           [](const PyGraphRun& self, const std::string& name, const at::Tensor& derivative) {
             self.runs->measure(*self.packet(name), derivative);
           });
}

}  // namespace backfold::python
