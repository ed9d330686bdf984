#include "zeros.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/result_type.h>

#include <limits>

namespace marid {

std::atomic<bool> has_marked_zeros{false};

namespace {

struct Looks {
  at::DimVector sizes;
  at::TensorOptions options;
};

// A number counts as any tensor without dimensions: PyTorch loses sight of what it was.
at::Tensor unwrapped(const at::Tensor& tensor) {
  bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  return is_number ? at::empty({}, tensor.options().device(at::kMeta)) : tensor;
}

Looks of_result(const at::Tensor& self, const at::Tensor& other) {
  const at::Tensor& own = handle_of(self) != nullptr ? self : other;
  at::TensorOptions options = own.options().dtype(at::result_type(unwrapped(self), unwrapped(other)));
  return {at::infer_size_dimvector(self.sizes(), other.sizes()), options};
}

at::Tensor zeros(const Looks& looks) { return at::_efficientzerotensor(looks.sizes, looks.options); }

Handle* unwritten(const at::Tensor& tensor) {
  Handle* handle = handle_of(tensor);
  return handle != nullptr && handle->version_counter().current_version() == 0 ? handle : nullptr;
}

}  // namespace

void mark_zero(const at::Tensor& made) {
  Handle* handle = handle_of(made);
  if (handle == nullptr) return;
  handle->is_zero = true;
  has_marked_zeros = true;
}

bool is_marked_zero(const at::Tensor& tensor) {
  const Handle* handle = tensor.defined() ? unwritten(tensor) : nullptr;
  return handle != nullptr && handle->is_zero;
}

bool views_zero(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!has_marked_zeros) return false;
  const auto &arguments = op.schema().arguments(), &returns = op.schema().returns();
  if (arguments.empty() || returns.empty() || returns[0].alias_info() == nullptr || returns[0].alias_info()->isWrite()) {
    return false;
  }
  const c10::IValue& first = torch::jit::peek(stack, 0, arguments.size());
  return first.isTensor() && is_marked_zero(first.toTensor());
}

void mark_views(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (const c10::IValue& one : torch::jit::last(stack, op.schema().returns().size())) {
    if (one.isTensor()) mark_zero(one.toTensor());
    if (!one.isTensorList()) continue;
    for (const c10::IValue& item : one.toListRef()) mark_zero(item.toTensor());
  }
}

at::Tensor sum_with_zero(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  Looks looks = of_result(self, other);
  auto copy = [&](const at::Tensor& of) {
    return at::_to_copy(of.expand(looks.sizes), looks.options);
  };
  if (!is_zero(self)) return copy(self);
  if (is_zero(other)) return zeros(looks);
  return alpha.equal(1) ? copy(other) : copy(other).mul(alpha);
}

at::Tensor product_with_zero(const at::Tensor& self, const at::Tensor& other) { return zeros(of_result(self, other)); }

at::Tensor quotient_with_zero(const at::Tensor& self, const at::Tensor& other) {
  Looks looks = of_result(self, other);
  if (!at::isFloatingType(looks.options.dtype().toScalarType()) && !at::isComplexType(looks.options.dtype().toScalarType())) {
    looks.options = looks.options.dtype(at::get_default_dtype());
  }
  if (!is_zero(other)) return zeros(looks);
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  return at::full(looks.sizes, is_zero(self) ? nan : infinity, looks.options);
}

at::Tensor dot_with_zero(const at::Tensor& self, const at::Tensor&) { return at::_efficientzerotensor({}, self.options()); }

}  // namespace marid
