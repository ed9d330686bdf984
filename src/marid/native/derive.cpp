// What an operator returns, asked of the C++ kernel that says so for tensors without data.
//
// PyTorch has such kernels for a good part of its operators: the same code that works out the results of the CPU's kernel
// ("structured" ones), or one function for every device (views). But `import torch` puts implementations in Python, a
// thousand times as slow, in front of many of them. The dispatcher keeps those behind; they are called directly.
#include "concretely.h"
#include "python.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/MemoryFormat.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <list>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace torch {
THPDtype* getTHPDtype(at::ScalarType type);
}

namespace {

using marid::Ref;
using Kernels = std::list<c10::impl::AnnotatedKernel>;

// --- the kernels of an operator --------------------------------------------------------------------------------------

const c10::impl::OperatorEntry& entry_of(const c10::OperatorHandle& op);
const ska::flat_hash_map<c10::DispatchKey, Kernels>& all_kernels(const c10::impl::OperatorEntry& entry);

// The dispatcher gives out only the newest kernel; naming private members is allowed where a template is instantiated.
template <auto Definition, auto All>
struct Opened {
  friend const c10::impl::OperatorEntry& entry_of(const c10::OperatorHandle& op) { return (op.*Definition)->op; }
  friend const ska::flat_hash_map<c10::DispatchKey, Kernels>& all_kernels(const c10::impl::OperatorEntry& entry) {
    return entry.*All;
  }
};
template struct Opened<&c10::OperatorHandle::operatorDef_, &c10::impl::OperatorEntry::kernels_>;

const Kernels* kernels_of(const c10::OperatorHandle& op, c10::DispatchKey key) {
  const auto& all = all_kernels(entry_of(op));
  auto found = all.find(key);
  return found == all.end() || found->second.empty() ? nullptr : &found->second;
}

// The first one that was registered, if it is written in C++.
const c10::KernelFunction* own_kernel(const c10::OperatorHandle& op, c10::DispatchKey key) {
  const Kernels* all = kernels_of(op, key);
  if (all == nullptr) return nullptr;
  const c10::KernelFunction& kernel = all->back().kernel;
  bool in_cpp = kernel.isValidUnboxed() || kernel.isValidSymUnboxed();
  return in_cpp && !kernel.isFallthrough() ? &kernel : nullptr;
}

struct Derived {
  c10::OperatorHandle op;
  const c10::KernelFunction* kernel;
};

std::deque<Derived> known;  // which stay where they are
std::unordered_map<std::string, long> by_name;  // -1 where there is none

const c10::KernelFunction* kernel_for(const c10::OperatorHandle& op) {
  if (const auto* own = own_kernel(op, c10::DispatchKey::Meta)) return own;
  // One function for all devices, if the CPU has none of its own.
  if (kernels_of(op, c10::DispatchKey::CPU) != nullptr) return nullptr;
  return own_kernel(op, c10::DispatchKey::CompositeExplicitAutograd);
}

// derives(name, overload): a number for the operator; -1 where no kernel in C++ tells what it returns.
PyObject* derives(PyObject*, PyObject* const* given, Py_ssize_t) {
  const char *name = PyUnicode_AsUTF8(given[0]), *overload = PyUnicode_AsUTF8(given[1]);
  if (name == nullptr || overload == nullptr) return nullptr;
  auto [found, is_new] = by_name.try_emplace(std::string(name) + "." + overload, -1);
  if (is_new) {
    auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    if (const c10::KernelFunction* kernel = op ? kernel_for(*op) : nullptr) {
      found->second = static_cast<long>(known.size());
      known.push_back({*op, kernel});
    }
  }
  return PyLong_FromLong(found->second);
}

// --- arguments -------------------------------------------------------------------------------------------------------

marid::Slots node, output, spec;
enum ValueSlot { kSpec };
enum SpecSlot { kPattern };

// The values among the arguments, in order, and what is passed for them; the same for the same one.
struct Tensors {
  c10::SmallVector<PyObject*, 8> values;
  c10::SmallVector<at::Tensor, 8> made;
};

// A tensor without data that looks like a value; undefined where there is no pattern of it.
at::Tensor without_data(PyObject* value) {
  PyObject* of = Py_TYPE(value) == node.type ? node.at(value, kSpec) : output.at(value, kSpec);
  if (of == Py_None || spec.at(of, kPattern) == Py_None) return at::Tensor();
  Ref address(PyObject_GetAttrString(spec.at(of, kPattern), "_cdata"));
  if (!address) return at::Tensor();
  auto* like = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address.get()));
  auto type = c10::typeMetaToScalarType(like->dtype());
  int64_t offset = like->storage_offset();
  at::Tensor made(at::detail::empty_strided_meta(like->sizes(), like->strides(), type));
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  if (offset != 0) {
    size_t nbytes = at::detail::computeStorageNbytes(like->sizes(), like->strides(), c10::elementSize(type), offset);
    impl->unsafe_storage().set_nbytes(nbytes);
    impl->set_storage_offset(offset);
  }
  made._set_conj(like->key_set().has(c10::DispatchKey::Conjugate));
  made._set_neg(like->key_set().has(c10::DispatchKey::Negative));
  return made;
}

