// A context manager that sets the state of dispatch, in one step: an interrupt cannot come between its halves.
#include "concretely.h"

#include "python.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace {

c10::DispatchKeySet included, excluded;

struct Concretely {
  PyObject_HEAD
  c10::impl::LocalDispatchKeySet keys;
  at::impl::TorchFunctionDisabledState functions;
};

PyObject* enter(PyObject* given, PyObject*) {
  auto* self = reinterpret_cast<Concretely*>(given);
  self->keys = c10::impl::tls_local_dispatch_key_set();
  self->functions = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  c10::impl::LocalDispatchKeySet inside = self->keys;
  inside.included_ = included;
  inside.excluded_ = excluded;
  c10::impl::_force_tls_local_dispatch_key_set(inside);
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  Py_RETURN_NONE;
}

PyObject* leave(PyObject* given, PyObject*) {
  auto* self = reinterpret_cast<Concretely*>(given);
  at::impl::PythonTorchFunctionTLS::set_disabled_state(self->functions);
  c10::impl::_force_tls_local_dispatch_key_set(self->keys);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"__enter__", enter, METH_NOARGS, nullptr},
    {"__exit__", leave, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots[] = {{Py_tp_methods, methods}, {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)}, {0, nullptr}};
PyType_Spec spec = {"marid_native.Concretely", sizeof(Concretely), 0, Py_TPFLAGS_DEFAULT, slots};

// concretely(included, excluded): the context manager, for these sets of dispatch keys (as numbers).
PyObject* concretely(PyObject*, PyObject* const* given, Py_ssize_t) {
  included = c10::DispatchKeySet(c10::DispatchKeySet::RAW, PyLong_AsUnsignedLongLong(given[0]));
  excluded = c10::DispatchKeySet(c10::DispatchKeySet::RAW, PyLong_AsUnsignedLongLong(given[1]));
  return PyErr_Occurred() ? nullptr : PyType_FromSpec(&spec);
}

}  // namespace

namespace marid {

std::pair<c10::DispatchKeySet, c10::DispatchKeySet> keys_inside() { return {included, excluded}; }

PyMethodDef concretely_functions[] = {
    {"concretely", fast(concretely), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
