// The kernels of `marid::lstm_layer` and its backward (frontend/recurrent.py), which are oneDNN's LSTM layer as PyTorch calls
// it, and those of PyTorch's operators for tensors of the device, which call these.
#include "lstm_layer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/mkldnn_rnn_layer_backward.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::IntArrayRef, at::Tensor;
using Maybe = std::optional<Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Seven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr int64_t kLstm = 2;  // oneDNN's number for it

// What an LSTM layer has.
struct Layer {
  const Tensor &input, &w_ih, &w_hh, &b_ih, &b_hh, &hx, &cx;
  bool reverse;
  int64_t hidden_size;
  bool has_biases;

  // With gradients PyTorch's operator computes for training.
  Four run(bool keep) const {
    at::AutoGradMode mode(keep);
    return at::mkldnn_rnn_layer(input, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse, {}, kLstm, hidden_size, 1, has_biases,
                                /*bidirectional=*/false, /*batch_first=*/false, /*train=*/keep);
  }

  std::vector<int64_t> key() const {
    std::vector<int64_t> key;
    for (const Tensor* one : {&input, &w_ih, &w_hh, &b_ih, &b_hh, &hx, &cx}) {
      key.push_back(static_cast<int64_t>(one->scalar_type()));
      key.push_back(one->dim());
      key.insert(key.end(), one->sizes().begin(), one->sizes().end());
    }
    return key;
  }
};

// How many bytes the workspace of a layer took, by types and sizes of its tensors.
class WorkspaceSizes {
 public:
  void remember(std::vector<int64_t> layer, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    if (bytes_.size() >= kMost) bytes_.clear();
    bytes_[std::move(layer)] = bytes;
  }
  std::optional<size_t> find(const std::vector<int64_t>& layer) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = bytes_.find(layer);
    return found == bytes_.end() ? std::nullopt : std::optional<size_t>(found->second);
  }

 private:
  static constexpr size_t kMost = 4096;
  std::mutex lock_;
  std::map<std::vector<int64_t>, size_t> bytes_;
};
auto& workspace_sizes = *new WorkspaceSizes;

Four forward(const Tensor& input, const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh,
             const Tensor& hx, const Tensor& cx, bool reverse, IntArrayRef hidden_size, bool has_biases, bool keep) {
  Layer layer{input, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse, hidden_size.at(0), has_biases};
  auto [output, hy, cy, workspace] = layer.run(keep);
  if (!keep) return {output, hy, cy, Tensor()};
  workspace_sizes.remember(layer.key(), workspace.nbytes());
  return {output, hy, cy, workspace.slice(0, 0, 1)};
}

// A workspace of which not all has come, as where somebody has copied its one element, is computed again.
Seven backward(const Tensor& input, const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh,
               const Tensor& hx, const Tensor& cx, const Tensor& output, const Tensor& hy, const Tensor& cy,
               const Maybe& grad_output, const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& workspace, bool reverse,
               IntArrayRef hidden_size, bool has_biases) {
  Layer layer{input, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse, hidden_size.at(0), has_biases};
  size_t held = workspace.storage().nbytes() - workspace.storage_offset() * workspace.itemsize();
  std::optional<size_t> wanted = workspace_sizes.find(layer.key());
  Tensor whole = wanted && held >= *wanted ? workspace : std::get<3>(layer.run(true));
  return at::mkldnn_rnn_layer_backward(input, w_ih, w_hh, b_ih, b_hh, hx, cx, output, hy, cy, grad_output, grad_hy, grad_cy,
                                       reverse, kLstm, layer.hidden_size, 1, has_biases, /*train=*/true,
                                       /*bidirectional=*/false, {}, /*batch_first=*/false, whole);
}

TORCH_LIBRARY_IMPL(marid, CPU, library) {
  library.impl("lstm_layer", TORCH_FN(forward));
  library.impl("lstm_layer_backward", TORCH_FN(backward));
}

// --- PyTorch's operators on the device -----------------------------------------------------------------------------------

template <typename Signature>
c10::TypedOperatorHandle<Signature> own_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Four forward_on_device(const Tensor& input, const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih, const Tensor& b_hh,
                       const Tensor& hx, const Tensor& cx, bool reverse, IntArrayRef, int64_t, int64_t hidden_size, int64_t,
                       bool has_biases, bool, bool, bool) {
  static const auto layer = own_operator<decltype(forward)>("marid::lstm_layer");
  at::AutoDispatchBelowADInplaceOrView below;
  return layer.call(input, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse, hidden_size, has_biases, at::GradMode::is_enabled());
}

Seven backward_on_device(const Tensor& input, const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih,
                         const Tensor& b_hh, const Tensor& hx, const Tensor& cx, const Tensor& output, const Tensor& hy,
                         const Tensor& cy, const Maybe& grad_output, const Maybe& grad_hy, const Maybe& grad_cy,
                         bool reverse, int64_t, int64_t hidden_size, int64_t, bool has_biases, bool, bool, IntArrayRef, bool,
                         const Tensor& workspace) {
  auto is_given = [](const Maybe& grad) { return grad && grad->defined(); };
  if (!is_given(grad_output) && !is_given(grad_hy) && !is_given(grad_cy)) return {};
  static const auto layer = own_operator<decltype(backward)>("marid::lstm_layer_backward");
  at::AutoDispatchBelowADInplaceOrView below;
  return layer.call(input, w_ih, w_hh, b_ih, b_hh, hx, cx, output, hy, cy, grad_output, grad_hy, grad_cy, workspace, reverse,
                    hidden_size, has_biases);
}

}  // namespace

void marid::register_lstm_layer(torch::Library& device) {
  device.impl("mkldnn_rnn_layer", TORCH_FN(forward_on_device));
  device.impl("mkldnn_rnn_layer_backward", TORCH_FN(backward_on_device));
}
