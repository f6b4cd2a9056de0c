// SPDX-License-Identifier: Apache-2.0

#include "python/saved.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include "torch/capture/entry.h"

namespace backfold::python {
namespace {

namespace py = pybind11;
using torch_layer::Entry;

// Lets other Python threads run meanwhile. Operators that Python calls have released the GIL, a
// Function that saves has not.
class Unlocked {
 public:
  Unlocked() {
    if (PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// A tensor's Python object, null if Python has not seen it. Needs no GIL.
template <typename Slot>
PyObject* object_in(const Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj();
  } else {
    return slot.check_pyobj().value_or(nullptr);
  }
}
PyObject* object_of(const at::TensorBase& tensor) {
  return object_in(*tensor.unsafeGetTensorImpl()->pyobj_slot());
}

bool has_attributes(PyObject* object) {
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict && *dict && PyDict_GET_SIZE(*dict) > 0;
}

// Whether torch.utils.checkpoint saves, which no call announces: a function of its module runs.
// Only while this thread holds the GIL.
bool is_checkpoint_saving() {
  if (torch_layer::running_call()) return false;
  PyObject* globals = PyEval_GetGlobals();
  PyObject* name = globals ? PyDict_GetItemString(globals, "__name__") : nullptr;
  return name && PyUnicode_Check(name) &&
         PyUnicode_CompareWithASCIIString(name, torch_layer::kCheckpoint.data()) == 0;
}

// Whether one of torch's own operators saves.
bool is_saved_by_torch() {
  const torch_layer::RunningCall* call = torch_layer::running_call();
  return call && !call->op->opaque;
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

// Stands in for a saved tensor where Python asks for it: an object that can only be unpacked.
struct PySaved {
  PyObject_HEAD std::shared_ptr<PackedTensor> packed;
};

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<PySaved*>(self)->packed.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* saved_type() {
  static PyTypeObject* const made = [] {
    static char doc[] = "Held by autograd in place of a tensor saved inside a Controller's block.";
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)}, {Py_tp_doc, doc}, {0, nullptr}};
    static PyType_Spec spec = {"backfold._C.Saved", sizeof(PySaved), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    PyObject* type = PyType_FromSpec(&spec);
    if (!type) throw python_error();
    return reinterpret_cast<PyTypeObject*>(type);
  }();
  return made;
}

PyObject* wrap(std::shared_ptr<PackedTensor> packed) {
  auto* object = reinterpret_cast<PySaved*>(saved_type()->tp_alloc(saved_type(), 0));
  if (!object) throw python_error();
  new (&object->packed) std::shared_ptr<PackedTensor>(std::move(packed));
  return reinterpret_cast<PyObject*>(object);
}

PyObject* pack(PyObject*, PyObject* argument) {
  HANDLE_TH_ERRORS
  return wrap(std::make_shared<PackedTensor>(THPVariable_Unpack(argument)));
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* argument) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(Py_TYPE(argument) == saved_type(), "backfold: expected a Saved, got ",
                   Py_TYPE(argument)->tp_name);
  return THPVariable_Wrap(reinterpret_cast<PySaved*>(argument)->packed->unpack());
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_method = {"pack", pack, METH_O, "Folds a tensor that autograd saves."};
PyMethodDef unpack_method = {"unpack", unpack, METH_O, "Restores a folded tensor."};

c10::SafePyObject safe(PyObject* owned) { return c10::SafePyObject(owned, getPyInterpreter()); }

}  // namespace

bool is_parameter_object(const at::Tensor& tensor) {
  const auto is_parameter = [](const at::TensorBase& one) {
    PyObject* object = object_of(one);
    return object && ParameterClass &&
           Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(ParameterClass);
  };
  return is_parameter(tensor) || (tensor.is_view() && is_parameter(tensor._base()));
}

PackedTensor::PackedTensor(const at::Tensor& tensor) {
  const char* obstacle = nullptr;
  bool checkpoint = false;
  // What Python has not seen is of no class of its own. Attributes matter to functions written in
  // Python alone: nodes of torch's own operators hand nothing to it.
  if (PyObject* seen = object_of(tensor);
      seen && (!is_saved_by_torch() || !THPVariable_CheckExact(seen))) {
    const py::gil_scoped_acquire gil;
    checkpoint = is_checkpoint_saving();
    auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    if (!object) throw python_error();
    if (!THPVariable_CheckExact(object.ptr())) {
      obstacle = "tensor subclass";
      original_ = object.attr("detach")().release().ptr();
    } else if (has_attributes(object.ptr())) {
      obstacle = "it carries Python attributes";
      if (!tensor.is_leaf()) object = alias_with_attributes(tensor, object.ptr());
      original_ = object.release().ptr();
    }
  }
  const Unlocked unlocked;
  Entry* entry = Entry::current();
  const auto* by = checkpoint ? &torch_layer::checkpoint_operator() : nullptr;
  saved_.emplace(entry ? entry->save(tensor, obstacle, by) : torch_layer::save_outside(tensor));
}

PackedTensor::~PackedTensor() {
  if (!original_) return;
  const py::gil_scoped_acquire gil;
  Py_DECREF(original_);
}

at::Tensor PackedTensor::unpack() {
  at::Tensor tensor;
  {
    const Unlocked unlocked;
    tensor = saved_->unpack();
  }
  if (!original_) return tensor;
  const py::gil_scoped_acquire gil;
  const at::Tensor& original = THPVariable_Unpack(original_);
  if (THPVariable_CheckExact(original_) && (!original.is_leaf() || original.requires_grad()))
    return THPVariable_Unpack(alias_with_attributes(original, original_).ptr());
  return original;
}

const HookFunctions& hook_functions() {
  static const HookFunctions made = {PyCFunction_New(&pack_method, nullptr),
                                     PyCFunction_New(&unpack_method, nullptr)};
  return made;
}

std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>>
SavedHooks::retrieve_unpack_hook_data() const {
  const py::gil_scoped_acquire gil;
  PyObject* unpack = hook_functions().unpack;
  Py_INCREF(unpack);
  return std::make_pair(safe(unpack), safe(wrap(packed_)));
}

}  // namespace backfold::python
