#include "composites.h"

#include "intermediates.h"
#include "lstm_layer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/group_norm_native.h>
#include <ATen/ops/instance_norm_native.h>
#include <ATen/ops/layer_norm_native.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/matmul_native.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool1d_native.h>
#include <ATen/ops/max_pool2d_native.h>
#include <ATen/ops/outer_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <utility>

namespace {

bool is_plain(const at::Tensor& tensor) {
  return tensor.device().type() == c10::DeviceType::PrivateUse1 && !tensor._fw_grad(0).defined() &&
      !(c10::GradMode::is_enabled() && tensor.requires_grad());
}

}  // namespace

namespace marid {

bool has_plain_rows(const at::Tensor& tensor) {
  int64_t step = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; dim--) {
    if (tensor.stride(dim) != step) return false;
    step *= tensor.size(dim);
  }
  return true;
}

bool in_own_function() {
  auto& state = c10::AutogradState::get_tls_state();
  return !state.get_grad_mode() && !state.get_fw_grad_mode() && !state.get_inference_mode();
}

bool is_simple(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (input.device() != weight.device()) return false;
  if (bias.has_value() && bias->defined() && bias->device() != input.device()) return false;
  return input.dim() == 2 || has_plain_rows(input);
}

bool is_simple_matmul(const at::Tensor& self, const at::Tensor& other) {
  if (self.dim() == 0 || other.dim() == 0 || self.device() != other.device()) return false;
  bool is_one_product = self.dim() <= 2 && other.dim() <= 2;
  if (is_one_product || (!self.requires_grad() && !other.requires_grad())) return true;
  int64_t batches = self.dim() - 2;
  if (batches >= 1 && other.dim() >= 3) {
    return other.dim() == self.dim() && self.sizes().slice(0, batches) == other.sizes().slice(0, batches);
  }
  return batches >= 1 ? has_plain_rows(self) || !other.requires_grad() : !self.requires_grad();
}

at::Tensor composed_matmul(const at::Tensor& self, const at::Tensor& other) {
  Intermediates inside;
  return inside.give(at::native::matmul(self, other));
}

}  // namespace marid

namespace {

at::Tensor turned(const at::Tensor& weight) {
  marid::Intermediates inside;
  return weight.t();
}

// As PyTorch composes it.
at::Tensor composed_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (input.dim() == 2 && weight.dim() == 2) {  // one product
    bool has_bias = bias.has_value() && bias->defined();
    return has_bias ? at::addmm(*bias, input, turned(weight)) : at::matmul(input, turned(weight));
  }
  marid::Intermediates inside;
  return inside.give(at::native::linear(input, weight, bias));
}

// Above autograd.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  bool plain = is_plain(input) && is_plain(weight) && (!bias.has_value() || !bias->defined() || is_plain(*bias));
  plain = plain && c10::impl::TorchDispatchModeTLS::stack_len() == 0;  // modes see what it is composed of
  if (!plain || marid::in_own_function() || !marid::is_simple(input, weight, bias)) {
    return composed_linear(input, weight, bias);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return at::linear(input, weight, bias);
}

// Above autograd.
at::Tensor matmul(const at::Tensor& self, const at::Tensor& other) {
  bool is_one_operation = self.dim() <= 2 && other.dim() <= 2 && !(self.dim() == 1 && other.dim() == 2);
  if (is_one_operation) return at::native::matmul(self, other);
  bool plain = is_plain(self) && is_plain(other) && c10::impl::TorchDispatchModeTLS::stack_len() == 0;
  if (!plain || marid::in_own_function() || !marid::is_simple_matmul(self, other)) return marid::composed_matmul(self, other);
  at::AutoDispatchBelowADInplaceOrView below;
  return at::matmul(self, other);
}

// A composite of several operations, or of one that computes more than is returned, as PyTorch composes it.
template <auto function>
struct Several;
template <typename... Arguments, at::Tensor (*function)(Arguments...)>
struct Several<function> {
  static at::Tensor call(Arguments... arguments) {
    marid::Intermediates inside;
    return inside.give(function(std::forward<Arguments>(arguments)...));
  }
};

// What `dropout` multiplies with.
at::Tensor kept(const at::Tensor& input, double p) {
  marid::Intermediates inside;
  return at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}

// What PyTorch composes it of on the CPU. Foreign devices get a fused operator, whose arithmetic differs in the last bit.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  return input.mul(kept(input, p));
}

// Where nobody differentiates it the CPU has a kernel of its own, to which there is no other way.
at::Tensor max_pool1d(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  if (!is_plain(input) || c10::impl::TorchDispatchModeTLS::stack_len() > 0) {
    return at::native::max_pool1d(input, kernel_size, stride, padding, dilation, ceil_mode);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return at::max_pool1d(input, kernel_size, stride, padding, dilation, ceil_mode);
}

// A tensor of the CPU that looks like another one and has no memory.
at::Tensor as_on_the_cpu(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return tensor;  // while a graph is traced
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
  auto keys = c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::ADInplaceOrView});
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(none), keys, tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.requires_grad()) impl->set_requires_grad(true);
  return at::Tensor(std::move(impl));
}

// Which kernel attention takes. It is found by the type of the device, and the CPU looks at that, at geometry, types and
// gradients, not at values.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool enable_gqa) {
  std::optional<at::Tensor> own_mask;
  if (mask.has_value() && mask->defined()) own_mask = as_on_the_cpu(*mask);
  return at::_ops::_fused_sdp_choice::redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CPU), as_on_the_cpu(query), as_on_the_cpu(key), as_on_the_cpu(value), own_mask,
      dropout, is_causal, scale, enable_gqa);
}

}  // namespace

void marid::register_composites(torch::Library& above) {
  above.impl("linear", TORCH_FN(linear));
  above.impl("max_pool1d", TORCH_FN(max_pool1d));
  above.impl("matmul", TORCH_FN(matmul));
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(choose_attention);
  static auto& own = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  own.impl("_fused_sdp_choice", TORCH_FN(choose_attention));
  register_lstm_layer(own);
  for (torch::Library* library : {&above, &own}) {
    library->impl("dropout", TORCH_FN(dropout));
    library->impl("layer_norm", TORCH_FN(Several<&at::native::layer_norm_symint>::call));
    library->impl("group_norm", TORCH_FN(Several<&at::native::group_norm>::call));
    library->impl("batch_norm", TORCH_FN(Several<&at::native::batch_norm>::call));
    library->impl("instance_norm", TORCH_FN(Several<&at::native::instance_norm>::call));
    library->impl("max_pool2d", TORCH_FN(Several<&at::native::max_pool2d>::call));
    library->impl("outer", TORCH_FN(Several<&at::native::outer>::call));
  }
}
