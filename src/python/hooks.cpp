// SPDX-License-Identifier: Apache-2.0

#include "python/hooks.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>

#include "torch/capture/entry.h"

namespace backfold::python {
namespace {

namespace py = pybind11;
using torch_layer::Entry;
using torch_layer::Saved;

// Stands in for a saved tensor: an object that can only be unpacked.
struct PySaved {
  PyObject_HEAD Saved saved;
  PyObject* original;  // a subclass instance to return, or a tensor with attributes; may be null
};

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  auto* object = reinterpret_cast<PySaved*>(self);
  Py_XDECREF(object->original);
  object->saved.~Saved();
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* saved_type = nullptr;

PyTypeObject* make_saved_type() {
  static char doc[] = "Held by autograd in place of a tensor saved inside a Controller's block.";
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)}, {Py_tp_doc, doc}, {0, nullptr}};
  static PyType_Spec spec = {"backfold._C.Saved", sizeof(PySaved), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) throw python_error();
  return reinterpret_cast<PyTypeObject*>(type);
}

// While a large tensor is packed on the CPU, other Python threads may run.
bool is_long_work(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.is_cpu() &&
         tensor.numel() > torch_layer::kLongWork;
}

bool has_attributes(PyObject* object) {
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict && *dict && PyDict_GET_SIZE(*dict) > 0;
}

// An alias of a tensor that carries the tensor's Python attributes. Autograd turns what it is given
// into a variable. For an alias that shares only its memory it does so in place, so the Python
// object with the attributes survives.
py::object alias_with_attributes(const at::Tensor& tensor, PyObject* attributes) {
  auto alias = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor.variable_data()));
  if (!alias) throw python_error();
  alias.attr("__dict__").attr("update")(py::handle(attributes).attr("__dict__"));
  return alias;
}

PyObject* pack(PyObject*, PyObject* argument) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  const bool subclass = !THPVariable_CheckExact(argument);
  const bool attributes = !subclass && has_attributes(argument);
  const char* obstacle = subclass     ? "tensor subclass"
                         : attributes ? "it carries Python attributes"
                                      : nullptr;
  Entry* entry = Entry::current();
  const auto save = [&] {
    return entry ? entry->save(tensor, obstacle) : torch_layer::save_outside(tensor);
  };
  std::optional<Saved> saved;
  if (!obstacle && is_long_work(tensor)) {
    const py::gil_scoped_release released;
    saved.emplace(save());
  } else {
    saved.emplace(save());
  }
  py::object original;
  if (subclass) {
    original = py::handle(argument).attr("detach")();
  } else if (attributes) {
    original = tensor.is_leaf() ? py::reinterpret_borrow<py::object>(argument)
                                : alias_with_attributes(tensor, argument);
  }
  auto* object = reinterpret_cast<PySaved*>(saved_type->tp_alloc(saved_type, 0));
  if (!object) throw python_error();
  new (&object->saved) Saved(std::move(*saved));
  object->original = original.release().ptr();
  return reinterpret_cast<PyObject*>(object);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* argument) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(Py_TYPE(argument) == saved_type, "backfold: expected a Saved, got ",
                   Py_TYPE(argument)->tp_name);
  auto* object = reinterpret_cast<PySaved*>(argument);
  at::Tensor tensor;
  if (object->saved.is_large_on_cpu()) {
    py::gil_scoped_release released;
    tensor = object->saved.unpack();
  } else {
    tensor = object->saved.unpack();
  }
  if (!object->original) return THPVariable_Wrap(std::move(tensor));
  if (THPVariable_CheckExact(object->original)) {
    const at::Tensor& original = THPVariable_Unpack(object->original);
    if (!original.is_leaf() || original.requires_grad())
      return alias_with_attributes(original, object->original).release().ptr();
  }
  Py_INCREF(object->original);
  return object->original;
  END_HANDLE_TH_ERRORS
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

PyMethodDef pack_method = {"pack", pack, METH_O, "Folds a tensor that autograd saves."};
PyMethodDef unpack_method = {"unpack", unpack, METH_O, "Restores a folded tensor."};
PyMethodDef begins_method = {"module_begins", module_begins, METH_O,
                             "Tells the block which module begins."};
PyMethodDef ends_method = {"module_ends", module_ends, METH_O,
                           "Tells the block that a module has ended."};

PyObject* pack_function = nullptr;
PyObject* unpack_function = nullptr;

py::object autograd_function(const char* name) {
  return py::module_::import("torch._C._autograd").attr(name);
}

}  // namespace

void add_hooks(py::module_& module) {
  saved_type = make_saved_type();
  pack_function = PyCFunction_New(&pack_method, nullptr);
  unpack_function = PyCFunction_New(&unpack_method, nullptr);
  module.attr("module_begins") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&begins_method, nullptr));
  module.attr("module_ends") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&ends_method, nullptr));
  torch_layer::set_hook_installer({
      [] {
        py::gil_scoped_acquire gil;
        autograd_function("_push_saved_tensors_default_hooks")(py::handle(pack_function),
                                                               py::handle(unpack_function));
      },
      [] {
        py::gil_scoped_acquire gil;
        autograd_function("_pop_saved_tensors_default_hooks")();
      },
  });
}

}  // namespace backfold::python
