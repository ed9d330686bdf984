// The operators of RWKV-7 on the CPU. frontend/rwkv7_operators.py says what each of them is, and has
// them in plain PyTorch.
#include "gemm/fast_linear.h"
#include "rwkv7_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using namespace marid;
using namespace marid::rwkv7;
using Tensors = std::initializer_list<const at::Tensor*>;

// The type of the result: the one to which all are promoted.
at::ScalarType common_type(Tensors tensors, const char* function) {
  std::optional<at::ScalarType> type;
  for (const at::Tensor* tensor : tensors) {
    TORCH_CHECK(at::isFloatingType(tensor->scalar_type()) && tensor->dim() >= 1, function,
                "() takes tensors of floating-point numbers with a dimension at least");
    type = type ? c10::promoteTypes(*type, tensor->scalar_type()) : tensor->scalar_type();
  }
  return *type;
}

at::ScalarType type_of_sums(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor made(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, at::TensorOptions(type));
}

void need_shape(const at::Tensor& tensor, at::IntArrayRef sizes, const char* what) {
  TORCH_CHECK(tensor.sizes() == sizes, what, " must have the shape ", sizes, ", but has ", tensor.sizes());
}

// How many tokens of each sequence there are: int64, or null.
struct Lengths {
  Lengths(const std::optional<at::Tensor>& given, int64_t batch) {
    if (!given.has_value() || !given->defined()) return;
    TORCH_CHECK(at::isIntegralType(given->scalar_type(), false), "lengths must be integers");
    need_shape(*given, {batch}, "lengths");
    tensor = plain(*given, at::kLong);
  }
  const int64_t* data() const { return tensor.defined() ? tensor.const_data_ptr<int64_t>() : nullptr; }
  at::Tensor tensor;
};

// --- element by element ----------------------------------------------------------------------------------------------

using Elementwise = void (*)(Element, const Rows&);

// Operands that are broadcast along all but the last dimension are read as one row; others are expanded.
at::Tensor elementwise(Elementwise kernel, const char* name, std::vector<const at::Tensor*> given, Rows rows,
                       at::ScalarType type) {
  std::vector<int64_t> sizes = given[0]->sizes().vec();
  for (const at::Tensor* tensor : given) sizes = at::infer_size(sizes, tensor->sizes());
  rows.width = sizes.back();
  rows.rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); i++) rows.rows *= sizes[i];
  std::array<at::Tensor, 3> kept;
  std::array<bool, 3> one{};
  for (size_t i = 0; i < given.size(); i++) {
    const at::Tensor& tensor = *given[i];
    one[i] = tensor.numel() == rows.width && tensor.size(-1) == rows.width;
    kept[i] = plain(one[i] || tensor.sizes() == at::IntArrayRef(sizes) ? tensor : tensor.expand(sizes), type);
  }
  auto data = [&](int i) { return kept[i].defined() ? kept[i].const_data_ptr() : nullptr; };
  at::Tensor out = made(sizes, type);
  if (out.numel() == 0) return out;
  rows.a = data(0), rows.b = data(1), rows.c = data(2);
  rows.one_a = one[0], rows.one_b = one[1], rows.one_c = one[2];
  rows.out = out.mutable_data_ptr();
  kernel(element_of(type), rows);
  return out;
}

at::Tensor lerp(const at::Tensor& a, const at::Tensor& b, const at::Tensor& factor, bool reversed) {
  Rows rows{};
  rows.first = reversed;
  return elementwise(kernels.lerp, "lerp", {&a, &b, &factor}, rows, common_type({&a, &b, &factor}, "lerp"));
}

at::Tensor blend(const at::Tensor& a, const at::Tensor& b, const at::Tensor& factor) {
  return elementwise(kernels.blend, "blend", {&a, &b, &factor}, Rows{}, common_type({&a, &b, &factor}, "blend"));
}

at::Tensor squared_relu(const at::Tensor& x) {
  return elementwise(kernels.squared_relu, "squared_relu", {&x}, Rows{}, common_type({&x}, "squared_relu"));
}

at::Tensor control_k(const at::Tensor& k, const at::Tensor& a, const at::Tensor& k_a) {
  return elementwise(kernels.control_k, "control_k", {&k, &a, &k_a}, Rows{}, common_type({&k, &a, &k_a}, "control_k"));
}

