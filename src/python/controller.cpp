// SPDX-License-Identifier: Apache-2.0

#include "python/controller.h"

#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>

#include "backfold/controller.h"
#include "python/codecs.h"
#include "python/state.h"
#include "torch/calibrate.h"
#include "torch/capture/entry.h"
#include "torch/probe/originals.h"

namespace backfold::python {
namespace {

namespace py = pybind11;

ControllerOptions options_of(const std::string& kind, double value, bool adaptive,
                             std::int64_t min_bytes, std::uint64_t seed) {
  ControllerOptions options;
  options.bits.reset();
  if (kind == "bits") options.bits = value;
  if (kind == "ratio") options.ratio = value;
  if (kind == "budget") options.budget = static_cast<std::int64_t>(value);
  options.adaptive = adaptive;
  options.min_bytes = min_bytes;
  options.seed = seed;
  return options;
}

// A controller whose block is entered and left by two calls.
class PyController {
 public:
  // `kind` is "bits", "ratio" or "budget", or "exact" without a value.
  PyController(const std::string& kind, double value, bool adaptive, std::int64_t min_bytes,
               std::uint64_t seed, bool observe_only, const std::vector<PyRule>& rules,
               const std::vector<std::pair<std::string, py::dict>>& menu)
      : controller_(options_of(kind, value, adaptive, min_bytes, seed)) {
    controller_.state().options.observe_only = observe_only;
    for (const PyRule& rule : rules)
      controller_.state().policy.add(rule_of(rule), std::get<2>(rule));
    for (const auto& [name, arguments] : menu)
      controller_.state().policy.offer(codec_of(name, arguments));
  }

  // For each rule, whether a saved tensor matched it.
  std::vector<bool> matched() {
    std::vector<bool> found;
    for (const auto& rule : controller_.state().policy.rules()) found.push_back(rule.matched);
    return found;
  }

  // Lists the model's parts, as (module, path, keep, bits of the rules for it), and its parameters
  // and buffers, as (name, tensor, whether it is a buffer).
  void list_model(
      const std::vector<std::tuple<py::object, std::string, bool, std::uint64_t>>& modules,
      const std::vector<std::tuple<std::string, at::Tensor, bool>>& tensors) {
    auto& state = controller_.state();
    state.model.modules.clear();
    listed_.clear();
    keeps_ = false;
    for (const auto& [module, path, keep, rules] : modules) {
      listed_.push_back(module);  // alive, so that its address stays its own
      const auto known = paths_.find(path);
      const std::uint32_t id =
          known != paths_.end() ? known->second : state.sites->add_path(path, keep, rules);
      paths_[path] = id;
      keeps_ |= keep || rules;
      state.model.modules.emplace(module.ptr(), id);
    }
    state.model.parameters.clear();
    for (const auto& [name, tensor, buffer] : tensors) {
      const auto owner =
          paths_.find(name.substr(0, std::max<std::size_t>(name.rfind('.') + 1, 1) - 1));
      state.model.parameters.push_back(
          {tensor, state.sites->landmark(name, owner == paths_.end() ? 0 : owner->second), buffer});
    }
    torch_layer::watch_gradients(state);
    state.model.unknown_modules = false;
  }

  // Whether the next entry should be told which modules run, which costs some microseconds for
  // each: while places are learned, and where the user named some.
  bool wants_modules() {
    auto& state = controller_.state();
    state.model.watches_modules = keeps_ || state.model.unplaced_sites || state.blocks.steps < 2;
    if (state.model.watches_modules) state.model.unplaced_sites = false;
    return state.model.watches_modules;
  }

  // Raises as enter() would where the block is open, or where torch takes no hooks.
  void expect_enterable() {
    if (controller_.state().blocks.entered) torch_layer::refuse_entered(controller_.state());
    torch_layer::hook_installer().install();
    torch_layer::hook_installer().uninstall();
  }

  // `device` is that of the GPU whose allocations are counted, -1 for none.
  void enter(int device) {
    controller_.state().blocks.device.reset();
    if (device >= 0) controller_.state().blocks.device.emplace(at::kCUDA, device);
    scope_.emplace(controller_.enter());
  }

