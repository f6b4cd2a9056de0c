// SPDX-License-Identifier: Apache-2.0

#include "python/controller.h"

#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>

#include "backfold/controller.h"
#include "python/codecs.h"
#include "python/graphs.h"
#include "python/hooks.h"
#include "python/options.h"
#include "torch/calibrate.h"
#include "torch/capture/entry.h"
#include "torch/capture/graph.h"
#include "torch/json/state.h"
#include "torch/listing.h"
#include "torch/probe/originals.h"

namespace backfold::python {
namespace {

namespace py = pybind11;

// What was recorded of the step that was watched ("nothing", "waiting", "complete" or "broken"),
// and why a broken call cannot be run again.
using PyRecorded = std::pair<std::string, std::string>;
using PyPartEnergy = std::optional<std::tuple<double, double, std::optional<double>>>;

torch_layer::Recorded recorded_of(const PyRecorded& recorded) {
  using What = torch_layer::Recorded::What;
  const auto& [what, obstacle] = recorded;
  return {what == "waiting"    ? What::kWaiting
          : what == "complete" ? What::kComplete
          : what == "broken"   ? What::kBroken
                               : What::kNothing,
          obstacle};
}

// What measures a step. A failure of the step may be part of a measurement; what ends the program
// is none, and is raised after it.
template <typename Measure>
int measured(const std::function<void()>& step, Measure measure) {
  std::exception_ptr ends;
  const int count = measure([&] {
    try {
      step();
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) ends = std::current_exception();
      throw;
    }
  });
  if (ends) std::rethrow_exception(ends);
  return count;
}

// A controller whose block is entered and left by separate calls.
class PyController {
 public:
  PyController(const py::dict& options, bool observe_only) : controller_(options_of(options)) {
    auto& state = controller_.state();
    state.options.observe_only = observe_only;
    if (options.contains("codec")) {
      const auto rules = options["codec"].cast<std::vector<PyRule>>();
      for (std::size_t i = 0; i < rules.size(); ++i)
        if (is_by_place(rules[i])) state.policy.choose_by_listing(i);
    }
    if (!options.contains("on_noise") || options["on_noise"].is_none()) return;
    on_noise_ = options["on_noise"];
    state.turns.on_noise = [this](double ratio) { on_noise_(ratio); };
  }

  // For each rule, whether a saved tensor matched it.
  std::vector<bool> matched() {
    std::vector<bool> found;
    for (const auto& rule : controller_.state().policy.rules()) found.push_back(rule.matched);
    return found;
  }

  // Lists the model's parts, as (module, path, keep, bit set of its rules), and its parameters and
  // buffers, as (name, tensor, whether it is a buffer).
  void list_model(
      const std::vector<std::tuple<py::object, std::string, bool, std::uint64_t>>& modules,
      const std::vector<std::tuple<std::string, at::Tensor, bool>>& tensors) {
    listed_.clear();
    std::vector<torch_layer::ListedPart> parts;
    for (const auto& [module, path, keep, rules] : modules) {
      listed_.push_back(module);  // kept alive, so that its address is not reused
      parts.push_back({module.ptr(), path, keep, rules});
    }
    std::vector<torch_layer::ListedTensor> named;
    for (const auto& [name, tensor, buffer] : tensors) named.push_back({name, tensor, buffer});
    torch_layer::list_model(controller_.state(), parts, named);
  }

  // Parameters are shards, which processes gather while modules run.
  bool sharded() { return controller_.state().model.sharded; }
  void set_sharded(bool sharded) { controller_.state().model.sharded = sharded; }

  bool wants_modules(bool compiles) {
    return torch_layer::wants_parts(controller_.state(), compiles);
  }

  // Raises like enter() if the block is open already or torch accepts no hooks.
  void expect_enterable() {
    if (controller_.state().blocks.entered) torch_layer::refuse_entered(controller_.state());
    torch_layer::hook_installer().install();
    torch_layer::hook_installer().uninstall();
  }

