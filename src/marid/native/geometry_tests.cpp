// Operators that compare the geometry of tensors, which derivatives that are computed forward ask for each tensor.
#include "geometry_tests.h"

#include "handle.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

namespace marid {

namespace {

using at::Tensor;

struct SameSize final : c10::OperatorKernel {
  bool operator()(const Tensor& self, const Tensor& other) { return self.sym_sizes().equals(other.sym_sizes()); }
};

// How many elements the memory has that a tensor lies in, which was computed at once; Python knows it of others.
std::optional<size_t> elements_behind(const Tensor& tensor) {
  Handle* handle = handle_of(tensor);
  if (handle == nullptr || !handle->computed() || !handle->computed()->ran_at_once()) return std::nullopt;
  return handle->computed()->tensor.storage().nbytes() / tensor.itemsize();
}

struct SameStorageNumel final : c10::OperatorKernel {
  SameStorageNumel(const c10::OperatorHandle& op, c10::KernelFunction usual) : op(op), usual(std::move(usual)) {}

  bool operator()(c10::DispatchKeySet keys, const Tensor& self, const Tensor& other) {
    {
      InterpreterLock lock;
      auto own = elements_behind(self), others = elements_behind(other);
      if (own && others) return *own == *others;
    }
    return usual.call<bool, const Tensor&, const Tensor&>(op, keys, self, other);
  }

  c10::OperatorHandle op;
  c10::KernelFunction usual;
};

}  // namespace

std::optional<c10::KernelFunction> geometry_test_kernel(const c10::OperatorHandle& op, const c10::KernelFunction& usual) {
  const std::string& name = op.operator_name().name;
  if (name == "aten::is_same_size") {
    return c10::KernelFunction::makeFromUnboxedFunctor<false, SameSize>(std::make_unique<SameSize>());
  }
  if (name != "aten::_has_same_storage_numel") return std::nullopt;
  return c10::KernelFunction::makeFromUnboxedFunctor<false, SameStorageNumel>(std::make_unique<SameStorageNumel>(op, usual));
}

}  // namespace marid
