// Recurrent cells as the CPU computes them, operation by operation in the order of PyTorch's RNN.cpp.
//
// PyTorch's own are composites that look at the device, and take fused CUDA kernels for any but the CPU.
#include "cells.h"

#include <ATen/ops/linear.h>
#include <c10/util/Exception.h>

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// --- the steps: from what the input gives to the gates, and the hidden state -------------------------------------------

Tensor gru(const Tensor& from_input, const Tensor& hidden, const Tensor& w_hh, const Maybe& b_hh) {
  auto inputs = from_input.unsafe_chunk(3, 1);
  auto hiddens = at::linear(hidden, w_hh, b_hh).unsafe_chunk(3, 1);
  Tensor reset = hiddens[0].add_(inputs[0]).sigmoid_();
  Tensor update = hiddens[1].add_(inputs[1]).sigmoid_();
  Tensor candidate = inputs[2].add(hiddens[2].mul_(reset)).tanh_();
  return hidden.sub(candidate).mul_(update).add_(candidate);
}

// `gates` is what the input and the hidden state give together.
std::tuple<Tensor, Tensor> lstm(const Tensor& gates, const Tensor& cx) {
  auto chunks = gates.unsafe_chunk(4, 1);
  Tensor in = chunks[0].sigmoid_(), forget = chunks[1].sigmoid_();
  Tensor cell = chunks[2].tanh_(), out = chunks[3].sigmoid_();
  Tensor cy = forget.mul(cx);
  cy = cy.add_(in.mul(cell));
  Tensor shown = cy.tanh();
  return {out.mul(shown), cy};
}

// --- the cells ---------------------------------------------------------------------------------------------------------

void check_input(const Tensor& input, const Tensor& w_ih) {
  int64_t got = input.size(1), wanted = w_ih.size(1);
  TORCH_CHECK(got == wanted, "input has inconsistent input_size: got ", got, " expected ", wanted);
}

void check_weights(int64_t gates, const Tensor& w_ih, const Tensor& w_hh) {
  int64_t size = w_hh.size(1);
  for (auto [name, weight] : {std::pair("weight_ih", &w_ih), std::pair("weight_hh", &w_hh)}) {
    TORCH_CHECK(weight->size(0) == gates * size, name, " first dim must be ", gates, " * hidden_size = ", gates * size,
                ", but got ", weight->size(0));
  }
}

void check_hidden(const Tensor& input, at::TensorList hidden, const Tensor& w_hh) {
  int64_t batch = input.size(0), size = w_hh.size(1);
  for (size_t i = 0; i < hidden.size(); i++) {
    TORCH_CHECK(batch == hidden[i].size(0), "Input batch size ", batch, " doesn't match hidden", i, " batch size ",
                hidden[i].size(0));
    TORCH_CHECK(hidden[i].size(1) == size, "hidden", i, " has inconsistent hidden_size: got ", hidden[i].size(1),
                ", expected ", size);
  }
}

Tensor gru_cell(const Tensor& input, const Tensor& hx, const Tensor& w_ih, const Tensor& w_hh, const Maybe& b_ih,
                const Maybe& b_hh) {
  check_input(input, w_ih);
  check_hidden(input, hx, w_hh);
  check_weights(3, w_ih, w_hh);
  return gru(at::linear(input, w_ih, b_ih), hx, w_hh, b_hh);
}

std::tuple<Tensor, Tensor> lstm_cell(const Tensor& input, at::TensorList hx, const Tensor& w_ih, const Tensor& w_hh,
                                     const Maybe& b_ih, const Maybe& b_hh) {
  TORCH_CHECK(hx.size() == 2, "lstm_cell expects two hidden states");
  check_input(input, w_ih);
  check_weights(4, w_ih, w_hh);
  check_hidden(input, hx, w_hh);
  Tensor gates = at::linear(hx[0], w_hh, b_hh);  // first, as gradients are added up in the order of calls
  return lstm(gates.add_(at::linear(input, w_ih, b_ih)), hx[1]);
}

template <Tensor (Tensor::*nonlinearity)() const>
Tensor simple_cell(const Tensor& input, const Tensor& hx, const Tensor& w_ih, const Tensor& w_hh, const Maybe& b_ih,
                   const Maybe& b_hh) {
  check_input(input, w_ih);
  check_weights(1, w_ih, w_hh);
  check_hidden(input, hx, w_hh);
  Tensor gates = at::linear(hx, w_hh, b_hh);
  return (gates.add_(at::linear(input, w_ih, b_ih)).*nonlinearity)();
}

}  // namespace

namespace marid {

HiddenState gru_step(const Tensor& from_input, const HiddenState& hidden, const RecurrentWeights& weights) {
  return {gru(from_input, hidden[0], weights.w_hh, weights.b_hh)};
}

HiddenState lstm_step(const Tensor& from_input, const HiddenState& hidden, const RecurrentWeights& weights) {
  auto [hy, cy] = lstm(at::linear(hidden[0], weights.w_hh, weights.b_hh).add_(from_input), hidden[1]);
  return {weights.w_hr.defined() ? hy.matmul(weights.w_hr.t()) : hy, cy};
}

HiddenState tanh_step(const Tensor& from_input, const HiddenState& hidden, const RecurrentWeights& weights) {
  return {at::linear(hidden[0], weights.w_hh, weights.b_hh).add_(from_input).tanh()};
}

HiddenState relu_step(const Tensor& from_input, const HiddenState& hidden, const RecurrentWeights& weights) {
  return {at::linear(hidden[0], weights.w_hh, weights.b_hh).add_(from_input).relu()};
}

NamedKernels kernels_of_cells() {
  using c10::KernelFunction;
  return {
      {{"aten::gru_cell", ""}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(gru_cell))},
      {{"aten::lstm_cell", ""}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(lstm_cell))},
      {{"aten::rnn_tanh_cell", ""}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(simple_cell<&Tensor::tanh>))},
      {{"aten::rnn_relu_cell", ""}, KernelFunction::makeFromUnboxedFunction(TORCH_FN(simple_cell<&Tensor::relu>))},
  };
}

}  // namespace marid
