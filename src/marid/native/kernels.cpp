// The kernels by which PyTorch's operators are recorded, below all that it would do to call Python; and how some
// composite operators are taken apart above autograd, or are not.
#include "accumulate.h"
#include "cells.h"
#include "known_calls.h"
#include "record.h"

#include <ATen/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul_native.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool1d_native.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using marid::Formal;
using marid::Operator;

// The kernel of one operator for tensors implemented in Python, ours and others.
struct Kernel final : c10::OperatorKernel {
  explicit Kernel(std::shared_ptr<Operator> of) : of(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    bool asks = of->asks_autocast && marid::is_autocasting();
    if (of->identity != nullptr && !asks && c10::impl::TorchDispatchModeTLS::stack_len() == 0) {
      marid::InterpreterLock lock;
      if (marid::recorded(op, *of, stack)) return;
      if (PyErr_Occurred()) {  // from the handler of a signal, say: it is raised at the user's line
        python_error error;
        error.persist();
        throw error;
      }
    }
    marid::call_python(op, keys, stack);
  }

  std::shared_ptr<Operator> of;
};

// The kernel of `a + b`, by which autograd adds gradients up.
struct Sum final : c10::OperatorKernel {
  explicit Sum(std::shared_ptr<Operator> of) : usual(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!marid::adds_up_gradients(*stack)) return usual(op, keys, stack);
    at::Tensor first = torch::jit::peek(*stack, 0, 3).toTensor(), second = torch::jit::peek(*stack, 1, 3).toTensor();
    usual(op, keys, stack);
    marid::add_up(first, second, stack);
  }

  Kernel usual;
};

// --- composites ------------------------------------------------------------------------------------------------------

bool is_plain(const at::Tensor& tensor) {
  return tensor.device().type() == c10::DeviceType::PrivateUse1 && !tensor._fw_grad(0).defined() &&
      !(c10::GradMode::is_enabled() && tensor.requires_grad());
}

// Whether the rows of a tensor lie behind each other by their strides alone. Those of dimensions of one element count, as
// they do where PyTorch decides.
bool has_plain_rows(const at::Tensor& tensor) {
  int64_t step = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; dim--) {
    if (tensor.stride(dim) != step) return false;
    step *= tensor.size(dim);
  }
  return true;
}

// Whether a function of the user's own (`torch.autograd.Function`, so a checkpoint) runs its forward. Autograd looks whether
// what that returns is a view, as the CPU's steps may have made it.
bool in_own_function() {
  auto& state = c10::AutogradState::get_tls_state();
  return !state.get_grad_mode() && !state.get_fw_grad_mode() && !state.get_inference_mode();
}

// Recorded whole where nobody differentiates it: that is one node in place of three or four, and the CPU takes it apart
// when it runs. Whether it folds other rows than plain ones depends on what requires gradients (parameters do, also where
// none are recorded), which is no longer known then. (frontend/overrides.py has the same rule for what arrives whole in
// inference mode.)
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  bool has_bias = bias.has_value() && bias->defined();
  bool simple = input.dim() == 2 || has_plain_rows(input);
  bool whole = is_plain(input) && is_plain(weight) && (!has_bias || is_plain(*bias)) &&
      simple && !in_own_function() && input.device() == weight.device() &&
      (!has_bias || bias->device() == input.device()) && !marid::is_in_users_mode();
  if (!whole) return at::native::linear(input, weight, bias);
  at::AutoDispatchBelowADInplaceOrView below;
  return at::linear(input, weight, bias);
}

// Where nobody differentiates it the CPU has a kernel of its own, to which there is no other way.
at::Tensor max_pool1d(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  if (!is_plain(input) || marid::is_in_users_mode()) {
    return at::native::max_pool1d(input, kernel_size, stride, padding, dilation, ceil_mode);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return at::max_pool1d(input, kernel_size, stride, padding, dilation, ceil_mode);
}

// PyTorch never broadcasts a single matrix against a batch for subclasses: another kernel multiplies them than on the
// CPU. (frontend/overrides.py has the same for where this cannot be built.)
at::Tensor matmul(const at::Tensor& self, const at::Tensor& other) {
  if (self.dim() == 3 && other.dim() == 3 && self.size(0) != other.size(0)) {
    const at::Tensor& alone = self.size(0) == 1 ? self : other;
    if (alone.size(0) == 1 && !alone.requires_grad()) {
      int64_t count = self.size(0) * other.size(0);
      return at::bmm(self.expand({count, -1, -1}), other.expand({count, -1, -1}));
    }
  }
  return at::native::matmul(self, other);
}

// --- registering -----------------------------------------------------------------------------------------------------

// Never freed: what is known of calls are objects of Python, which ends before this would.
auto& operators = *new std::unordered_map<c10::OperatorName, std::shared_ptr<Operator>>();
std::vector<c10::RegistrationHandleRAII>* kernels;  // these two stay when the process ends
torch::Library* above;
PyObject* not_recorded;  // names of arguments with which a call is left to Python

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  auto inner = type.containedTypes();
  return std::any_of(inner.begin(), inner.end(), [](const c10::TypePtr& one) { return holds_tensors(*one); });
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    return holds_tensors(*argument.type());
  });
}

