// marid::dequantize and marid::quantized_linear on the CPU. frontend/quantized_operators.py says what they are, and has
// them in plain PyTorch.
#include "expose.h"
#include "fast_linear.h"
#include "quantized_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace marid {
namespace {

constexpr int64_t kFewRows = 4, kMostRows = 12;  // at once, and in all before it pays to unpack the matrix
constexpr int64_t kGrain = 1 << 15;

std::atomic<bool> may_use_bytes{true};

Packing packing_named(c10::string_view name, const char* function) {
  for (size_t i = 0; i < kPackings.size(); i++) {
    if (kPackings[i].name == std::string_view(name.data(), name.size())) return static_cast<Packing>(i);
  }
  TORCH_CHECK_VALUE(false, function, "() does not know the packing '", name, "'");
}

// The number of elements in a row of a packed matrix.
int64_t depth_of(const at::Tensor& packed, Packing packing, const char* function) {
  const PackingSizes& of = kPackings[static_cast<size_t>(packing)];
  TORCH_CHECK(packed.dim() >= 1 && packed.scalar_type() == at::kByte && packed.size(-1) % of.bytes == 0, function,
              "() takes rows of whole blocks of ", of.bytes, " bytes, but got ", packed.scalar_type(), " of ",
              packed.sizes());
  return packed.size(-1) / of.bytes * of.elements;
}

at::Tensor unpacked(const at::Tensor& packed, Packing packing, int64_t depth) {
  const PackingSizes& of = kPackings[static_cast<size_t>(packing)];
  std::vector<int64_t> sizes = packed.sizes().vec();
  sizes.back() = depth;
  at::Tensor from = packed.contiguous(), to = at::detail::empty_cpu(sizes, at::TensorOptions(at::kFloat));
  const uint8_t* blocks = from.const_data_ptr<uint8_t>();
  float* data = to.mutable_data_ptr<float>();
  at::parallel_for(0, to.numel() / of.elements, kGrain / of.elements, [&](int64_t begin, int64_t end) {
    unpack(packing, blocks + begin * of.bytes, data + begin * of.elements, (end - begin) * of.elements);
  });
  return to;
}

at::Tensor dequantize(const at::Tensor& packed, c10::string_view name) {
  Packing packing = packing_named(name, "dequantize");
  return unpacked(packed, packing, depth_of(packed, packing, "dequantize"));
}

at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                            c10::string_view name, c10::string_view of_activation) {
  Packing packing = packing_named(name, "quantized_linear");
  int64_t activation = activation_named(of_activation, "quantized_linear");
  int64_t depth = depth_of(packed, packing, "quantized_linear");
  bool has_bias = bias.has_value() && bias->defined();
  TORCH_CHECK(x.dim() >= 1 && packed.dim() == 2 && x.size(-1) == depth && at::isFloatingType(x.scalar_type()),
              "quantized_linear() cannot multiply ", x.scalar_type(), " of ", x.sizes(), " by rows of ", depth,
              " elements");
  TORCH_CHECK(!has_bias || (bias->dim() == 1 && bias->size(0) == packed.size(0) && at::isFloatingType(bias->scalar_type())),
              "quantized_linear(): the bias must have the shape [", packed.size(0), "]");
  at::ScalarType sums_in = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  std::optional<at::Tensor> added = has_bias ? std::optional(plain(*bias, sums_in)) : std::nullopt;
  at::Tensor wide = plain(x, sums_in);
  int64_t rows = depth == 0 ? 0 : x.numel() / depth;
  bool few = rows > 0 && rows <= kMostRows && packed.numel() > 0 && sums_in == at::kFloat;
  const float* data = few ? wide.const_data_ptr<float>() : nullptr;
  const IntegerProducts* integers = products_in_words();
  if (const IntegerProducts* bytes = products_in_bytes(); bytes != nullptr && may_use_bytes) integers = bytes;
  int64_t parts = few ? rows * depth / 32 : 0;
  std::vector<uint8_t> rounded(integers ? parts * integers->bytes : 0);
  std::vector<float> scales(parts), sums(parts);
  if (few && integers) few = integers->round(packing, data, rows * depth, rounded.data(), scales.data(), sums.data());
  if (!few) {
    at::Tensor matrix = unpacked(packed, packing, depth).to(sums_in);
    return fast_linear(wide, matrix, added, activation).to(x.scalar_type());
  }
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = packed.size(0);
  at::Tensor matrix = packed.contiguous(), y = at::detail::empty_cpu(sizes, at::TensorOptions(at::kFloat));
  for (int64_t i = 0; i < (integers ? 0 : parts); i++) {
    for (int64_t j = 0; j < 32; j++) sums[i] += data[i * 32 + j];
  }
  auto multiply = integers ? integers->multiply : multiply_packed;
  for (int64_t row = 0; row < rows; row += kFewRows) {
    PackedRows of{};
    of.rows = std::min(kFewRows, rows - row), of.depth = depth, of.columns = packed.size(0);
    of.x = data + row * depth;
    of.sums = sums.data() + row * depth / 32;
    of.scales = scales.data() + row * depth / 32;
    if (integers) of.rounded = rounded.data() + row * depth / 32 * integers->bytes;
    of.bias = has_bias ? added->const_data_ptr<float>() : nullptr;
    of.matrix = matrix.const_data_ptr<uint8_t>();
    of.y = y.mutable_data_ptr<float>() + row * of.columns;
    of.activation = activation;
    at::parallel_for(0, of.columns, std::max<int64_t>(4, kGrain / depth),
                     [&](int64_t begin, int64_t end) { multiply(packing, of, begin, end); });
  }
  return y.to(x.scalar_type());
}

TORCH_LIBRARY_IMPL(marid, CPU, library) {
  library.impl("dequantize", TORCH_FN(dequantize));
  library.impl("quantized_linear", TORCH_FN(quantized_linear));
}

// For tests: whether products in integers may be by instructions for bytes, where the processor has them.
void quantized_configure(bool bytes) { may_use_bytes = bytes; }

}  // namespace

PyMethodDef quantized_functions[] = {
    held<quantized_configure>("quantized_configure"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
