// Operations that run at once, in place of being recorded (immediate.cpp).
#pragma once
#include "recorder.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace marid {

// Run a call now, if operations run at once; kUnusual where it has to be recorded, and nothing has happened. Throws what the
// kernel throws.
Outcome run_at_once(PyObject* by, const c10::OperatorHandle& handle, const Operator& op, c10::ArrayRef<c10::IValue> arguments,
                    Results& results);

// The same for a call of which it has been said that it may run at once.
Outcome perform_at_once(PyObject* by, const c10::OperatorHandle& handle, const Operator& op,
                        c10::ArrayRef<c10::IValue> arguments, Results& results);

// The same for a call that makes a tensor of none.
Outcome make_at_once(PyObject* by, const c10::OperatorHandle& handle, const Operator& op,
                     c10::ArrayRef<c10::IValue> arguments, c10::DeviceIndex device, Results& results);

// A number that has been computed; false to leave the read to Python.
bool read_number(torch::jit::Stack* stack);

// The concrete tensor that a value holds; undefined where its operation has not run.
at::Tensor concrete_tensor(PyObject* value);

// For as long as this lives: the state of dispatch below everything but kernels; without the interpreter's lock, if it is
// to be let go of.
class Below {
 public:
  explicit Below(bool lets_go);
  Below(const Below&) = delete;
  Below& operator=(const Below&) = delete;
  ~Below();

 private:
  c10::impl::LocalDispatchKeySet keys_;
  at::impl::TorchFunctionDisabledState functions_;
  PyThreadState* thread_;  // null where the lock is kept
};

// Call an operator on concrete tensors with the arguments of a call on ours, with the interpreter's lock, which is let go
// of meanwhile where that may take long. Below everything that dispatch does above kernels. Throws what the kernel throws.
void perform(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const Concrete& concrete,
             torch::jit::Stack& returned);

// How much memory operations may still read and write before they are recorded again: work that is large, or of which
// nothing is read, is done better as a whole.
class Allowance {
 public:
  void renew();
  bool take(int64_t nbytes);  // false where it is used up

 private:
  static constexpr int64_t kBytesAtFirst = 4 << 20;
  int64_t bytes_ = kBytesAtFirst, operations_ = 0;
};
extern Allowance allowance;

// How many blocks this thread is in whose operations are recorded, whatever the other threads do.
extern thread_local int recording;
extern int64_t performed;  // operations that ran at once since the process began

}  // namespace marid