bool read(PyObject* arg, const c10::TypePtr& type, Tensors& tensors, c10::IValue& result);

bool read_tensor(PyObject* arg, Tensors& tensors, c10::IValue& result) {
  if (Py_TYPE(arg) == node.type || Py_TYPE(arg) == output.type) {
    auto same = std::find(tensors.values.begin(), tensors.values.end(), arg);
    bool is_new = same == tensors.values.end();
    at::Tensor made = is_new ? without_data(arg) : tensors.made[same - tensors.values.begin()];
    if (!made.defined()) return false;
    tensors.values.push_back(arg);
    tensors.made.push_back(made);
    result = std::move(made);
    return true;
  }
  // A number that stands for a tensor.
  at::Tensor number;
  auto filled = [](at::ScalarType type, auto value) {
    at::Tensor made(at::detail::empty_cpu({}, type));
    *static_cast<decltype(value)*>(made.data_ptr()) = value;
    return made;
  };
  if (PyBool_Check(arg)) {
    number = filled(at::kBool, arg == Py_True);
  } else if (PyLong_CheckExact(arg)) {
    int64_t value = PyLong_AsLongLong(arg);
    if (value == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
    number = filled(at::kLong, value);
  } else if (PyFloat_CheckExact(arg)) {
    number = filled(at::kDouble, PyFloat_AS_DOUBLE(arg));
  } else if (PyComplex_CheckExact(arg)) {
    number = filled(at::kComplexDouble, c10::complex<double>(PyComplex_RealAsDouble(arg), PyComplex_ImagAsDouble(arg)));
  } else {
    return false;
  }
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  result = std::move(number);
  return true;
}

bool read_int(PyObject* arg, int64_t& number) {
  if (!PyLong_CheckExact(arg)) return false;
  number = PyLong_AsLongLong(arg);
  return number != -1 || !PyErr_Occurred() || (PyErr_Clear(), false);
}

bool read_number(PyObject* arg, c10::IValue& result) {
  int64_t whole = 0;
  if (PyBool_Check(arg)) {
    result = arg == Py_True;
  } else if (PyFloat_CheckExact(arg)) {
    result = PyFloat_AS_DOUBLE(arg);
  } else if (PyComplex_CheckExact(arg)) {
    result = c10::complex<double>(PyComplex_RealAsDouble(arg), PyComplex_ImagAsDouble(arg));
  } else if (read_int(arg, whole)) {
    result = whole;
  } else {
    return false;
  }
  return true;
}

bool read_list(PyObject* arg, const c10::TypePtr& type, Tensors& tensors, c10::IValue& result) {
  if (!PyTuple_CheckExact(arg)) return false;
  // A list of symbolic integers may be one of integers.
  bool whole = type->kind() == c10::TypeKind::SymIntType;
  c10::impl::GenericList list(whole ? c10::IntType::get() : type);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arg); i++) {
    c10::IValue item;
    if (!read(PyTuple_GET_ITEM(arg, i), type, tensors, item)) return false;
    list.push_back(std::move(item));
  }
  result = std::move(list);
  return true;
}

