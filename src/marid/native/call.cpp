// Reading the arguments of a call: what of them is part of its key, and what is recorded. As frontend/calls.py does it for
// any call; here for own tensors, numbers, texts, None, dtypes, and lists of these.
#include "call.h"


#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>

// From PyTorch's Python half, whose headers take long to compile.
struct THPDtype;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
namespace torch {
THPDtype* getTHPDtype(at::ScalarType type);
namespace utils {
PyObject* getTHPMemoryFormat(at::MemoryFormat format);
}
}  // namespace torch

namespace marid {

namespace {

PyObject* bucket;
PyObject *unit, *large, *yes, *no;

// An argument's part of the key, borrowed, and what is recorded of it.
Outcome given(PyObject* part, PyObject* own, PyObject** key, PyObject** stored) {
  *key = Py_XNewRef(part);
  *stored = own;
  return part != nullptr && own != nullptr ? Outcome::kDone : Outcome::kError;
}

Outcome read_float(double number, bool exact, PyObject** key, PyObject** stored) {
  Ref own(PyFloat_FromDouble(number)), part;
  if (!own) return Outcome::kError;
  if (exact) {
    part = Ref(PyTuple_Pack(1, own.get()));  // not equal to the integer
  } else if (0 <= number && number <= 1) {
    part = Ref::to(unit);
  } else {
    part = 1 < number && number <= 127 ? Ref::to(large) : Ref(PyObject_CallOneArg(bucket, own.get()));
  }
  return given(part.get(), own.release(), key, stored);
}

Outcome read_int(int64_t number, PyObject** key, PyObject** stored) {
  PyObject* own = PyLong_FromLongLong(number);
  return given(own, own, key, stored);
}

Outcome read_bool(bool truth, PyObject** key, PyObject** stored) {
  return given(truth ? yes : no, Py_NewRef(truth ? Py_True : Py_False), key, stored);
}

Outcome read_complex(c10::complex<double> number, PyObject** key, PyObject** stored) {
  PyObject* own = PyComplex_FromDoubles(number.real(), number.imag());
  return given(reinterpret_cast<PyObject*>(&PyComplex_Type), own, key, stored);
}

// The key and the value of a tensor: of the device, a number that the user gave for one, or none.
Outcome read_tensor(const at::Tensor& tensor, bool exact, Call& call, PyObject** key, PyObject** stored) {
  if (!tensor.defined()) return given(Py_None, Py_NewRef(Py_None), key, stored);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->is_wrapped_number()) {
    if (!impl->is_cpu() || impl->key_set().has(c10::DispatchKey::Python)) return Outcome::kUnusual;
    switch (tensor.scalar_type()) {
      case at::kDouble: return read_float(*static_cast<const double*>(impl->data()), exact, key, stored);
      case at::kLong: return read_int(*static_cast<const int64_t*>(impl->data()), key, stored);
      case at::kBool: return read_bool(*static_cast<const bool*>(impl->data()), key, stored);
      case at::kComplexDouble:
        return read_complex(*static_cast<const c10::complex<double>*>(impl->data()), key, stored);
      default: return Outcome::kUnusual;
    }
  }
  Handle* handle = handle_of(impl);
  PyObject* value = handle == nullptr ? nullptr : handle->value();
  if (value == nullptr && PyErr_Occurred()) return Outcome::kError;
  if (value == nullptr || !is_value(value)) return Outcome::kUnusual;
  call.handles.push_back(handle);
  call.values.push_back(value);
  return given(spec_of(value), Py_NewRef(value), key, stored);
}

}  // namespace

Ref untracked_tuple(size_t size) {
  Ref made(PyTuple_New(static_cast<Py_ssize_t>(size)));
  if (made) PyObject_GC_UnTrack(made.get());
  return made;
}

Outcome read_argument(const c10::IValue& arg, bool exact, Call& call, PyObject** key, PyObject** stored) {
  if (arg.isTensor()) return read_tensor(arg.toTensor(), exact, call, key, stored);
  if (arg.isInt()) return read_int(arg.toInt(), key, stored);
  if (arg.isNone()) return given(Py_None, Py_NewRef(Py_None), key, stored);
  if (arg.isBool()) return read_bool(arg.toBool(), key, stored);
  if (arg.isDouble()) return read_float(arg.toDouble(), exact, key, stored);
  if (arg.isComplexDouble()) return read_complex(arg.toComplexDouble(), key, stored);
  if (arg.isString()) {
    const std::string& text = arg.toStringRef();
    PyObject* own = PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
    return given(own, own, key, stored);
  }
  if (!arg.isList()) return Outcome::kUnusual;
  c10::List<c10::IValue> list = arg.toList();
  size_t count = list.size();
  Ref parts = untracked_tuple(count), items = untracked_tuple(count);
  if (!parts || !items) return Outcome::kError;
  for (size_t i = 0; i < count; i++) {
    PyObject *one = nullptr, *other = nullptr;
    Outcome outcome = read_argument(list.get(i), call.exact_lists, call, &one, &other);
    PyTuple_SET_ITEM(parts.get(), i, one);
    PyTuple_SET_ITEM(items.get(), i, other);
    if (outcome != Outcome::kDone) return outcome;
  }
  *key = parts.release();
  *stored = items.release();
  return Outcome::kDone;
}

