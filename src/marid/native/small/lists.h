// Operators on lists of small tensors, as optimizers call them (lists.cpp): as ATen does them, one tensor after the other.
#pragma once
#include "small.h"

#include <string>
#include <unordered_map>

namespace marid {

extern const std::unordered_map<std::string, AnySmallKernel> list_kernels;

}  // namespace marid
