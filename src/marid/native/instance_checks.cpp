// `isinstance(x, torch.Tensor)` for tensors of a class of their own, as ours are. PyTorch asks it twice for each tensor that a
// function is called with, and Python answers by making a bound method of `type.__instancecheck__`, which takes more time than
// all else that PyTorch does to an argument. The metaclass of tensors gets a descriptor whose bound method is made once.
#include "python.h"

#include <torch/csrc/autograd/python_variable.h>

namespace marid {

namespace {

PyObject* general;  // type.__instancecheck__
PyObject* for_tensors;  // what it is bound to torch.Tensor

// Whether the `__class__` of an object is its type: it has that of `object`, which comes before what the instance has.
bool is_of_its_class(PyObject* object) {
  static PyObject* name = PyUnicode_InternFromString("__class__");
  static PyObject* usual = _PyType_Lookup(&PyBaseObject_Type, name);
  PyTypeObject* type = Py_TYPE(object);
  return type->tp_getattro == PyObject_GenericGetAttr && _PyType_Lookup(type, name) == usual;
}

PyObject* is_tensor(PyObject*, PyObject* object) {
  PyTypeObject* tensor = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  if (PyType_IsSubtype(Py_TYPE(object), tensor)) Py_RETURN_TRUE;
  if (is_of_its_class(object)) Py_RETURN_FALSE;
  return PyObject_CallFunctionObjArgs(general, THPVariableClass, object, nullptr);  // its `__class__` may say otherwise
}
PyMethodDef is_tensor_method = {"__instancecheck__", is_tensor, METH_O, nullptr};

PyObject* bind(PyObject*, PyObject* cls, PyObject* metaclass) {
  if (cls == THPVariableClass) return Py_NewRef(for_tensors);
  return Py_TYPE(general)->tp_descr_get(general, cls, metaclass);
}
PyTypeObject descriptor_type = {PyVarObject_HEAD_INIT(nullptr, 0) "marid._InstanceCheck"};

PyTypeObject* metaclass_of_tensors() { return Py_TYPE(THPVariableClass); }

// quicken_instance_checks(): returns whether the metaclass had no such method of its own, and has ours now.
PyObject* quicken(PyObject*, PyObject*) {
  PyObject* names = metaclass_of_tensors()->tp_dict;
  if (names == nullptr || PyDict_GetItemString(names, "__instancecheck__") != nullptr) Py_RETURN_FALSE;
  if (general == nullptr) {
    descriptor_type.tp_basicsize = sizeof(PyObject);
    descriptor_type.tp_flags = Py_TPFLAGS_DEFAULT;
    descriptor_type.tp_descr_get = bind;
    if (PyType_Ready(&descriptor_type) < 0) return nullptr;
    for_tensors = PyCFunction_New(&is_tensor_method, THPVariableClass);
    Ref found(PyObject_GetAttrString(reinterpret_cast<PyObject*>(&PyType_Type), "__dict__"));
    if (for_tensors == nullptr || !found) return nullptr;
    general = PyObject_GetItem(found.get(), Ref(PyUnicode_FromString("__instancecheck__")).get());
    if (general == nullptr) return nullptr;
  }
  Ref descriptor(reinterpret_cast<PyObject*>(PyObject_New(PyObject, &descriptor_type)));
  if (!descriptor || PyDict_SetItemString(names, "__instancecheck__", descriptor.get()) < 0) return nullptr;
  PyType_Modified(metaclass_of_tensors());
  Py_RETURN_TRUE;
}

// leave_instance_checks(): undoes it.
PyObject* leave(PyObject*, PyObject*) {
  PyObject* names = metaclass_of_tensors()->tp_dict;
  PyObject* found = PyDict_GetItemString(names, "__instancecheck__");
  if (found == nullptr || Py_TYPE(found) != &descriptor_type) Py_RETURN_NONE;
  if (PyDict_DelItemString(names, "__instancecheck__") < 0) return nullptr;
  PyType_Modified(metaclass_of_tensors());
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef instance_check_functions[] = {
    {"quicken_instance_checks", quicken, METH_NOARGS, nullptr},
    {"leave_instance_checks", leave, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
