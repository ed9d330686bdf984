// Operations that run at once, in place of being recorded (immediate.cpp).
#pragma once
#include "free_lists.h"
#include "recorder.h"

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <optional>

namespace marid {

// The tensors of ours among the arguments of a call, and the generator.
struct Given {
  c10::SmallVector<Handle*, 8> handles;  // kept by the arguments
  Concrete concrete;
  c10::DeviceIndex device = -1;
  bool takes_host = false;  // whether small tensors of the host are as good
  bool has_host = false;  // of those that are not, any of no dimension, which may stand beside tensors of the device
  bool is_usual = true;  // no others but numbers, and all on one device, as is the generator
  at::Generator generator;  // if one was given

  Given() = default;
  explicit Given(c10::ArrayRef<c10::IValue> arguments, bool takes_host = false);
  void add(const at::Tensor& tensor);
  void add_indices(const c10::IValue& list);  // `x[...]` takes them from the host too
};

// Bytes that an operator reads in less time than others would wait for the interpreter's lock.
constexpr size_t kQuick = 256 << 10;

// Calls an operator on concrete tensors, and says what it has returned.
using Invoke = c10::function_ref<void(Concrete& concrete, Results& returned)>;

// Whether an argument that is not recorded says what it says where it is left out; with `any_device`, a device says nothing.
bool is_usual_call(const Operator& op, c10::ArrayRef<c10::IValue> arguments, bool any_device = false);

// Call an operator with the arguments of a call on ours, in whose place it gets concrete tensors; one that draws gets a
// generator as the argument at `generator`.
void call_concretely(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const Concrete& concrete,
                     Results& returned, std::optional<size_t> generator = std::nullopt);

// Run a call now, if operations run at once; kUnusual where it has to be recorded, and nothing has happened. Throws what the
// kernel throws.
Outcome run_at_once(PyObject* by, Given& given, Invoke invoke, Results& results);
Outcome run_at_once(PyObject* by, const c10::OperatorHandle& handle, const Operator& op, c10::ArrayRef<c10::IValue> arguments,
                    Results& results);

// The same for a call that copies a tensor to a device, which may be the host, from there or from the host; without one, to the
// device where it is.
Outcome move_at_once(PyObject* by, Given& given, std::optional<c10::Device> device, Invoke invoke, Results& results);

// Whether anything runs at once now; what is looked at first, since most calls are recorded.
bool may_run_at_once();

// Whether operations of a device run at once now; whether none is recorded that has not run.
bool runs_at_once(c10::DeviceIndex device);
bool has_nothing_recorded(c10::DeviceIndex device);

// The recorder of an operator that may run at once as it is called, without a generator; null for others. Borrowed.
PyObject* at_once_by(const Operator& op);

// The same for a call that makes a tensor of none.
Outcome make_at_once(PyObject* by, const c10::OperatorHandle& handle, const Operator& op,
                     c10::ArrayRef<c10::IValue> arguments, c10::DeviceIndex device, Results& results);

// The concrete tensor that a value holds; undefined where its operation has not run.
at::Tensor concrete_tensor(PyObject* value);

// For as long as this lives: the state of dispatch below everything but kernels, and memory from free lists; without the
// interpreter's lock, if it is to be let go of.
class Below {
 public:
  explicit Below(bool lets_go);
  Below(const Below&) = delete;
  Below& operator=(const Below&) = delete;
  ~Below();

 private:
  UsesFreeLists uses_;
  c10::impl::LocalDispatchKeySet keys_;
  PyThreadState* thread_;  // null where the lock is kept
};

// How much memory operations may still read and write before they are recorded again: work that is large, or of which
// nothing is read, is done better as a whole.
class Allowance {
 public:
  void renew();
  bool take(int64_t nbytes);  // false where it is used up

 private:
  static constexpr int64_t kBytesAtFirst = 16 << 20;
  int64_t bytes_ = kBytesAtFirst, operations_ = 0;
};
extern Allowance allowance;

// How many blocks this thread is in whose operations are recorded, whatever the other threads do.
extern constinit thread_local int recording;
extern int64_t performed;  // operations that ran at once since the process began
extern std::atomic<int64_t> performed_small;  // those of them that small/ computed, perhaps without the lock

}  // namespace marid
