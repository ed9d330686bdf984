// Tensors of the device: without data, with what they stand for (frontend/handles.py).
#pragma once
#include "computed.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <typeinfo>
#include <utility>

namespace marid {

extern PyTypeObject* handle_type;  // of the Python objects of handles

struct Handle final : c10::TensorImpl {
  // Looks like `pattern`. To PyTorch's C++ all handles of a pattern share its storage, but for those that are made `alone`.
  Handle(const c10::TensorImpl* pattern, bool alone);
  // Looks like a tensor of the CPU, in all but its device, which is that of `pattern`.
  Handle(const c10::TensorImpl* pattern, const c10::TensorImpl* tensor);
  ~Handle() override;

  // PyTorch copies a tensor where autograd saves an output, say. A handle is copied as `detach` does it: the copy has a Python
  // object of our class, too.
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version, bool allow_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version, bool allow_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) override;
  void release_resources() override;
  const char* tensorimpl_type_name() const override;

  // All of this with the interpreter's lock. What it stands for (graph/node.py); null for nothing, or after an error.
  PyObject* value();
  // What the value lies in; null where nothing has asked for it.
  PyObject* memory() const;
  void lie_in(PyObject* storage);
  void stand_for(PyObject* other);
  void stand_for(std::shared_ptr<Computed> other) { computed_ = std::move(other); }
  // What it stands for, if that has been computed; empty where its operation has not run.
  const std::shared_ptr<Computed>& computed();
  // Whether it was made as zeros that have no memory on the CPU, or is a view of such (zeros.h).
  bool is_zero = false;
  // Of the mean of a group norm: how the input lay in memory (group_norm.cpp).
  c10::MemoryFormat normalised_in = c10::MemoryFormat::Contiguous;

  // Whether another tensor may lie in its memory.
  bool is_shared() const;

  // A copy of one for which nothing but its computed value is known, for autograd alone; null for others. Without the
  // interpreter's lock.
  c10::intrusive_ptr<Handle> copy_for_autograd() const;

 private:
  void stand_for_the_same(Handle* other);
  c10::VariableVersion own_version() const;

  Ref value_, storage_;
  std::shared_ptr<Computed> computed_;
};

// The handle that a tensor is; null where it is another one. (Patterns are on the device too, and are none.)
inline Handle* handle_of(c10::TensorImpl* impl) {
  bool may_be = impl != nullptr && impl->key_set().has(c10::DispatchKey::PrivateUse1);  // which is quicker to see
  return may_be && typeid(*impl) == typeid(Handle) ? static_cast<Handle*>(impl) : nullptr;
}
inline Handle* handle_of(const at::Tensor& tensor) { return handle_of(tensor.unsafeGetTensorImpl()); }

// Call `with` each tensor among arguments, those in lists too, in order.
template <typename With>
void each_tensor(c10::ArrayRef<c10::IValue> arguments, With with) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      with(argument.toTensor());
    } else if (argument.isTensorList() || argument.isOptionalTensorList()) {
      for (const c10::IValue& item : argument.toListRef()) {
        if (item.isTensor()) with(item.toTensor());
      }
    }
  }
}

// Whether an argument is such a tensor, or a list with one.
bool holds_handle(const c10::IValue& value);

// A handle that looks like `pattern` and stands for `value`, with its Python object; or one for what has been computed, which
// for autograd alone may have no object (backward.h). Null after an error.
at::Tensor new_handle(const c10::TensorImpl* pattern, PyObject* value, bool alone = false);
at::Tensor new_handle(std::shared_ptr<Computed> value);

// Have Python read and write what handles stand for as attributes, and compare them as it does tensors and parameters; false
// after an error.
bool prepare_handles(PyObject* type);

}  // namespace marid
