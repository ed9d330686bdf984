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
#include <cstdint>

namespace marid {

namespace {

// Parts begin at a multiple: at the same place in a cache line, and in the groups of columns that BLAS takes together.
constexpr int64_t kColumns = 64;
constexpr int64_t kWorthSharing = 1 << 17;  // elements of a part: to begin and end together takes some microseconds
constexpr int64_t kGroup = 16;              // columns that one thread computes
constexpr int64_t kWhole = 4;               // columns that BLAS adds up alike
constexpr uintptr_t kAlignment = 16;        // bytes
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

// How many columns our kernel computes, from the first on. BLAS adds the last ones up otherwise if they are not four, and
// others again if they are alone.
int64_t own_columns(const Product& p) {
  if (p.columns % kWhole == 0) return p.columns;
  if (p.batch > 1) return 0;
  return p.b.row != 1 ? p.columns : std::max<int64_t>(0, p.columns / kColumns - 1) * kColumns;
}

// Of several rows ATen tells BLAS whether they lie like columns, from a stride that says nothing else; the order of
// summation is another one then.
bool is_like_column(const Product& p) { return p.batch > 1 && p.a.row == 1; }

auto kernel_of(const Product& p) {
  return p.b.row != 1 ? row_one_by_one : is_like_column(p) ? row_turned_one_by_one : row_in_lanes;
}

// Where a matrix begins decides which of its elements BLAS takes into which lane.
bool has_aligned_matrices(const Product& p) {
  return reinterpret_cast<uintptr_t>(p.b.data) % kAlignment == 0 && (p.batch == 1 || p.b.batch % kWhole == 0);
}

void multiply_by_kernel(const Product& p) {
  int64_t columns = own_columns(p), stride = p.b.row == 1 ? p.b.column : p.b.row;
  int64_t groups = (columns + kGroup - 1) / kGroup, grain = std::max<int64_t>(1, kGrain / p.depth / kGroup);
  at::parallel_for(0, p.batch * groups, grain, [&, kernel = kernel_of(p)](int64_t begin, int64_t end) {
    for (int64_t group = begin, next; group < end; group = next) {
      int64_t i = group / groups;  // of the products
      next = std::min(end, (i + 1) * groups);
      RowProduct of{p.a.data + i * p.a.batch, p.b.data + i * p.b.batch, p.c + i * p.columns, p.depth, stride, p.add};
      kernel(of, (group - i * groups) * kGroup, std::min((next - i * groups) * kGroup, columns));
    }
  });
  if (columns < p.columns) multiply_columns(p, columns, p.columns - columns);
}

}  // namespace

bool can_multiply_row(const Product& p) {
  bool is_known = p.batch == 1 || !p.turned || is_like_column(p) || p.b.row != 1;
  bool has_place = kernel_of(p) != row_in_lanes || has_aligned_matrices(p);
  return row_in_lanes != nullptr && is_known && has_place && own_columns(p) > 0;
}

int64_t parts_of_row(const Product& p) {
  if (p.batched || p.turned) return 1;  // parts are products by mm
  int64_t worth = std::min(p.depth * p.columns / kWorthSharing, p.columns / kColumns);
  return at::in_parallel_region() ? 1 : std::min<int64_t>(worth, at::get_num_threads());
}

void multiply_row(const Product& p, int64_t parts, bool in_blas_order) {
  if (in_blas_order && can_multiply_row(p)) return multiply_by_kernel(p);
  int64_t width = (p.columns + parts - 1) / parts;
  width = (width + kColumns - 1) / kColumns * kColumns;
  at::parallel_for(0, (p.columns + width - 1) / width, 1, [&](int64_t begin, int64_t end) {
    int64_t from = begin * width;
    multiply_columns(p, from, std::min(end * width, p.columns) - from);
  });
}

}  // namespace marid
