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
  bool written = false;
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
  // The recorder that was found last, and when: see recorder_of.
  mutable Ref recorder;
  mutable int64_t found_at = 0;
  std::shared_ptr<KnownCalls> calls;
  std::optional<c10::OperatorHandle> kernel;  // of ours, which is run in its place
  // Of one that draws and takes no generator: the overload that does, as which it is recorded.
  std::shared_ptr<Operator> general;
  std::optional<c10::OperatorHandle> general_handle;
  std::optional<size_t> generator, device;  // which argument it is
  bool copies = false;  // whether it is `copy_`, which takes what it copies from the host, too
  std::shared_ptr<Operator> view;  // of an operator that makes its argument a view of itself: the one that returns the view
  std::optional<c10::OperatorHandle> view_handle;
};

// What is known of the operator of a name, with the interpreter's lock. (kernels.cpp)
std::shared_ptr<Operator> operator_named(const c10::OperatorName& name);

// Record a call like one that was recorded before, or run it at once, with the interpreter's lock; false to leave it to
// Python, and nothing was recorded. Then an error may be set. Throws what a kernel throws.
bool recorded(const c10::OperatorHandle& handle, const Operator& op, torch::jit::Stack* stack);

// One of our tensors without its gradient's history, with the interpreter's lock: a second tensor for its value. Undefined
// for other tensors, where Python has to make it, and after an error, which is set then.
at::Tensor detached(const at::Tensor& tensor);

// Give a call to Python: to `dispatch` in frontend/record.py, or to another function that is called like the operator.
// (dispatch.cpp)
void call_python(const c10::OperatorHandle& op, torch::jit::Stack* stack, PyObject* function = nullptr);

// The same for a function that calls operators above autograd.
void call_in_python(const c10::OperatorHandle& op, torch::jit::Stack* stack, PyObject* function);

// Have Python make the recorder of an operator, with the interpreter's lock; false after an error. (dispatch.cpp)
bool make_recorder(const c10::OperatorHandle& op);

// The recorder of an operator in the table that is in use; borrowed. Null where there is none yet. (record.cpp)
PyObject* recorder_of(const Operator& op);
extern int64_t uses_of_tables;  // how often a table was taken into use

// Tell a Python function of a call: the operator, arguments, keywords, and what was returned. It must not raise. (dispatch.cpp)
void tell(PyObject* function, const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> given,
          c10::ArrayRef<c10::IValue> returned);

// Throw the error that Python has set, with the interpreter's lock. (dispatch.cpp)
[[noreturn]] void throw_python_error();

// Give the memory behind a storage object of the device another size in bytes. Throws what Python's half raises. (dispatch.cpp)
void resize_storage(const c10::Storage& storage, size_t bytes);

// One of our tensors without its gradient's history, in one way or the other. (dispatch.cpp)
at::Tensor detach(const at::Tensor& tensor);

// Whether autocast is on for the device, and not excluded. (autocast.cpp)
bool is_autocasting();

// Give each operator on tensors that has none yet a kernel that records; keywords in `not_recorded` are left to Python.
void register_kernels(PyObject* not_recorded);

// The user's line and the scope that are running now, either of which may be left out; false after an error. Borrowed:
// sites and scopes live for good. (stack.cpp)
bool where(PyObject** site, PyObject** scope);

// The innermost frame of Python of this thread, which may be without the interpreter's lock; null where that cannot be known.
// (stack.cpp)
const void* running_frame();

// The code of the innermost frame that runs Python; borrowed, null where there is none. (stack.cpp)
PyObject* running_code();

// The scope of what autograd runs for an operation of this scope; borrowed. (stack.cpp)
PyObject* backward_of(PyObject* scope);

}  // namespace marid
