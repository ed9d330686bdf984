// Group normalisation, and its gradients. (group_norm.cpp)
#pragma once
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace marid {

// The kernel of `native_group_norm` or of its backward, of which `usual` would be the kernel; none for other operators.
std::optional<c10::KernelFunction> group_norm_kernel(const c10::OperatorHandle& op, const c10::KernelFunction& usual);

}  // namespace marid
