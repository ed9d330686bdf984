// Recurrent cells, and the steps of layers. (cells.cpp)
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/operator_name.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>
#include <vector>

namespace marid {

using NamedKernels = std::vector<std::pair<c10::OperatorName, c10::KernelFunction>>;

// The parameters of a layer in one direction.
struct RecurrentWeights {
  at::Tensor w_ih, w_hh;
  std::optional<at::Tensor> b_ih, b_hh;
  at::Tensor w_hr;  // projects the hidden state of an LSTM, if defined
};

using HiddenState = c10::SmallVector<at::Tensor, 2>;  // (h), or (h, c) of an LSTM

// The next hidden state, from what the input of a step gives to the gates.
using RecurrentStep = HiddenState (*)(const at::Tensor& from_input, const HiddenState& hidden, const RecurrentWeights& weights);
HiddenState gru_step(const at::Tensor& from_input, const HiddenState& hidden, const RecurrentWeights& weights);
HiddenState lstm_step(const at::Tensor& from_input, const HiddenState& hidden, const RecurrentWeights& weights);
HiddenState tanh_step(const at::Tensor& from_input, const HiddenState& hidden, const RecurrentWeights& weights);
HiddenState relu_step(const at::Tensor& from_input, const HiddenState& hidden, const RecurrentWeights& weights);

// What takes the CPU's steps for PyTorch's operators for cells.
NamedKernels kernels_of_cells();

}  // namespace marid