// An argument as the dispatcher takes it; false for one that is not known here.
bool read(PyObject* arg, const c10::TypePtr& type, Tensors& tensors, c10::IValue& result) {
  int64_t whole = 0;
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      if (arg != Py_None) return read(arg, type->castRaw<c10::OptionalType>()->getElementType(), tensors, result);
      result = c10::IValue();
      return true;
    case c10::TypeKind::TensorType: return read_tensor(arg, tensors, result);
    case c10::TypeKind::ListType:
      return read_list(arg, type->castRaw<c10::ListType>()->getElementType(), tensors, result);
    case c10::TypeKind::NumberType: return read_number(arg, result);
    case c10::TypeKind::BoolType:
      if (!PyBool_Check(arg)) return false;
      result = arg == Py_True;
      return true;
    case c10::TypeKind::FloatType:
      if (PyFloat_CheckExact(arg)) {
        result = PyFloat_AS_DOUBLE(arg);
      } else if (read_int(arg, whole)) {
        result = static_cast<double>(whole);
      } else {
        return false;
      }
      return true;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      if (!read_int(arg, whole)) return false;
      result = whole;
      return true;
    case c10::TypeKind::StringType:
      if (!PyUnicode_CheckExact(arg)) return false;
      result = std::string(PyUnicode_AsUTF8(arg));
      return true;
    case c10::TypeKind::ScalarTypeType:
      if (!THPDtype_Check(arg)) return false;
      result = static_cast<int64_t>(reinterpret_cast<THPDtype*>(arg)->scalar_type);
      return true;
    case c10::TypeKind::MemoryFormatType:
      if (!THPMemoryFormat_Check(arg)) return false;
      result = static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(arg)->memory_format);
      return true;
    default: return false;
  }
}

// Read a call as it is recorded: positional arguments, and pairs of names and values.
bool read_call(const c10::FunctionSchema& schema, PyObject* args, PyObject* kwargs, Tensors& tensors,
               torch::jit::Stack& stack) {
  size_t given = PyTuple_GET_SIZE(args), named = kwargs == Py_None ? 0 : PyTuple_GET_SIZE(kwargs), used = 0;
  const auto& formals = schema.arguments();
  if (given > formals.size()) return false;
  for (size_t i = 0; i < formals.size(); i++) {
    PyObject* arg = i < given ? PyTuple_GET_ITEM(args, i) : nullptr;
    for (size_t k = 0; arg == nullptr && k < named; k++) {
      PyObject* pair = PyTuple_GET_ITEM(kwargs, k);
      if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(pair, 0), formals[i].name().c_str()) == 0) {
        arg = PyTuple_GET_ITEM(pair, 1);
        used++;
      }
    }
    if (arg == nullptr) {
      if (!formals[i].default_value()) return false;
      stack.push_back(*formals[i].default_value());
    } else if (!read(arg, formals[i].real_type(), tensors, stack.emplace_back())) {
      return false;
    }
  }
  return used == named;
}

// --- results ---------------------------------------------------------------------------------------------------------

Ref numbers(c10::IntArrayRef of) {
  Ref all(PyTuple_New(static_cast<Py_ssize_t>(of.size())));
  for (size_t i = 0; all && i < of.size(); i++) PyTuple_SET_ITEM(all.get(), i, PyLong_FromLongLong(of[i]));
  return all;
}

