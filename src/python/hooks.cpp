// SPDX-License-Identifier: Apache-2.0

#include "python/hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <atomic>
#include <memory>
#include <utility>

#include "python/saved.h"
#include "torch/capture/entry.h"

namespace backfold::python {
namespace {

namespace py = pybind11;
using torch_layer::Entry;

// The pair that the next block of this thread will have, if not our own.
thread_local const GraphHooks* next_hooks = nullptr;

// The first of each pair that a block ever had on autograd's stack of hooks. They are few, and stay
// alive: backward finds that stack again on threads of the engine, one for each GPU, where no block
// was entered.
struct Ours {
  PyObject* const pack;
  const Ours* const next;
};
std::atomic<const Ours*> ours{nullptr};

bool is_ours(const PyObject* pack) {
  for (const Ours* one = ours; one; one = one->next)
    if (one->pack == pack) return true;
  return false;
}

// Under the GIL.
void remember(py::handle pack) {
  if (!is_ours(pack.ptr())) ours = new Ours{pack.inc_ref().ptr(), ours};
}

// Hands out our hooks without Python where autograd's stack of hooks has them on top, and leaves
// everything else to the engine of Python, which keeps its threads and its state.
class FoldingEngine : public torch::autograd::Engine {
 public:
  explicit FoldingEngine(Engine& python) : python_(python) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
    if (!hooks.stack.empty() && !hooks.is_tracing && !hooks.disabled_error_message &&
        is_ours(hooks.stack.top().first.ptr(getPyInterpreter())))
      return std::make_unique<SavedHooks>();
    return python_.get_default_saved_variable_hooks();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return python_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task,
      decltype(torch::autograd::Edge::function) root,
      torch::autograd::InputBuffer&& inputs) override {
    return python_.execute_with_graph_task(task, std::move(root), std::move(inputs));
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return python_.make_anomaly_metadata();
  }

 private:
  Engine& python_;
};

// From the first block on.
void install_engine() {
  static FoldingEngine& engine = *new FoldingEngine(torch::autograd::Engine::get_default_engine());
  torch::autograd::set_default_engine_stub([]() -> torch::autograd::Engine& { return engine; });
}

PyObject* module_begins(PyObject*, PyObject* module) {
  HANDLE_TH_ERRORS
  if (Entry* entry = Entry::current()) {
    entry->enter_module(module, Py_TYPE(module)->tp_name);
  } else if (at::GradMode::is_enabled() &&
             torch_layer::missed(module, PyObject_HasAttrString(module, "_is_replica"))) {
    const char* text =
        "backfold: a forward of the model runs on a thread outside of the Controller's block (as "
        "with DataParallel), and nothing that it saves is folded. Enter a separate Controller on "
        "that thread.";
    if (PyErr_WarnEx(PyExc_UserWarning, text, 1) < 0) throw python_error();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* module_ends(PyObject*, PyObject* module) {
  HANDLE_TH_ERRORS
  if (Entry* entry = Entry::current()) entry->leave_module(module);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef begins_method = {"module_begins", module_begins, METH_O,
                             "Tells the block which module begins."};
PyMethodDef ends_method = {"module_ends", module_ends, METH_O,
                           "Tells the block that a module has ended."};

py::object autograd_function(const char* name) {
  return py::module_::import("torch._C._autograd").attr(name);
}

}  // namespace

GraphHooks::GraphHooks(const py::object& pair) : outer_(next_hooks) {
  next_hooks = nullptr;
  if (pair.is_none()) return;
  const auto modules = pair.cast<py::tuple>();
  pair_ = {py::object(modules[0]).ptr(), py::object(modules[1]).ptr()};
  next_hooks = this;
}

GraphHooks::~GraphHooks() { next_hooks = outer_; }

void add_hooks(py::module_& module) {
  module.attr("module_begins") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&begins_method, nullptr));
  module.attr("module_ends") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&ends_method, nullptr));
  torch_layer::recognise_parameters_by(is_parameter_object);
  torch_layer::set_hook_installer({
      [] {
        py::gil_scoped_acquire gil;
        install_engine();
        const HookFunctions& hooks = next_hooks ? next_hooks->pair() : hook_functions();
        const py::handle pack = hooks.pack, unpack = hooks.unpack;
        remember(pack);
        autograd_function("_push_saved_tensors_default_hooks")(pack, unpack);
      },
      [] {
        py::gil_scoped_acquire gil;
        autograd_function("_pop_saved_tensors_default_hooks")();
      },
  });
}

}  // namespace backfold::python
