// Views that are made without PyTorch's kernels above the device's, where they run at once and need no gradients.
#pragma once
#include "record.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace marid {

// What `make` makes of the concrete tensor that a tensor stands for, as the result of an operator that returns a view;
// undefined where PyTorch has to call the operator, or `make` makes nothing. With the interpreter's lock. (views_at_once.cpp)
at::Tensor view_at_once(const at::Tensor& self, const Operator& of, c10::function_ref<at::Tensor(const at::Tensor&)> make);

}  // namespace marid
