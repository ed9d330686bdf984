// Composite operators that take another way on the device than PyTorch gives it.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

namespace marid {

// Whether `linear` may be recorded whole, if nobody differentiates it: that is one node in place of three or four, and the
// CPU takes it apart when it runs. Whether it folds other rows than plain ones depends on what requires gradients
// (parameters do, also where none are recorded), which is no longer known then.
bool is_simple(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// Give the device their kernels above autograd, and attention the choice of kernel that it makes on the CPU.
void register_composites(torch::Library& above);

}  // namespace marid
