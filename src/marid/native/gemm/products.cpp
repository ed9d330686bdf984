// The operators that products of matrices are run by: marid::mm, marid::bmm, marid::product (both of these, in compiled
// parts), marid::product_add (addmm) and marid::linear. They do what ATen's do, bit for bit, by multiply.cpp or
// multiply_row.cpp where trials.cpp chooses it.
#include "expose.h"

#include "multiply.h"
#include "small/views.h"
#include "trials.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/mv.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using marid::Matrices;
using marid::Product;

constexpr int64_t kLeastRows = 4, kLeastColumns = 12;  // below, BLAS has kernels that add up in other orders
constexpr int64_t kLeastOfBatch = 16;                  // rows and columns of each of several products
constexpr int64_t kLeastOfRow = 32;                    // columns, of a single row
constexpr int64_t kLeastWork = 400;                    // multiplications of each of bmm's, below which it asks no BLAS
constexpr int64_t kLeastDepth = 8;
constexpr int64_t kMostDepth = 1 << 14;

std::atomic<int64_t> count{0};

bool is_plain(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
         !tensor.is_neg();
}

// Products may be asked to round their factors, which is oneDNN's affair then.
bool is_exact() {
  auto precision = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::NONE || precision == at::Float32Precision::IEEE;
}

bool can_use_microkernel() { return marid::can_multiply() && at::globalContext().userEnabledMkldnn(); }

std::optional<Matrices> matrices_of(const at::Tensor& tensor) {
  int64_t dims = tensor.dim(), rows = tensor.size(dims - 2), columns = tensor.size(dims - 1);
  int64_t row = tensor.stride(dims - 2), column = tensor.stride(dims - 1);
  if (rows == 1 && column == 1) row = row == 1 ? 1 : columns;  // it may be anything
  if (columns == 1 && row == 1) column = column == 1 ? 1 : rows;
  bool is_line = rows == 1 ? column == 1 : columns == 1 && row == 1;
  if (!is_line && !(column == 1 && row >= columns) && !(row == 1 && column >= rows)) return std::nullopt;
  return Matrices{tensor.const_data_ptr<float>(), dims == 3 ? tensor.stride(0) : 0, row, column};
}

Matrices transposed(const Matrices& of) { return {of.data, of.batch, of.column, of.row}; }

// The result of a product in the faster way, or an undefined tensor. `is_vector`: b is a vector that mv is called with.
at::Tensor multiplied(const at::Tensor& a, const at::Tensor& b, const at::Tensor* bias, bool is_vector = false) {
  int64_t dims = a.dim();
  if ((dims != 2 && dims != 3) || b.dim() != dims || !is_plain(a) || !is_plain(b)) return {};
  Product p{};
  p.batch = dims == 3 ? a.size(0) : 1;
  p.rows = a.size(dims - 2);
  p.depth = a.size(dims - 1);
  p.columns = b.size(dims - 1);
  p.turned = p.columns == 1 && p.rows > 1;
  bool one_row = p.rows == 1 || p.turned;
  if (one_row) {
    int64_t wide = std::max(p.rows, p.columns);
    if (wide < kLeastOfRow || (dims == 3 && wide * p.depth < kLeastWork)) return {};
  } else if (dims == 3 ? std::min(p.rows, p.columns) < kLeastOfBatch : p.rows < kLeastRows || p.columns < kLeastColumns) {
    return {};
  }
  if (p.depth < kLeastDepth || p.depth > kMostDepth || p.batch < 1 || b.size(dims - 2) != p.depth ||
      (dims == 3 && b.size(0) != p.batch) || !is_exact() || !(one_row || can_use_microkernel())) {
    return {};
  }
  marid::Added added = marid::kNothing;
  if (bias != nullptr) {
    bool row = bias->dim() == 1 && bias->size(0) == p.columns;
    bool matrix = bias->dim() == 2 && bias->size(0) == p.rows && bias->size(1) == p.columns;
    if (!is_plain(*bias) || !(row || matrix)) return {};
    added = row ? marid::kRow : marid::kMatrix;
  }
  auto left = matrices_of(a), right = matrices_of(b);
  if (!left || !right) return {};
  if (p.turned) {
    std::swap(p.rows, p.columns);
    std::tie(left, right) = std::pair(transposed(*right), transposed(*left));
  }
  if (one_row && left->column != 1) return {};
  p.a = *left;
  p.b = *right;
  p.add = bias != nullptr;
  p.batched = dims == 3;
  p.of_vector = is_vector;
  marid::Tiles tiles{};
  int64_t parts = 1;
  if (one_row) {
    parts = marid::parts_of_row(p);
    if ((parts < 2 && !marid::can_multiply_row(p)) || !marid::choose(p, added, std::nullopt)) return {};
  } else {
    tiles = marid::tiles_of(p);
    if (!marid::choose(p, added, marid::shape_of(p, tiles))) return {};
  }
  std::array<int64_t, 3> sizes{p.batch, a.size(dims - 2), b.size(dims - 1)};
  at::Tensor made = at::detail::empty_cpu(at::IntArrayRef(sizes).slice(3 - dims), at::TensorOptions(at::kFloat));
  if (bias != nullptr) made.copy_(*bias);
  p.c = made.mutable_data_ptr<float>();
  if (one_row) {
    marid::multiply_row(p, parts, marid::rows_are_in_blas_order());
  } else {
    marid::multiply(p, tiles, marid::block_of_blas());
  }
  count++;
  return made;
}

