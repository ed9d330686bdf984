// Giving calls to Python, as pythonFallback in aten/src/ATen/core/PythonFallbackKernel.cpp does it.
//
// Calls that are about our tensors alone go to `LazyTensor.__torch_dispatch__` without a detour: PyTorch's own way looks
// first whether a tensor is one of torch.distributed, and imports that with the first call of a process. Autocast stays
// as it is for them, since kernels of composite operators call operators on its lists, on the CPU too, and under a mode
// of our own that only watches (PyTorch switches it off in modes). Detaching an output that autograd saves, which is no
// call but asked of the interpreter, takes no detour either.
#include "call.h"

#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/api/include/torch/version.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
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

// --- who is to have a call -------------------------------------------------------------------------------------------

// Whether Python knows of a tensor.
template <typename Slot>
bool has_object(const Slot* slot) {
  if constexpr (requires { slot->pyobj_interpreter(); }) {
    return slot->pyobj_interpreter() != nullptr;  // before PyTorch 2.13
  } else {
    return slot->load_pyobj() != nullptr;
  }
}

template <typename Visit>
void each_tensor(c10::ArrayRef<c10::IValue> arguments, Visit visit) {
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) visit(item.toTensor());
      }
    }
  }
}

// Whether each tensor that is implemented in Python is ours, with the interpreter's lock.
bool only_own(c10::ArrayRef<c10::IValue> arguments) {
  bool own = true;
  each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!own || !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python)) return;
    marid::Ref handle(THPVariable_Wrap(tensor));
    if (!handle) throw python_error();
    own = Py_TYPE(handle.get()) == marid::handle_type;
  });
  return own;
}

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

// Give a call to our own tensors, with the interpreter's lock.
void call_own(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t count = op.schema().arguments().size();
  auto [arguments, keywords] = to_python(op.schema(), torch::jit::last(*stack, count));
  torch::jit::drop(*stack, count);
  py::handle type(reinterpret_cast<PyObject*>(marid::handle_type));
  PyObject* returned = PyObject_CallMethod(
      type.ptr(), "__torch_dispatch__", "O(O)OO", torch::detail::getTorchApiFunction(op).ptr(), type.ptr(),
      arguments.ptr(), keywords.ptr());
  if (returned == nullptr) throw python_error();
  push_returned(op.schema(), stack, py::reinterpret_steal<py::object>(returned));
}

// Give a call to our own tensors if it is about them alone; false where it is not.
bool call_if_own(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, torch::jit::Stack* stack) {
  marid::InterpreterLock lock;
  try {
    if (!only_own(arguments)) return false;
    call_own(op, stack);
    return true;
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

// --- detaching -------------------------------------------------------------------------------------------------------

using c10::impl::PyInterpreterVTable;
using Detached = c10::intrusive_ptr<c10::TensorImpl>;

// Where a virtual function is in the table of its class. The ABI of g++ and clang++ says so in a pointer to the function.
template <typename Function>
size_t place_of(Function function) {
  std::uintptr_t place = 0;
  std::memcpy(&place, &function, sizeof place);
#if !defined(__aarch64__) && !defined(__arm__)
  place--;  // what tells virtual functions from others; elsewhere that is in the second half
#endif
  return place / sizeof(void*);
}

// The interpreter's functions as PyTorch has them, with another one in the place of `detach`. Classes with these
// functions differ between versions of PyTorch, and are known to none but itself; they hold no data.
struct Replacement {
  const void* const* functions;  // where objects with virtual functions have them
  const PyInterpreterVTable* before = nullptr;
  std::array<const void*, 128> table{};
};

Replacement replacement;

Detached detach(const void*, const c10::TensorImpl* self) {
  if (c10::impl::TorchDispatchModeTLS::stack_len() == 0) {
    static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
    at::impl::MaybeSetTLSOnEntryGuard guard;
    using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    at::Tensor tensor(Pointer::unsafe_reclaim_from_nonowning(const_cast<c10::TensorImpl*>(self)));
    {
      marid::InterpreterLock lock;
      at::Tensor made = marid::detached(tensor);
      if (made.defined()) return made.getIntrusivePtr();
      if (PyErr_Occurred()) {
        python_error error;
        error.persist();
        throw error;
      }
    }
    torch::jit::Stack stack;
    stack.emplace_back(std::move(tensor));
    if (call_if_own(op, torch::jit::last(stack, 1), &stack)) return stack.back().toTensor().getIntrusivePtr();
  }
  return replacement.before->detach(self);
}

}  // namespace

namespace marid {

void call_python(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  constexpr c10::DispatchKeySet below = c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
      (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
       c10::DispatchKeySet(c10::DispatchKey::Python));
  constexpr c10::DispatchKeySet autocast = c10::autocast_dispatch_keyset;
  c10::impl::ExcludeDispatchKeyGuard guard(below - autocast);
  auto modes = c10::impl::TorchDispatchModeTLS::stack_len();
  bool under_mode = modes > 0;
  bool in_python = under_mode, known_to_python = under_mode;
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  each_tensor(arguments, [&](const at::Tensor& tensor) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    in_python = in_python || impl->key_set().has(c10::DispatchKey::Python);
    known_to_python = known_to_python || has_object(impl->pyobj_slot());
  });
  TORCH_INTERNAL_ASSERT(known_to_python, "Hit Python dispatch key but no arguments had PyInterpreter (no tensor args?)");
  if (!in_python) {
    c10::impl::ExcludeDispatchKeyGuard without(autocast);
    c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
    c10::impl::ForceDispatchKeyGuard concrete(local.included_.remove(c10::DispatchKey::Python), local.excluded_);
    op.redispatchBoxed(keys.remove(c10::DispatchKey::Python), stack);
    return;
  }
  if (!under_mode && call_if_own(op, arguments, stack)) return;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> without;
  if (modes != 1 || !is_watched()) without.emplace(autocast);
  (*c10::impl::getGlobalPyInterpreter())->dispatch(op, stack);
}

void detach_in_python(bool directly) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR <= 13  // later ones may have more functions behind the last
  c10::impl::PyInterpreter* interpreter = c10::impl::getGlobalPyInterpreter();
  auto* ours = reinterpret_cast<const PyInterpreterVTable*>(&replacement);
  if (directly && interpreter->vtable_ != ours) {
    const size_t detaching = place_of(&PyInterpreterVTable::detach);
    const size_t count = place_of(&PyInterpreterVTable::reset_backward_hooks) + 1;  // which is the last one
    if (detaching >= count || count + 2 > replacement.table.size()) return;
    constexpr size_t header = 2;  // what the class is, and where the object begins
    const void* const* functions = *reinterpret_cast<const void* const* const*>(interpreter->vtable_);
    std::copy(functions - header, functions + count, replacement.table.begin());
    replacement.table[header + detaching] = reinterpret_cast<const void*>(&detach);
    replacement.functions = replacement.table.data() + header;
    replacement.before = interpreter->vtable_;
    interpreter->vtable_ = ours;
  } else if (!directly && interpreter->vtable_ == ours) {
    interpreter->vtable_ = replacement.before;
  }
#endif
}

}  // namespace marid
