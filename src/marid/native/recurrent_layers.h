// Recurrent layers. (recurrent_layers.cpp)
#pragma once
#include "cells.h"

namespace marid {

// What takes the CPU's steps for PyTorch's operators for recurrent layers, of padded and of packed sequences.
NamedKernels kernels_of_recurrent_layers();

}  // namespace marid