// Whether the dispatcher would call the CPU's kernel with such tensors, and nobody watches (a profiler), so that it can be
// called without.
template <typename... Tensors>
bool is_for_the_cpu(const Tensors&... tensors) {
  c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = ((tensors.key_set() | ...) | local.included_) - local.excluded_;
  keys = keys.remove(c10::DispatchKey::BackendSelect);  // these operators have no such kernel
  return keys.highestPriorityTypeId() == c10::DispatchKey::CPU && !at::hasCallbacks();
}

at::Tensor product(const at::Tensor& self, const at::Tensor& other) {
  at::Tensor made = multiplied(self, other, nullptr);
  if (made.defined()) return made;
  if (self.dim() == 3) return is_for_the_cpu(self, other) ? at::cpu::bmm(self, other) : at::bmm(self, other);
  return is_for_the_cpu(self, other) ? at::cpu::mm(self, other) : at::mm(self, other);
}
at::Tensor mm(const at::Tensor& self, const at::Tensor& other) {
  return self.dim() == 2 ? product(self, other) : at::mm(self, other);
}
at::Tensor bmm(const at::Tensor& self, const at::Tensor& other) {
  return self.dim() == 3 ? product(self, other) : at::bmm(self, other);
}

at::Tensor product_add(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                       const at::Scalar& alpha) {
  if (beta.equal(1) && alpha.equal(1) && a.dim() == 2) {
    at::Tensor made = multiplied(a, b, &self);
    if (made.defined()) return made;
  }
  return is_for_the_cpu(self, a, b) ? at::cpu::addmm(self, a, b, beta, alpha) : at::addmm(self, a, b, beta, alpha);
}

// The sizes of a result, but for the last.
at::DimVector leading(const at::Tensor& of, int64_t last) {
  at::DimVector sizes(of.sizes().begin(), of.sizes().end());
  sizes.back() = last;
  return sizes;
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  bool has_bias = bias.has_value() && bias->defined();
  bool is_bare = is_for_the_cpu(input, weight) && (!has_bias || is_for_the_cpu(*bias));
  bool fits = input.dim() >= 2 && weight.dim() == 2 && input.is_contiguous() && input.numel() > 0 && weight.numel() > 0 &&
      input.size(-1) == weight.size(1);
  bool is_one_product = input.dim() == 2 || !has_bias || bias->dim() == 1;  // PyTorch adds other biases behind it
  if (is_bare && fits && is_one_product) {
    at::Tensor rows = input.dim() == 2 ? input : marid::viewed(input, {-1, input.size(-1)});
    at::Tensor turned = marid::transposed(weight);
    at::Tensor made = has_bias ? product_add(*bias, rows, turned, 1, 1) : product(rows, turned);
    return input.dim() == 2 ? made : marid::viewed(made, c10::fromIntArrayRefSlow(leading(input, weight.size(0))));
  }
  return at::linear(input, weight, bias);
}

