// The kernels by which PyTorch's operators are recorded, below all that it would do to call Python.
#pragma once
#include "accumulate.h"
#include "backward.h"
#include "composites.h"
#include "record.h"
#include "zeros.h"

#include <ATen/Tensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear_native.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace marid {

// The kernel of one operator for tensors of the device.
struct Kernel final : c10::OperatorKernel {
  explicit Kernel(std::shared_ptr<Operator> of) : of(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    bool of_zero = views_zero(op, *stack);
    perform(op, stack);
    if (of_zero) mark_views(op, *stack);
  }

  void perform(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    bool asks = of->asks_autocast && is_autocasting();
    if (of->identity != nullptr && !asks) {
      InterpreterLock lock;
      if (recorded(op, *of, stack)) return;
      if (PyErr_Occurred()) throw_python_error();  // from the handler of a signal, say: it is raised at the user's line
    }
    call_python(op, stack);
  }

  // Whether a result lies where the first tensor does, and what is drawn comes from the device's generator.
  template <typename First, typename... Others>
  static bool is_usual(const First& first, const Others&... others) {
    return (lies_with(first, others) && ...);
  }
  template <typename First, typename Other>
  static bool lies_with(const First&, const Other&) {
    return true;
  }
  static bool lies_with(const at::Tensor& first, const std::optional<c10::Device>& device) {
    return !device || *device == first.device();
  }
  static bool lies_with(const at::Tensor&, const std::optional<c10::Layout>& layout) {
    return !layout || *layout == at::kStrided;
  }
  static bool lies_with(const at::Tensor&, const std::optional<bool>& is_pinned) { return !is_pinned || !*is_pinned; }
  static bool lies_with(const at::Tensor&, const std::optional<at::Generator>& generator) { return !generator; }

  std::shared_ptr<Operator> of;
};

// The kernel, above autograd, of an operator that a function of Python takes apart.
struct Replaced final : c10::OperatorKernel {
  explicit Replaced(PyObject* function) : function(function) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    call_in_python(op, stack, function);
  }

  PyObject* function;  // kept as long as the process
};

// The kernel of an operator that is asked for a tensor of the device that is not dense, or given one of the CPU beside tensors
// of the device: Python says what is possible.
struct OtherLayout final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    call_python(op, stack);
  }
};

// The kernel of an operator of two tensors that has rules for zeros that have no memory on the CPU.
template <at::Tensor (*with_zero)(const at::Tensor&, const at::Tensor&)>
struct BesideZeros final : c10::OperatorKernel {
  explicit BesideZeros(std::shared_ptr<Operator> of) : usual(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const at::Tensor &self = torch::jit::peek(*stack, 0, 2).toTensor(), &other = torch::jit::peek(*stack, 1, 2).toTensor();
    if (is_usual(self, other)) return usual(op, keys, stack);
    at::Tensor made = with_zero(self, other);
    torch::jit::drop(*stack, 2);
    stack->emplace_back(std::move(made));
  }

  static bool is_usual(const at::Tensor& self, const at::Tensor& other) { return !is_zero(self) && !is_zero(other); }

  Kernel usual;
};
using Product = BesideZeros<product_with_zero>;
using Quotient = BesideZeros<quotient_with_zero>;
using DotProduct = BesideZeros<dot_with_zero>;

// The kernel of `a * 2`.
struct Scaled final : c10::OperatorKernel {
  explicit Scaled(std::shared_ptr<Operator> of) : usual(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const at::Tensor& self = torch::jit::peek(*stack, 0, 2).toTensor();
    if (!is_zero(self)) return usual(op, keys, stack);
    at::Tensor made = product_with_zero(self, at::native::wrapped_scalar_tensor(torch::jit::peek(*stack, 1, 2).toScalar()));
    torch::jit::drop(*stack, 2);
    stack->emplace_back(std::move(made));
  }

  static bool is_usual(const at::Tensor& self, const at::Scalar&) { return !is_zero(self); }

  Kernel usual;
};

// The kernel of `a - b`.
struct Difference final : c10::OperatorKernel {
  explicit Difference(std::shared_ptr<Operator> of) : usual(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const at::Tensor &first = torch::jit::peek(*stack, 0, 3).toTensor(), &second = torch::jit::peek(*stack, 1, 3).toTensor();
    at::Scalar alpha = torch::jit::peek(*stack, 2, 3).toScalar();
    if (is_usual(first, second, alpha)) return usual(op, keys, stack);
    at::Tensor made = sum_with_zero(first, second, -alpha);
    torch::jit::drop(*stack, 3);
    stack->emplace_back(std::move(made));
  }

  static bool is_usual(const at::Tensor& first, const at::Tensor& second, const at::Scalar&) {
    return !is_zero(first) && !is_zero(second);
  }

  Kernel usual;
};

// The kernel of `a + b`, by which autograd adds gradients up.
struct Sum final : c10::OperatorKernel {
  explicit Sum(std::shared_ptr<Operator> of) : usual(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (is_zero(torch::jit::peek(*stack, 0, 3).toTensor()) || is_zero(torch::jit::peek(*stack, 1, 3).toTensor())) {
      at::Tensor made = sum_with_zero(torch::jit::peek(*stack, 0, 3).toTensor(), torch::jit::peek(*stack, 1, 3).toTensor(),
                                      torch::jit::peek(*stack, 2, 3).toScalar());
      torch::jit::drop(*stack, 3);
      stack->emplace_back(std::move(made));
      return;
    }
    if (!adds_up_gradients(*stack)) return usual(op, keys, stack);
    at::Tensor first = torch::jit::peek(*stack, 0, 3).toTensor(), second = torch::jit::peek(*stack, 1, 3).toTensor();
    usual(op, keys, stack);
    add_up(first, second, stack);
  }

