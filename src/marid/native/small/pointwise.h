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
at::Tensor pointwise_in_place(Binary function, const at::Tensor& self, const at::Tensor& other);
at::Tensor pointwise_in_place(Binary function, const at::Tensor& self, const at::Scalar& other);

at::Tensor pointwise_in_place(Unary function, const at::Tensor& self, const at::Tensor& from);

// Of tensors without gaps, `c` being left out where a function is of two; in place, the result is written over `a`.
at::Tensor scaled(Scaled function, const at::Tensor& a, const at::Tensor& b, const at::Tensor* c, const at::Scalar& number,
                  bool in_place = false);

// Whether this is what an operator multiplies its other argument with where nobody says; a factor of another type than an
// integer ATen looks at.
inline bool is_one(const at::Scalar& factor) {
  return factor.isIntegral(/*includeBool=*/false) && !factor.isSymbolic() && factor.toLong() == 1;
}

at::Tensor copy_of(const at::Tensor& of, std::optional<at::MemoryFormat> format);

}  // namespace marid