namespace {

// The same, by what the argument is in the schema.
Outcome read_formal(const c10::IValue& arg, const Formal& formal, Call& call, PyObject** key, PyObject** stored) {
  if (formal.kind == Formal::kPlain || arg.isNone()) return read_argument(arg, call.exact, call, key, stored);
  if (formal.kind == Formal::kNotRecorded || !arg.isInt()) return Outcome::kUnusual;
  PyObject* named = formal.kind == Formal::kDtype
      ? reinterpret_cast<PyObject*>(torch::getTHPDtype(arg.toScalarType()))
      : torch::utils::getTHPMemoryFormat(arg.toMemoryFormat());
  return given(named, Py_XNewRef(named), key, stored);
}

// For each of some objects, where it is first among them.
template <typename Object>
c10::SmallVector<size_t, 8> first_occurrences(const c10::SmallVector<Object*, 8>& objects) {
  c10::SmallVector<size_t, 8> all;
  for (Object* one : objects) all.push_back(std::find(objects.begin(), objects.end(), one) - objects.begin());
  return all;
}

Ref tuple_of(const c10::SmallVector<size_t, 8>& numbers) {
  Ref all(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; all && i < numbers.size(); i++) {
    PyObject* number = PyLong_FromSize_t(numbers[i]);
    if (number == nullptr) return Ref();
    PyTuple_SET_ITEM(all.get(), i, number);
  }
  return all;
}

// Which arguments a call is recorded with: the first so many, and others by name. Without what is as the schema has it
// anyway.
struct Recorded {
  size_t positional;
  c10::SmallVector<size_t, 4> named;
};

Recorded recorded_arguments(const Operator& op, const c10::IValue* given_args) {
  Recorded found{op.positional, {}};
  while (found.positional > 0 && is_default(given_args[found.positional - 1], op.formals[found.positional - 1])) {
    found.positional--;
  }
  for (size_t i = op.positional; i < op.formals.size(); i++) {
    if (!is_default(given_args[i], op.formals[i]) && !is_usual(given_args, i, op)) found.named.push_back(i);
  }
  return found;
}

// What is recorded of an argument; `next` is the tensor that comes next. Null after an error.
PyObject* stored(const c10::IValue& arg, const Call& call, size_t& next) {
  if (arg.isTensor()) {
    const at::Tensor& tensor = arg.toTensor();
    if (!tensor.defined()) return Py_NewRef(Py_None);
    if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) return Py_NewRef(call.values[next++]);
    const void* number = tensor.unsafeGetTensorImpl()->data();
    switch (tensor.scalar_type()) {
      case at::kDouble: return PyFloat_FromDouble(*static_cast<const double*>(number));
      case at::kLong: return PyLong_FromLongLong(*static_cast<const int64_t*>(number));
      case at::kBool: return PyBool_FromLong(*static_cast<const bool*>(number));
      default: {
        auto complex = *static_cast<const c10::complex<double>*>(number);
        return PyComplex_FromDoubles(complex.real(), complex.imag());
      }
    }
  }
  if (arg.isInt()) return PyLong_FromLongLong(arg.toInt());
  if (arg.isNone()) return Py_NewRef(Py_None);
  if (arg.isBool()) return PyBool_FromLong(arg.toBool());
  if (arg.isDouble()) return PyFloat_FromDouble(arg.toDouble());
  if (arg.isComplexDouble()) {
    auto complex = arg.toComplexDouble();
    return PyComplex_FromDoubles(complex.real(), complex.imag());
  }
  if (arg.isString()) {
    const std::string& text = arg.toStringRef();
    return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  }
  auto items = arg.toListRef();
  Ref all = untracked_tuple(items.size());
  for (size_t i = 0; all && i < items.size(); i++) {
    PyObject* item = stored(items[i], call, next);
    if (item == nullptr) return nullptr;
    PyTuple_SET_ITEM(all.get(), i, item);
  }
  return all.release();
}

PyObject* stored_formal(const c10::IValue& arg, const Formal& formal, const Call& call, size_t& next) {
  if (arg.isNone() || formal.kind == Formal::kPlain || formal.kind == Formal::kNotRecorded) return stored(arg, call, next);
  return Py_XNewRef(
      formal.kind == Formal::kDtype ? reinterpret_cast<PyObject*>(torch::getTHPDtype(arg.toScalarType()))
                                    : torch::utils::getTHPMemoryFormat(arg.toMemoryFormat()));
}

}  // namespace

