// Whether what a function under marid.compile works on is as it was when it was recorded (replay/state_check.py,
// replay/template.py): looked at before each replay, without making an object.
#include "handle.h"
#include "nodes.h"

#include <torch/csrc/autograd/python_variable.h>

namespace {

using namespace marid;

// The objects of a state, one after the other, beside those that were there.
class Walk {
 public:
  Walk(PyObject* kept, PyObject* free) : kept_(kept), free_(free) {}

  bool is_next(PyObject* found) {
    if (at_ >= PyList_GET_SIZE(kept_)) return false;
    Py_ssize_t place = at_++;
    if (next_free_ < PyTuple_GET_SIZE(free_) && PyLong_AsSsize_t(PyTuple_GET_ITEM(free_, next_free_)) == place) {
      next_free_++;  // any object may be there
      return true;
    }
    return PyList_GET_ITEM(kept_, place) == found;
  }

  bool is_at_end() const { return at_ == PyList_GET_SIZE(kept_); }

 private:
  PyObject *kept_, *free_;
  Py_ssize_t at_ = 0, next_free_ = 0;
};

template <typename Each>
bool all_of(PyObject* list, Each each) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    if (!each(PyList_GET_ITEM(list, i))) return false;
  }
  return true;
}

bool has_next_entries(PyObject* dict, bool keys, Walk& walk) {
  PyObject *key, *value;
  Py_ssize_t at = 0;
  while (PyDict_Next(dict, &at, &key, &value)) {
    if (!walk.is_next(keys ? key : value)) return false;
  }
  return true;
}

bool has_next_items(PyObject* sequence, Walk& walk) {
  if (PyList_CheckExact(sequence)) {
    return all_of(sequence, [&](PyObject* item) { return walk.is_next(item); });
  }
  Ref items(PyObject_GetIter(sequence));
  while (items) {
    Ref item(PyIter_Next(items.get()));
    if (!item) return PyErr_Occurred() == nullptr;
    if (!walk.is_next(item.get())) return false;
  }
  return false;
}

// same_objects(dicts, lists, names, cells, kept, free, missing): whether these hold the objects `kept`: the values of all
// dicts, their keys, the items of lists and other sequences, what scopes have by names, and what is in cells. Those at
// the places `free` may be any.
PyObject* same_objects(PyObject*, PyObject* const* given, Py_ssize_t) {
  PyObject *dicts = given[0], *missing = given[6];
  Walk walk(given[4], given[5]);
  auto has_name = [&](PyObject* name) {
    PyObject *scope = PyTuple_GET_ITEM(name, 0), *called = PyTuple_GET_ITEM(name, 1);
    Ref found = PyDict_CheckExact(scope) ? Ref(Py_XNewRef(PyDict_GetItemWithError(scope, called)))
                                         : Ref(PyObject_CallMethod(scope, "get", "OO", called, missing));
    return walk.is_next(found ? found.get() : missing);
  };
  auto has_content = [&](PyObject* cell) {
    PyObject* content = PyCell_GET(cell);
    return walk.is_next(content == nullptr ? missing : content);
  };
  bool same = all_of(dicts, [&](PyObject* dict) { return has_next_entries(dict, false, walk); }) &&
      all_of(dicts, [&](PyObject* dict) { return has_next_entries(dict, true, walk); }) &&
      all_of(given[1], [&](PyObject* list) { return has_next_items(list, walk); }) &&
      all_of(given[2], has_name) && all_of(given[3], has_content) && walk.is_at_end();
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(same);
}

enum Flag { kRequiresGrad = 1, kHasHooks = 2 };

char flags_of(PyObject* tensor) {
  bool requires_grad = THPVariable_Unpack(tensor).requires_grad();
  bool has_hooks = reinterpret_cast<THPVariable*>(tensor)->backward_hooks != nullptr;
  return static_cast<char>((requires_grad ? kRequiresGrad : 0) | (has_hooks ? kHasHooks : 0));
}

// tensor_flags(tensors): a byte for each: whether it requires gradients, and has hooks on them.
PyObject* tensor_flags(PyObject*, PyObject* tensors) {
  Ref made(PyBytes_FromStringAndSize(nullptr, PyList_GET_SIZE(tensors)));
  if (!made) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
    PyBytes_AS_STRING(made.get())[i] = flags_of(PyList_GET_ITEM(tensors, i));
  }
  return made.release();
}

// same_tensors(tensors, specs, flags): whether tensors of the device have these specs and flags.
PyObject* same_tensors(PyObject*, PyObject* const* given, Py_ssize_t) {
  PyObject *tensors = given[0], *specs = given[1];
  const char* flags = PyBytes_AsString(given[2]);
  if (flags == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
    PyObject* tensor = PyList_GET_ITEM(tensors, i);
    Handle* handle = handle_of(THPVariable_Unpack(tensor));
    PyObject* value = handle == nullptr ? nullptr : handle->value();
    if (PyErr_Occurred()) return nullptr;
    if (value == nullptr || !is_value(value) || spec_of(value) != PyList_GET_ITEM(specs, i)) Py_RETURN_FALSE;
    if (flags_of(tensor) != flags[i]) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

}  // namespace

namespace marid {

PyMethodDef state_functions[] = {
    {"same_objects", fast(same_objects), METH_FASTCALL, nullptr},
    {"same_tensors", fast(same_tensors), METH_FASTCALL, nullptr},
    {"tensor_flags", tensor_flags, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
