// Running an operation at once on concrete tensors. When that is done is decided in frontend/ahead.py, and checked for
// each call in record.cpp: all of its arguments have run, and nothing is pending that a write could overtake.
#include "immediate.h"

#include "concretely.h"
#include "device.h"
#include "immediate_results.h"
#include "nodes.h"
#include "queue.h"
#include "random.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace marid {

Allowance allowance;
constinit thread_local int recording = 0;
int64_t performed = 0;
std::atomic<int64_t> performed_small{0};

namespace {

constexpr int64_t kMostBytes = 64 << 20;
constexpr int64_t kOperations = 16384;  // without a read
constexpr size_t kMostCopied = 1 << 20;
int64_t bytes_an_operation = 0;

}  // namespace

Below::Below(bool lets_go)
    : keys_(c10::impl::tls_local_dispatch_key_set()),
      thread_(lets_go ? PyEval_SaveThread() : nullptr) {
  c10::impl::LocalDispatchKeySet inside = keys_;
  auto [included, excluded] = keys_inside();
  inside.included_ = included;
  inside.excluded_ = excluded;
  c10::impl::_force_tls_local_dispatch_key_set(inside);
}

Below::~Below() {
  c10::impl::_force_tls_local_dispatch_key_set(keys_);
  if (thread_ != nullptr) PyEval_RestoreThread(thread_);
}

void Allowance::renew() { operations_ = kOperations; }

bool Allowance::take(int64_t nbytes) {
  bytes_ = std::min(bytes_ + bytes_an_operation - nbytes, kMostBytes);
  if (bytes_ >= 0 && --operations_ >= 0) return true;
  bytes_ = kBytesAtFirst;  // for the next time
  return false;
}

at::Tensor concrete_tensor(PyObject* value) {
  PyObject* held = concrete_of(value);
  if (held == Py_None || !THPVariable_Check(held)) return at::Tensor();
  const at::Tensor& tensor = THPVariable_Unpack(held);
  return handle_of(tensor) != nullptr ? at::Tensor() : tensor;
}

namespace {

// A stack for a call, whose memory the next call of this thread has again.
struct Returned {
  Returned() { stack.swap(spare); }
  ~Returned() {
    stack.clear();
    if (spare.capacity() < stack.capacity()) stack.swap(spare);
  }
  torch::jit::Stack stack;

 private:
  static thread_local torch::jit::Stack spare;
};
thread_local torch::jit::Stack Returned::spare;

size_t bytes_of(const Concrete& tensors) {
  size_t nbytes = 0;
  for (const at::Tensor& tensor : tensors) nbytes += tensor.nbytes();
  return nbytes;
}

// Whether a tensor of the host is copied as quickly as anything else is done at once.
bool is_small(const at::Tensor& tensor) {
  return is_plain(tensor) && !tensor.is_conj() && !tensor.is_neg() && tensor.nbytes() <= kMostCopied;
}

}  // namespace

void Given::add(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  Handle* handle = handle_of(tensor);
  if (handle == nullptr) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
    is_usual = is_usual && (takes_host || tensor.dim() == 0) && is_small(tensor);
    has_host = has_host || !takes_host;
    return;
  }
  c10::DeviceIndex on = tensor.device().index();
  is_usual = is_usual && (device == -1 || device == on);
  device = on;
  handles.push_back(handle);
}

void Given::add_indices(const c10::IValue& list) {
  bool before = std::exchange(takes_host, true);
  for (const c10::IValue& item : list.toListRef()) {
    if (item.isTensor()) add(item.toTensor());
  }
  takes_host = before;
}

Given::Given(c10::ArrayRef<c10::IValue> arguments, bool takes_host) : takes_host(takes_host) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isOptionalTensorList()) {
      add_indices(argument);
    } else if (argument.isGenerator()) {
      generator = argument.toGenerator();
      is_usual = is_usual && position_of(generator) != nullptr;
    } else {
      each_tensor(argument, [this](const at::Tensor& tensor) { add(tensor); });
    }
  }
}

