// Values that are read without asking Python (reads_at_once.cpp).
#pragma once
#include "record.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/stack.h>

#include <optional>

namespace marid {

// A number that has been computed; false to leave the read to Python.
bool read_number(torch::jit::Stack* stack);

// The number in a tensor that has one, where operations run at once and it can be read now; none where not, or after an error.
c10::IValue number_now(const at::Tensor& tensor);

// The kernel of `equal` or `allclose`; none for other operators. `general` is the one that leaves a call to Python.
std::optional<c10::KernelFunction> reading_kernel(const c10::OperatorHandle& op, c10::KernelFunction general);

}  // namespace marid
