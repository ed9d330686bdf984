// What a backward computes and Python does not see (backward.cpp).
#pragma once
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

namespace marid {

// Whether autograd's engine has called what runs, and not a function in Python that it has called. With the interpreter's lock.
bool is_called_by_engine();

// Whether transforms of functions (`torch.func`) are active, as `torch._C._are_functorch_transforms_active`.
bool has_transforms();

// Whether what is computed now is for the functions of autograd alone, all of which are C++. With the interpreter's lock.
bool is_for_autograd_alone();

// Give tensors of ours among arguments the Python objects that they do without so far; for where Python is called. With the
// interpreter's lock.
void give_objects(c10::ArrayRef<c10::IValue> arguments);

}  // namespace marid
