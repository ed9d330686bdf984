// Multiplies one row by a matrix, whose columns threads share: BLAS itself leaves such a product to one thread, which
// reads a matrix at a part of the speed that memory has.
//
// Where BLAS adds up as the kernels in row_kernels.cpp do, these read the matrix at the speed of memory. Elsewhere each part is
// ATen's own product, so a sum is added up as it would be in the whole. trials.cpp looks whether bits are the same.
#include "multiply.h"
#include "row_kernels.h"

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
constexpr int64_t kGroup = 4;               // columns
constexpr int64_t kGrain = 1 << 15;         // elements that our kernel leaves to one thread

at::Tensor view_of(const float* data, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::from_blob(const_cast<float*>(data), sizes, strides, at::TensorOptions(at::kFloat));
}

// The product of some columns by ATen.
void multiply_columns(const Product& p, int64_t from, int64_t columns) {
  at::Tensor a = view_of(p.a.data, {1, p.depth}, {p.a.row, p.a.column});
  at::Tensor b = view_of(p.b.data + from * p.b.column, {p.depth, columns}, {p.b.row, p.b.column});
  at::Tensor c = view_of(p.c + from, {1, columns}, {p.columns, 1});
  if (p.add) {
    at::cpu::addmm_out(c, c, a, b);
  } else {
    at::cpu::mm_out(c, a, b);
  }
}

// How many columns our kernel computes, from the first on. BLAS adds the last ones up otherwise if they are no group, and
// others again if they are alone.
int64_t own_columns(const Product& p) {
  if (p.b.row != 1 || p.columns % kGroup == 0) return p.columns;
  return std::max<int64_t>(0, p.columns / kColumns - 1) * kColumns;
}

}  // namespace

bool can_multiply_row(const Product& p) { return row_in_lanes != nullptr && own_columns(p) > 0; }

int64_t parts_of_row(const Product& p) {
  int64_t worth = std::min(p.depth * p.columns / kWorthSharing, p.columns / kColumns);
  return at::in_parallel_region() ? 1 : std::min<int64_t>(worth, at::get_num_threads());
}

void multiply_row(const Product& p, int64_t parts, bool in_blas_order) {
  if (in_blas_order && can_multiply_row(p)) {
    int64_t columns = own_columns(p);
    RowProduct of{p.a.data, p.b.data, p.c, p.depth, p.b.row == 1 ? p.b.column : p.b.row, p.add};
    auto kernel = p.b.row == 1 ? row_in_lanes : row_one_by_one;
    int64_t groups = (columns + kGroup - 1) / kGroup, grain = std::max<int64_t>(1, kGrain / p.depth / kGroup);
    at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
      kernel(of, begin * kGroup, std::min(end * kGroup, columns));
    });
    if (columns < p.columns) multiply_columns(p, columns, p.columns - columns);
    return;
  }
  int64_t width = (p.columns + parts - 1) / parts;
  width = (width + kColumns - 1) / kColumns * kColumns;
  at::parallel_for(0, (p.columns + width - 1) / width, 1, [&](int64_t begin, int64_t end) {
    int64_t from = begin * width;
    multiply_columns(p, from, std::min(end * width, p.columns) - from);
  });
}

}  // namespace marid
