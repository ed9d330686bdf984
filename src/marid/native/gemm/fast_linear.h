// A linear layer and its activation (elements.h), as other operators use it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace marid {

at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       int64_t activation);

}  // namespace marid