at::Tensor add_activate(const at::Tensor& a, const at::Tensor& b, c10::string_view of_a, c10::string_view of_b,
                        c10::string_view of_sum) {
  Rows rows{};
  rows.first = activation_named(of_a, "add_activate");
  rows.second = activation_named(of_b, "add_activate");
  rows.third = activation_named(of_sum, "add_activate");
  return elementwise(kernels.add_activate, "add_activate", {&a, &b}, rows, common_type({&a, &b}, "add_activate"));
}

at::Tensor l2_norm(const at::Tensor& x, int64_t groups, double eps) {
  at::ScalarType type = common_type({&x}, "l2_norm");
  TORCH_CHECK(groups > 0 && x.size(-1) % groups == 0, "l2_norm(): the last dimension does not have ", groups, " groups");
  at::Tensor given = plain(x, type), out = made(x.sizes(), type);
  if (out.numel() == 0) return out;
  Rows rows{};
  rows.a = given.const_data_ptr();
  rows.out = out.mutable_data_ptr();
  rows.width = x.size(-1) / groups;
  rows.rows = x.numel() / rows.width;
  rows.number = eps;
  kernels.l2_norm(element_of(type), rows);
  return out;
}

// --- along tokens ----------------------------------------------------------------------------------------------------

std::tuple<at::Tensor, at::Tensor> token_shift(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& mix,
                                               const std::optional<at::Tensor>& lengths) {
  at::ScalarType type = common_type({&x, &shift, &mix}, "token_shift");
  TORCH_CHECK(x.dim() == 3 && mix.dim() == 2, "token_shift() takes x of [batch, tokens, width] and mix of [count, width]");
  TokenShift of{};
  of.batch = x.size(0), of.tokens = x.size(1), of.width = x.size(2), of.count = mix.size(0);
  need_shape(shift, {of.batch, of.width}, "token_shift(): shift");
  need_shape(mix, {of.count, of.width}, "token_shift(): mix");
  Lengths many(lengths, of.batch);
  at::Tensor of_x = plain(x, type), of_shift = plain(shift, type), of_mix = plain(mix, type);
  at::Tensor mixed = made({of.count, of.batch, of.tokens, of.width}, type), last = made({of.batch, of.width}, type);
  of.x = of_x.const_data_ptr(), of.shift = of_shift.const_data_ptr(), of.mix = of_mix.const_data_ptr();
  of.mixed = mixed.mutable_data_ptr(), of.last = last.mutable_data_ptr();
  of.lengths = many.data();
  kernels.token_shift(element_of(type), of);
  return {mixed, last};
}

at::Tensor pack_kvakk(const at::Tensor& k, const at::Tensor& v, const at::Tensor& a, const at::Tensor& kk,
                      int64_t heads) {
  at::ScalarType type = common_type({&k, &v, &a, &kk}, "pack_kvakk");
  TORCH_CHECK(heads > 0 && k.size(-1) % heads == 0, "pack_kvakk(): the last dimension does not have ", heads, " heads");
  for (const at::Tensor* tensor : {&v, &a, &kk}) need_shape(*tensor, k.sizes(), "pack_kvakk(): each tensor");
  Pack of{};
  of.heads = heads, of.size = k.size(-1) / heads;
  of.rows = of.size == 0 ? 0 : k.numel() / k.size(-1);
  std::vector<int64_t> sizes = k.sizes().vec();
  sizes.back() = heads;
  sizes.insert(sizes.end(), {4, of.size});
  at::Tensor of_k = plain(k, type), of_v = plain(v, type), of_a = plain(a, type), of_kk = plain(kk, type);
  at::Tensor packed = made(sizes, type);
  of.k = of_k.const_data_ptr(), of.v = of_v.const_data_ptr(), of.a = of_a.const_data_ptr();
  of.kk = of_kk.const_data_ptr(), of.packed = packed.mutable_data_ptr();
  kernels.pack(element_of(type), of);
  return packed;
}