  // `device` is the index of the GPU whose allocations are counted, -1 for none; `hooks` what
  // compilers find on autograd's stack of hooks, as a pair, or None.
  void enter(int device, const py::object& hooks) {
    const GraphHooks graph_hooks(hooks);
    controller_.state().blocks.device.reset();
    if (device >= 0) controller_.state().blocks.device.emplace(at::kCUDA, device);
    try {
      torch::PyWarningHandler as_python_warnings;
      scope_.emplace(controller_.enter());
    } catch (...) {  // a warning that the program takes for an error, too
      const py::error_scope raised;
      scope_.reset();
      throw;
    }
  }

  void exit() {
    torch::PyWarningHandler as_python_warnings;
    TORCH_CHECK(scope_ && torch_layer::Entry::current() &&
                    &torch_layer::Entry::current()->state() == &controller_.state(),
                "a Controller's block must end on the thread that entered it, after all blocks "
                "inside it");
    scope_.reset();
    auto& state = controller_.state();
    if (state.probing.running)
      state.probing.waiting = std::exchange(state.probing.running, nullptr);
  }

  // Measures every site that `step` saves to. Returns their number.
  int calibrate(const std::function<void()>& step, const std::vector<at::Tensor>& leaves,
                double scale) {
    torch::PyWarningHandler as_python_warnings;
    return measured(step, [&](const std::function<void()>& run) {
      return torch_layer::calibrate(controller_.shared_state(), run, {leaves, scale, false});
    });
  }
  // The same for a step that adds to the gradients, with a plan made of it.
  void calibrate_and_plan(const std::function<void()>& step, bool exactly) {
    torch::PyWarningHandler as_python_warnings;
    const auto measure = exactly ? torch_layer::calibrate_exactly : torch_layer::calibrate;
    measured(step, [&](const std::function<void()>& run) {
      torch_layer::measure_and_plan(controller_.state(),
                                    [&] { return measure(controller_.shared_state(), run, {}); });
      return 0;
    });
  }

  void replan() {
    torch::PyWarningHandler as_python_warnings;
    torch_layer::replan(controller_.state());
  }

  // Turns of probes, see torch/turns.h. `arrived` is None if no call was recorded.
  bool probe_is_due(std::int64_t step) {
    return torch_layer::probe_is_due(controller_.state(), step);
  }
  // (whether to measure, whether by running the model again, why that is never to be done).
  std::tuple<bool, bool, std::string> resolve_turn(const PyRecorded& recorded) {
    torch::PyWarningHandler as_python_warnings;
    const torch_layer::Resolution found =
        torch_layer::resolve_turn(controller_.state(), recorded_of(recorded));
    return {found.measure, found.replay, found.obstacle};
  }
  bool begin_turn(bool model_runs_again) {
    torch::PyWarningHandler as_python_warnings;
    auto& state = controller_.state();
    torch_layer::look_if_due(state);
    if (!torch_layer::is_due(state)) return false;
    torch_layer::begin_turn(state, model_runs_again);
    return true;
  }
  // Whether a step that was watched waits to be measured.
  std::pair<double, double> part_to_run_again() {
    const torch_layer::ProbePart part = torch_layer::part_to_run_again(controller_.state());
    return {part.wanted, part.at_most};
  }
  bool turn_waits() { return controller_.state().turns.waits; }
  void cancel_turn() { torch_layer::cancel_turn(controller_.state()); }
  void forget_turn() { torch_layer::forget_turn(controller_.state()); }
  bool settle_turn(const PyRecorded& recorded) {
    return torch_layer::settle_turn(controller_.state(), recorded_of(recorded));
  }
  // `energy` is that of the gradient: of the part, that part's share, that of the user's own step.
  // `failure` is why running the model again failed, and whether that was with a part of the batch,
  // and whether for want of memory.
  // Returns why it is never to be run again, and whether it must be with its whole batch.
  std::pair<std::string, bool> finish_turn(int measured, double rest,
                                           const std::vector<std::optional<at::Tensor>>& moved,
                                           const PyPartEnergy& energy,
                                           const std::tuple<std::string, bool, bool>& failure) {
    torch::PyWarningHandler as_python_warnings;
    const auto& [why, part, memory] = failure;
    torch_layer::Replayed replayed{measured, rest, {}, {}, {why, part, memory}};
    if (energy)
      replayed.energy = {std::get<0>(*energy), std::get<1>(*energy), std::get<2>(*energy)};
    for (const auto& one : moved) replayed.moved.push_back(one.value_or(at::Tensor()));
    const torch_layer::Outcome outcome = torch_layer::finish_turn(controller_.state(), replayed);
    return {outcome.obstacle, outcome.whole};
  }

