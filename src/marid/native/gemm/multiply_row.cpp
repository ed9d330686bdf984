// Multiplies one row by a matrix, whose columns threads share: BLAS itself leaves such a product to one thread, which
// reads a matrix at a part of the speed that memory has.
//
// Each part is ATen's own product, so a sum is added up as it would be in the whole (trials.cpp looks whether it is).
#include "multiply.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <algorithm>

namespace marid {

namespace {

// Parts begin at a multiple: at the same place in a cache line, and in the groups of columns that BLAS takes together.
constexpr int64_t kColumns = 64;
constexpr int64_t kWorthSharing = 1 << 17;  // elements of a part: to begin and end together takes some microseconds

at::Tensor view_of(const float* data, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::from_blob(const_cast<float*>(data), sizes, strides, at::TensorOptions(at::kFloat));
}

}  // namespace

int64_t parts_of_row(const Product& p) {
  int64_t worth = std::min(p.depth * p.columns / kWorthSharing, p.columns / kColumns);
  return at::in_parallel_region() ? 1 : std::min<int64_t>(worth, at::get_num_threads());
}

void multiply_row(const Product& p, int64_t parts) {
  int64_t width = (p.columns + parts - 1) / parts;
  width = (width + kColumns - 1) / kColumns * kColumns;
  at::parallel_for(0, (p.columns + width - 1) / width, 1, [&](int64_t begin, int64_t end) {
    int64_t from = begin * width, columns = std::min(end * width, p.columns) - from;
    at::Tensor a = view_of(p.a.data, {1, p.depth}, {p.a.row, p.a.column});
    at::Tensor b = view_of(p.b.data + from * p.b.column, {p.depth, columns}, {p.b.row, p.b.column});
    at::Tensor c = view_of(p.c + from, {1, columns}, {p.columns, 1});
    if (p.add) {
      at::cpu::addmm_out(c, c, a, b);
    } else {
      at::cpu::mm_out(c, a, b);
    }
  });
}

}  // namespace marid