// Where a tensor is among the arguments, as a number; or its shape, strides, offset, dtype, and whether it is to be
// conjugated and negated.
Ref describe(const at::Tensor& tensor, const Tensors& tensors, bool mutates) {
  if (!tensor.defined()) return Ref::to(Py_None);
  for (size_t i = 0; mutates && i < tensors.made.size(); i++) {
    if (tensors.made[i].is_same(tensor)) return Ref(PyLong_FromSize_t(i));
  }
  if (tensor.layout() != at::kStrided || !tensor.is_meta()) return Ref::to(Py_NotImplemented);
  Ref shape = numbers(tensor.sizes()), stride = numbers(tensor.strides());
  if (!shape || !stride) return Ref();
  return Ref(Py_BuildValue(
      "OOLOOO", shape.get(), stride.get(), static_cast<long long>(tensor.storage_offset()),
      reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())), tensor.is_conj() ? Py_True : Py_False,
      tensor.is_neg() ? Py_True : Py_False));
}

Ref describe(const c10::IValue& value, const Tensors& tensors, bool mutates) {
  if (value.isNone()) return Ref::to(Py_None);
  if (value.isTensor()) return describe(value.toTensor(), tensors, mutates);
  if (!value.isTensorList()) return Ref::to(Py_NotImplemented);
  Ref all(PyList_New(0));
  for (const at::Tensor& tensor : value.toTensorVector()) {
    Ref one = describe(tensor, tensors, mutates);
    if (!one || one.get() == Py_NotImplemented) return one;
    if (PyList_Append(all.get(), one.get()) < 0) return Ref();
  }
  return all;
}

using Geometry = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t>;

Geometry geometry(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()};
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Run a kernel as if there were nothing above it; false when it raises.
bool call(const Derived& derived, torch::jit::Stack& stack) {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  auto [included, excluded] = marid::keys_inside();
  c10::impl::ForceDispatchKeyGuard guard(included, excluded);
  try {
    derived.kernel->callBoxed(derived.op, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    return true;
  } catch (python_error& error) {  // from an operator inside of it
    error.restore();
    if (PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
  } catch (const std::exception&) {
  }
  return false;
}

// derive(number, args, kwargs, mutates): what the operator returns for a call as it is recorded: for each result a number
// or a tuple (above), None for none, lists of these. NotImplemented where that cannot be said, also for calls that raise.
PyObject* derive(PyObject*, PyObject* const* given, Py_ssize_t) {
  const Derived& derived = known[PyLong_AsSize_t(given[0])];
  bool mutates = given[3] == Py_True;
  const c10::FunctionSchema& schema = derived.op.schema();
  Tensors tensors;
  torch::jit::Stack stack;
  if (!read_call(schema, given[1], given[2], tensors, stack)) {
    return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
  }
  std::vector<Geometry> before;
  if (mutates) std::transform(tensors.made.begin(), tensors.made.end(), std::back_inserter(before), geometry);
  if (!call(derived, stack)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
  for (size_t i = 0; i < before.size(); i++) {
    if (geometry(tensors.made[i]) != before[i]) return Py_NewRef(Py_NotImplemented);
  }
  if (schema.returns().size() == 1) return describe(stack.back(), tensors, mutates).release();
  if (schema.returns().empty()) return Py_NewRef(Py_None);
  Ref all(PyList_New(0));
  for (const c10::IValue& value : stack) {
    Ref one = describe(value, tensors, mutates);
    if (!one || one.get() == Py_NotImplemented) return one.release();
    if (PyList_Append(all.get(), one.get()) < 0) return nullptr;
  }
  return all.release();
}

// configure_deriving(Node, Output, Spec): the classes it reads.
PyObject* configure_deriving(PyObject*, PyObject* const* given, Py_ssize_t) {
  bool found = node.find(given[0], {"spec"}) && output.find(given[1], {"spec"}) && spec.find(given[2], {"pattern"});
  return found ? Py_NewRef(Py_None) : nullptr;
}

}  // namespace

namespace marid {

PyMethodDef derive_functions[] = {
    {"derives", fast(derives), METH_FASTCALL, nullptr},
    {"derive", fast(derive), METH_FASTCALL, nullptr},
    {"configure_deriving", fast(configure_deriving), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