  // Whether the model's call is run again, and whether with its whole batch.
  std::pair<bool, bool> replay() {
    const auto& turns = controller_.state().turns;
    return {turns.replays, turns.whole};
  }
  void set_replay(bool replays, bool whole) {
    auto& turns = controller_.state().turns;
    turns.replays = replays;
    turns.whole = whole;
  }

  void inside_model(bool inside) { controller_.state().probing.inside_model = inside; }
  // The outputs of the model's recorded call, each with the number of its rows that are run again;
  // 0 means all.
  void model_returned(const std::vector<std::pair<at::Tensor, std::int64_t>>& outputs) {
    std::vector<torch_layer::ModelOutput> returned;
    for (const auto& [tensor, rows] : outputs) returned.push_back({tensor, rows});
    if (const auto& probe = controller_.state().probing.running) probe->model_returned(returned);
  }

  void pause_guard(bool on) { torch_layer::pause_guard(controller_.state(), on); }

  py::object state() { return from_json(torch_layer::state_as_json(controller_.state())); }
  void load_state(const py::dict& dict) {
    torch_layer::take_state(controller_.state(), to_json(dict));
  }
  std::string plan() { return torch_layer::plan_as_json(controller_.state()); }
  void load_plan(const std::string& json) { torch_layer::take_plan(controller_.state(), json); }

  // `gather` sends bytes to all processes and returns the list of theirs; None if each plans on its
  // own.
  void join(int rank, int size, const py::object& gather) {
    gather_ = gather;
    torch_layer::Gather called;
    if (!gather.is_none())
      called = [this](const std::string& bytes) {
        const py::gil_scoped_acquire gil;
        return gather_(py::bytes(bytes)).cast<std::vector<std::string>>();
      };
    torch_layer::join(controller_.state(), rank, size, std::move(called));
  }

  // What graphs are compiled with: (whether they round, are measured, send away; min_bytes), or
  // None.
  std::optional<std::tuple<bool, bool, bool, std::int64_t>> graph_rules() {
    const auto rules = torch_layer::graph_rules(controller_.state());
    if (!rules) return std::nullopt;
    return std::make_tuple(rules->rounds, rules->measures, rules->offloads, rules->min_bytes);
  }
  // Of the gradients that the watched step has brought.
  torch_layer::LeafWeights leaf_weights() {
    const auto& arriving = controller_.state().probing.arriving;
    return arriving ? arriving->weights() : torch_layer::LeafWeights();
  }

  std::vector<std::shared_ptr<PyGraphRun>> graph_runs() {
    return python::graph_runs(controller_.state());
  }
  bool is_mostly_compiled() { return torch_layer::is_mostly_compiled(controller_.state()); }

  bool unmet_samples() { return controller_.state().blocks.unmet_samples; }
  void sample_ids(const at::Tensor& ids, std::int64_t count) { controller_.sample_ids(ids, count); }

  // Processes may run out of batches at different times, and do not meet.
  void stay_away(bool away) { controller_.state().together.away = away; }

