// Values that are read of what has been computed, without asking Python: where operations run at once, or nothing is recorded.
#include "reads_at_once.h"

#include "immediate.h"
#include "nodes.h"
#include "queue.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>

namespace marid {

namespace {

// The number that a tensor of the CPU holds.
c10::IValue number_in(const at::Tensor& tensor) {
  if (tensor.numel() == 1 && !tensor.is_neg()) {
    switch (tensor.scalar_type()) {
      case at::kFloat: return c10::IValue(static_cast<double>(*tensor.const_data_ptr<float>()));
      case at::kDouble: return c10::IValue(*tensor.const_data_ptr<double>());
      case at::kLong: return c10::IValue(*tensor.const_data_ptr<int64_t>());
      case at::kBool: return c10::IValue(*tensor.const_data_ptr<bool>());
      default: break;
    }
  }
  static const c10::OperatorHandle item = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_local_scalar_dense", "");
  torch::jit::Stack returned{tensor};
  Below below(false);
  item.callBoxed(&returned);
  return returned[0];
}

// Whether a read of this has nothing to run, and tells nothing of the program that reads: operations run at once, or none is
// recorded and the value was not (a replay has made it).
bool is_idle(Handle* handle, c10::DeviceIndex device) {
  if (runs_at_once(device)) return true;
  if (!has_nothing_recorded(device)) return false;
  PyObject* value = handle->value();
  return value != nullptr && is_node(value) && node.at(value, kOp) == Py_None;
}

// What a tensor stands for, if that is in the host's memory and can be read now; else null, perhaps after an error.
const at::Tensor* readable(const at::Tensor& tensor) {
  Handle* handle = handle_of(tensor);
  if (handle == nullptr || !is_idle(handle, tensor.device().index()) || queue_is_busy()) return nullptr;
  if (handle->memory() != nullptr && last_write(handle->memory()) != nullptr) return nullptr;
  const std::shared_ptr<Computed>& computed = handle->computed();
  if (!computed || !computed->tensor.is_cpu()) return nullptr;
  allowance.renew();
  return &computed->tensor;
}

}  // namespace

c10::IValue number_now(const at::Tensor& tensor) {
  const at::Tensor* found = tensor.numel() == 1 ? readable(tensor) : nullptr;
  return found == nullptr ? c10::IValue() : number_in(*found);
}

bool read_number(torch::jit::Stack* stack) {
  c10::IValue number = number_now(torch::jit::peek(*stack, 0, 1).toTensor());
  if (number.isNone()) return false;
  torch::jit::drop(*stack, 1);
  stack->push_back(std::move(number));
  return true;
}

namespace {

// The kernel of an operator that compares two tensors, and perhaps takes options.
template <typename... Options>
struct Comparison final : c10::OperatorKernel {
  using Signature = bool(const at::Tensor&, const at::Tensor&, Options...);

  Comparison(const c10::OperatorHandle& op, c10::KernelFunction general)
      : op(op), typed(op.typed<Signature>()), general(std::move(general)) {}

  bool operator()(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other, Options... options) {
    {
      InterpreterLock lock;
      const at::Tensor* left = self.device() == other.device() ? readable(self) : nullptr;
      const at::Tensor* right = left == nullptr ? nullptr : readable(other);
      if (right != nullptr) {
        Below below(left->nbytes() > kQuick);
        return typed.call(*left, *right, options...);
      }
      if (PyErr_Occurred()) throw_python_error();
    }
    return general.call<bool, const at::Tensor&, const at::Tensor&, Options...>(op, keys, self, other, options...);
  }

  c10::OperatorHandle op;
  c10::TypedOperatorHandle<Signature> typed;
  c10::KernelFunction general;
};

template <typename... Options>
c10::KernelFunction comparison(const c10::OperatorHandle& op, c10::KernelFunction general) {
  using Own = Comparison<Options...>;
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Own>(std::make_unique<Own>(op, std::move(general)));
}

}  // namespace

std::optional<c10::KernelFunction> reading_kernel(const c10::OperatorHandle& op, c10::KernelFunction general) {
  if (op.operator_name() == c10::OperatorName("aten::equal", "")) return comparison<>(op, std::move(general));
  if (op.operator_name() == c10::OperatorName("aten::allclose", "")) {
    return comparison<double, double, bool>(op, std::move(general));
  }
  return std::nullopt;
}

namespace {

// readable(tensor): a tensor of the CPU with its value, for a moment, where that has been computed and nothing is recorded; else
// None.
PyObject* readable_now(PyObject*, PyObject* given) {
  const at::Tensor* found = THPVariable_Check(given) ? readable(THPVariable_Unpack(given)) : nullptr;
  if (found == nullptr && PyErr_Occurred()) return nullptr;
  return found == nullptr ? Py_NewRef(Py_None) : THPVariable_Wrap(*found);
}

}  // namespace

PyMethodDef reading_functions[] = {
    {"readable", readable_now, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
