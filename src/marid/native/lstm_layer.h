// oneDNN's LSTM layer. (lstm_layer.cpp)
#pragma once
#include <torch/library.h>

namespace marid {

// Give the device PyTorch's operators for it.
void register_lstm_layer(torch::Library& device);

}  // namespace marid
