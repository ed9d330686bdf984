#include "views_at_once.h"

#include "above_autograd.h"
#include "immediate.h"

#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

namespace marid {

namespace {

using at::Tensor;

// Whether nothing but autograd, which need not see it, stands between a call and the device's kernel; nor does a profiler.
bool is_plain_call(const Tensor& self, c10::DispatchKeySet keys) {
  switch (keys.highestPriorityTypeId()) {
    case c10::DispatchKey::AutogradPrivateUse1:
    case c10::DispatchKey::ADInplaceOrView:
    case c10::DispatchKey::PrivateUse1: break;
    default: return false;
  }
  return is_next_below(keys) && !needs_gradient(self) && !c10::AutogradState::get_tls_state().get_view_replay_enabled() &&
      !at::hasCallbacks();
}

// What PyTorch notes of a view (its kernels for the key ADInplaceOrView).
Tensor as_view(const Tensor& self, Tensor made) {
  using torch::autograd::CreationMeta;
  CreationMeta how = c10::InferenceMode::is_enabled() ? CreationMeta::INFERENCE_MODE
      : c10::GradMode::is_enabled()                   ? CreationMeta::DEFAULT
                                                      : CreationMeta::NO_GRAD_MODE;
  return torch::autograd::as_view(self, made, true, true, nullptr, nullptr, how);
}

}  // namespace

Tensor view_at_once(const Tensor& self, const Operator& of, c10::function_ref<Tensor(const Tensor&)> make) {
  const auto& local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = (self.key_set() | local.included_) - local.excluded_;
  keys = keys.remove(c10::DispatchKey::BackendSelect);  // these operators have no such kernel
  if (!may_run_at_once() || !is_plain_call(self, keys)) return {};
  PyObject* by = at_once_by(of);
  if (by == nullptr) return {};
  Given given;
  given.add(self);
  Results results;
  auto invoke = [&](Concrete& concrete, Results& returned) { returned.push_back(make(concrete[0])); };
  Outcome outcome = run_at_once(by, given, invoke, results);
  if (outcome == Outcome::kError) throw_python_error();
  if (outcome != Outcome::kDone || !results[0].defined()) return {};
  performed_small.fetch_add(1, std::memory_order_relaxed);
  return keys.has(c10::DispatchKey::ADInplaceOrView) ? as_view(self, std::move(results[0])) : std::move(results[0]);
}

}  // namespace marid
