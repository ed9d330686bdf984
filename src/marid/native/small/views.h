// Views (views.cpp). Undefined where ATen has to make one, or to raise an error.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>

namespace marid {

at::Tensor alias_of(const at::Tensor& self);
at::Tensor transposed(const at::Tensor& self);
at::Tensor transposed(const at::Tensor& self, int64_t first, int64_t second);
at::Tensor permuted(const at::Tensor& self, at::IntArrayRef dimensions);
at::Tensor viewed(const at::Tensor& self, c10::SymIntArrayRef sizes);
at::Tensor expanded(const at::Tensor& self, c10::SymIntArrayRef sizes, bool implicit);
at::Tensor unsqueezed(const at::Tensor& self, int64_t dimension);
at::Tensor squeezed(const at::Tensor& self, int64_t dimension);
at::Tensor selected(const at::Tensor& self, int64_t dimension, c10::SymInt index);
at::Tensor sliced(const at::Tensor& self, int64_t dimension, std::optional<c10::SymInt> start,
                  std::optional<c10::SymInt> end, c10::SymInt step);

// One of the indices in `x[2, 1:3, None, ...]`: a number inside of its dimension, in `start`; a slice with a positive step; a
// dimension of one element; the rest, of so many dimensions as `start` says.
struct Index {
  enum Kind { kNumber, kSlice, kNewDimension, kRest } kind;
  int64_t start = 0, stop = 0, step = 1;
};
at::Tensor indexed(const at::Tensor& self, c10::ArrayRef<Index> indices);

}  // namespace marid
