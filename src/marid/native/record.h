// What the kernels of operators (kernels.cpp) and recording (record.cpp) share.
#pragma once
#include "python.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <vector>

namespace marid {

// One argument of an operator, by its schema.
struct Formal {
  enum Kind { kPlain, kDtype, kMemoryFormat, kNotRecorded } kind = kPlain;
  PyObject* name = nullptr;  // where it can only be given by name
  const c10::IValue* otherwise = nullptr;
};

class KnownCalls;  // known_calls.h

struct Operator {
  std::vector<Formal> formals;
  size_t positional = 0;
  size_t returns = 0;
  bool returns_list = false;
  PyObject* identity = nullptr;  // of the operator in Python, once it has been seen
  bool reads_number = false;  // whether it is what `item()` calls
  bool asks_autocast = false;  // whether Python has to be asked how autocast changes it
  std::shared_ptr<KnownCalls> calls;
  std::optional<size_t> generator;  // which argument it is
  std::shared_ptr<Operator> view;  // of an operator that makes its argument a view of itself: the one that returns the view
  std::optional<c10::OperatorHandle> view_handle;
};

// Record a call like one that was recorded before, or run it at once, with the interpreter's lock; false to leave it to
// Python, and nothing was recorded. Then an error may be set. Throws what a kernel throws.
bool recorded(const c10::OperatorHandle& handle, const Operator& op, torch::jit::Stack* stack);

// One of our tensors without its gradient's history, with the interpreter's lock: a second tensor for its value. Undefined
// for other tensors, where Python has to make it, and after an error, which is set then.
at::Tensor detached(const at::Tensor& tensor);

// Do with a call that is not recorded what PyTorch does with operators that have no kernel for tensors implemented in
// Python: give it to Python, or to the kernel below. (dispatch.cpp)
void call_python(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Detach our own tensors without PyTorch's detour, or as PyTorch does it again. (dispatch.cpp)
void detach_in_python(bool directly);

// Whether autocast is on for the device, and not excluded. (autocast.cpp)
bool is_autocasting();

// Whether there is a dispatch mode of ours on this thread that changes nothing of what a call does. (autocast.cpp)
bool is_watched();

// Whether there are other dispatch modes than that one on this thread. (autocast.cpp)
bool is_in_users_mode();

// Give each of PyTorch's operators on tensors a kernel that records; keywords in `not_recorded` are left to Python.
void register_kernels(PyObject* not_recorded);
void unregister_kernels();

// The user's line and the scope that are running now, of which either may be null; false after an error. (stack.cpp)
bool where(Ref* site, Ref* scope);

// The scope of what autograd runs for an operation of this scope; borrowed. (stack.cpp)
PyObject* backward_of(PyObject* scope);

}  // namespace marid