at::Tensor time_first(const at::Tensor& y, const at::Tensor& r, const at::Tensor& packed, const at::Tensor& bonus) {
  at::ScalarType type = common_type({&y, &r, &packed, &bonus}, "time_first_v7");
  TORCH_CHECK(bonus.dim() == 2, "time_first_v7() takes a bonus of [heads, size]");
  TimeFirst of{};
  of.heads = bonus.size(0), of.size = bonus.size(1);
  TORCH_CHECK(y.size(-1) == of.heads * of.size, "time_first_v7(): y has ", y.size(-1), " elements in a row, the bonus ",
              of.heads * of.size);
  need_shape(r, y.sizes(), "time_first_v7(): r");
  std::vector<int64_t> sizes = y.sizes().vec();
  sizes.back() = of.heads;
  sizes.insert(sizes.end(), {4, of.size});
  need_shape(packed, sizes, "time_first_v7(): packed");
  at::Tensor of_y = plain(y, type), of_r = plain(r, type), of_p = plain(packed, type), of_b = plain(bonus, type);
  at::Tensor out = made(y.sizes(), type);
  of.rows = y.size(-1) == 0 ? 0 : y.numel() / y.size(-1);
  of.y = of_y.const_data_ptr(), of.r = of_r.const_data_ptr(), of.packed = of_p.const_data_ptr();
  of.bonus = of_b.const_data_ptr(), of.out = out.mutable_data_ptr();
  kernels.time_first(element_of(type), of);
  return out;
}

std::tuple<at::Tensor, at::Tensor> time_mix(const at::Tensor& r, const at::Tensor& w, const at::Tensor& packed,
                                            const at::Tensor& state, const std::optional<at::Tensor>& lengths) {
  at::ScalarType type = common_type({&r, &w, &packed}, "time_mix_v7");
  common_type({&state}, "time_mix_v7");
  TORCH_CHECK(r.dim() == 3 && state.dim() == 4 && state.size(2) == state.size(3),
              "time_mix_v7() takes r of [batch, tokens, width] and a state of [batch, heads, size, size]");
  TimeMix of{};
  of.batch = r.size(0), of.tokens = r.size(1), of.heads = state.size(1), of.size = state.size(2);
  TORCH_CHECK(r.size(2) == of.heads * of.size && state.size(0) == of.batch,
              "time_mix_v7(): r is ", r.sizes(), ", but the state ", state.sizes());
  need_shape(w, r.sizes(), "time_mix_v7(): w");
  need_shape(packed, {of.batch, of.tokens, of.heads, 4, of.size}, "time_mix_v7(): packed");
  Lengths many(lengths, of.batch);
  at::ScalarType of_sums = type_of_sums(type);
  at::Tensor of_r = plain(r, type), of_w = plain(w, type), of_p = plain(packed, type), of_s = plain(state, of_sums);
  at::Tensor y = made(r.sizes(), type), next = made(state.sizes(), of_sums);
  of.r = of_r.const_data_ptr(), of.w = of_w.const_data_ptr(), of.packed = of_p.const_data_ptr();
  of.state = of_s.const_data_ptr(), of.y = y.mutable_data_ptr(), of.next = next.mutable_data_ptr();
  of.lengths = many.data();
  kernels.time_mix(element_of(type), of);
  return {y, next};
}

std::tuple<at::Tensor, at::Tensor> channel_mix(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& mix,
                                               const at::Tensor& key, const at::Tensor& value,
                                               const std::optional<at::Tensor>& lengths) {
  c10::impl::ExcludeDispatchKeyGuard as_they_are(c10::autocast_dispatch_keyset);
  TORCH_CHECK(mix.dim() == 1, "channel_mix_v7() takes mix of [width]");
  auto [mixed, last] = token_shift(x, shift, mix.unsqueeze(0), lengths);
  at::Tensor hidden = marid::fast_linear(mixed.squeeze(0), key, std::nullopt, marid::kSquaredRelu);
  return {marid::fast_linear(hidden, value, std::nullopt, marid::kNone), last};
}

TORCH_LIBRARY_IMPL(marid, CPU, library) {
  library.impl("token_shift", TORCH_FN(token_shift));
  library.impl("lerp", TORCH_FN(lerp));
  library.impl("blend", TORCH_FN(blend));
  library.impl("l2_norm", TORCH_FN(l2_norm));
  library.impl("squared_relu", TORCH_FN(squared_relu));
  library.impl("add_activate", TORCH_FN(add_activate));
  library.impl("control_k", TORCH_FN(control_k));
  library.impl("pack_kvakk", TORCH_FN(pack_kvakk));
  library.impl("time_first_v7", TORCH_FN(time_first));
  library.impl("time_mix_v7", TORCH_FN(time_mix));
  library.impl("channel_mix_v7", TORCH_FN(channel_mix));
}

}  // namespace
