// Tensors of the device: without data, with what they stand for (frontend/handles.py).
#pragma once
#include "python.h"

#include <ATen/core/Tensor.h>

namespace marid {

extern PyTypeObject* handle_type;  // of the Python objects of handles

struct Handle final : c10::TensorImpl {
  // Looks like `pattern`. To PyTorch's C++ all handles of a pattern share its storage, but for those that are made `alone`.
  Handle(const c10::TensorImpl* pattern, bool alone);
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

  void stand_for(PyObject* other, PyObject* in);  // with the interpreter's lock, as all that follows

  Ref value;  // graph/node.py
  Ref storage;  // what the value lies in; empty where nothing has asked for it
};

// The handle that a tensor is; null where it is another one. (Patterns are on the device too, and are none.)
Handle* handle_of(c10::TensorImpl* impl);
inline Handle* handle_of(const at::Tensor& tensor) { return handle_of(tensor.unsafeGetTensorImpl()); }

// Whether an argument is such a tensor, or a list with one.
bool holds_handle(const c10::IValue& value);

// A handle that looks like `pattern` and stands for `value`, with its Python object; null after an error.
at::Tensor new_handle(const c10::TensorImpl* pattern, PyObject* value, bool alone = false);

// Have Python read and write what handles stand for as attributes; false after an error.
bool prepare_handles(PyObject* type);

}  // namespace marid