namespace {

// Whether a call can run at once: its arguments exist, and nothing is pending, or on the device's thread, that it must see
// or could overtake.
bool is_ready(PyObject* on, Given& given, bool writes) {
  given.concrete.clear();
  if (queue_is_busy()) return false;
  bool pending = PyList_GET_SIZE(tape.at(on, kEntries)) != 0;
  if (writes && pending) return false;
  bool may_be_written = pending || any_failed();  // a write that failed is an error for the next reader
  for (Handle* handle : given.handles) {
    const std::shared_ptr<Computed>& computed = handle->computed();
    if (!computed) return false;
    if (may_be_written && handle->memory() != nullptr && last_write(handle->memory()) != nullptr) return false;
    given.concrete.push_back(computed->tensor);
  }
  return true;
}

bool is_immediate(c10::DeviceIndex device) {
  bool exists = device < PyList_GET_SIZE(tapes);  // a copy may name one that does not
  return exists && tape.at(PyList_GET_ITEM(tapes, device), kImmediate) == Py_True;
}

// Whether an operation on these runs at once. What is written may not be the host's.
bool is_at_once(PyObject* by, const Given& given) {
  if (given.has_host && operation.at(recorder.at(by, kRecorderOp), kMutates) == Py_True) return false;
  return given.is_usual && given.device >= 0 && is_immediate(given.device);
}

// kDone where a call can run at once, which it may have had to wait for.
Outcome make_ready(PyObject* on, Given& given, bool writes) {
  if (is_ready(on, given, writes)) return Outcome::kDone;
  if (PyErr_Occurred() || !Ref(PyObject_CallOneArg(run_pending, on))) return Outcome::kError;
  if (is_ready(on, given, writes)) return Outcome::kDone;
  return PyErr_Occurred() ? Outcome::kError : Outcome::kUnusual;
}

Outcome perform_at_once(PyObject* by, Given& given, Invoke invoke, Results& results) {
  PyObject* on = PyList_GetItem(tapes, given.device);
  bool writes = operation.at(recorder.at(by, kRecorderOp), kMutates) == Py_True;
  Outcome outcome = make_ready(on, given, writes);
  if (outcome != Outcome::kDone) return outcome;
  Results returned;
  size_t read = bytes_of(given.concrete);
  bool draws = recorder.at(by, kDraws) == Py_True;
  if (draws && read > kQuick) return Outcome::kUnusual;  // it would hold the lock for long
  Draws drawn(draws, given.device, given.generator);
  if (!drawn.begin()) return Outcome::kError;
  {
    Below below(read > kQuick);
    invoke(given.concrete, returned);
  }
  ImmediateResults taken(by, given, writes, results);
  for (at::Tensor& one : returned) {
    outcome = taken.take(std::move(one));
    if (outcome == Outcome::kDone) continue;
    results.clear();
    drawn.undo();
    return outcome;
  }
  int64_t nbytes = taken.nbytes();
  if (nbytes > 0 || writes || returned.empty()) nbytes += static_cast<int64_t>(read);  // else nothing but views
  if (!allowance.take(nbytes)) tape.set(on, kImmediate, Ref::to(Py_False));
  performed++;
  return drawn.end() ? Outcome::kDone : Outcome::kError;
}

Outcome perform_at_once(PyObject* by, const c10::OperatorHandle& handle, const Operator& op,
                        c10::ArrayRef<c10::IValue> arguments, Given& given, Results& results) {
  auto invoke = [&](Concrete& concrete, Results& returned) {
    call_concretely(op.kernel ? *op.kernel : handle, arguments, concrete, returned, op.generator);
  };
  Outcome outcome = perform_at_once(by, given, invoke, results);
  if (outcome == Outcome::kDone) note_writes(by, op, arguments);
  return outcome;
}

Outcome copy_to_host(Given& given, Invoke invoke, Results& results) {
  Outcome outcome = make_ready(PyList_GetItem(tapes, given.device), given, false);
  if (outcome != Outcome::kDone) return outcome;
  {
    Below below(bytes_of(given.concrete) > kQuick);
    invoke(given.concrete, results);
  }
  allowance.renew();
  performed++;
  return Outcome::kDone;
}

}  // namespace

bool is_usual_call(const Operator& op, c10::ArrayRef<c10::IValue> arguments, bool any_device) {
  for (size_t i = 0; i < arguments.size(); i++) {
    if (op.formals[i].kind != Formal::kNotRecorded || arguments[i].isNone() || (any_device && i == op.device)) continue;
    if (i == op.generator) continue;  // `Given` looks at it
    if (!is_default(arguments[i], op.formals[i]) && !is_usual(arguments.data(), i, op)) return false;
  }
  return true;
}

void call_concretely(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const Concrete& concrete,
                     Results& returned, std::optional<size_t> generator) {
  Returned spare;
  torch::jit::Stack& stack = spare.stack;
  size_t next = 0;
  stack.reserve(arguments.size());
  auto placed = [&](const at::Tensor& tensor) { return handle_of(tensor) != nullptr ? concrete[next++] : tensor; };
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      stack.emplace_back(placed(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> items;
      for (const c10::IValue& item : argument.toListRef()) items.push_back(placed(item.toTensor()));
      stack.emplace_back(std::move(items));
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> items;
      for (const c10::IValue& item : argument.toListRef()) {
        items.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(placed(item.toTensor())));
      }
      stack.emplace_back(std::move(items));
    } else if (argument.isDevice()) {
      stack.emplace_back(c10::Device(c10::kCPU));
    } else {
      stack.push_back(argument);
    }
  }
  if (generator) stack[*generator] = Draws::source();
  op.callBoxed(&stack);
  for (const c10::IValue& one : stack) {
    if (!one.isTensorList()) {
      returned.push_back(one.toTensor());
    } else {
      for (const c10::IValue& item : one.toListRef()) returned.push_back(item.toTensor());
    }
  }
}

