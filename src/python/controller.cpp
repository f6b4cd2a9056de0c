// SPDX-License-Identifier: Apache-2.0

#include "python/controller.h"

#include "backfold/controller.h"
#include "torch/entry.h"

namespace backfold::python {
namespace {

namespace py = pybind11;

// A controller whose block is entered and left by two calls.
class PyController {
 public:
  PyController(std::optional<int> bits, std::int64_t min_bytes, std::uint64_t seed,
               bool observe_only)
      : controller_(
            ControllerOptions{.bits = bits, .keep = {}, .min_bytes = min_bytes, .seed = seed}) {
    controller_.state().options.observe_only = observe_only;
  }

  // Lists the model's parts, as (module, path, keep), and its parameters and buffers, by name.
  void list_model(const std::vector<std::tuple<py::object, std::string, bool>>& modules,
                  const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
    auto& state = controller_.state();
    state.modules.clear();
    listed_.clear();
    keeps_ = false;
    for (const auto& [module, path, keep] : modules) {
      listed_.push_back(module);  // alive, so that its address stays its own
      const auto known = paths_.find(path);
      const std::uint32_t id =
          known != paths_.end() ? known->second : state.sites->add_path(path, keep);
      paths_[path] = id;
      keeps_ |= keep;
      state.modules.emplace(module.ptr(), id);
    }
    state.parameters.clear();
    for (const auto& [name, tensor] : tensors) {
      const auto owner =
          paths_.find(name.substr(0, std::max<std::size_t>(name.rfind('.') + 1, 1) - 1));
      state.parameters.push_back(
          {tensor, state.sites->landmark(name, owner == paths_.end() ? 0 : owner->second)});
    }
    state.unknown_modules = false;
  }

  // Whether the next entry should be told which modules run, which costs some microseconds for
  // each: while places are learned, and where the user named some.
  bool wants_modules() {
    auto& state = controller_.state();
    state.watches_modules = keeps_ || state.unplaced_sites || state.steps < 2;
    if (state.watches_modules) state.unplaced_sites = false;
    return state.watches_modules;
  }

  // `device` is that of the GPU whose allocations are counted, -1 for none.
  void enter(int device) {
    controller_.state().device.reset();
    if (device >= 0) controller_.state().device.emplace(at::kCUDA, device);
    scope_.emplace(controller_.enter());
  }

  void exit() {
    TORCH_CHECK(scope_ && torch_layer::Entry::current() &&
                    &torch_layer::Entry::current()->state() == &controller_.state(),
                "a controller's block must end on the thread that entered it, after the blocks "
                "inside it");
    scope_.reset();
  }

  bool stale() { return controller_.state().unknown_modules; }
  std::int64_t steps() const { return controller_.steps(); }
  Report report() const { return controller_.report(); }

 private:
  Controller controller_;
  std::optional<Controller::Scope> scope_;
  std::vector<py::object> listed_;
  std::unordered_map<std::string, std::uint32_t> paths_;
  bool keeps_ = false;
};

py::dict row_as_dict(const ReportRow& row) {
  py::dict dict;
  dict["module"] = row.module;
  dict["op"] = row.op;
  dict["slot"] = row.slot;
  dict["occurrence"] = row.occurrence;
  dict["saves"] = row.saves;
  dict["saved_bytes"] = row.saved_bytes;
  dict["unique_bytes"] = row.unique_bytes;
  dict["held_bytes"] = row.held_bytes;
  dict["duplicate_bytes"] = row.duplicate_bytes;
  dict["kind"] = row.kind;
  dict["bits"] = row.bits;
  dict["stored_bits"] = row.stored_bits;
  dict["reason"] = row.reason;
  return dict;
}

py::dict as_dict(const Report& report) {
  py::dict dict;
  dict["step"] = report.step;
  dict["saved_bytes"] = report.saved_bytes;
  dict["unique_bytes"] = report.unique_bytes;
  dict["held_bytes"] = report.held_bytes;
  dict["alive_bytes"] = report.alive_bytes;
  dict["unseen_bytes"] = report.unseen_bytes;
  py::list sites;
  for (const ReportRow& row : report.rows) sites.append(row_as_dict(row));
  dict["sites"] = sites;
  return dict;
}

}  // namespace

void add_controller(py::module_& module) {
  py::class_<Report>(module, "Report").def("text", &Report::text).def("to_dict", &as_dict);
  py::class_<PyController>(module, "Controller")
      .def(py::init<std::optional<int>, std::int64_t, std::uint64_t, bool>())
      .def("list_model", &PyController::list_model)
      .def("wants_modules", &PyController::wants_modules)
      .def("enter", &PyController::enter)
      .def("exit", &PyController::exit)
      .def("report", &PyController::report)
      .def_property_readonly("stale", &PyController::stale)
      .def_property_readonly("steps", &PyController::steps);
}

}  // namespace backfold::python
