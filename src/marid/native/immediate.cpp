// Running an operation at once on concrete tensors. When that is done is decided in frontend/ahead.py, and checked for
// each call in record.cpp: all of its arguments have run, and nothing is pending that a write could overtake.
#include "immediate.h"

#include "concretely.h"
#include "geometry.h"
#include "resident.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

extern "C" int marid_queue_busy();  // queue.cpp

namespace marid {

Allowance allowance;
thread_local int recording = 0;
int64_t performed = 0;

namespace {

constexpr int64_t kMostBytes = 16 << 20;
constexpr int64_t kOperations = 16384;  // without a read
constexpr size_t kQuick = 256 << 10;  // bytes that an operator reads in less time than others would wait for the lock
int64_t bytes_an_operation = 0;

}  // namespace

Below::Below(bool lets_go)
    : keys_(c10::impl::tls_local_dispatch_key_set()),
      functions_(at::impl::PythonTorchFunctionTLS::get_disabled_state()),
      thread_(lets_go ? PyEval_SaveThread() : nullptr) {
  c10::impl::LocalDispatchKeySet inside = keys_;
  auto [included, excluded] = keys_inside();
  inside.included_ = included;
  inside.excluded_ = excluded;
  c10::impl::_force_tls_local_dispatch_key_set(inside);
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
}

Below::~Below() {
  at::impl::PythonTorchFunctionTLS::set_disabled_state(functions_);
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

void perform(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const Concrete& concrete,
             torch::jit::Stack& returned) {
  size_t next = 0;
  returned.reserve(arguments.size());
  auto placed = [&](const at::Tensor& tensor) { return handle_of(tensor) != nullptr ? concrete[next++] : tensor; };
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      returned.emplace_back(placed(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> items;
      for (const c10::IValue& item : argument.toListRef()) items.push_back(placed(item.toTensor()));
      returned.emplace_back(std::move(items));
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> items;
      for (const c10::IValue& item : argument.toListRef()) {
        items.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(placed(item.toTensor())));
      }
      returned.emplace_back(std::move(items));
    } else if (argument.isDevice()) {
      returned.emplace_back(c10::Device(c10::kCPU));
    } else {
      returned.push_back(argument);
    }
  }
  size_t nbytes = 0;
  for (const at::Tensor& tensor : concrete) nbytes += tensor.nbytes();
  Below below(nbytes > kQuick);
  op.callBoxed(&returned);
}

namespace {

// Whether a call can run at once: its arguments exist, and nothing is pending, or on the device's thread, that it must see
// or could overtake.
bool is_ready(PyObject* on, const Call& call, bool writes, Concrete& concrete) {
  concrete.clear();
  if (marid_queue_busy() != 0) return false;
  if (writes && PyList_GET_SIZE(tape.at(on, kEntries)) != 0) return false;
  for (size_t i = 0; i < call.values.size(); i++) {
    concrete.push_back(concrete_tensor(call.values[i]));
    PyObject* own = call.handles[i]->storage.get();
    if (!concrete.back().defined() || (own != nullptr && last_write(own) != nullptr)) return false;
  }
  return true;
}

// Whether a result is as recorded; `viewed` is what it is a view of.
bool is_as_recorded(const at::Tensor& result, PyObject* spec, const at::Tensor* viewed) {
  const Geometry* recorded = geometry_of(spec);
  if (recorded == nullptr || !agrees(result, *recorded, viewed)) return false;
  size_t owners = result.use_count();  // the stack, and the list that is on it
  return viewed != nullptr || owners == 1 || (owners == 2 && has_object(*result.unsafeGetTensorImpl()->pyobj_slot()));
}

// A result in the layout that was recorded for it, with the interpreter's lock. Throws where it is another tensor.
at::Tensor laid_out(const at::Tensor& result, PyObject* spec) {
  const Geometry* recorded = geometry_of(spec);
  TORCH_CHECK(recorded != nullptr && result.defined() && result.sizes() == c10::IntArrayRef(recorded->sizes) &&
                  result.scalar_type() == recorded->dtype,
              "marid: an operator returned another tensor than was recorded");
  Below below(false);
  return at::empty_strided(recorded->sizes, recorded->strides, result.options()).copy_(result);
}

// The new tensors among what an operator returned; false where they are not as recorded. Where it also `writes`, it cannot
// be done again, and they are laid out as recorded.
bool take_returned(const Operator& op, PyObject* like, const Concrete& concrete, const torch::jit::Stack& returned,
                   bool writes, Concrete& made) {
  auto take = [&](const at::Tensor& result, PyObject* spec, PyObject* view_of) {
    const at::Tensor* viewed = view_of == Py_None ? nullptr : &concrete[PyLong_AsSize_t(view_of)];
    bool is_right = is_as_recorded(result, spec, viewed);
    if (is_right || writes) made.push_back(is_right ? result : laid_out(result, spec));
    return is_right || writes;
  };
  if (known.at(like, kReturned) != Py_None) return true;
  if (known.at(like, kPattern) != Py_None) {
    return take(returned[0].toTensor(), known.at(like, kResult), known.at(like, kViewOf));
  }
  PyObject* described = known.at(like, kSeveral);
  size_t count = static_cast<size_t>(PyTuple_GET_SIZE(described));
  c10::ArrayRef<c10::IValue> items = op.returns_list ? returned[0].toListRef() : c10::ArrayRef<c10::IValue>(returned);
  if (items.size() != count) return false;
  for (size_t i = 0; i < count; i++) {
    PyObject* one = PyTuple_GET_ITEM(described, i);
    if (one == Py_None || PyTuple_GET_ITEM(one, 0) != Py_None) {
      made.emplace_back();
    } else if (!take(items[i].toTensor(), PyTuple_GET_ITEM(one, 2), PyTuple_GET_ITEM(one, 4))) {
      return false;
    }
  }
  return true;
}

// How many bytes a call has read and written, at most; none for views.
int64_t traffic(PyObject* like, const Concrete& concrete, const Concrete& made) {
  PyObject* described = known.at(like, kSeveral);
  PyObject* first = described != Py_None && PyTuple_GET_SIZE(described) != 0 ? PyTuple_GET_ITEM(described, 0) : Py_None;
  if (known.at(like, kViewOf) != Py_None || (first != Py_None && PyTuple_GET_ITEM(first, 4) != Py_None)) return 0;
  int64_t nbytes = 0;
  for (const Concrete* tensors : {&concrete, &made}) {
    for (const at::Tensor& one : *tensors) nbytes += one.defined() ? static_cast<int64_t>(one.nbytes()) : 0;
  }
  return nbytes;
}

}  // namespace

Outcome run_at_once(PyObject* by, PyObject* like, const c10::OperatorHandle& handle, const Operator& op,
                    c10::ArrayRef<c10::IValue> arguments, const Call& call, Results& results) {
  PyObject* on = known.at(like, kTape);
  bool writes = PyList_GET_SIZE(known.at(like, kWrites)) != 0;
  if (any_failed()) return Outcome::kUnusual;
  Concrete concrete, made;
  if (!is_ready(on, call, writes, concrete)) {
    if (PyErr_Occurred() || !Ref(PyObject_CallOneArg(run_pending, on))) return Outcome::kError;
    if (any_failed() || !is_ready(on, call, writes, concrete)) {
      return PyErr_Occurred() ? Outcome::kError : Outcome::kUnusual;
    }
  }
  torch::jit::Stack returned;
  perform(handle, arguments, concrete, returned);
  if (!take_returned(op, like, concrete, returned, writes, made)) {
    return PyErr_Occurred() ? Outcome::kError : Outcome::kUnusual;
  }
  if (!allowance.take(traffic(like, concrete, made))) tape.set(on, kImmediate, Ref::to(Py_False));
  performed++;
  note_writes(by, like, call);
  if (known.at(like, kReturned) != Py_None) {
    results.push_back(argument(call, known.at(like, kReturned)));
    return Outcome::kDone;
  }
  Ref of = new_node(by, like);
  return of && give_results(of.get(), like, call, &made, results) ? Outcome::kDone : Outcome::kError;
}

bool read_number(torch::jit::Stack* stack) {
  const at::Tensor& tensor = torch::jit::peek(*stack, 0, 1).toTensor();
  Handle* handle = handle_of(tensor);
  if (handle == nullptr || !handle->value || !is_value(handle->value.get())) return false;
  Ref value = Ref::to(handle->value.get());
  PyObject* on = tape_of(spec_of(value.get()));
  if (on == nullptr || recording > 0 || tape.at(on, kImmediate) != Py_True || any_failed()) return false;
  if (marid_queue_busy() != 0) return false;
  if (handle->storage && last_write(handle->storage.get()) != nullptr) return false;
  at::Tensor concrete = concrete_tensor(value.get());
  if (!concrete.defined()) return false;
  static const c10::OperatorHandle item = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_local_scalar_dense", "");
  torch::jit::Stack returned;
  const c10::IValue argument(tensor);
  perform(item, c10::ArrayRef<c10::IValue>(argument), Concrete{concrete}, returned);
  allowance.renew();
  torch::jit::drop(*stack, 1);
  stack->push_back(std::move(returned[0]));
  return true;
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

// performed(): how many operations have run at once.
PyObject* count(PyObject*, PyObject*) { return PyLong_FromLongLong(performed); }

}  // namespace

PyMethodDef immediate_functions[] = {
    {"allow_immediate", allow_immediate, METH_O, nullptr},
    {"record_here", record_here, METH_O, nullptr},
    {"performed", count, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
