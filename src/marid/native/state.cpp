// Whether what a function under marid.compile works on is as it was when it was recorded (replay/state_check.py,
// replay/template.py), and what it works on now: looked at before each replay.
#include "handle.h"
#include "nodes.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <unordered_map>

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

// same_objects(dicts, lists, names, cells, objects, kept, free, missing): whether these hold the objects `kept`: the values
// of all dicts, their keys, the items of lists and other sequences, what scopes and functions have by names, what is in
// cells, and the classes of objects. Those at the places `free` may be any.
PyObject* same_objects(PyObject*, PyObject* const* given, Py_ssize_t) {
  PyObject *dicts = given[0], *missing = given[7];
  Walk walk(given[5], given[6]);
  auto has_name = [&](PyObject* name) {
    PyObject *scope = PyTuple_GET_ITEM(name, 0), *called = PyTuple_GET_ITEM(name, 1);
    Ref found = PyDict_CheckExact(scope)      ? Ref(Py_XNewRef(PyDict_GetItemWithError(scope, called)))
        : PyFunction_Check(scope)             ? Ref(PyObject_GetAttr(scope, called))
                                              : Ref(PyObject_CallMethod(scope, "get", "OO", called, missing));
    return walk.is_next(found ? found.get() : missing);
  };
  auto has_content = [&](PyObject* cell) {
    PyObject* content = PyCell_GET(cell);
    return walk.is_next(content == nullptr ? missing : content);
  };
  auto has_class = [&](PyObject* object) { return walk.is_next(reinterpret_cast<PyObject*>(Py_TYPE(object))); };
  bool same = all_of(dicts, [&](PyObject* dict) { return has_next_entries(dict, false, walk); }) &&
      all_of(dicts, [&](PyObject* dict) { return has_next_entries(dict, true, walk); }) &&
      all_of(given[1], [&](PyObject* list) { return has_next_items(list, walk); }) &&
      all_of(given[2], has_name) && all_of(given[3], has_content) && all_of(given[4], has_class) && walk.is_at_end();
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(same);
}

// The dictionary of an object's attributes, where it has some; else null. None is made.
PyObject* attributes(PyObject* object) {
  PyObject** own = _PyObject_GetDictPtr(object);
  return own != nullptr && *own != nullptr && PyDict_GET_SIZE(*own) > 0 ? *own : nullptr;
}

// attributes_of(object): that, or None.
PyObject* attributes_of(PyObject*, PyObject* object) {
  PyObject* own = attributes(object);
  return Py_NewRef(own == nullptr ? Py_None : own);
}

enum Flag { kRequiresGrad = 1, kHasHooks = 2, kHasAttributes = 4 };

char flags_of(PyObject* tensor) {
  bool requires_grad = THPVariable_Unpack(tensor).requires_grad();
  auto* own = reinterpret_cast<THPVariable*>(tensor);
  auto has = [](PyObject* hooks) { return hooks != nullptr && (!PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) > 0); };
  bool has_hooks = has(own->backward_hooks) || has(own->post_accumulate_grad_hooks);
  bool has_attributes = attributes(tensor) != nullptr;
  return static_cast<char>(
      (requires_grad ? kRequiresGrad : 0) | (has_hooks ? kHasHooks : 0) | (has_attributes ? kHasAttributes : 0));
}

// tensor_flags(tensors): a byte for each: whether it requires gradients, has hooks on them, and attributes of its own.
PyObject* tensor_flags(PyObject*, PyObject* tensors) {
  Ref made(PyBytes_FromStringAndSize(nullptr, PyList_GET_SIZE(tensors)));
  if (!made) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
    PyBytes_AS_STRING(made.get())[i] = flags_of(PyList_GET_ITEM(tensors, i));
  }
  return made.release();
}

