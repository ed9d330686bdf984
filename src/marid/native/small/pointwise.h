// Pointwise operators on small tensors (pointwise.cpp). Undefined where ATen has to do it.
#pragma once
#include "pointwise_kernels.h"

#include <ATen/core/Tensor.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/Scalar.h>

#include <optional>

namespace marid {

at::Tensor pointwise(Binary function, const at::Tensor& left, const at::Tensor& right);
at::Tensor pointwise(Binary function, const at::Tensor& left, const at::Scalar& right);
at::Tensor pointwise(Binary function, const at::Scalar& left, const at::Tensor& right);
at::Tensor pointwise(Unary function, const at::Tensor& of);

// Write the result over `self`, and return that.
at::Tensor pointwise_in_place(Binary function, at::Tensor& self, const at::Tensor& other);
at::Tensor pointwise_in_place(Binary function, at::Tensor& self, const at::Scalar& other);

at::Tensor copy_of(const at::Tensor& of, std::optional<at::MemoryFormat> format);

}  // namespace marid
