// The recorded geometry of a tensor, and whether a kernel's result has it: the invariant of the executor.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

typedef struct _object PyObject;

namespace marid {

struct Geometry {
  at::ScalarType dtype;
  bool conj, neg;
  int64_t offset;
  c10::SmallVector<int64_t, 5> sizes, strides;
};

// The geometry of a `Spec` (graph/node.py), made when it is first asked for and kept by it; null after an error.
const Geometry* geometry_of(PyObject* spec);

// Whether a Python object stands for a storage. (PyTorch 2.13 has another name for it than those before.)
template <typename Slot>
bool has_object(const Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj() != nullptr;
  } else {
    return slot._unchecked_untagged_pyobj() != nullptr;
  }
}

// Whether nobody else sees the memory of a tensor; an operator written in Python may have had a look at its storage.
inline bool is_owned(const c10::Storage& storage) {
  size_t owners = storage.use_count();
  return owners == 1 || (owners == 2 && has_object(*storage.unsafeGetStorageImpl()->pyobj_slot()));
}

// Whether a result is what was recorded: sizes, strides, offset, dtype and bits, and memory of its own or, for a view, the
// memory of what it views.
inline bool agrees(const at::Tensor& result, const Geometry& recorded, const at::Tensor* viewed) {
  if (!result.defined()) return false;
  const c10::TensorImpl& impl = *result.unsafeGetTensorImpl();
  if (impl.dtype().toScalarType() != recorded.dtype || impl.storage_offset() != recorded.offset ||
      impl.sizes() != c10::IntArrayRef(recorded.sizes) || impl.strides() != c10::IntArrayRef(recorded.strides) ||
      result.is_conj() != recorded.conj || result.is_neg() != recorded.neg) {
    return false;
  }
  if (viewed != nullptr) return impl.unsafe_storage().is_alias_of(viewed->storage());
  return is_owned(impl.unsafe_storage());
}

}  // namespace marid
