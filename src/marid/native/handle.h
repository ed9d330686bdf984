// Tensors of the device: without data, with a Python object that says what they stand for (frontend/handles.py).
#pragma once
#include "python.h"

#include <ATen/core/Tensor.h>

namespace marid {

// Whether a tensor is one of the device that a user may hold. (Patterns are on the device too, and are none.)
bool is_handle(const c10::TensorImpl* impl);
bool is_handle(const at::Tensor& tensor);

// Whether an argument is such a tensor, or a list with one.
bool holds_handle(const c10::IValue& value);

// A tensor that looks like `pattern`, with its Python object, which has no attributes yet; undefined after an error. To
// PyTorch's C++ all handles of a pattern share its storage, but for those that are made `alone`.
at::Tensor handle_like(const c10::TensorImpl* pattern, Ref& object, bool alone = false);

}  // namespace marid