  void exit() {
    TORCH_CHECK(scope_ && torch_layer::Entry::current() &&
                    &torch_layer::Entry::current()->state() == &controller_.state(),
                "a controller's block must end on the thread that entered it, after the blocks "
                "inside it");
    scope_.reset();
    auto& state = controller_.state();
    if (state.probing.running)
      state.probing.waiting = std::exchange(state.probing.running, nullptr);
  }

  // Measures every site that `step` saves to. Returns how many there were.
  int calibrate(const std::function<void()>& step, const std::vector<at::Tensor>& leaves,
                double scale, bool exactly) {
    const auto measure = exactly ? torch_layer::calibrate_exactly : torch_layer::calibrate;
    return measure(controller_.shared_state(), step, {leaves, scale});
  }
  // `energy` is that of the gradient which the last calibrate() saw, where it could not tell.
  void replan(std::optional<double> energy) {
    torch::PyWarningHandler as_python_warnings;
    if (energy) controller_.state().planning.gradient_energy = energy;
    torch_layer::replan(controller_.state());
  }

  // A probe that goes along with the next step. What runs inside the model it leaves out.
  void begin_own_probe(bool model_runs_again) {
    auto& state = controller_.state();
    state.probing.running = std::make_shared<torch_layer::Probe>(state.options.seed, 0,
                                                                 torch_layer::least_width(state));
    state.probing.running->begin(torch_layer::Probe::Pass::kUsersOwn);
    if (model_runs_again) state.probing.running->outside().expect_model();
    state.probing.inside_model = false;
  }
  void inside_model(bool inside) { controller_.state().probing.inside_model = inside; }
  // What the recorded call of the model returned, with the rows of each that are run again; 0 is
  // all of them.
  void model_returned(const std::vector<std::pair<at::Tensor, std::int64_t>>& outputs) {
    std::vector<torch_layer::ModelOutput> returned;
    for (const auto& [tensor, rows] : outputs) returned.push_back({tensor, rows});
    if (const auto& probe = controller_.state().probing.running) probe->model_returned(returned);
  }
  // After the step's backward. `rest` is the signal gain of what it left out, `moved` by how much
  // what the model returned moved in the last calibrate().
  int finish_own_probe(double rest, const std::vector<std::optional<at::Tensor>>& moved) {
    auto& state = controller_.state();
    const auto probe = std::exchange(state.probing.waiting, nullptr);
    if (!probe || !probe->backward_began()) return 0;
    std::vector<at::Tensor> tangents;
    for (const auto& one : moved) tangents.push_back(one.value_or(at::Tensor()));
    return probe->finish_own(rest, tangents, state.probing.epsilon);
  }

  void forget_own_probe() { controller_.state().probing.waiting.reset(); }
  // Of a step that was not entered after all.
  void cancel_own_probe() { controller_.state().probing.running.reset(); }

  void pause_guard(bool on) { torch_layer::pause_guard(controller_.state(), on); }

  // (ratio, sites that add most, value of the target that would do), or None.
  py::object noise() {
    const auto noise = torch_layer::noise_of(controller_.state());
    if (!noise) return py::none();
    return py::make_tuple(noise->ratio, noise->sites, noise->needed);
  }

  bool own_probe_ran() {
    const auto& probe = controller_.state().probing.waiting;
    return !probe || probe->backward_began();
  }

  bool has_unknown_sites() {
    const auto& state = controller_.state();
    return state.planning.plan && torch_layer::has_unknown_sites(*state.sites, state.blocks.steps);
  }
  bool planned() { return controller_.state().planning.plan.has_value(); }
  py::dict state() { return state_as_dict(controller_.state()); }
  void load_state(const py::dict& dict) { take_state(controller_.state(), dict); }
  py::dict plan() { return plan_as_dict(controller_.state()); }
  void load_plan(const py::dict& dict) { take_plan(controller_.state(), dict); }

  void combine_tables_by(const py::function& combine) {
    combine_ = combine;
    python::combine_tables_by(controller_.state(), combine_);
  }

  bool unmet_samples() { return controller_.state().blocks.unmet_samples; }
  void sample_ids(const at::Tensor& ids, std::int64_t count) { controller_.sample_ids(ids, count); }

  bool stale() { return controller_.state().model.unknown_modules; }
  std::int64_t steps() const { return controller_.steps(); }
  Report report() const { return controller_.report(); }

