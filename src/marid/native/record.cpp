// Recording a call that is like one recorded before, without running Python.
//
// frontend/record.py says what recording is and does all of it, for any call; `recorded` does the
// same for the usual ones: calls with own tensors, numbers, texts, None, dtypes and lists of these, whose key is known,
// and which return new tensors, views, arguments or nothing. Everything else is left to Python as it came.
//
// What it returns is made in results.cpp, what it must see and could overtake is found in order.cpp, and immediate.cpp runs it
// at once where that is allowed.
#include "record.h"

#include "backward.h"
#include "immediate.h"
#include "known_calls.h"
#include "reads_at_once.h"
#include "recorder.h"
#include "zeros.h"

#include <c10/util/SmallVector.h>

namespace {

using namespace marid;

// Add a node for a call to the tape, and its results for the user; false after an error. Until it is added, nothing
// changes.
bool add(PyObject* by, PyObject* like, const Call& call, long long budget, Results& results) {
  PyObject* on = known.at(like, kTape);
  Origin origin;
  if (!find_origin(by, &origin)) return false;
  Ref left(PyLong_FromLongLong(budget)), made = new_node(on, origin, known.at(like, kResult));
  if (!left || !made) return false;
  PyObject* of = made.get();
  node.set(of, kArgs, Ref::to(call.args.get()));
  node.set(of, kKwargs, Ref::to(call.kwargs.get()));
  if (!give_results(of, like, call, results)) return false;
  Ref entry(PyWeakref_NewRef(of, nullptr));
  if (!entry) return false;
  PyObject_GC_UnTrack(entry.get());
  // A node on the tape that failed to be ordered dies with this call: only `order` makes others refer to it, at its end.
  if (PyList_Append(tape.at(on, kEntries), entry.get()) < 0) return false;
  if (!order(of, on, call, known.at(like, kWrites))) return false;
  tape.set(on, kBudget, std::move(left));
  return true;
}

// What is known of a call that is the first with its key, where that can be derived; empty where it cannot, or after an
// error.
Ref derived(PyObject* by, PyObject* key, const Call& call) {
  PyObject* deriver = recorder.at(by, kDeriver);
  if (key == nullptr || deriver == Py_None || PyErr_Occurred()) return Ref();
  Ref values(PyTuple_New(static_cast<Py_ssize_t>(call.values.size())));
  if (!values) return Ref();
  for (size_t i = 0; i < call.values.size(); i++) {
    PyTuple_SET_ITEM(values.get(), i, Py_NewRef(call.values[i]));
  }
  Ref made(PyObject_CallFunctionObjArgs(
      deriver, by, key, call.args.get(), call.kwargs.get(), values.get(), nullptr));
  return made && Py_TYPE(made.get()) == known.type ? std::move(made) : Ref();
}

// A second tensor for the value of one of ours: no operation at all. Undefined where Python has to make it, or after an
// error.
at::Tensor same_value(const at::Tensor& tensor) {
  Handle* handle = handle_of(tensor);
  if (handle == nullptr) return at::Tensor();
  const std::shared_ptr<Computed>& computed = handle->computed();
  if (computed && computed->ran_at_once()) return new_handle(computed);
  Ref value(Py_XNewRef(handle->value()));
  if (!value || !is_value(value.get())) return at::Tensor();
  PyObject* pattern = spec.at(spec_of(value.get()), kSpecPattern);
  if (pattern == Py_None) return at::Tensor();
  PyObject* on = tape_of(spec_of(value.get()));
  PyObject* own = on == nullptr ? nullptr : storage_behind(handle, on);
  Ref address(own == nullptr ? nullptr : PyObject_GetAttr(pattern, address_name));
  if (!address) return at::Tensor();
  at::Tensor second = new_handle(address.get(), value.get());
  if (second.defined()) handle_of(second)->lie_in(own);
  return second;
}

bool same_value(const Operator& op, torch::jit::Stack* stack) {
  const c10::IValue& first = torch::jit::peek(*stack, 0, op.formals.size());
  if (op.formals.size() != 1 || !first.isTensor() || handle_of(first.toTensor()) == nullptr) return false;
  at::Tensor made = same_value(first.toTensor());
  if (!made.defined()) return false;
  torch::jit::drop(*stack, 1);
  stack->emplace_back(std::move(made));
  return true;
}

}  // namespace

at::Tensor marid::detached(const at::Tensor& tensor) {
  at::Tensor made = handle_type == nullptr || tapes == nullptr ? at::Tensor() : same_value(tensor);
  if (made.defined() && is_zero(tensor)) mark_zero(made);
  return made;
}

int64_t marid::uses_of_tables = 0;

