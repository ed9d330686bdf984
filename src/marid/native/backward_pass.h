// A backward on the thread that asked for it, without autograd's engine (backward_pass.cpp).
#pragma once
#include <Python.h>

namespace marid {

// Whether a function that this thread runs for such a backward has called what runs, and not Python below it. With the
// interpreter's lock.
bool is_called_in_pass();
// Whether nobody but functions of autograd sees what it computes.
bool is_hidden_in_pass();

// `_engine_run_backward` of PyTorch, with its arguments; null, without an error, where it has to run itself.
PyObject* run_pass(PyObject* const* given, Py_ssize_t count, PyObject* names);

}  // namespace marid
