// What the slots of the device's class (arithmetic.cpp, indexing.cpp) ask of their operands.
#pragma once
#include "handle.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>

namespace marid {

// Whether an object is of the device's own class, and not of one derived from it.
inline bool is_own(PyObject* object) { return Py_TYPE(object) == handle_type; }

// Whether what runs an operation sees the operands as they are: modes for functions see Python's function first.
inline bool is_usual() { return !at::impl::torch_function_mode_enabled(); }

// Python's own numbers, of a size that PyTorch reads as it is.
inline std::optional<at::Scalar> number(PyObject* object) {
  if (PyFloat_CheckExact(object)) return at::Scalar(PyFloat_AS_DOUBLE(object));
  if (PyBool_Check(object)) return at::Scalar(object == Py_True);
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0 ? std::optional<at::Scalar>(value) : std::nullopt;
}

// A number without a fraction.
inline std::optional<int64_t> whole(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  auto found = number(object);
  return found ? std::optional(found->toLong()) : std::nullopt;
}

// What a call returns, with errors of C++ as Python's.
template <typename Call>
PyObject* guarded(Call call) {
  HANDLE_TH_ERRORS
  return call();
  END_HANDLE_TH_ERRORS
}

}  // namespace marid
