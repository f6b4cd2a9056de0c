// SPDX-License-Identifier: Apache-2.0
//
// The Python face of the torch layer: types and conversions, nothing else.

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <string>

#include <pybind11/stl.h>

#include "backfold/batch_search.h"
#include "backfold/execution.h"
#include "backfold/planner.h"
#include "python/codecs.h"
#include "python/controller.h"
#include "python/graphs.h"
#include "python/hooks.h"
#include "python/options.h"
#include "torch/codec/codec.h"
#include "torch/codec/host_target.h"
#include "torch/codec/reused_memory.h"
#include "torch/packet.h"

namespace backfold {
namespace {

namespace py = pybind11;
using torch_layer::Packet;
using torch_layer::PackOptions;

PYBIND11_MODULE(_C, module) {
  module.def("built_with_cuda", &built_with_cuda);
  module.def("simd_targets", [] {
    const auto names = simd_targets();
    return std::vector<std::string_view>(names.begin(), names.end());
  });
  module.def("usual_host_target", &torch_layer::usual_host_target);
  module.def("use_host_target", &torch_layer::use_host_target);
  module.def("host_target_that_ran", &torch_layer::host_target_that_ran);
  module.def("bytes_kept_for_reuse", &torch_layer::bytes_kept_for_reuse);
  module.def("give_back_idle_memory", [](double seconds) {
    torch_layer::give_back_idle_memory(
        std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3)));
  });
  module.def(
      "make_plan",
      [](const std::vector<std::vector<std::pair<std::int64_t, double>>>& sites,
         std::int64_t budget) {
        std::vector<PlanSite> menus(sites.size());
        for (std::size_t i = 0; i < sites.size(); ++i)
          for (const auto& [bytes, error] : sites[i]) menus[i].options.push_back({bytes, error});
        Plan plan;
        torch_layer::check(make_plan(menus, budget, &plan));
        return py::make_tuple(plan.choice, plan.bytes, plan.error, plan.lower_bound);
      },
      "Chooses a (bytes, error) option per site within a budget. Returns the indices, the total "
      "bytes and error, and a lower bound of the error.");

  py::class_<BatchSearch>(module, "BatchSearch", "Which batch to try next, and the largest so far.")
      .def(py::init([](std::int64_t start, std::int64_t multiple, std::int64_t limit, int trials) {
             const BatchSearchOptions options{start, multiple, limit, trials};
             torch_layer::check(validate(options));
             return BatchSearch(options);
           }),
           py::arg("start"), py::arg("multiple"), py::arg("limit"), py::arg("trials"))
      .def("next", &BatchSearch::next)
      .def("tried", &BatchSearch::tried)
      .def_property_readonly("largest", &BatchSearch::largest);

  py::class_<Packet>(module, "Packet", "One tensor, folded. Made by backfold.pack().")
      .def(py::init([](const at::Tensor& tensor, std::int64_t bits, const std::string& layout,
                       std::int64_t group, bool zero_exact, std::uint64_t seed,
                       std::uint64_t stream) {
        py::gil_scoped_release release;
        return Packet(tensor, PackOptions{bits, layout, group, zero_exact, Key{seed, stream}});
      }))
      .def(
          py::init([](const at::Tensor& tensor, const std::string& codec, const py::dict& arguments,
                      const std::string& op, std::uint64_t seed, std::uint64_t stream) {
            const Codec chosen = python::codec_of(codec, arguments);
            py::gil_scoped_release release;
            return Packet(tensor, chosen, op, Key{seed, stream});
          }))
      .def("unpack", &Packet::unpack, py::call_guard<py::gil_scoped_release>(),
           "Decodes the tensor into new memory.")
      .def_property_readonly("payload", &Packet::payload, "The packed bytes, as a tensor.")
      .def_property_readonly("nbytes", &Packet::bytes, "Bytes of the payload.")
      .def_property_readonly("source_nbytes", &Packet::source_bytes, "Bytes of the tensor.")
      .def_property_readonly(
          "shape", [](const Packet& packet) { return packet.sizes().vec(); }, "Its shape.")
      .def_property_readonly("exact", &Packet::exact,
                             "Whether the tensor was too small to fold and is kept unfolded.")
      .def("__repr__", &Packet::describe);

  python::add_codecs(module);
  python::add_options(module);
  python::add_controller(module);
  python::add_graphs(module);
  python::add_hooks(module);
}

}  // namespace
}  // namespace backfold
