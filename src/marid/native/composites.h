// Composite operators that take another way on the device than PyTorch gives it.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

namespace marid {

// Whether the rows of a tensor lie behind each other by their strides alone. Those of dimensions of one element count, as
// they do where PyTorch decides whether it folds them.
bool has_plain_rows(const at::Tensor& tensor);

// Whether `linear` may be recorded whole, if nobody differentiates it: that is one node in place of three or four, and the
// CPU takes it apart when it runs. Whether it folds other rows than plain ones depends on what requires gradients
// (parameters do, also where none are recorded), which is no longer known then.
bool is_simple(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// Whether the CPU composes `matmul`, of more than two matrices or vectors, in the same way where it is not known what requires
// gradients.
bool is_simple_matmul(const at::Tensor& self, const at::Tensor& other);

// As PyTorch composes it.
at::Tensor composed_matmul(const at::Tensor& self, const at::Tensor& other);

// Whether a function of the user's own (`torch.autograd.Function`, so a checkpoint) runs its forward. Autograd looks whether
// what that returns is a view, as the CPU's steps may have made it.
bool in_own_function();

// Give the device their kernels above autograd, and attention the choice of kernel that it makes on the CPU.
void register_composites(torch::Library& above);

}  // namespace marid
