// How gradients that are added up lie in memory.
//
// Where several gradients of one tensor meet, autograd adds into the first of them if nobody else has it (`accumulate` in
// torch/csrc/autograd/input_buffer.cpp), so that the sum lies in memory as that one. For tensors implemented in Python it
// makes a new tensor, which may have other strides: in dimensions of one element, for instance. So such a sum is recorded
// into a tensor that is laid out as the first one. It is never recorded as a write: what autograd takes for unused may
// have readers among what was recorded.
#include "accumulate.h"

#include "backward.h"
#include "call.h"

#include <ATen/Context.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

// Whether nobody but autograd's buffer has a tensor that is an argument on the stack, nor another that lies in its memory.
// Python may know the tensor, and not keep it.
bool is_unshared(const at::Tensor& tensor) {
  const auto& slot = *tensor.unsafeGetTensorImpl()->pyobj_slot();
  size_t others = tensor.use_count() - 2;
  if constexpr (requires { slot.load_pyobj(); }) {  // from PyTorch 2.13 on a tensor counts its Python object
    PyObject* known = slot.load_pyobj();
    if (known != nullptr && others == 1 && Py_REFCNT(known) == 1) others = 0;
  }
  if (others > 0) return false;
  marid::Handle* handle = marid::handle_of(tensor);
  return handle != nullptr && !handle->is_shared();
}

}  // namespace

namespace marid {

bool may_add_up(const at::Tensor& first) {
  if (torch::autograd::get_current_graph_task_id() < 0 || c10::GradMode::is_enabled()) return false;
  // Every function of a graph runs under this guard (torch/csrc/autograd/node.h), the engine itself does not.
  if (at::ROCmBackwardPassGuard::is_backward_pass()) return false;
  if (!first.is_non_overlapping_and_dense()) return false;
  return c10::impl::TorchDispatchModeTLS::stack_len() == 0;  // in a mode it never adds in place
}

bool adds_up_gradients(const torch::jit::Stack& stack) {
  const at::Tensor& first = torch::jit::peek(stack, 0, 3).toTensor();
  if (!may_add_up(first)) return false;
  InterpreterLock lock;
  return is_called_by_engine() && is_unshared(first);
}

void add_up(const at::Tensor& first, const at::Tensor& second, torch::jit::Stack* stack) {
  const at::Tensor& sum = torch::jit::peek(*stack, 0, 1).toTensor();
  if (sum.strides() == first.strides() || sum.sizes() != first.sizes() || sum.dtype() != first.dtype()) return;
  at::Tensor like = at::empty_strided(first.sizes(), first.strides(), first.options());
  at::add_out(like, first, second);
  torch::jit::drop(*stack, 1);
  stack->emplace_back(std::move(like));
}

}  // namespace marid
