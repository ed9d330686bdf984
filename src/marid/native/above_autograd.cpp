#include "above_autograd.h"

namespace marid {

namespace {

// PyTorch gives kernels in a class that offers calls with boxed arguments only. What lies inside is private; an explicit
// instantiation may name it all the same (C++20, [temp.spec.general]/6).
struct Inside {
  using type = c10::KernelFunction c10::SafeKernelFunction::*;
  friend type kernel_in(Inside);
};
template <typename Of, typename Of::type member>
struct Open {
  friend typename Of::type kernel_in(Of) { return member; }
};
template struct Open<Inside, &c10::SafeKernelFunction::kernel_>;

}  // namespace

c10::KernelFunction kernel_above_autograd(const c10::OperatorHandle& op) {
  // Other devices compose what the CPU has a kernel for.
  bool is_composed_elsewhere = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  auto like = is_composed_elsewhere ? c10::DispatchKey::AutogradCPU : c10::DispatchKey::AutogradPrivateUse2;
  return op.getComputedKernelForDispatchKey(like).*kernel_in(Inside());
}

}  // namespace marid
