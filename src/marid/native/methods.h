// Methods of the device's class that take the place of those of `torch.Tensor`. (methods.cpp)
#pragma once
#include "python.h"

namespace marid {

// Whether a method of this interned name may call PyTorch's function itself: for a tensor of the device's own class, which nobody
// has to see first, where the method of `torch.Tensor` is PyTorch's.
bool may_call(PyObject* object, PyObject* name);

// What the method of `torch.Tensor` returns, by its interned name.
PyObject* call_general(PyObject* name, PyObject* object, PyObject* const* given, Py_ssize_t count, PyObject* names);

// Give a method to the class of handles, with what `torch.Tensor` says of it; false after an error.
bool set_method(PyMethodDef& method);

// The methods of view_methods.cpp, and of methods.cpp.
bool prepare_view_methods();
bool prepare_methods();

}  // namespace marid
