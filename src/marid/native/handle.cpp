#include "handle.h"

#include "call.h"
#include "record.h"

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <utility>

PyObject* THPVariable_Wrap(const at::TensorBase& tensor, PyTypeObject* type);

namespace marid {
namespace {

using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// PyTorch copies a tensor (where autograd saves an output, say) without its Python object, which is where a handle has its
// value. So handles are copied as `detach` does it.
struct Handle final : c10::TensorImpl {
  Handle(const c10::TensorImpl* pattern, bool alone)
      : c10::TensorImpl(alone ? c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, pattern->device()))
                              : c10::Storage(pattern->storage()),
                        pattern->key_set(), pattern->dtype()) {
    c10::Storage own = storage();
    copy_tensor_metadata(pattern, this, c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true);
    if (alone) set_storage_keep_dtype(std::move(own));
  }

  template <typename Version>
  c10::intrusive_ptr<c10::TensorImpl> copy(Version version, bool allow_change) const {
    bool in_mode = c10::impl::TorchDispatchModeTLS::stack_len() > 0 &&
        !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
    if (in_mode) return c10::TensorImpl::shallow_copy_and_detach(std::move(version), allow_change);
    at::Tensor made = detach(at::Tensor(Pointer::unsafe_reclaim_from_nonowning(const_cast<Handle*>(this))));
    auto impl = made.getIntrusivePtr();
    impl->set_version_counter(std::move(version));
    impl->set_allow_tensor_metadata_change(allow_change);
    return impl;
  }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version, bool allow_change) const override {
    return copy(version, allow_change);
  }
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version, bool allow_change) const override {
    return copy(std::move(version), allow_change);
  }
  const char* tensorimpl_type_name() const override { return "marid::Handle"; }
};

}  // namespace

bool is_handle(const c10::TensorImpl* impl) { return dynamic_cast<const Handle*>(impl) != nullptr; }

bool is_handle(const at::Tensor& tensor) { return is_handle(tensor.unsafeGetTensorImpl()); }

bool holds_handle(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && is_handle(value.toTensor());
  if (!value.isTensorList() && !value.isOptionalTensorList()) return false;
  auto items = value.toListRef();
  return std::any_of(items.begin(), items.end(), holds_handle);
}

at::Tensor handle_like(const c10::TensorImpl* pattern, Ref& object, bool alone) {
  at::Tensor made(c10::make_intrusive<Handle>(pattern, alone));
  object = Ref(THPVariable_Wrap(made, handle_type));
  return object ? made : at::Tensor();
}

}  // namespace marid
