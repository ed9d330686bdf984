#include "intermediates.h"

#include "backward.h"
#include "handle.h"
#include "record.h"

#include <ATen/LegacyVmapMode.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace marid {

namespace {

// The frame of Python that has called the outermost composite; null outside of all. Where another one runs, Python has been
// called from inside: by a kernel, a signal or the collector.
constinit thread_local const void* calling = nullptr;

bool is_seen() {
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0 || at::impl::VmapMode::current_vmap_level() > 0) return true;
  if (c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return true;
  return at::SavedTensorDefaultHooks::get_hooks().has_value();
}

}  // namespace

Intermediates::Intermediates() : outer_(calling) {
  if (outer_ == nullptr && !is_seen()) calling = running_frame();
}

Intermediates::~Intermediates() { calling = outer_; }

void Intermediates::give(c10::ArrayRef<c10::IValue> results) const {
  if (outer_ != nullptr || calling == nullptr) return;
  InterpreterLock lock;
  give_objects(results);
}

at::Tensor Intermediates::give(at::Tensor result) const {
  if (outer_ != nullptr || calling == nullptr) return result;
  c10::IValue one(std::move(result));
  InterpreterLock lock;
  give_objects(one);
  return std::move(one).toTensor();
}

bool is_intermediate() { return calling != nullptr && calling == running_frame(); }

constinit thread_local const void* Saves::calling_ = nullptr;

Saves::Saves() : outer_(calling_) { calling_ = running_frame(); }

bool Saves::now() { return calling_ != nullptr && calling_ == running_frame() && !is_seen(); }

}  // namespace marid