// A row by a matrix, a matrix by a column, or batches of matrices, one by one.
at::Tensor matmul(const at::Tensor& self, const at::Tensor& other) {
  int64_t dims = self.dim();
  if (dims == 1 && other.dim() == 2 && other.size(1) > 0) {
    return marid::viewed(product(marid::unsqueezed(self, 0), other), {other.size(1)});
  }
  if (dims == 2 && other.dim() == 1) {
    bool is_large = self.size(0) >= kLeastOfRow && self.size(1) >= kLeastDepth;
    at::Tensor made = is_large ? multiplied(self, marid::unsqueezed(other, 1), nullptr, true) : at::Tensor();
    return made.defined() ? marid::viewed(made, {self.size(0)}) : at::mv(self, other);
  }
  bool alike = dims >= 3 && other.dim() == dims && self.sizes().slice(0, dims - 2) == other.sizes().slice(0, dims - 2);
  if (alike && dims == 3) return product(self, other);
  if (alike && self.numel() > 0 && other.numel() > 0) {
    at::Tensor left = marid::viewed(self, {-1, self.size(dims - 2), self.size(dims - 1)});
    at::Tensor right = marid::viewed(other, {-1, other.size(dims - 2), other.size(dims - 1)});
    if (left.defined() && right.defined()) {
      return marid::viewed(product(left, right), c10::fromIntArrayRefSlow(leading(self, other.size(dims - 1))));
    }
  }
  return at::matmul(self, other);
}

TORCH_LIBRARY_FRAGMENT(marid, library) {
  library.def("product(Tensor self, Tensor mat2) -> Tensor");
  library.def("mm(Tensor self, Tensor mat2) -> Tensor");
  library.def("bmm(Tensor self, Tensor mat2) -> Tensor");
  library.def("product_add(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor");
  library.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  library.def("matmul(Tensor self, Tensor other) -> Tensor");
  library.impl("product", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(product));
  library.impl("mm", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(mm));
  library.impl("bmm", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(bmm));
  library.impl("product_add", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(product_add));
  library.impl("linear", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(linear));
  library.impl("matmul", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(matmul));
}

// Like ATen's, they see conjugate and negative views as such, and hand them on.
void hand_on_views(torch::Library& library) {
  for (const char* name : {"product", "mm", "bmm", "product_add", "linear", "matmul"}) {
    library.impl(name, torch::CppFunction::makeFallthrough());
  }
}
TORCH_LIBRARY_IMPL(marid, Conjugate, library) { hand_on_views(library); }
TORCH_LIBRARY_IMPL(marid, Negative, library) { hand_on_views(library); }

using torch::aot_inductor::new_tensor_handle;
using torch::aot_inductor::tensor_handle_to_tensor_pointer;

// How many products our kernel has computed.
int64_t products_count() { return count; }

}  // namespace

namespace marid {

PyMethodDef product_functions[] = {
    held<products_count>("products_count"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid

extern "C" {

// What compiled parts call (execute/compiled/lower.py).
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_product(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(product(*tensor_handle_to_tensor_pointer(a), *tensor_handle_to_tensor_pointer(b)));
  });
}
AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_product_add(AtenTensorHandle bias, AtenTensorHandle a, AtenTensorHandle b,
                                          AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(product_add(*tensor_handle_to_tensor_pointer(bias), *tensor_handle_to_tensor_pointer(a),
                                            *tensor_handle_to_tensor_pointer(b), 1, 1));
  });
}

}  // extern "C"