PyObject* marid::recorder_of(const Operator& op) {
  if (op.found_at != uses_of_tables || !op.recorder) {
    op.recorder = Ref(Py_XNewRef(PyDict_GetItemWithError(recorders, op.identity)));
    op.found_at = uses_of_tables;
  }
  return op.recorder.get();
}

void marid::give_back(const Operator& op, Results& results, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.formals.size());
  if (op.returns_list) {
    c10::List<at::Tensor> list;
    for (at::Tensor& result : results) list.push_back(std::move(result));
    stack->emplace_back(std::move(list));
  } else {
    for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  }
}

namespace {

// What is known of a call, whose tensors are read into `call`; empty where Python has to find it out, or after an error.
Ref known_of(const Operator& op, PyObject* by, const c10::IValue* arguments, Call& call) {
  bool mutates = operation.at(recorder.at(by, kRecorderOp), kMutates) == Py_True;
  Words words{reinterpret_cast<uint64_t>(by)};
  if (!read_words(op, arguments, call, words)) return Ref();
  if (mutates) {
    Sharing shared = sharing(call);
    words.append(shared.roots.begin(), shared.roots.end());
    words.append(shared.tensors.begin(), shared.tensors.end());
  }
  if (PyObject* found = op.calls->find(words)) return Ref::to(found);
  Call whole{call.exact, call.exact_lists};
  if (read_call(op, arguments, whole) != Outcome::kDone) return Ref();
  Ref key = mutates ? full_key(whole) : Ref::to(whole.key.get());
  Ref like = key ? Ref(Py_XNewRef(PyDict_GetItemWithError(recorder.at(by, kKnown), key.get()))) : Ref();
  if (!like) like = derived(by, key.get(), whole);
  Ref keeps = like ? Ref(PyTuple_Pack(2, by, key.get())) : Ref();
  if (keeps) op.calls->keep(words, Ref::to(like.get()), std::move(keeps));
  return like;
}

// Whether a call, of an operator that may change the geometry of what it writes to, is known not to; false after an error, too.
bool keeps_geometry(const Operator& op, PyObject* by, const c10::IValue* given) {
  if (recorder.at(by, kAtOnceByRule) != Py_True || !may_run_at_once()) return false;
  Call call{recorder.at(by, kExactFloats) == Py_True, recorder.at(by, kExactLists) == Py_True};
  Ref like = known_of(op, by, given, call);
  return like && known.at(like.get(), kRepeats) == Py_True;
}

// Whether none of the indices of a call is a mask, by which the shape of its result would depend on values.
bool indexes_by_number(const c10::IValue& indices) {
  if (!indices.isList()) return false;
  for (const c10::IValue& index : indices.toListRef()) {
    if (!index.isTensor() || !index.toTensor().defined()) continue;
    at::ScalarType type = index.toTensor().scalar_type();
    if (type == at::kBool || type == at::kByte) return false;
  }
  return true;
}

// Let a call take its numbers from the device's generator; kUnusual to leave the call to Python, and nothing is taken.
Outcome draw(PyObject* by, PyObject* like, Call& call) {
  Ref named(PyObject_CallFunctionObjArgs(draw_for, by, like, call.args.get(), call.kwargs.get(), nullptr));
  if (!named) return Outcome::kError;
  if (named.get() == Py_None) return Outcome::kUnusual;
  call.kwargs = std::move(named);
  return Outcome::kDone;
}

// Make a tensor a view of itself: what `retarget` in frontend/record.py does with what `op.view` returns.
bool view_in_place(const Operator& op, torch::jit::Stack* stack) {
  size_t count = op.formals.size();
  at::Tensor self = torch::jit::peek(*stack, 0, count).toTensor();
  if (op.view == nullptr || !op.view_handle || handle_of(self) == nullptr) return false;
  auto arguments = torch::jit::last(*stack, count);
  torch::jit::Stack inner(arguments.begin(), arguments.end());
  if (!marid::recorded(*op.view_handle, *op.view, &inner)) return false;
  at::Tensor view = inner.back().toTensor();
  if (handle_of(view) == nullptr) return false;
  self.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(self));
  return true;
}

}  // namespace