  static bool is_usual(const at::Tensor& first, const at::Tensor& second, const at::Scalar&) {
    if (is_zero(first) || is_zero(second)) return false;
    bool alike = first.sizes() == second.sizes() && first.dtype() == second.dtype();
    return (alike && has_plain_rows(first) && has_plain_rows(second)) || !may_add_up(first);  // the sum lies as both do
  }

  Kernel usual;
};

// The kernel of `_reshape_alias`, which is what `reshape` calls where a view is possible: it is one.
struct Reshaped final : c10::OperatorKernel {
  Reshaped(std::shared_ptr<Operator> of, std::shared_ptr<Operator> view) : usual(std::move(of)), view(std::move(view)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const at::Tensor& self = torch::jit::peek(*stack, 0, 3).toTensor();
    auto size = torch::jit::peek(*stack, 1, 3).toIntVector(), stride = torch::jit::peek(*stack, 2, 3).toIntVector();
    auto own = at::detail::computeStride(self.sizes(), self.strides(), at::DimVector(size));
    if (!own.has_value() || !std::equal(own->begin(), own->end(), stride.begin(), stride.end())) {
      return usual(op, keys, stack);
    }
    static const c10::OperatorHandle viewing = c10::Dispatcher::singleton().findSchemaOrThrow("aten::view", "");
    torch::jit::drop(*stack, 1);
    view(viewing, keys, stack);
  }

  Kernel usual, view;
};

// The kernel of `detach` and `lift_fresh`: a second tensor for the same value.
struct SameValue final : c10::OperatorKernel {
  SameValue(const c10::OperatorHandle& op, std::shared_ptr<Operator> of)
      : op(op), of(of), usual(c10::BoxedKernel::makeFromFunctor(std::make_unique<Kernel>(of))) {}

  at::Tensor operator()(c10::DispatchKeySet keys, const at::Tensor& self) {
    if (of->identity != nullptr) {
      InterpreterLock lock;
      at::Tensor made = detached(self);
      if (made.defined()) return made;
      if (PyErr_Occurred()) throw_python_error();
    }
    return c10::impl::BoxedKernelWrapper<at::Tensor(const at::Tensor&)>::call(usual, op, keys, self);
  }

  c10::OperatorHandle op;
  std::shared_ptr<Operator> of;
  c10::BoxedKernel usual;
};

// The kernel of `linear`, where there is no autograd above it.
struct Linear final : c10::OperatorKernel {
  explicit Linear(std::shared_ptr<Operator> of) : usual(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    at::Tensor input = torch::jit::peek(*stack, 0, 3).toTensor(), weight = torch::jit::peek(*stack, 1, 3).toTensor();
    auto bias = torch::jit::peek(*stack, 2, 3).toOptional<at::Tensor>();
    if (is_simple(input, weight, bias)) return usual(op, keys, stack);
    torch::jit::drop(*stack, 3);
    stack->emplace_back(at::native::linear(input, weight, bias));
  }

  static bool is_usual(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    return is_simple(input, weight, bias);
  }

  Kernel usual;
};

// The kernel of `matmul`, where there is no autograd above it: as a whole it only runs at once.
struct Matmul final : c10::OperatorKernel {
  explicit Matmul(std::shared_ptr<Operator> of) : of(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (of->identity == nullptr) {
      InterpreterLock lock;
      if (!make_recorder(op)) throw_python_error();
    }
    at::Tensor self = torch::jit::peek(*stack, 0, 2).toTensor(), other = torch::jit::peek(*stack, 1, 2).toTensor();
    torch::jit::drop(*stack, 2);
    stack->emplace_back(composed_matmul(self, other));
  }

  static bool is_usual(const at::Tensor& self, const at::Tensor& other) { return is_simple_matmul(self, other); }

  std::shared_ptr<Operator> of;
};

// The kernel of `histc`. The CPU has one for floating-point numbers only.
struct Histogram final : c10::OperatorKernel {
  explicit Histogram(std::shared_ptr<Operator> of) : usual(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (torch::jit::peek(*stack, 0, 4).toTensor().is_floating_point()) return usual(op, keys, stack);
    call_python(op, stack);
  }

  static bool is_usual(const at::Tensor& self, int64_t, const at::Scalar&, const at::Scalar&) {
    return self.is_floating_point();
  }

  Kernel usual;
};

// The kernel of `_to_copy`, which is what `to` calls.
struct Moved final : c10::OperatorKernel {
  using Type = std::optional<at::ScalarType>;
  using Layout = std::optional<at::Layout>;
  using Device = std::optional<at::Device>;
  using Flag = std::optional<bool>;
  using Format = std::optional<at::MemoryFormat>;

  explicit Moved(std::shared_ptr<Operator> of) : usual(std::move(of)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    usual(op, keys, stack);
  }

  static bool is_usual(const at::Tensor&, const Type&, const Layout& layout, const Device&, const Flag& is_pinned, bool,
                       const Format&) {
    return (!layout || *layout == at::kStrided) && (!is_pinned || !*is_pinned);
  }
  static Device target(const at::Tensor&, const Type&, const Layout&, const Device& device, const Flag&, bool, const Format&) {
    return device;
  }

  Kernel usual;
};

}  // namespace marid
