// Operators without an argument that is a tensor.
#pragma once
#include "record.h"

#include <ATen/core/boxing/KernelFunction.h>

#include <optional>

namespace marid {

// The kernel of one: it runs at once where operations do, and is recorded else; by Python where nothing is known of such a
// call yet (frontend/factories.py).
struct Factory final : c10::OperatorKernel {
  Factory(c10::OperatorHandle as, PyObject* python, bool has_default_dtype)
      : as(as), of(operator_named(as.operator_name())), python(python), has_default_dtype(has_default_dtype) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack);

  c10::OperatorHandle as;  // which operator is recorded
  std::shared_ptr<Operator> of;
  PyObject* python;  // lives for good
  bool has_default_dtype;  // whether it makes the default dtype where none is given
};

// A kernel that calls the CPU's without its arguments being boxed, for a usual operator; none for others. `general` is the
// kernel for what does not run at once. (direct_factories.cpp)
std::optional<c10::KernelFunction> direct_factory(const c10::OperatorHandle& op, const Factory& general);

// The same for an operator that draws a tensor like another.
std::optional<c10::KernelFunction> direct_like(const c10::OperatorHandle& op, const std::shared_ptr<Operator>& of);

}  // namespace marid
