// Operators that compare the geometry of tensors. (geometry_tests.cpp)
#pragma once
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace marid {

// The kernel of `is_same_size` or `_has_same_storage_numel`, of which `usual` would be the kernel; none for other operators.
std::optional<c10::KernelFunction> geometry_test_kernel(const c10::OperatorHandle& op, const c10::KernelFunction& usual);

}  // namespace marid
