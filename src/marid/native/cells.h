// Recurrent cells. (cells.cpp)
#pragma once
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/operator_name.h>

#include <utility>
#include <vector>

namespace marid {

// What takes the CPU's steps for PyTorch's operators for cells, above autograd.
std::vector<std::pair<c10::OperatorName, c10::KernelFunction>> kernels_of_cells();

}  // namespace marid