// host_looks(tensors): what Python can see of tensors of the host, but for their values, as bytes.
PyObject* host_looks(PyObject*, PyObject* tensors) {
  std::string looks;
  auto put = [&looks](int64_t number) { looks.append(reinterpret_cast<const char*>(&number), sizeof number); };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
    PyObject* object = PyList_GET_ITEM(tensors, i);
    const at::Tensor& tensor = THPVariable_Unpack(object);
    put(flags_of(object));
    put(static_cast<int64_t>(tensor.scalar_type()));
    put(tensor.is_leaf() ? reinterpret_cast<int64_t>(tensor.grad().unsafeGetTensorImpl()) : 0);  // which tensor it is
    put(tensor.layout() == at::kStrided ? tensor.dim() : -1);
    if (tensor.layout() != at::kStrided) continue;
    for (int64_t size : tensor.sizes()) put(size);
    for (int64_t stride : tensor.strides()) put(stride);
  }
  return PyBytes_FromStringAndSize(looks.data(), static_cast<Py_ssize_t>(looks.size()));
}

// share_version(tensor, with): from now on, writes to either are counted for both, as for a tensor and its view.
PyObject* share_version(PyObject*, PyObject* const* given, Py_ssize_t) {
  THPVariable_Unpack(given[0]).unsafeGetTensorImpl()->set_version_counter(
      THPVariable_Unpack(given[1]).unsafeGetTensorImpl()->version_counter());
  Py_RETURN_NONE;
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

// values_of(tensors): the value that each tensor of the device stands for.
PyObject* values_of(PyObject*, PyObject* tensors) {
  Ref made(PyList_New(PyList_GET_SIZE(tensors)));
  for (Py_ssize_t i = 0; made && i < PyList_GET_SIZE(tensors); i++) {
    Handle* handle = handle_of(THPVariable_Unpack(PyList_GET_ITEM(tensors, i)));
    PyObject* value = handle == nullptr ? nullptr : handle->value();
    if (value == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "values_of() takes tensors of the device");
      return nullptr;
    }
    PyList_SET_ITEM(made.get(), i, Py_NewRef(value));
  }
  return made.release();
}

// share_as(values, shared): whether each value lies in the memory of the first one that `shared` names for it, and of none
// before that.
PyObject* share_as(PyObject*, PyObject* const* given, Py_ssize_t) {
  PyObject *values = given[0], *shared = given[1];
  std::unordered_map<PyObject*, Py_ssize_t> first;
  first.reserve(PyList_GET_SIZE(values));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); i++) {
    auto [found, is_new] = first.emplace(root_of(PyList_GET_ITEM(values, i)), i);
    if (found->second != PyLong_AsSsize_t(PyTuple_GET_ITEM(shared, i))) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// grads_of(tensors, indices): the gradients of those of the tensors that have one, by index.
PyObject* grads_of(PyObject*, PyObject* const* given, Py_ssize_t) {
  PyObject *tensors = given[0], *indices = given[1];
  Ref made(PyDict_New());
  for (Py_ssize_t i = 0; made && i < PyList_GET_SIZE(indices); i++) {
    PyObject* index = PyList_GET_ITEM(indices, i);
    const at::Tensor& grad = THPVariable_Unpack(PyList_GET_ITEM(tensors, PyLong_AsSsize_t(index))).grad();
    if (!grad.defined()) continue;
    Ref wrapped(THPVariable_Wrap(grad));
    if (!wrapped || PyDict_SetItem(made.get(), index, wrapped.get()) != 0) return nullptr;
  }
  return made.release();
}

}  // namespace

namespace marid {

PyMethodDef state_functions[] = {
    {"attributes_of", attributes_of, METH_O, nullptr},
    {"grads_of", fast(grads_of), METH_FASTCALL, nullptr},
    {"host_looks", host_looks, METH_O, nullptr},
    {"same_objects", fast(same_objects), METH_FASTCALL, nullptr},
    {"same_tensors", fast(same_tensors), METH_FASTCALL, nullptr},
    {"share_as", fast(share_as), METH_FASTCALL, nullptr},
    {"share_version", fast(share_version), METH_FASTCALL, nullptr},
    {"tensor_flags", tensor_flags, METH_O, nullptr},
    {"values_of", values_of, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
