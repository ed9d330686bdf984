// marid::fast_linear: a linear layer and its activation, with sums in an order of its own. A few rows, as in decoding, are
// multiplied at the speed at which memory gives the matrix; many rows by the microkernel of multiply.cpp.
// marid::linear_activation: the same with the bits of ATen's sums.
#include "fast_linear.h"

#include "linear_kernels.h"
#include "multiply.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace marid {
namespace {

constexpr int64_t kWorthSharing = 1 << 15;  // elements of a matrix for which a second thread pays
constexpr int64_t kLeast = 16;              // rows that the microkernel is for
constexpr int64_t kGrain = 1 << 15;

at::Tensor few_rows(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    int64_t activation, at::IntArrayRef sizes) {
  at::Tensor wide = plain(x, at::kFloat), added = bias ? plain(*bias, at::kFloat) : at::Tensor();
  at::Tensor y = at::detail::empty_cpu(sizes, at::TensorOptions(at::kFloat));
  FewRows of{};
  of.x = wide.const_data_ptr<float>();
  of.bias = added.defined() ? added.const_data_ptr<float>() : nullptr;
  of.weight = weight.const_data_ptr();
  of.y = y.mutable_data_ptr<float>();
  of.depth = weight.size(1), of.columns = weight.size(0), of.rows = y.numel() / of.columns;
  of.activation = activation;
  Element element = element_of(weight.scalar_type());
  int64_t grain = std::max<int64_t>(4, kWorthSharing / 2 / std::max<int64_t>(of.depth, 1));
  at::parallel_for(0, of.columns, grain,
                   [&](int64_t begin, int64_t end) { multiply_few_rows(element, of, begin, end); });
  return y.to(x.scalar_type());
}

at::Tensor many_rows(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     at::IntArrayRef sizes) {
  at::Tensor given = plain(x, at::kFloat), y = at::detail::empty_cpu(sizes, at::TensorOptions(at::kFloat));
  Product p{};
  p.batch = 1, p.depth = weight.size(1), p.columns = weight.size(0), p.rows = y.numel() / p.columns;
  p.a = {given.const_data_ptr<float>(), 0, p.depth, 1};
  p.b = {weight.const_data_ptr<float>(), 0, 1, p.depth};
  p.add = bias.has_value();
  p.c = y.mutable_data_ptr<float>();
  if (p.add) y.copy_(*bias);
  multiply(p, tiles_of(p), 0);
  return y;
}

// The product that programs use: the same bits as ATen's, with all threads also for a single row.
at::Tensor product_of(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("marid::linear", "")
                       .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&)>();
  return op.call(x, weight, bias);
}

const std::array<std::string_view, 8> kLayers{"none", "relu", "squared_relu", "sigmoid",
                                              "tanh", "silu", "gelu",         "gelu_tanh"};

at::Tensor& activated(at::Tensor& y, int64_t layer) {
  switch (layer) {
    case 1: return at::relu_(y);
    case 2: return at::relu_(y).square_();
    case 3: return at::sigmoid_(y);
    case 4: return at::tanh_(y);
    case 5: return at::silu_(y);
    case 6: return at::gelu_(y);
    case 7: return at::gelu_(y, "tanh");
    default: return y;
  }
}

at::Tensor linear_activation(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                             c10::string_view activation) {
  c10::impl::ExcludeDispatchKeyGuard as_they_are(c10::autocast_dispatch_keyset);
  auto found = std::find(kLayers.begin(), kLayers.end(), std::string_view(activation.data(), activation.size()));
  TORCH_CHECK_VALUE(found != kLayers.end(), "linear_activation() knows none, relu, squared_relu, sigmoid, tanh, silu, ",
                    "gelu, gelu_tanh, but got '", activation, "'");
  at::Tensor y = product_of(x, weight, bias);
  return activated(y, found - kLayers.begin());
}

at::Tensor fast_linear_named(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                             c10::string_view activation) {
  return fast_linear(x, weight, bias, activation_named(activation, "fast_linear"));
}

TORCH_LIBRARY_IMPL(marid, CPU, library) {
  library.impl("fast_linear", TORCH_FN(fast_linear_named));
  library.impl("linear_activation", TORCH_FN(linear_activation));
}

}  // namespace

at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       int64_t activation) {
  bool has_bias = bias.has_value() && bias->defined();
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1),
              "fast_linear() cannot multiply x of ", x.sizes(), " by a weight of ", weight.sizes());
  TORCH_CHECK(!has_bias || bias->sizes() == weight.sizes().slice(0, 1), "fast_linear(): the bias must have the shape [",
              weight.size(0), "]");
  at::ScalarType type = x.scalar_type();
  TORCH_CHECK(at::isFloatingType(type) && weight.scalar_type() == type && (!has_bias || bias->scalar_type() == type),
              "fast_linear() takes floating-point numbers of one type");
  std::optional<at::Tensor> added = has_bias ? bias : std::nullopt;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  int64_t rows = x.size(-1) == 0 ? 0 : x.numel() / x.size(-1);
  bool laid_out = weight.is_contiguous() && weight.numel() > 0 && rows > 0 && !weight.is_neg();
  if (laid_out && rows <= kMostRows && (type == at::kFloat || type == at::kHalf || type == at::kBFloat16)) {
    return few_rows(x, weight, added, activation, sizes);
  }
  c10::impl::ExcludeDispatchKeyGuard as_they_are(c10::autocast_dispatch_keyset);
  bool by_tiles = laid_out && rows >= kLeast && type == at::kFloat && can_multiply() && weight.size(0) >= kLeast;
  at::Tensor y = by_tiles ? many_rows(x, weight, added, sizes) : at::linear(x, weight, added);
  if (type == at::kFloat && y.is_contiguous()) {
    float* data = y.mutable_data_ptr<float>();
    if (activation != kNone) {
      at::parallel_for(0, y.numel(), kGrain, [&](int64_t begin, int64_t end) {
        activate_floats(activation, data + begin, end - begin);
      });
    }
    return y;
  }
  if (activation == kExp) return y.exp_();
  if (activation == kOppositeExp) return y.exp_().neg_();
  return activated(y, activation);
}

}  // namespace marid