PyObject* at_once_by(const Operator& op) {
  if (op.identity == nullptr || recorders == nullptr || op.view_handle || (op.asks_autocast && is_autocasting())) return nullptr;
  PyObject* by = recorder_of(op);
  bool may = by != nullptr && recorder.at(by, kAtOnce) == Py_True && recorder.at(by, kSameValue) != Py_True;
  return may ? by : nullptr;
}

bool may_run_at_once() {
  if (recording > 0 || tapes == nullptr) return false;
  Py_ssize_t count = PyList_GET_SIZE(tapes);
  for (Py_ssize_t i = 0; i < count; i++) {
    if (is_immediate(static_cast<c10::DeviceIndex>(i))) return true;
  }
  return false;
}

bool runs_at_once(c10::DeviceIndex device) { return recording == 0 && tapes != nullptr && is_immediate(device); }

bool has_nothing_recorded(c10::DeviceIndex device) {
  if (recording > 0 || tapes == nullptr || device >= PyList_GET_SIZE(tapes)) return false;
  constexpr Py_ssize_t kFew = 32;  // entries of nodes that have run or are gone stay until the next cut
  PyObject* entries = tape.at(PyList_GET_ITEM(tapes, device), kEntries);
  if (PyList_GET_SIZE(entries) > kFew) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
    PyObject* found = PyWeakref_GetObject(PyList_GET_ITEM(entries, i));
    if (found != Py_None && node.at(found, kArgs) != Py_None) return false;
  }
  return true;
}

Outcome run_at_once(PyObject* by, Given& given, Invoke invoke, Results& results) {
  return is_at_once(by, given) ? perform_at_once(by, given, invoke, results) : Outcome::kUnusual;
}

Outcome run_at_once(PyObject* by, const c10::OperatorHandle& handle, const Operator& op, c10::ArrayRef<c10::IValue> arguments,
                    Results& results) {
  if (!may_run_at_once()) return Outcome::kUnusual;
  Given given(arguments, op.copies);
  if (!is_at_once(by, given) || !is_usual_call(op, arguments)) return Outcome::kUnusual;
  return perform_at_once(by, handle, op, arguments, given, results);
}

Outcome move_at_once(PyObject* by, Given& given, std::optional<c10::Device> device, Invoke invoke, Results& results) {
  bool to_host = device && device->is_cpu();
  if (device && !to_host) {
    if (!device->is_privateuseone()) return Outcome::kUnusual;
    c10::DeviceIndex to = device->has_index() ? device->index() : current_device();
    if (given.device >= 0 && given.device != to) return Outcome::kUnusual;
    given.device = to;
  }
  if (!is_at_once(by, given)) return Outcome::kUnusual;
  return to_host ? copy_to_host(given, invoke, results) : perform_at_once(by, given, invoke, results);
}

Outcome make_at_once(PyObject* by, const c10::OperatorHandle& handle, const Operator& op,
                     c10::ArrayRef<c10::IValue> arguments, c10::DeviceIndex device, Results& results) {
  if (recording > 0 || !is_immediate(device)) return Outcome::kUnusual;
  if (!is_usual_call(op, arguments, true)) return Outcome::kUnusual;
  Given given(arguments);  // `linspace` may be given its limits as tensors
  if (!given.is_usual || (given.device >= 0 && given.device != device)) return Outcome::kUnusual;
  given.device = device;
  return perform_at_once(by, handle, op, arguments, given, results);
}

namespace {

// allow_immediate(bytes): operations may run at once, so far as each makes so many bytes.
PyObject* allow_immediate(PyObject*, PyObject* bytes) {
  bytes_an_operation = PyLong_AsLongLong(bytes);
  if (PyErr_Occurred()) return nullptr;
  allowance.renew();
  Py_RETURN_NONE;
}

// record_here(change): this thread enters (1) or leaves (-1) a block whose operations do not run at once.
PyObject* record_here(PyObject*, PyObject* change) {
  long by = PyLong_AsLong(change);
  if (by == -1 && PyErr_Occurred()) return nullptr;
  recording += static_cast<int>(by);
  Py_RETURN_NONE;
}

// performed(): how many operations have run at once; performed_small(): how many of these by a kernel for small tensors.
PyObject* count(PyObject*, PyObject*) { return PyLong_FromLongLong(performed); }
PyObject* count_small(PyObject*, PyObject*) { return PyLong_FromLongLong(performed_small.load()); }

}  // namespace

PyMethodDef immediate_functions[] = {
    {"allow_immediate", allow_immediate, METH_O, nullptr},
    {"record_here", record_here, METH_O, nullptr},
    {"performed", count, METH_NOARGS, nullptr},
    {"performed_small", count_small, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
