// Group normalisation, whose results lie in memory as its input does, and so do its gradients on the CPU.
//
// PyTorch's formula for the gradients keeps the memory format of the input on the CPU alone. For other devices it makes
// everything contiguous, and another kernel calculates other bits. So the handle of the mean, which comes back with the gradients,
// says what the format was.
#include "group_norm.h"

#include "handle.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <tuple>
#include <utility>

namespace marid {

namespace {

using at::Tensor, c10::SymInt;
using Maybe = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 3>;

struct GroupNorm final : c10::OperatorKernel {
  GroupNorm(const c10::OperatorHandle& op, c10::KernelFunction usual) : op(op), usual(std::move(usual)) {}

  Three operator()(c10::DispatchKeySet keys, const Tensor& input, const Maybe& weight, const Maybe& bias, SymInt n, SymInt c,
                   SymInt hxw, int64_t group, double eps) {
    auto results = usual.call<Three, const Tensor&, const Maybe&, const Maybe&, SymInt, SymInt, SymInt, int64_t, double>(
        op, keys, input, weight, bias, std::move(n), std::move(c), std::move(hxw), group, eps);
    if (Handle* mean = handle_of(std::get<1>(results))) mean->normalised_in = input.suggest_memory_format();
    return results;
  }

  c10::OperatorHandle op;
  c10::KernelFunction usual;
};

struct GroupNormBackward final : c10::OperatorKernel {
  GroupNormBackward(const c10::OperatorHandle& op, c10::KernelFunction usual) : op(op), usual(std::move(usual)) {}

  Three operator()(c10::DispatchKeySet keys, const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& rstd,
                   const Maybe& weight, SymInt n, SymInt c, SymInt hxw, int64_t group, Wanted wanted) {
    Handle* handle = handle_of(mean);
    auto format = handle == nullptr ? at::MemoryFormat::Contiguous : handle->normalised_in;
    // Where the gradient of the input is not wanted, the CPU's kernel for other formats writes to it all the same.
    bool is_forgotten = format != at::MemoryFormat::Contiguous && wanted[0] &&
        torch::autograd::get_current_graph_task_id() >= 0;
    if (!is_forgotten) return compute(keys, grad, input, mean, rstd, weight, n, c, hxw, group, wanted);
    at::AutoDispatchBelowADInplaceOrView below;
    return compute(keys, grad.contiguous(format), input.contiguous(format), mean, rstd, weight, n, c, hxw, group, wanted);
  }

 private:
  Three compute(c10::DispatchKeySet keys, const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& rstd,
                const Maybe& weight, SymInt n, SymInt c, SymInt hxw, int64_t group, Wanted wanted) const {
    return usual.call<Three, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Maybe&, SymInt, SymInt, SymInt,
                      int64_t, Wanted>(op, keys, grad, input, mean, rstd, weight, std::move(n), std::move(c), std::move(hxw),
                                       group, wanted);
  }

  c10::OperatorHandle op;
  c10::KernelFunction usual;
};

template <typename Kernel>
c10::KernelFunction made(const c10::OperatorHandle& op, c10::KernelFunction usual) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(std::make_unique<Kernel>(op, std::move(usual)));
}

}  // namespace

std::optional<c10::KernelFunction> group_norm_kernel(const c10::OperatorHandle& op, const c10::KernelFunction& usual) {
  const std::string& name = op.operator_name().name;
  if (!op.operator_name().overload_name.empty()) return std::nullopt;
  if (name == "aten::native_group_norm") return made<GroupNorm>(op, usual);
  if (name == "aten::native_group_norm_backward") return made<GroupNormBackward>(op, usual);
  return std::nullopt;
}

}  // namespace marid
