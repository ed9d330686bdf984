// Giving calls to Python that are not recorded in C++.
#include "backward.h"
#include "recorder.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace py = pybind11;

// From PyTorch's Python half, whose headers take long to compile.
struct THPDtype;
struct THPLayout;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
namespace torch {
THPDtype* getTHPDtype(at::ScalarType type);
THPLayout* getTHPLayout(at::Layout layout);
namespace utils {
PyObject* getTHPMemoryFormat(at::MemoryFormat format);
}
namespace detail {
py::handle getTorchApiFunction(const c10::OperatorHandle& op);
}
namespace jit {
py::object toPyObject(c10::IValue value);
c10::IValue toIValue(py::handle object, const c10::TypePtr& type, std::optional<int32_t> size);
}  // namespace jit
}  // namespace torch

namespace {

// --- a call in Python's terms ----------------------------------------------------------------------------------------

py::object to_python(const c10::IValue& value, const c10::Argument& formal) {
  c10::TypePtr type = formal.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (!value.isNone() && type->kind() == c10::TypeKind::ScalarTypeType) {
    return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(value.toScalarType())));
  }
  if (!value.isNone() && type->kind() == c10::TypeKind::LayoutType) {
    return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPLayout(value.toLayout())));
  }
  if (!value.isNone() && type->kind() == c10::TypeKind::MemoryFormatType) {
    return py::reinterpret_borrow<py::object>(torch::utils::getTHPMemoryFormat(value.toMemoryFormat()));
  }
  return torch::jit::toPyObject(value);
}

// Positional and keyword arguments, without what is as the schema has it anyway.
std::pair<py::tuple, py::dict> to_python(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values) {
  const auto& formals = schema.arguments();
  auto is_default = [&](size_t i) {
    return formals[i].default_value().has_value() && *formals[i].default_value() == values[i];
  };
  size_t positional = 0;
  while (positional < formals.size() && !formals[positional].kwarg_only()) positional++;
  py::dict keywords;
  for (size_t i = positional; i < formals.size(); i++) {
    if (!is_default(i)) keywords[py::str(formals[i].name())] = to_python(values[i], formals[i]);
  }
  while (positional > 0 && is_default(positional - 1)) positional--;
  py::tuple arguments(positional);
  for (size_t i = 0; i < positional; i++) arguments[i] = to_python(values[i], formals[i]);
  return {std::move(arguments), std::move(keywords)};
}

void push_returned(const c10::FunctionSchema& schema, torch::jit::Stack* stack, const py::object& returned) {
  const auto& formals = schema.returns();
  if (formals.size() == 1) {
    stack->push_back(torch::jit::toIValue(returned, formals[0].type(), std::nullopt));
    return;
  }
  if (formals.empty()) return;
  auto results = py::reinterpret_borrow<py::sequence>(returned);
  for (size_t i = 0; i < formals.size(); i++) {
    py::object result = results[i];
    stack->push_back(torch::jit::toIValue(result, formals[i].type(), std::nullopt));
  }
}

void call(const c10::OperatorHandle& op, torch::jit::Stack* stack, PyObject* function) {
  size_t count = op.schema().arguments().size();
  marid::give_objects(torch::jit::last(*stack, count));
  auto [arguments, keywords] = to_python(op.schema(), torch::jit::last(*stack, count));
  torch::jit::drop(*stack, count);
  PyObject* returned = function != nullptr
      ? PyObject_Call(function, arguments.ptr(), keywords.ptr())
      : PyObject_CallFunctionObjArgs(
            marid::dispatch, torch::detail::getTorchApiFunction(op).ptr(), arguments.ptr(), keywords.ptr(), nullptr);
  if (returned == nullptr) throw python_error();
  push_returned(op.schema(), stack, py::reinterpret_steal<py::object>(returned));
}

}  // namespace

namespace marid {

void call_in_python(const c10::OperatorHandle& op, torch::jit::Stack* stack, PyObject* function) {
  InterpreterLock lock;
  try {
    call(op, stack, function);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error own;
    own.persist();
    throw own;
  } catch (python_error& error) {
    error.persist();
    throw;
  }
}

bool make_recorder(const c10::OperatorHandle& op) {
  return static_cast<bool>(Ref(PyObject_CallOneArg(make_recorder_of, torch::detail::getTorchApiFunction(op).ptr())));
}

// Whether an operator of the user's has no derivative, and gradients are needed: autograd goes through what its kernel calls,
// as PyTorch's fallback lets it on every device.
static bool is_differentiated_inside(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const std::string& name = op.schema().name();
  if (!at::GradMode::is_enabled() || name.rfind("aten::", 0) == 0 || name.rfind("marid::", 0) == 0) return false;
  for (auto key : {c10::DispatchKey::Autograd, c10::DispatchKey::AutogradPrivateUse1}) {
    if (op.hasKernelForDispatchKey(key)) return false;
  }
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradPrivateUse1)) return false;
  auto is_needed = [](const c10::IValue& one) { return one.isTensor() && one.toTensor().requires_grad(); };
  return std::any_of(arguments.begin(), arguments.end(), [&](const c10::IValue& one) {
    if (!one.isList()) return is_needed(one);
    auto items = one.toListRef();
    return std::any_of(items.begin(), items.end(), is_needed);
  });
}

void call_python(const c10::OperatorHandle& op, torch::jit::Stack* stack, PyObject* function) {
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  bool composed = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  if (function == nullptr && composed &&
      (std::none_of(arguments.begin(), arguments.end(), holds_handle) || is_differentiated_inside(op, arguments))) {
    // Tensors that only say that they are on the device, as FakeTensor makes them, or gradients of what the kernel calls.
    return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  constexpr c10::DispatchKeySet above = c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
      (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
       c10::DispatchKeySet(c10::DispatchKey::Python));
  // Autocast stays as it is, since kernels of composite operators call operators on its lists, on the CPU too. Where such an
  // operator comes whole, in inference mode, the views that it makes of usual tensors are views to PyTorch.
  c10::DispatchKeySet left = c10::autocast_dispatch_keyset;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    left = left | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  }
  c10::impl::ExcludeDispatchKeyGuard guard(above - left);
  call_in_python(op, stack, function);
}

void tell(PyObject* function, const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> given,
          c10::ArrayRef<c10::IValue> returned) {
  InterpreterLock lock;
  try {
    auto [arguments, keywords] = to_python(op.schema(), given);
    py::tuple results(returned.size());
    for (size_t i = 0; i < returned.size(); i++) results[i] = torch::jit::toPyObject(returned[i]);
    py::object result = returned.size() == 1 ? py::object(results[0]) : py::object(results);
    py::function told = py::reinterpret_borrow<py::function>(function);
    told(torch::detail::getTorchApiFunction(op), arguments, keywords, result);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("a function that is told of calls on the host");
  }
}

void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  {
    InterpreterLock lock;
    Ref identity(PyLong_FromVoidPtr(impl)), size(PyLong_FromSize_t(bytes));
    if (!identity || !size || !Ref(PyObject_CallFunctionObjArgs(resize_memory, identity.get(), size.get(), nullptr))) throw_python_error();
  }
  impl->set_nbytes(bytes);
}

at::Tensor detach(const at::Tensor& tensor) {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
  {
    InterpreterLock lock;
    at::Tensor made = detached(tensor);
    if (made.defined()) return made;
    if (PyErr_Occurred()) throw_python_error();
  }
  torch::jit::Stack stack{tensor};
  call_python(op, &stack);
  return stack.back().toTensor();
}

}  // namespace marid
