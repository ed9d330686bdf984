// Recurrent layers as the CPU computes them: oneDNN's LSTM where the CPU takes it, and else a cell along each sequence.
//
// PyTorch's own are composites that look at the device: on the CPU the projections of all inputs are one matrix product, and
// LSTMs are calls of oneDNN; foreign devices get fused CUDA kernels. This follows `aten/src/ATen/native/RNN.cpp` and
// `aten/src/ATen/native/mkldnn/RNN.cpp` of PyTorch 2.13 operation by operation, in their order, so that results and gradients
// are bitwise those of the CPU.
#include "recurrent_layers.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <functional>
#include <thread>
#include <tuple>

namespace {

using namespace marid;
using at::Tensor, at::TensorList;
using Hiddens = std::vector<HiddenState>;
using Weights = std::vector<RecurrentWeights>;

// What all recurrent operators take.
struct Options {
  bool has_biases;
  int64_t num_layers;
  double dropout;
  bool train, bidirectional;

  size_t directions() const { return bidirectional ? 2 : 1; }
};

void check_devices(const Tensor& input, TensorList hidden, TensorList parameters) {
  for (auto [name, tensors] : {std::pair("hidden", hidden), std::pair("parameter", parameters)}) {
    for (const Tensor& one : tensors) {
      TORCH_CHECK(one.device() == input.device(), "Input and ", name,
                  " tensors are not at the same device, found input tensor at ", input.device(), " and ", name,
                  " tensor at ", one.device());
    }
  }
}

Weights gathered(TensorList parameters, bool has_biases, bool projects = false) {
  size_t stride = (has_biases ? 4 : 2) + (projects ? 1 : 0);
  TORCH_CHECK(parameters.size() % stride == 0, "got an incorrect number of RNN parameters");
  Weights found;
  for (size_t i = 0; i < parameters.size(); i += stride) {
    RecurrentWeights weights{parameters[i], parameters[i + 1], std::nullopt, std::nullopt, Tensor()};
    if (has_biases) weights.b_ih = parameters[i + 2], weights.b_hh = parameters[i + 3];
    if (projects) weights.w_hr = parameters[i + stride - 1];
    found.push_back(std::move(weights));
  }
  return found;
}

Hiddens hiddens_of(const Tensor& hx) {
  Hiddens found;
  for (Tensor& one : hx.unbind(0)) found.push_back({std::move(one)});
  return found;
}

Hiddens hiddens_of(const Tensor& hx, const Tensor& cx) {
  auto h = hx.unbind(0), c = cx.unbind(0);
  TORCH_CHECK(h.size() == c.size(), "Expected c_0 size(0) to be ", h.size(), ", but got ", c.size());
  Hiddens found;
  for (size_t i = 0; i < h.size(); i++) found.push_back({h[i], c[i]});
  return found;
}

// --- one layer in one direction: its outputs, and the last hidden state --------------------------------------------------

using Run = std::pair<Tensor, HiddenState>;
using Layer = std::function<Run(bool reverse, const Tensor& input, const HiddenState& first, const RecurrentWeights& weights)>;

Layer of_sequences(RecurrentStep step) {
  return [step](bool reverse, const Tensor& input, const HiddenState& first, const RecurrentWeights& weights) -> Run {
    auto inputs = at::linear(input, weights.w_ih, weights.b_ih).unbind(0);
    TORCH_CHECK(!inputs.empty(), "Expected sequence length to be larger than 0 in RNN");
    HiddenState hidden = first;
    std::vector<Tensor> outputs(inputs.size());
    for (size_t i = 0; i < inputs.size(); i++) {
      size_t at = reverse ? inputs.size() - 1 - i : i;
      hidden = step(inputs[at], hidden, weights);
      outputs[at] = hidden[0];
    }
    return {at::stack(outputs, 0), hidden};
  };
}

HiddenState narrowed(const HiddenState& hidden, int64_t start, int64_t end) {
  HiddenState found;
  for (const Tensor& one : hidden) found.push_back(one.narrow(0, start, end - start));
  return found;
}

HiddenState joined(const Hiddens& hiddens) {
  HiddenState found;
  for (size_t i = 0; i < hiddens[0].size(); i++) {
    std::vector<Tensor> parts;
    for (const HiddenState& one : hiddens) parts.push_back(one[i]);
    found.push_back(at::cat(parts, 0));
  }
  return found;
}

// The batch shrinks as sequences end. What is cut off the hidden state is final.
Run packed_forwards(RecurrentStep step, at::IntArrayRef sizes, const Tensor& inputs, HiddenState hidden,
                    const RecurrentWeights& weights) {
  std::vector<Tensor> outputs;
  Hiddens ended;
  int64_t offset = 0, last = sizes[0];
  for (int64_t size : sizes) {
    Tensor input = inputs.narrow(0, offset, size);
    offset += size;
    if (size < last) {
      ended.push_back(narrowed(hidden, size, last));
      hidden = narrowed(hidden, 0, size);
    }
    last = size;
    hidden = step(input, hidden, weights);
    outputs.push_back(hidden[0]);
  }
  ended.push_back(std::move(hidden));
  std::reverse(ended.begin(), ended.end());
  return {at::cat(outputs, 0), joined(ended)};
}

// The batch grows as sequences begin, from their ends.
Run packed_backwards(RecurrentStep step, at::IntArrayRef sizes, const Tensor& inputs, const HiddenState& first,
                     const RecurrentWeights& weights) {
  std::vector<Tensor> outputs(sizes.size());
  int64_t offset = inputs.size(0), last = sizes.back();
  HiddenState hidden = narrowed(first, 0, last);
  for (size_t i = sizes.size(); i-- > 0;) {
    int64_t size = sizes[i];
    if (size > last) hidden = joined({hidden, narrowed(first, last, size)});
    offset -= size;
    last = size;
    hidden = step(inputs.narrow(0, offset, size), hidden, weights);
    outputs[i] = hidden[0];
  }
  return {at::cat(outputs, 0), hidden};
}

Layer of_packed_sequences(RecurrentStep step, std::vector<int64_t> sizes) {
  return [step, sizes = std::move(sizes)](bool reverse, const Tensor& data, const HiddenState& first,
                                          const RecurrentWeights& weights) -> Run {
    Tensor inputs = at::linear(data, weights.w_ih, weights.b_ih);
    return reverse ? packed_backwards(step, sizes, inputs, first, weights)
                   : packed_forwards(step, sizes, inputs, first, weights);
  };
}

Layer of_onednn(const Options& options, bool batch_first) {
  return [options, batch_first](bool reverse, const Tensor& input, const HiddenState& first,
                                const RecurrentWeights& weights) -> Run {
    const auto &w_ih = weights.w_ih, &w_hh = weights.w_hh, &h = first[0], &c = first[1];
    int64_t size = h.size(1);
    auto has = [](const Tensor& tensor, int64_t rows, int64_t columns) {
      return tensor.sizes() == at::IntArrayRef({rows, columns});
    };
    bool fits = has(w_ih, 4 * size, input.size(2)) && has(w_hh, 4 * size, size) && has(h, input.size(1), size) &&
        has(c, input.size(1), size);
    TORCH_CHECK(fits, "lstm: the sizes of its tensors do not match");  // oneDNN reads whatever memory is there
    Tensor b_ih = weights.b_ih ? *weights.b_ih : at::zeros(w_ih.sizes(), w_ih.options());
    Tensor b_hh = weights.b_hh ? *weights.b_hh : at::zeros(w_hh.sizes(), w_hh.options());
    constexpr int64_t kLstm = 2;  // oneDNN's number for it
    auto [output, hy, cy, workspace] = at::mkldnn_rnn_layer(
        input, w_ih, w_hh, b_ih, b_hh, h, c, reverse, {}, kLstm, size, options.num_layers, options.has_biases,
        options.bidirectional, batch_first, options.train);
    return {output, {hy, cy}};
  };
}

// --- layers on each other ------------------------------------------------------------------------------------------------

// The output of the last layer, and the last hidden states (or hidden and cell states) of all, stacked.
std::pair<Tensor, HiddenState> stacked(const Layer& layer, Tensor input, const Hiddens& hiddens, const Weights& weights,
                                       const Options& options) {
  size_t directions = options.directions();
  for (auto [count, name] : {std::pair(hiddens.size(), "hidden states"), std::pair(weights.size(), "weights")}) {
    TORCH_CHECK(count % directions == 0, "Odd number of params or hiddens given to a bidirectional RNN");
    TORCH_CHECK(options.num_layers == static_cast<int64_t>(count / directions), "Expected more ", name, " in stacked_rnn");
  }
  std::array<std::vector<Tensor>, 2> last;  // of all layers, hidden and cell states
  for (int64_t index = 0; index < options.num_layers; index++) {
    std::vector<Tensor> outputs;
    for (size_t direction = 0; direction < directions; direction++) {
      size_t at = index * directions + direction;
      auto [output, hidden] = layer(direction == 1, input, hiddens[at], weights[at]);
      outputs.push_back(output);
      for (size_t i = 0; i < hidden.size(); i++) last[i].push_back(hidden[i]);
    }
    input = options.bidirectional ? at::cat(outputs, outputs[0].dim() - 1) : outputs[0];
    if (options.dropout != 0 && options.train && index < options.num_layers - 1) {
      input = at::dropout(input, options.dropout, /*train=*/true);
    }
  }
  HiddenState states;
  for (const std::vector<Tensor>& one : last) {
    if (!one.empty()) states.push_back(at::stack(one, 0));
  }
  return {input, states};
}

// --- GRU and simple networks ---------------------------------------------------------------------------------------------

template <RecurrentStep step>
std::tuple<Tensor, Tensor> simple_layers(const Tensor& input, const Tensor& hx, TensorList parameters, bool has_biases,
                                         int64_t num_layers, double dropout, bool train, bool bidirectional,
                                         bool batch_first) {
  Options options{has_biases, num_layers, dropout, train, bidirectional};
  check_devices(input, hx, parameters);
  Tensor turned = batch_first ? input.transpose(0, 1) : input;
  auto [output, last] =
      stacked(of_sequences(step), turned, hiddens_of(hx), gathered(parameters, has_biases), options);
  if (batch_first) output.transpose_(0, 1);
  return {output, last.at(0)};
}

std::vector<int64_t> sizes_in(const Tensor& batch_sizes) {
  Tensor host = batch_sizes.cpu().contiguous();
  TORCH_CHECK(host.numel() > 0 && host.scalar_type() == at::kLong, "batch_sizes must be a tensor of int64 with elements");
  const int64_t* sizes = host.const_data_ptr<int64_t>();
  return {sizes, sizes + host.numel()};
}

template <RecurrentStep step>
std::tuple<Tensor, Tensor> packed_layers(const Tensor& data, const Tensor& batch_sizes, const Tensor& hx,
                                         TensorList parameters, bool has_biases, int64_t num_layers, double dropout,
                                         bool train, bool bidirectional) {
  Options options{has_biases, num_layers, dropout, train, bidirectional};
  auto weights = gathered(parameters, has_biases);
  auto [output, last] =
      stacked(of_packed_sequences(step, sizes_in(batch_sizes)), data, hiddens_of(hx), weights, options);
  return {output, last.at(0)};
}

// --- LSTM ----------------------------------------------------------------------------------------------------------------

bool has_onednn_for(const char* support) {
  auto op = c10::Dispatcher::singleton().findSchema({support, ""});
  return op && op->typed<bool()>().call();
}

// Whether the CPU gives an LSTM on such tensors to oneDNN.
bool takes_onednn(const Tensor& input, TensorList hx, TensorList parameters) {
  if (!at::hasMKLDNN() || !at::globalContext().userEnabledMkldnn() || input.numel() == 0) return false;
  auto is_elsewhere = [&](const Tensor& one) { return one.device() != input.device(); };
  if (std::any_of(hx.begin(), hx.end(), is_elsewhere)) return false;
  if (std::any_of(parameters.begin(), parameters.end(), is_elsewhere)) return false;
  if (input.scalar_type() == at::kBFloat16) return has_onednn_for("mkldnn::_is_mkldnn_bf16_supported");
  if (input.scalar_type() == at::kHalf) {
    return !c10::GradMode::is_enabled() && has_onednn_for("mkldnn::_is_mkldnn_fp16_supported");
  }
  return input.scalar_type() == at::kFloat;
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

Three onednn_layers(const Tensor& input, TensorList hx, TensorList parameters, const Options& options, bool batch_first) {
  Tensor turned = (batch_first ? input.transpose(0, 1) : input).contiguous();
  Tensor h = hx[0].contiguous(), c = hx[1].contiguous();
  size_t stride = options.has_biases ? 4 : 2, size = parameters.size(), count = options.num_layers * options.directions();
  TORCH_CHECK(size % stride == 0, "MatrixRef: ArrayRef size ", size, " not divisible by stride ", stride);
  TORCH_CHECK(size >= count * stride, "ArrayRef: invalid slice, N = ", size, "; M = ", stride, "; size = ", size);
  Hiddens hiddens;
  for (size_t i = 0; i < count; i++) hiddens.push_back({h.select(0, i), c.select(0, i)});
  auto weights = gathered(parameters.slice(0, count * stride), options.has_biases);
  auto [output, last] = stacked(of_onednn(options, batch_first), turned, hiddens, weights, options);
  return {batch_first ? output.transpose(0, 1) : output, last.at(0), last.at(1)};
}

Three lstm(const Tensor& input, TensorList hx, TensorList parameters, bool has_biases, int64_t num_layers, double dropout,
           bool train, bool bidirectional, bool batch_first) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  Options options{has_biases, num_layers, dropout, train, bidirectional};
  bool projects = hx[0].size(2) != hx[1].size(2);
  if (takes_onednn(input, hx, parameters)) {
    if (!projects) return onednn_layers(input, hx, parameters, options, batch_first);
    TORCH_WARN_ONCE("LSTM with projections is not supported with oneDNN. Using default implementation.");
  }
  check_devices(input, hx, parameters);
  Tensor turned = batch_first ? input.transpose(0, 1) : input;
  auto weights = gathered(parameters, has_biases, projects);
  auto [output, last] = stacked(of_sequences(lstm_step), turned, hiddens_of(hx[0], hx[1]), weights, options);
  return {batch_first ? output.transpose(0, 1) : output, last.at(0), last.at(1)};
}

// Whether this PyTorch gives packed sequences of one length to oneDNN, as it does sequences that are not packed. The graph of
// such a call tells; it is made in a thread of its own, where no mode or transform of the user's is on.
bool packs_equal_lengths() {
  static const bool does = [] {
    bool found = false;
    std::thread([&] {
      auto data = at::ones({1, 1}, at::kCPU).requires_grad_(), state = at::ones({1, 1, 1}, at::kCPU);
      auto weight = at::ones({4, 1}, at::kCPU);
      auto called = at::lstm(data, at::ones({1}, at::kLong), {state, state}, {weight, weight}, /*has_biases=*/false,
                             /*num_layers=*/1, /*dropout=*/0, /*train=*/true, /*bidirectional=*/false);
      std::vector<torch::autograd::Node*> pending{std::get<0>(called).grad_fn().get()};
      while (!pending.empty()) {
        auto* node = pending.back();
        pending.pop_back();
        found = found || node->name().rfind("MkldnnRnnLayer", 0) == 0;
        for (const auto& edge : node->next_edges()) {
          if (edge.function) pending.push_back(edge.function.get());
        }
      }
    }).join();
    return found;
  }();
  return does;
}

Three packed_lstm(const Tensor& data, const Tensor& batch_sizes, TensorList hx, TensorList parameters, bool has_biases,
                  int64_t num_layers, double dropout, bool train, bool bidirectional) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  Options options{has_biases, num_layers, dropout, train, bidirectional};
  bool projects = hx[0].size(2) != hx[1].size(2);
  auto sizes = sizes_in(batch_sizes);
  if (sizes.front() == sizes.back() && !projects && packs_equal_lengths()) {
    Tensor whole = data.reshape({static_cast<int64_t>(sizes.size()), sizes[0], data.size(-1)});
    if (takes_onednn(whole, hx, parameters)) {
      auto [output, hy, cy] = onednn_layers(whole, hx, parameters, options, /*batch_first=*/false);
      return {output.reshape({data.size(0), output.size(-1)}), hy, cy};
    }
  }
  auto weights = gathered(parameters, has_biases, projects);
  auto layer = of_packed_sequences(lstm_step, std::move(sizes));
  auto [output, last] = stacked(layer, data, hiddens_of(hx[0], hx[1]), weights, options);
  return {output, last.at(0), last.at(1)};
}

}  // namespace

namespace marid {

NamedKernels kernels_of_recurrent_layers() {
  using c10::KernelFunction;
  return {
      {{"aten::gru", "input"}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(simple_layers<gru_step>))},
      {{"aten::gru", "data"}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(packed_layers<gru_step>))},
      {{"aten::rnn_tanh", "input"}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(simple_layers<tanh_step>))},
      {{"aten::rnn_tanh", "data"}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(packed_layers<tanh_step>))},
      {{"aten::rnn_relu", "input"}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(simple_layers<relu_step>))},
      {{"aten::rnn_relu", "data"}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(packed_layers<relu_step>))},
      {{"aten::lstm", "input"}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(lstm))},
      {{"aten::lstm", "data"}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(packed_lstm))},
  };
}

}  // namespace marid