// Operators that make their argument a view of itself, and those that return such a view.
const std::unordered_map<std::string, const char*> views_in_place{
    {"aten::t_", "aten::t"},
    {"aten::transpose_", "aten::transpose"},
    {"aten::swapaxes_", "aten::transpose"},
    {"aten::swapdims_", "aten::transpose"},
    {"aten::squeeze_", "aten::squeeze"},
    {"aten::unsqueeze_", "aten::unsqueeze"},
    {"aten::as_strided_", "aten::as_strided"},
};

// What recording needs to know of an operator.
void describe(Operator* made, const c10::FunctionSchema& schema) {
  made->calls = std::make_shared<marid::KnownCalls>();
  auto found = views_in_place.find(schema.name());
  if (found != views_in_place.end()) {
    std::string overload = schema.name() == std::string("aten::swapaxes_") || schema.name() == std::string("aten::swapdims_") ||
            schema.name() == std::string("aten::transpose_")
        ? "int"
        : schema.overload_name();
    c10::OperatorName name(found->second, overload);
    made->view_handle = c10::Dispatcher::singleton().findSchema(name);
    auto own = operators.find(name);
    if (own != operators.end()) made->view = own->second;
  }
  for (const c10::Argument& argument : schema.arguments()) {
    Formal formal;
    formal.name = PyUnicode_InternFromString(argument.name().c_str());
    if (PySet_Contains(not_recorded, formal.name) == 1) {
      formal.kind = Formal::kNotRecorded;
    } else {
      auto type = argument.real_type();
      if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      if (type->kind() == c10::TypeKind::ScalarTypeType) formal.kind = Formal::kDtype;
      if (type->kind() == c10::TypeKind::MemoryFormatType) formal.kind = Formal::kMemoryFormat;
      if (type->kind() == c10::TypeKind::LayoutType) formal.kind = Formal::kNotRecorded;
    }
    if (argument.name() == "generator") made->generator = made->formals.size();
    if (argument.default_value().has_value()) formal.otherwise = &*argument.default_value();
    if (!argument.kwarg_only()) made->positional++;
    made->formals.push_back(formal);
  }
  const auto& returns = schema.returns();
  made->returns = returns.size();
  made->reads_number = schema.name() == "aten::_local_scalar_dense";
  made->returns_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
}

// adopt(name, overload, identity, asks_autocast): the operator (`aten::add`, `Tensor`) is recorded by the recorder that
// is found by this number; under autocast not without asking Python, if that is said.
PyObject* adopt(PyObject*, PyObject* const* given, Py_ssize_t) {
  const char *name = PyUnicode_AsUTF8(given[0]), *overload = PyUnicode_AsUTF8(given[1]);
  if (name == nullptr || overload == nullptr) return nullptr;
  c10::OperatorName full(name, overload);
  auto found = operators.find(full);
  if (found != operators.end()) {
    Operator& own = *found->second;
    if (own.identity == nullptr) describe(&own, c10::Dispatcher::singleton().findSchema(full)->schema());
    Py_XSETREF(own.identity, Py_NewRef(given[2]));
    own.asks_autocast = given[3] == Py_True;
  }
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

// Operators are PyTorch's own again.
void unregister_kernels() {
  delete std::exchange(kernels, nullptr);
  delete std::exchange(above, nullptr);
}

// Give each of PyTorch's operators on tensors, and of ours, our kernel, until `unregister_kernels`. There are thousands:
// what is known of one is found out when it is first recorded.
void register_kernels(PyObject* names) {
  unregister_kernels();
  not_recorded = names;
  above = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  above->impl("linear", TORCH_FN(linear));
  above->impl("matmul", TORCH_FN(matmul));
  above->impl("max_pool1d", TORCH_FN(max_pool1d));
  marid::register_cells(*above);
  kernels = new std::vector<c10::RegistrationHandleRAII>();
  auto& dispatcher = c10::Dispatcher::singleton();
  const c10::OperatorName sum("aten::add", "Tensor");
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 && name.name.rfind("marid::", 0) != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::Python) || !takes_tensors(op->schema())) continue;
    std::shared_ptr<Operator>& own = operators[name];
    if (own == nullptr) own = std::make_shared<Operator>();
    auto kernel = name == sum ? c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Sum>(own))
                              : c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(own));
    kernels->push_back(
        dispatcher.registerImpl(name, c10::DispatchKey::Python, std::move(kernel), {}, nullptr, __FILE__));
  }
}

PyMethodDef kernel_functions[] = {
    {"adopt", fast(adopt), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