bool marid::recorded(const c10::OperatorHandle& handle, const Operator& op, torch::jit::Stack* stack) {
  if (op.identity == nullptr || recorders == nullptr) return false;
  if (op.reads_number) return read_number(stack);
  PyObject* by = recorder_of(op);
  if (by == nullptr) return false;
  if (op.view_handle) return view_in_place(op, stack);
  if (op.general_handle) {
    torch::jit::Stack general = with_generator(op, torch::jit::last(*stack, op.formals.size()));
    if (general.empty() || !recorded(*op.general_handle, *op.general, &general)) return false;
    torch::jit::drop(*stack, op.formals.size());
    stack->push_back(std::move(general.back()));
    return true;
  }
  if (recorder.at(by, kSameValue) == Py_True) return same_value(op, stack);
  Results results;
  const c10::IValue* given = stack->data() + stack->size() - op.formals.size();
  c10::ArrayRef<c10::IValue> arguments(given, op.formals.size());
  bool may = recorder.at(by, kAtOnce) == Py_True || keeps_geometry(op, by, given);
  if (PyErr_Occurred()) return false;
  Outcome at_once = may ? run_at_once(by, handle, op, arguments, results) : Outcome::kUnusual;
  if (at_once == Outcome::kDone) give_back(op, results, stack);
  if (at_once != Outcome::kUnusual) return at_once == Outcome::kDone;
  give_objects(arguments);
  bool draws = recorder.at(by, kDraws) == Py_True;
  bool indexes = recorder.at(by, kIndexes) == Py_True && indexes_by_number(given[1]);
  if (recorder.at(by, kPlain) != Py_True && !draws && !indexes) return false;
  Call call{recorder.at(by, kExactFloats) == Py_True, recorder.at(by, kExactLists) == Py_True};
  Ref like = known_of(op, by, given, call);
  PyObject* found = like.get();
  if (found == nullptr || known.at(found, kRepeats) != Py_True) return false;
  bool one = known.at(found, kPattern) != Py_None || known.at(found, kReturned) != Py_None;
  PyObject* described = known.at(found, kSeveral);
  if (one ? op.returns != 1 || op.returns_list : described == Py_None) return false;
  if (!one && !op.returns_list && PyTuple_GET_SIZE(described) != static_cast<Py_ssize_t>(op.returns)) return false;
  long long left = PyLong_AsLongLong(tape.at(known.at(found, kTape), kBudget)) - PyLong_AsLongLong(known.at(found, kCost));
  if (left < 0) return false;  // the tape may be full
  if (!store_call(op, given, call)) return false;
  if (draws && draw(by, found, call) != Outcome::kDone) return false;
  if (!add(by, found, call, left, results)) return false;
  note_writes(by, op, arguments);
  give_back(op, results, stack);
  return true;
}

torch::jit::Stack marid::with_generator(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.general->identity == nullptr) return {};
  torch::jit::Stack general;
  for (const Formal& formal : op.general->formals) {
    auto own = std::find_if(op.formals.begin(), op.formals.end(), [&](const Formal& one) { return one.name == formal.name; });
    general.push_back(own == op.formals.end() ? c10::IValue() : arguments[own - op.formals.begin()]);
  }
  return general;
}

bool marid::recorded_anew(const Operator& op, c10::ArrayRef<c10::IValue> plain, c10::DeviceIndex device, Results& results) {
  PyObject* by = recorder_of(op);
  if (by == nullptr) return false;
  bool draws = recorder.at(by, kDraws) == Py_True;
  if (recorder.at(by, kPlain) != Py_True && !draws) return false;
  Call call{recorder.at(by, kExactFloats) == Py_True, recorder.at(by, kExactLists) == Py_True};
  Words words{reinterpret_cast<uint64_t>(by)};
  if (!read_words(op, plain.data(), call, words) || !call.values.empty()) return false;
  words.push_back(static_cast<uint64_t>(device));
  Ref like = Ref(Py_XNewRef(op.calls->find(words)));
  if (!like) {  // where Python knows it
    Call whole{call.exact, call.exact_lists};
    if (read_call(op, plain.data(), whole) != Outcome::kDone) return false;
    Ref index(PyLong_FromLong(device));
    Ref key = index ? Ref(PyTuple_Pack(2, whole.key.get(), index.get())) : Ref();
    like = key ? Ref(Py_XNewRef(PyDict_GetItemWithError(recorder.at(by, kKnown), key.get()))) : Ref();
    Ref keeps = like ? Ref(PyTuple_Pack(2, by, key.get())) : Ref();
    if (!keeps) return false;
    op.calls->keep(words, Ref::to(like.get()), std::move(keeps));
  }
  PyObject* found = like.get();
  if (known.at(found, kRepeats) != Py_True || known.at(found, kPattern) == Py_None) return false;
  long long left = PyLong_AsLongLong(tape.at(known.at(found, kTape), kBudget)) - PyLong_AsLongLong(known.at(found, kCost));
  if (left < 0 || !store_call(op, plain.data(), call)) return false;
  if (draws && draw(by, found, call) != Outcome::kDone) return false;
  return add(by, found, call, left, results);
}