  bool adaptive() { return controller_.state().planning.target.has_value(); }
  // Whether a target is kept without rounding.
  bool exact() { return controller_.state().planning.exact.has_value(); }
  bool stale() { return controller_.state().model.unknown_modules; }
  std::int64_t steps() const { return controller_.steps(); }
  Report report() const { return controller_.report(); }

  // For the garbage collector: a module may hold the controller that lists it.
  int traverse(visitproc visit, void* arg) const {
    for (const py::object& module : listed_) Py_VISIT(module.ptr());
    Py_VISIT(gather_.ptr());
    Py_VISIT(on_noise_.ptr());
    return 0;
  }
  void clear() {
    const auto listed = std::exchange(listed_, {});  // destroying them may lead back here
    controller_.state().together.gather = nullptr;
    const auto gather = std::exchange(gather_, {});
    controller_.state().turns.on_noise = nullptr;
    const auto on_noise = std::exchange(on_noise_, {});
  }

 private:
  Controller controller_;
  std::optional<Controller::Scope> scope_;
  std::vector<py::object> listed_;
  py::object gather_, on_noise_;
};

// The controller in an object; null until its constructor has finished.
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

}  // namespace

void add_controller(py::module_& module) {
  py::class_<Report>(module, "Report")
      .def_static("from_json", &Report::from_json)
      .def("text", &Report::text)
      .def("json", &Report::json);
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
      .def(py::init<const py::dict&, bool>(), py::arg("options"), py::arg("observe_only") = false)
      .def_property_readonly("matched", &PyController::matched)
      .def("list_model", &PyController::list_model)
      .def_property("sharded", &PyController::sharded, &PyController::set_sharded)
      .def("wants_modules", &PyController::wants_modules)
      .def("expect_enterable", &PyController::expect_enterable)
      .def("enter", &PyController::enter, py::arg("device"), py::arg("hooks") = py::none())
      .def("exit", &PyController::exit)
      .def("graph_rules", &PyController::graph_rules)
      .def("graph_runs", &PyController::graph_runs)
      .def("leaf_weights", &PyController::leaf_weights)
      .def_property_readonly("is_mostly_compiled", &PyController::is_mostly_compiled)
      .def("report", &PyController::report)
      .def("calibrate", &PyController::calibrate)
      .def("replan", &PyController::replan)
      .def("calibrate_and_plan", &PyController::calibrate_and_plan)
      .def("probe_is_due", &PyController::probe_is_due)
      .def("resolve_turn", &PyController::resolve_turn)
      .def_property_readonly("turn_waits", &PyController::turn_waits)
      .def("begin_turn", &PyController::begin_turn)
      .def("part_to_run_again", &PyController::part_to_run_again)
      .def("cancel_turn", &PyController::cancel_turn)
      .def("forget_turn", &PyController::forget_turn)
      .def("settle_turn", &PyController::settle_turn)
      .def("finish_turn", &PyController::finish_turn)
      .def_property_readonly("replay", &PyController::replay)
      .def("set_replay", &PyController::set_replay)
      .def("inside_model", &PyController::inside_model)
      .def("model_returned", &PyController::model_returned)
      .def("pause_guard", &PyController::pause_guard)
      .def("state", &PyController::state)
      .def("load_state", &PyController::load_state)
      .def("plan", &PyController::plan)
      .def("sample_ids", &PyController::sample_ids)
      .def("join", &PyController::join)
      .def("stay_away", &PyController::stay_away)
      .def("load_plan", &PyController::load_plan)
      .def_property_readonly("unmet_samples", &PyController::unmet_samples)
      .def_property_readonly("adaptive", &PyController::adaptive)
      .def_property_readonly("exact", &PyController::exact)
      .def_property_readonly("stale", &PyController::stale)
      .def_property_readonly("steps", &PyController::steps);
}

}  // namespace backfold::python
