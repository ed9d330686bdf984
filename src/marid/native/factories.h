// Operators without an argument that is a tensor.
#pragma once
#include "record.h"

namespace marid {

// The kernel of one: it runs at once where operations do, and is left to Python else (frontend/factories.py).
struct Factory final : c10::OperatorKernel {
  Factory(std::shared_ptr<Operator> of, PyObject* python) : of(std::move(of)), python(python) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack);

  std::shared_ptr<Operator> of;
  PyObject* python;  // lives for good
};

}  // namespace marid
