// Methods of tensors of the device with several results, which they return as a LazyTuple (frontend/tuples.py).
#include "handle.h"

#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <utility>

namespace marid {

namespace {

PyTypeObject *method_type, *lazy_tuple;

// A method of `torch.Tensor` that is wrapped. It looks like that one.
struct Method {
  PyObject_HEAD
  PyObject* wrapped;
  PyObject* spared;  // the globals of a module whose functions get what the method itself returns
  vectorcallfunc call;
};

// The class in `torch.return_types` of a result, which has names then; None for others, null after an error.
Ref kind_of(PyObject* result) {
  if (PyTuple_CheckExact(result) || PyList_CheckExact(result)) return Ref::to(Py_None);
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(result));
  Ref module(PyObject_GetAttrString(type, "__module__"));
  if (!module) return Ref();
  bool has_names = PyUnicode_Check(module.get()) && PyUnicode_CompareWithASCIIString(module.get(), "torch.return_types") == 0;
  return Ref::to(has_names ? type : Py_None);
}

bool is_tupled(PyObject* result) {
  if (!(PyTuple_Check(result) || PyList_Check(result)) || PyObject_TypeCheck(result, lazy_tuple)) return false;
  Py_ssize_t count = PySequence_Fast_GET_SIZE(result);
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!PyObject_TypeCheck(PySequence_Fast_GET_ITEM(result, i), handle_type)) return false;
  }
  return count > 0;
}

PyObject* call(PyObject* self, PyObject* const* arguments, size_t count, PyObject* names) {
  auto* method = reinterpret_cast<Method*>(self);
  Ref result(PyObject_Vectorcall(method->wrapped, arguments, count, names));
  if (!result || PyEval_GetGlobals() == method->spared || !is_tupled(result.get())) return result.release();
  static PyObject* name = PyUnicode_InternFromString("_kind");
  Ref kind = kind_of(result.get()), given(PyTuple_Pack(1, result.get()));
  Ref made(kind && given ? PyTuple_Type.tp_new(lazy_tuple, given.get(), nullptr) : nullptr);
  if (!made || PyObject_SetAttr(made.get(), name, kind.get()) < 0) return nullptr;
  return made.release();
}

PyObject* bound(PyObject* self, PyObject* instance, PyObject*) {
  return instance == nullptr || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

PyObject* attribute(PyObject* self, PyObject* name) {
  PyObject* wrapped = reinterpret_cast<Method*>(self)->wrapped;
  if (PyUnicode_CompareWithASCIIString(name, "__doc__") == 0) return PyObject_GetAttr(wrapped, name);  // types have one, too
  PyObject* own = PyObject_GenericGetAttr(self, name);
  if (own != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return own;
  PyErr_Clear();
  return PyObject_GetAttr(wrapped, name);
}

PyObject* shown(PyObject* self) { return PyObject_Repr(reinterpret_cast<Method*>(self)->wrapped); }

void free_method(PyObject* self) {
  auto* method = reinterpret_cast<Method*>(self);
  Py_XDECREF(method->wrapped);
  Py_XDECREF(method->spared);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__wrapped__", T_OBJECT, offsetof(Method, wrapped), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_descr_get, reinterpret_cast<void*>(bound)},
    {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
    {Py_tp_repr, reinterpret_cast<void*>(shown)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_method)},
    {Py_tp_members, members},
    {0, nullptr},
};
PyType_Spec type_spec = {
    "marid_native.TupleMethod", sizeof(Method), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

// returning_tuples(method, LazyTuple, globals): the method, but that it returns a LazyTuple where all of its results are tensors
// of the device; not to functions with these globals.
PyObject* returning_tuples(PyObject*, PyObject* const* given, Py_ssize_t) {
  if (method_type == nullptr) method_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&type_spec));
  if (method_type == nullptr) return nullptr;
  Py_XSETREF(lazy_tuple, reinterpret_cast<PyTypeObject*>(Py_NewRef(given[1])));
  auto* made = reinterpret_cast<Method*>(method_type->tp_alloc(method_type, 0));
  if (made == nullptr) return nullptr;
  made->wrapped = Py_NewRef(given[0]);
  made->spared = Py_NewRef(given[2]);
  made->call = call;
  return reinterpret_cast<PyObject*>(made);
}

}  // namespace

PyMethodDef tuple_functions[] = {
    {"returning_tuples", fast(returning_tuples), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
