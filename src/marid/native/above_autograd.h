// PyTorch's own kernels above autograd, and whether a call needs them.
//
// They save what gradients need, and call the device's kernel through the dispatcher. Without gradients all that they do is to
// find that out. Kernels of ours in their place ask once, and are the device's kernels already.
#pragma once
#include <ATen/core/IListRef.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>

namespace marid {

// Whether autograd, forward or backward, has to see what is done with a tensor.
inline bool needs_gradient(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->autograd_meta() == nullptr) return false;
  return (tensor.requires_grad() && c10::GradMode::is_enabled()) || tensor._fw_grad(0).defined();
}
inline bool needs_gradient(const std::optional<at::Tensor>& tensor) { return tensor && needs_gradient(*tensor); }
inline bool needs_gradient(at::TensorList list) {
  return std::any_of(list.begin(), list.end(), [](const at::Tensor& tensor) { return needs_gradient(tensor); });
}
inline bool needs_gradient(const at::ITensorListRef& list) {
  return std::any_of(list.begin(), list.end(), [](const at::Tensor& tensor) { return needs_gradient(tensor); });
}
inline bool needs_gradient(const c10::List<std::optional<at::Tensor>>& list) {
  for (size_t i = 0; i < list.size(); i++) {
    if (needs_gradient(list.get(i))) return true;
  }
  return false;
}
template <typename Other>
bool needs_gradient(const Other&) {
  return false;
}

// Whether nothing stands between autograd and the device's kernel in a call: no mode, no transform, no bit of a tensor.
inline bool is_next_below(c10::DispatchKeySet keys) {
  return (keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == c10::DispatchKey::PrivateUse1;
}

// PyTorch's kernel above autograd for an operator. Where ours takes its place for the device, other devices out of PyTorch's
// tree have it still.
c10::KernelFunction kernel_above_autograd(const c10::OperatorHandle& op);

}  // namespace marid
