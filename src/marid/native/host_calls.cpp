// The calls of operators on tensors of the host, told to a Python function without changing what they do. A dispatch mode
// would: PyTorch's formulas for gradients, its sums of them and some kernels go other ways where there is one.
#include "call.h"
#include "handle.h"
#include "record.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace {

using marid::Ref;

thread_local PyObject* told = nullptr;  // a function of the operator, its arguments, its keywords and what it returned
thread_local int inside = 0;  // of operators that are not composed of others, and of the function that is told
thread_local at::CallbackHandle watching = at::INVALID_CALLBACK_HANDLE;

struct Inside : at::ObserverContext {
  Inside() { inside++; }
  ~Inside() override { inside--; }
};

struct Begun final : Inside {
  Begun(const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> inputs)
      : op(op), inputs(inputs.begin(), inputs.end()) {}

  c10::OperatorHandle op;
  std::vector<c10::IValue> inputs;
};

// A tensor inside of a transform: the calls on what it wraps are told.
bool is_wrapped(const c10::IValue& value) {
  constexpr c10::DispatchKeySet wrapping{c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::Functionalize};
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().key_set().has_any(wrapping);
  if (!value.isTensorList() && !value.isOptionalTensorList()) return false;
  auto items = value.toListRef();
  return std::any_of(items.begin(), items.end(), is_wrapped);
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  if (told == nullptr || inside > 0 || !call.operator_name()) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchema(*call.operator_name());
  if (!op || op->schema().arguments().empty()) return nullptr;  // PyTorch has no inputs then, not even none
  auto inputs = call.inputs();
  if (std::any_of(inputs.begin(), inputs.end(), is_wrapped)) return nullptr;
  bool composed = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
  if (std::any_of(inputs.begin(), inputs.end(), marid::holds_handle)) {
    bool told_in_parts = composed && !op->hasKernelForDispatchKey(c10::DispatchKey::AutogradPrivateUse1);
    return told_in_parts ? nullptr : std::make_unique<Inside>();
  }
  if (composed) return nullptr;  // what it is composed of is told
  return std::make_unique<Begun>(*op, inputs);
}

void end(const at::RecordFunction& call, at::ObserverContext* context) {
  auto* begun = dynamic_cast<Begun*>(context);
  if (begun == nullptr || told == nullptr) return;
  if (begun->op.schema().returns().size() != call.outputs().size()) return;  // it has raised
  marid::tell(told, begun->op, begun->inputs, call.outputs());
}

// watch_host(function): tell it of the calls of this thread, or nobody any more (None).
PyObject* watch_host(PyObject*, PyObject* function) {
  if (watching != at::INVALID_CALLBACK_HANDLE) at::removeCallback(std::exchange(watching, at::INVALID_CALLBACK_HANDLE));
  Py_CLEAR(told);
  if (function != Py_None) {
    told = Py_NewRef(function);
    watching = at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end)
                                              .needsInputs(true)
                                              .needsOutputs(true)
                                              .scopes({at::RecordScope::FUNCTION}));
  }
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

PyMethodDef host_call_functions[] = {
    {"watch_host", watch_host, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
