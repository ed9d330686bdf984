// Results of selections: how they look.
#include "selections.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/SmallVector.h>

namespace marid {

namespace {

constexpr int64_t kMostNumbers = 1 << 20;  // ATen's loops are slower for as many as that too, on as many threads as there are

bool is_usual(const at::Tensor& of) {
  bool is_known = of.scalar_type() == at::kFloat || of.scalar_type() == at::kDouble || of.scalar_type() == at::kLong;
  return is_known && of.dim() > 0 && of.numel() > 0 && of.numel() <= kMostNumbers && of.is_contiguous() && !of.is_neg() &&
      !of._is_zerotensor();
}

// What is walked along, and the shape of results.
struct Rows {
  int64_t outer = 1, count = 1, inner = 1;
  c10::SmallVector<int64_t, 6> sizes;
};

std::optional<Rows> rows_of(const at::Tensor& of, int64_t dim, bool keep) {
  int64_t dims = of.dim();
  if (dim < -dims || dim >= dims) return std::nullopt;  // an error
  if (dim < 0) dim += dims;
  Rows made;
  for (int64_t i = 0; i < dims; i++) {
    (i < dim ? made.outer : i == dim ? made.count : made.inner) *= of.size(i);
    if (i != dim) made.sizes.push_back(of.size(i));
    if (i == dim && keep) made.sizes.push_back(1);
  }
  return made;
}

}  // namespace

at::Tensor index_of(Selection selection, const at::Tensor& of, std::optional<int64_t> dim, bool keep) {
  if (!is_usual(of)) return {};
  std::optional<Rows> rows = Rows{1, of.numel(), 1, {}};
  if (dim) {
    rows = rows_of(of, *dim, keep);
  } else if (keep) {
    rows->sizes.assign(of.dim(), 1);
  }
  if (!rows) return {};
  at::Tensor indices = at::detail::empty_cpu(rows->sizes, at::TensorOptions(at::kLong));
  select(selection, of.scalar_type(), rows->outer, rows->count, rows->inner, of.const_data_ptr(), nullptr,
         indices.mutable_data_ptr<int64_t>());
  return indices;
}

std::tuple<at::Tensor, at::Tensor> selection_of(Selection selection, const at::Tensor& of, int64_t dim, bool keep) {
  std::optional<Rows> rows = is_usual(of) ? rows_of(of, dim, keep) : std::nullopt;
  if (!rows) return {};
  at::Tensor numbers = at::detail::empty_cpu(rows->sizes, at::TensorOptions(of.scalar_type()));
  at::Tensor indices = at::detail::empty_cpu(rows->sizes, at::TensorOptions(at::kLong));
  select(selection, of.scalar_type(), rows->outer, rows->count, rows->inner, of.const_data_ptr(), numbers.mutable_data_ptr(),
         indices.mutable_data_ptr<int64_t>());
  return {std::move(numbers), std::move(indices)};
}

}  // namespace marid