  // For the garbage collector: a module may hold the controller that lists it.
  int traverse(visitproc visit, void* arg) const {
    for (const py::object& module : listed_) Py_VISIT(module.ptr());
    Py_VISIT(combine_.ptr());
    return 0;
  }
  void clear() {
    const auto listed = std::exchange(listed_, {});  // what they hold may lead back here
    const auto combine = std::exchange(combine_, {});
  }

 private:
  Controller controller_;
  std::optional<Controller::Scope> scope_;
  std::vector<py::object> listed_;
  py::object combine_;
  std::unordered_map<std::string, std::uint32_t> paths_;
  bool keeps_ = false;
};

// The controller of an object whose constructor is done; null before.
PyController* controller_in(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  return instance->get_value_and_holder().holder_constructed() ? py::cast<PyController*>(self)
                                                               : nullptr;
}

void make_collectable(PyHeapTypeObject* heap_type) {
  PyTypeObject* type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const PyController* controller = controller_in(self);
    return controller ? controller->traverse(visit, arg) : 0;
  };
  type->tp_clear = [](PyObject* self) {
    if (PyController* controller = controller_in(self)) controller->clear();
    return 0;
  };
}

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
  dict["layout"] = row.layout;
  dict["estimate"] = row.estimate;
  dict["error"] = row.error;
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
  dict["noise"] = report.noise;
  dict["plan"] = py::none();
  if (report.plan) dict["plan"] = summary_as_dict(*report.plan);
  py::list sites;
  for (const ReportRow& row : report.rows) sites.append(row_as_dict(row));
  dict["sites"] = sites;
  return dict;
}

}  // namespace

void add_controller(py::module_& module) {
  py::class_<Report>(module, "Report")
      .def("text", &Report::text)
      .def("to_dict", [](const Report& report) { return as_dict(report); });
  using torch_layer::Originals;
  py::class_<Originals, std::shared_ptr<Originals>>(module, "Originals")
      .def(py::init<const std::vector<at::Tensor>&>())
      .def("watch", &Originals::watch)
      .def("stop", &Originals::stop)
      .def("unseen", &Originals::unseen)
      .def("restore", &Originals::restore)
      .def("rewind", &Originals::rewind)
      .def("return_from_rewind", &Originals::return_from_rewind);
  py::class_<PyController>(module, "Controller", py::custom_type_setup(make_collectable))
      .def(py::init<const std::string&, double, bool, std::int64_t, std::uint64_t, bool,
                    const std::vector<PyRule>&,
                    const std::vector<std::pair<std::string, py::dict>>&>())
      .def_property_readonly("matched", &PyController::matched)
      .def("list_model", &PyController::list_model)
      .def("wants_modules", &PyController::wants_modules)
      .def("expect_enterable", &PyController::expect_enterable)
      .def("enter", &PyController::enter)
      .def("exit", &PyController::exit)
      .def("report", &PyController::report)
      .def("calibrate", &PyController::calibrate)
      .def("replan", &PyController::replan, py::arg("energy") = py::none())
      .def("begin_own_probe", &PyController::begin_own_probe)
      .def("inside_model", &PyController::inside_model)
      .def("model_returned", &PyController::model_returned)
      .def("finish_own_probe", &PyController::finish_own_probe)
      .def("forget_own_probe", &PyController::forget_own_probe)
      .def("cancel_own_probe", &PyController::cancel_own_probe)
      .def("pause_guard", &PyController::pause_guard)
      .def("noise", &PyController::noise)
      .def("state", &PyController::state)
      .def("load_state", &PyController::load_state)
      .def("plan", &PyController::plan)
      .def("sample_ids", &PyController::sample_ids)
      .def("combine_tables_by", &PyController::combine_tables_by)
      .def("load_plan", &PyController::load_plan)
      .def_property_readonly("own_probe_ran", &PyController::own_probe_ran)
      .def_property_readonly("has_unknown_sites", &PyController::has_unknown_sites)
      .def_property_readonly("planned", &PyController::planned)
      .def_property_readonly("unmet_samples", &PyController::unmet_samples)
      .def_property_readonly("stale", &PyController::stale)
      .def_property_readonly("steps", &PyController::steps);
}

}  // namespace backfold::python