bool is_default(const c10::IValue& arg, const Formal& formal) {
  if (formal.otherwise == nullptr) return false;
  if (arg.isNone() || formal.otherwise->isNone()) return arg.isNone() && formal.otherwise->isNone();
  if (arg.isInt() && formal.otherwise->isInt()) return arg.toInt() == formal.otherwise->toInt();
  if (arg.isBool() && formal.otherwise->isBool()) return arg.toBool() == formal.otherwise->toBool();
  return arg == *formal.otherwise;
}

// Where `zeros_like` and its kin are told to put their result what Python's half of PyTorch always says: to where the
// first tensor is.
bool is_usual(const c10::IValue* given_args, size_t index, const Operator& op) {
  const c10::IValue &arg = given_args[index], &like = given_args[0];
  if (op.formals[index].kind != Formal::kNotRecorded) return false;
  if (arg.isDevice()) return like.isTensor() && like.toTensor().defined() && arg.toDevice() == like.toTensor().device();
  if (arg.isBool()) return !arg.toBool();  // memory that is not pinned
  return arg.isInt() && arg.toLayout() == at::kStrided;
}

bool store_call(const Operator& op, const c10::IValue* given_args, Call& call) {
  auto [positional, named] = recorded_arguments(op, given_args);
  call.args = untracked_tuple(positional);
  call.kwargs = named.empty() ? Ref::to(Py_None) : untracked_tuple(named.size());
  if (!call.args || !call.kwargs) return false;
  size_t next = 0;
  for (size_t i = 0; i < positional; i++) {
    PyObject* one = stored_formal(given_args[i], op.formals[i], call, next);
    if (one == nullptr) return false;
    PyTuple_SET_ITEM(call.args.get(), i, one);
  }
  for (size_t i = 0; i < named.size(); i++) {
    const Formal& formal = op.formals[named[i]];
    Ref value(stored_formal(given_args[named[i]], formal, call, next)), pair = untracked_tuple(2);
    if (!value || !pair) return false;
    PyTuple_SET_ITEM(pair.get(), 0, Py_NewRef(formal.name));
    PyTuple_SET_ITEM(pair.get(), 1, value.release());
    PyTuple_SET_ITEM(call.kwargs.get(), i, pair.release());
  }
  return true;
}

Outcome read_call(const Operator& op, const c10::IValue* given_args, Call& call) {
  auto [positional, named] = recorded_arguments(op, given_args);
  call.key = untracked_tuple(positional + 2 * named.size());
  call.args = untracked_tuple(positional);
  call.kwargs = named.empty() ? Ref::to(Py_None) : untracked_tuple(named.size());
  if (!call.key || !call.args || !call.kwargs) return Outcome::kError;
  for (size_t i = 0; i < positional; i++) {
    PyObject *part = nullptr, *stored = nullptr;
    Outcome outcome = read_formal(given_args[i], op.formals[i], call, &part, &stored);
    PyTuple_SET_ITEM(call.key.get(), i, part);
    PyTuple_SET_ITEM(call.args.get(), i, stored);
    if (outcome != Outcome::kDone) return outcome;
  }
  for (size_t i = 0; i < named.size(); i++) {
    const Formal& formal = op.formals[named[i]];
    PyObject *part = nullptr, *stored = nullptr;
    Outcome outcome = read_formal(given_args[named[i]], formal, call, &part, &stored);
    Ref value(stored);
    PyTuple_SET_ITEM(call.key.get(), positional + 2 * i, Py_NewRef(formal.name));
    PyTuple_SET_ITEM(call.key.get(), positional + 2 * i + 1, part);
    if (outcome != Outcome::kDone) return outcome;
    Ref pair = untracked_tuple(2);
    if (!pair) return Outcome::kError;
    PyTuple_SET_ITEM(pair.get(), 0, Py_NewRef(formal.name));
    PyTuple_SET_ITEM(pair.get(), 1, value.release());
    PyTuple_SET_ITEM(call.kwargs.get(), i, pair.release());
  }
  return Outcome::kDone;
}

Ref full_key(const Call& call) {
  auto [of_roots, of_tensors] = sharing(call);
  if (of_roots.empty()) return Ref::to(call.key.get());
  Ref roots = tuple_of(of_roots), tensors = tuple_of(of_tensors);
  return roots && tensors ? Ref(PyTuple_Pack(3, call.key.get(), roots.get(), tensors.get())) : Ref();
}

Sharing sharing(const Call& call) {
  c10::SmallVector<PyObject*, 8> roots;
  for (PyObject* value : call.values) roots.push_back(root_of(value));
  Sharing found{first_occurrences(roots), first_occurrences(call.handles)};
  bool shared = false;
  for (size_t i = 0; i < roots.size(); i++) shared = shared || found.roots[i] != i;
  return shared ? found : Sharing();
}

void prepare_reading(PyObject* bucket_of) {
  bucket = bucket_of;
  unit = PyUnicode_InternFromString("unit");
  large = PyUnicode_InternFromString("large");
  yes = PyUnicode_InternFromString("True");
  no = PyUnicode_InternFromString("False");
}

}  // namespace marid
