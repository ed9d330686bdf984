// Zeros that have no memory on the CPU (`_efficientzerotensor`): derivatives of what does not depend on the variable.
//
// PyTorch has kernels of its own for them (aten/src/ATen/ZeroTensorFallback.cpp, BinaryOps.cpp): they are left out of sums,
// and a product with one is another, whatever the other factor is: also infinite. On the device they are ordinary zeros in
// memory that are marked, and these are the same rules.
#pragma once
#include "handle.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>

#include <atomic>

namespace marid {

// Mark a tensor that was just made.
void mark_zero(const at::Tensor& made);

bool is_marked_zero(const at::Tensor& tensor);

extern std::atomic<bool> has_marked_zeros;  // whether there ever was one

// Whether a tensor is marked, and was not written to since.
inline bool is_zero(const at::Tensor& tensor) {
  return has_marked_zeros.load(std::memory_order_relaxed) && is_marked_zero(tensor);
}

// Whether a call, whose arguments are on the stack, returns views of zeros; afterwards, mark them.
bool views_zero(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
void mark_views(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// With at least one of the operands being zero in that sense:
at::Tensor sum_with_zero(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha);
at::Tensor product_with_zero(const at::Tensor& self, const at::Tensor& other);
at::Tensor quotient_with_zero(const at::Tensor& self, const at::Tensor& other);
at::Tensor dot_with_zero(const at::Tensor& self, const at::Tensor& other);

}  // namespace marid
