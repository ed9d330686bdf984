// The operators of Python on tensors of the device: `x + y`, `2 * x`, `x < y`, `bool(x)`.
//
// For a tensor Python looks `__add__` up, and PyTorch's function for it reads its arguments from a tuple by the signatures that
// it knows, lets the interpreter's lock go, and takes it again. Where both operands are what they nearly always are, tensors of
// the device's own class or plain numbers, these functions call at once what PyTorch would call, with the lock held. (What
// runs at once holds it anyway, and lets it go where it takes long.) All else is left to the methods of the operands.
#include "arithmetic.h"

#include "immediate.h"
#include "operands.h"
#include "reads_at_once.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/and.h>
#include <ATen/ops/or.h>
#include <ATen/ops/xor.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_not.h>
#include <ATen/ops/div.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/le.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sub.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>
#include <bit>
#include <cstring>
#include <optional>

namespace marid {

namespace {

using at::Scalar, at::Tensor;

// A number as the tensor that PyTorch makes of one. Nobody writes to these, and a program has few: they are kept, each until
// another takes its place; who has one has it for himself, as other threads run while an operation takes long. With the
// interpreter's lock.
Tensor as_tensor(const Scalar& number) {
  struct Kept {
    at::ScalarType type = at::ScalarType::Undefined;
    int64_t bits = 0;
    Tensor tensor;
  };
  static auto& kept = *new std::array<Kept, 64>();  // never given back: the process may end without the lock
  at::ScalarType type = number.type();
  int64_t bits = type == at::kDouble ? std::bit_cast<int64_t>(number.toDouble()) : number.toLong();
  uint64_t mixed = static_cast<uint64_t>(bits) * 0x9E3779B97F4A7C15 + static_cast<uint64_t>(type);
  Kept& one = kept[mixed >> 58];
  if (one.type != type || one.bits != bits) {
    c10::InferenceMode usual(false);  // autograd saves it
    at::AutoDispatchBelowADInplaceOrView below;
    Tensor made = c10::scalar_to_tensor(number);
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
    one = {type, bits, std::move(made)};
  }
  return one.tensor;
}

// A binary operator: its methods, and what PyTorch calls for two tensors, for a tensor and a number, and for those in the other
// order.
struct Binary {
  const char *method, *reflected;
  Tensor (*tensors)(const Tensor&, const Tensor&);
  Tensor (*with_number)(const Tensor&, const Scalar&);
  Tensor (*of_number)(const Scalar&, const Tensor&);
};

constexpr Binary kAdd = {
    "__add__", "__radd__",
    [](const Tensor& a, const Tensor& b) { return at::add(a, b); },
    [](const Tensor& a, const Scalar& b) { return at::add(a, as_tensor(b)); },
    [](const Scalar& a, const Tensor& b) { return at::add(b, as_tensor(a)); }};
constexpr Binary kSubtract = {
    "__sub__", "__rsub__",
    [](const Tensor& a, const Tensor& b) { return at::sub(a, b); },
    [](const Tensor& a, const Scalar& b) { return at::sub(a, as_tensor(b)); },
    [](const Scalar& a, const Tensor& b) { return at::rsub(b, a); }};
constexpr Binary kMultiply = {
    "__mul__", "__rmul__",
    [](const Tensor& a, const Tensor& b) { return at::mul(a, b); },
    [](const Tensor& a, const Scalar& b) { return at::mul(a, as_tensor(b)); },
    [](const Scalar& a, const Tensor& b) { return at::mul(b, as_tensor(a)); }};
constexpr Binary kDivide = {
    "__truediv__", "__rtruediv__",
    [](const Tensor& a, const Tensor& b) { return at::div(a, b); },
    [](const Tensor& a, const Scalar& b) { return at::div(a, as_tensor(b)); },
    [](const Scalar& a, const Tensor& b) { return at::mul(at::reciprocal(b), as_tensor(a)); }};
constexpr Binary kPower = {
    "__pow__", "__rpow__",
    [](const Tensor& a, const Tensor& b) { return at::pow(a, b); },
    [](const Tensor& a, const Scalar& b) { return at::pow(a, b); },
    [](const Scalar& a, const Tensor& b) { return at::pow(a, b); }};
constexpr Binary kFloorDivide = {
    "__floordiv__", "__rfloordiv__",
    [](const Tensor& a, const Tensor& b) { return at::floor_divide(a, b); },
    [](const Tensor& a, const Scalar& b) { return at::floor_divide(a, as_tensor(b)); },
    [](const Scalar& a, const Tensor& b) { return at::floor_divide(as_tensor(a), b); }};
constexpr Binary kRemainder = {
    "__mod__", "__rmod__",
    [](const Tensor& a, const Tensor& b) { return at::remainder(a, b); },
    [](const Tensor& a, const Scalar& b) { return at::remainder(a, b); },
    [](const Scalar& a, const Tensor& b) { return at::remainder(a, b); }};
constexpr Binary kAnd = {
    "__and__", "__rand__", [](const Tensor& a, const Tensor& b) { return at::__and__(a, b); }, nullptr, nullptr};
constexpr Binary kOr = {
    "__or__", "__ror__", [](const Tensor& a, const Tensor& b) { return at::__or__(a, b); }, nullptr, nullptr};
constexpr Binary kXor = {
    "__xor__", "__rxor__", [](const Tensor& a, const Tensor& b) { return at::__xor__(a, b); }, nullptr, nullptr};
constexpr Binary kMatmul = {
    "__matmul__", "__rmatmul__", [](const Tensor& a, const Tensor& b) { return at::matmul(a, b); }, nullptr, nullptr};

// Comparisons, in the order of Py_LT to Py_GE. `compare` leaves other operands to the base class, so they name no methods.
constexpr std::array<Binary, 6> kComparisons = {{
    {nullptr, nullptr, [](const Tensor& a, const Tensor& b) { return at::lt(a, b); },
     [](const Tensor& a, const Scalar& b) { return at::lt(a, b); }, nullptr},
    {nullptr, nullptr, [](const Tensor& a, const Tensor& b) { return at::le(a, b); },
     [](const Tensor& a, const Scalar& b) { return at::le(a, b); }, nullptr},
    {nullptr, nullptr, [](const Tensor& a, const Tensor& b) { return at::eq(a, b); },
     [](const Tensor& a, const Scalar& b) { return at::eq(a, b); }, nullptr},
    {nullptr, nullptr, [](const Tensor& a, const Tensor& b) { return at::ne(a, b); },
     [](const Tensor& a, const Scalar& b) { return at::ne(a, b); }, nullptr},
    {nullptr, nullptr, [](const Tensor& a, const Tensor& b) { return at::gt(a, b); },
     [](const Tensor& a, const Scalar& b) { return at::gt(a, b); }, nullptr},
    {nullptr, nullptr, [](const Tensor& a, const Tensor& b) { return at::ge(a, b); },
     [](const Tensor& a, const Scalar& b) { return at::ge(a, b); }, nullptr},
}};

// An operator that writes to its left operand.
struct InPlace {
  const char* method;
  void (*tensors)(Tensor&, const Tensor&);
};
constexpr InPlace kAddTo = {"__iadd__", [](Tensor& a, const Tensor& b) { a.add_(b); }};
constexpr InPlace kSubtractFrom = {"__isub__", [](Tensor& a, const Tensor& b) { a.sub_(b); }};
constexpr InPlace kMultiplyBy = {"__imul__", [](Tensor& a, const Tensor& b) { a.mul_(b); }};
constexpr InPlace kDivideBy = {"__itruediv__", [](Tensor& a, const Tensor& b) { a.div_(b); }};

// The result of a call, or what PyTorch makes of an error: operands that are of the wrong type are for the other one's method.
template <typename Call>
PyObject* result(Call call) {
  PyObject* found = guarded(call);
  if (found != nullptr || PyErr_ExceptionMatches(PyExc_TypeError) == 0) return found;
  PyErr_Clear();
  Py_RETURN_NOTIMPLEMENTED;
}

PyObject* call_method(PyObject* of, const char* method, PyObject* argument) {
  Ref name(PyUnicode_InternFromString(method));
  return name ? PyObject_CallMethodOneArg(of, name.get(), argument) : nullptr;
}

// What Python does where a class has methods for an operator.
PyObject* by_method(PyObject* left, PyObject* right, const char* method, const char* reflected) {
  bool has = PyType_IsSubtype(Py_TYPE(left), handle_type->tp_base) != 0;
  PyObject* found = has ? call_method(left, method, right) : Py_NewRef(Py_NotImplemented);
  bool may_reflect = Py_TYPE(left) != Py_TYPE(right) && PyType_IsSubtype(Py_TYPE(right), handle_type->tp_base) != 0;
  if (found != Py_NotImplemented || !may_reflect) return found;
  Py_DECREF(found);
  return call_method(right, reflected, left);
}

const Tensor& tensor_of(PyObject* object) { return THPVariable_Unpack(object); }

// What PyTorch computes for operands that are the device's own, or numbers; null, without an error, for others.
template <const Binary& of>
PyObject* computed(PyObject* left, PyObject* right) {
  if (!is_usual()) return nullptr;
  if (is_own(left) && is_own(right)) {
    return result([&] { return THPVariable_Wrap(of.tensors(tensor_of(left), tensor_of(right))); });
  }
  if constexpr (of.with_number != nullptr) {
    std::optional<Scalar> other = is_own(left) ? number(right) : std::nullopt;
    if (other) return result([&] { return THPVariable_Wrap(of.with_number(tensor_of(left), *other)); });
  }
  if constexpr (of.of_number != nullptr) {
    std::optional<Scalar> other = is_own(right) ? number(left) : std::nullopt;
    if (other) return result([&] { return THPVariable_Wrap(of.of_number(*other, tensor_of(right))); });
  }
  return nullptr;
}

template <const Binary& of>
PyObject* binary(PyObject* left, PyObject* right) {
  PyObject* found = computed<of>(left, right);
  return found != nullptr || PyErr_Occurred() ? found : by_method(left, right, of.method, of.reflected);
}

PyObject* power(PyObject* left, PyObject* right, PyObject* modulus) {
  if (modulus == Py_None) return binary<kPower>(left, right);
  return handle_type->tp_base->tp_as_number->nb_power(left, right, modulus);
}

template <const InPlace& of>
PyObject* in_place(PyObject* left, PyObject* right) {
  std::optional<Scalar> other = is_own(right) ? std::nullopt : number(right);
  if (!is_own(left) || !(is_own(right) || other) || !is_usual()) return call_method(left, of.method, right);
  return result([&] {
    Tensor self = tensor_of(left);
    of.tensors(self, other ? as_tensor(*other) : tensor_of(right));
    return Py_NewRef(left);
  });
}

PyObject* call_base(const char* method, PyObject* object) {
  return PyObject_CallMethod(reinterpret_cast<PyObject*>(handle_type->tp_base), method, "O", object);
}

PyObject* call_method(PyObject* of, const char* method) {
  Ref name(PyUnicode_InternFromString(method));
  return name ? PyObject_CallMethodNoArgs(of, name.get()) : nullptr;
}

PyObject* negative(PyObject* object) {
  if (!is_own(object) || !is_usual()) return call_method(object, "__neg__");
  return guarded([&] { return THPVariable_Wrap(at::neg(tensor_of(object))); });
}

PyObject* absolute(PyObject* object) {
  if (!is_own(object) || !is_usual()) return call_method(object, "__abs__");
  return guarded([&] { return THPVariable_Wrap(at::abs(tensor_of(object))); });
}

PyObject* inverted(PyObject* object) {
  bool can = is_own(object) && c10::isIntegralType(tensor_of(object).scalar_type(), /*includeBool=*/true);
  if (!can || !is_usual()) return call_method(object, "__invert__");
  return guarded([&] { return THPVariable_Wrap(at::bitwise_not(tensor_of(object))); });
}

// The number that a tensor holds, where that can be read now and nobody else has to see it; else none, perhaps after an error.
c10::IValue number_of(PyObject* object) {
  if (!is_own(object) || !is_usual() || c10::impl::dispatch_mode_enabled()) return {};
  if (torch::jit::tracer::isTracing()) return {};  // PyTorch warns
  c10::IValue found;
  Ref done(guarded([&]() -> PyObject* {
    found = number_now(tensor_of(object));
    return Py_NewRef(Py_None);
  }));
  return found;
}

int truth(PyObject* object) {
  c10::IValue found = number_of(object);
  if (found.isBool()) return found.toBool() ? 1 : 0;
  if (found.isInt()) return found.toInt() != 0 ? 1 : 0;
  if (found.isDouble()) return found.toDouble() != 0 ? 1 : 0;
  if (PyErr_Occurred()) return -1;
  Ref said(call_method(object, "__bool__"));
  return said ? PyObject_IsTrue(said.get()) : -1;
}

PyObject* as_float(PyObject* object) {
  if (tensor_of(object).requires_grad()) return call_method(object, "__float__");  // PyTorch warns
  c10::IValue found = number_of(object);
  if (found.isDouble()) return PyFloat_FromDouble(found.toDouble());
  return PyErr_Occurred() ? nullptr : call_method(object, "__float__");
}

// Tensor.item
PyObject* item(PyObject* object, PyObject*) {
  c10::IValue found = number_of(object);
  if (found.isDouble()) return PyFloat_FromDouble(found.toDouble());
  if (found.isInt()) return PyLong_FromLongLong(found.toInt());
  if (found.isBool()) return PyBool_FromLong(found.toBool() ? 1 : 0);
  return PyErr_Occurred() ? nullptr : call_base("item", object);
}
PyMethodDef item_method = {"item", item, METH_NOARGS, nullptr};

// Whether a handle is a parameter. On the CPU these have a class of their own.
bool is_parameter(PyObject* handle) {
  static PyObject* name = PyUnicode_InternFromString("_is_param");
  PyObject** own = _PyObject_GetDictPtr(handle);
  return own != nullptr && *own != nullptr && PyDict_GetItem(*own, name) == Py_True;
}

// The elements of a NumPy array on the device of a tensor; empty for anything else, perhaps after an error. Of the comparisons
// PyTorch takes arrays in `==` only.
Ref array_beside(PyObject* tensor, PyObject* object) {
  if (std::strcmp(Py_TYPE(object)->tp_name, "numpy.ndarray") != 0) return {};
  Ref torch(PyImport_ImportModule("torch")), device(PyObject_GetAttrString(tensor, "device"));
  if (!torch || !device) return {};
  Ref copied(PyObject_CallMethod(torch.get(), "tensor", "O", object));
  if (!copied && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear();  // of objects: PyTorch says that they differ
  return Ref(copied ? PyObject_CallMethod(copied.get(), "to", "O", device.get()) : nullptr);
}

// Python asks the right operand of a comparison first where its class is derived from the left one's, as the class of
// parameters is: results are laid out like the operand that is asked.
PyObject* compare(PyObject* left, PyObject* right, int by) {
  constexpr int mirrored[] = {Py_GT, Py_GE, Py_EQ, Py_NE, Py_LT, Py_LE};  // in the order of the constants
  constexpr binaryfunc computes[] = {
      computed<kComparisons[Py_LT]>, computed<kComparisons[Py_LE]>, computed<kComparisons[Py_EQ]>,
      computed<kComparisons[Py_NE]>, computed<kComparisons[Py_GT]>, computed<kComparisons[Py_GE]>};
  if (is_own(right) && is_parameter(right) && !is_parameter(left)) {
    std::swap(left, right);
    by = mirrored[by];
  }
  Ref array = by == Py_EQ && !is_own(right) ? array_beside(left, right) : Ref();
  if (PyErr_Occurred()) return nullptr;
  if (array) right = array.get();
  PyObject* found = computes[by](left, right);
  return found != nullptr || PyErr_Occurred() ? found : handle_type->tp_base->tp_richcompare(left, right, by);
}

}  // namespace

bool prepare_arithmetic() {
  PyNumberMethods& slots = *handle_type->tp_as_number;
  slots.nb_add = binary<kAdd>;
  slots.nb_subtract = binary<kSubtract>;
  slots.nb_multiply = binary<kMultiply>;
  slots.nb_true_divide = binary<kDivide>;
  slots.nb_floor_divide = binary<kFloorDivide>;
  slots.nb_remainder = binary<kRemainder>;
  slots.nb_and = binary<kAnd>;
  slots.nb_or = binary<kOr>;
  slots.nb_xor = binary<kXor>;
  slots.nb_matrix_multiply = binary<kMatmul>;
  slots.nb_power = power;
  slots.nb_inplace_add = in_place<kAddTo>;
  slots.nb_inplace_subtract = in_place<kSubtractFrom>;
  slots.nb_inplace_multiply = in_place<kMultiplyBy>;
  slots.nb_inplace_true_divide = in_place<kDivideBy>;
  slots.nb_negative = negative;
  slots.nb_absolute = absolute;
  slots.nb_invert = inverted;
  slots.nb_bool = truth;
  slots.nb_float = as_float;
  handle_type->tp_richcompare = compare;
  Ref method(PyDescr_NewMethod(handle_type, &item_method));
  return method && PyObject_SetAttrString(reinterpret_cast<PyObject*>(handle_type), "item", method.get()) == 0;
}

}  // namespace marid
