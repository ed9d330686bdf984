// Recording a call that is like one recorded before, without running Python.
//
// frontend/record.py says what recording is and does all of it, for any call; `recorded` does the
// same for the usual ones: calls with own tensors, numbers, texts, None, dtypes and lists of these, whose key is known,
// and which return new tensors, views, arguments or nothing. Everything else is left to Python as it came.
//
// Nodes, storages and what is known of calls are Python objects with __slots__, read and written where the slots lie.
#include "record.h"

#include "call.h"
#include "geometry.h"
#include "immediate.h"
#include "known_calls.h"
#include "resident.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/SmallVector.h>

#include <cstring>
#include <exception>

// From PyTorch's Python half, whose headers take long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
PyObject* THPVariable_Wrap(const at::TensorBase& tensor, PyTypeObject* type);
extern "C" {
void marid_view_by_strides(void* tensor);  // device.cpp
int marid_queue_busy();  // queue.cpp
}
namespace torch::autograd {
int get_current_graph_task_id();
}

namespace {

using namespace marid;

// --- what `configure` is told ----------------------------------------------------------------------------------------

Slots operation, storage, recorder, known, tape, spec;
enum OperationSlot { kMutates };
enum StorageSlot { kLastRead, kLastWrite, kStorageHandle };
enum RecorderSlot { kRecorderOp, kPlain, kDraws, kIndexes, kSameValue, kExactFloats, kExactLists, kKnown, kBumps, kDeriver };
enum KnownSlot { kRepeats, kResult, kPattern, kViewOf, kReturned, kSeveral, kWrites, kTape, kCost };
enum TapeSlot { kSequence, kEntries, kRoom, kImmediate };
enum SpecSlot { kSpecPattern, kSpecDevice };

PyObject* torch_function;  // of handles
PyObject *not_recorded, *bucket, *bounds;  // see frontend/calls.py
PyObject* tapes;  // see frontend/handles.py
PyObject* last_write_of;  // see graph/node.py
PyObject* run_pending;  // see frontend/materialize.py
PyObject *draw_for, *draw_failed;  // see frontend/record.py
PyObject* recorders;  // by identity of the operator
PyObject *backward_name, *address_name;  // attributes

// --- the order of reads and writes -----------------------------------------------------------------------------------

// The write that a reader must see, if any: a pending one, or one that failed unnoticed (graph/node.py). Borrowed.
PyObject* last_write(PyObject* of) {
  PyObject* write = storage.at(of, kLastWrite);
  if (write == Py_None) return nullptr;
  if (node.at(write, kArgs) != Py_None) return write;
  if (any_failed() && Ref(PyObject_CallOneArg(last_write_of, of)).get() == write) return write;
  storage.set(of, kLastWrite, Ref::to(Py_None));
  return nullptr;
}

Ref next_number(PyObject* on) {
  PyObject* sequence = tape.at(on, kSequence);
  return Ref(Py_TYPE(sequence)->tp_iternext(sequence));
}

// The storage of a tensor of this tape, made when it has none: `storage_of` in frontend/handles.py.
Ref storage_behind(PyObject* tensor, PyObject* on) {
  Ref own = storage_of(tensor);
  if (own.get() != Py_None) return own;
  Ref number = next_number(on), made(storage.type->tp_alloc(storage.type, 0));
  if (!number || !made) return Ref();
  storage.set(made.get(), kLastRead, std::move(number));
  storage.set(made.get(), kLastWrite, Ref::to(Py_None));
  storage.set(made.get(), kStorageHandle, Ref::to(Py_None));
  return set_storage(tensor, made.get()) ? std::move(made) : Ref();
}

// Note what the node must see and, for what it writes, who may still have to read. Everything that can fail comes first.
bool order(PyObject* of, PyObject* on, const Call& call, PyObject* writes) {
  c10::SmallVector<Ref, 8> storages;
  for (const Ref& tensor : call.tensors) {
    storages.push_back(storage_of(tensor.get()));
    if (!storages.back()) return false;
  }
  c10::SmallVector<size_t, 8> written;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(writes); i++) {
    written.push_back(PyLong_AsSize_t(PyList_GET_ITEM(writes, i)));
    storages[written.back()] = storage_behind(call.tensors[written.back()].get(), on);
    if (!storages[written.back()]) return false;
  }
  c10::SmallVector<PyObject*, 8> after, overwrites;
  for (const Ref& own : storages) {
    if (own.get() == Py_None) continue;
    if (PyObject* write = last_write(own.get())) after.push_back(write);
    if (PyErr_Occurred()) return false;
  }
  for (size_t index : written) {
    PyObject* own = storages[index].get();
    PyObject* write = storage.at(own, kLastWrite);
    long long read_at = PyLong_AsLongLong(storage.at(own, kLastRead));
    long long written_at = write == Py_None ? 0 : PyLong_AsLongLong(node.at(write, kSeq));
    if (read_at > written_at) overwrites.push_back(root_of(call.values[index]));
  }
  for (auto [found, index] : {std::pair(&after, kAfter), std::pair(&overwrites, kOverwrites)}) {
    if (found->empty()) continue;
    Ref all = untracked_tuple(found->size());
    if (!all) return false;
    for (size_t i = 0; i < found->size(); i++) PyTuple_SET_ITEM(all.get(), i, Py_NewRef((*found)[i]));
    node.set(of, index, std::move(all));
  }
  for (const Ref& own : storages) {
    if (own.get() != Py_None) storage.set(own.get(), kLastRead, Ref::to(node.at(of, kSeq)));
  }
  for (size_t index : written) {
    storage.set(storages[index].get(), kLastWrite, Ref::to(of));
    storage.set(storages[index].get(), kLastRead, Ref(PyLong_FromLong(0)));
  }
  return true;
}

// --- recording -------------------------------------------------------------------------------------------------------

bool is_in_python(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

// A tensor copied from a pattern, with its Python object; undefined after an error.
at::Tensor new_handle(PyObject* address, PyObject* value, Ref& handle) {
  auto* pattern = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address));
  auto copy = pattern->shallow_copy_and_detach(c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true);
  copy->set_python_dispatch(true);
  at::Tensor made(std::move(copy));
  handle = Ref(THPVariable_Wrap(made, handle_type));
  marid_view_by_strides(made.unsafeGetTensorImpl());
  return handle && set_value(handle.get(), value) ? made : at::Tensor();
}

at::Tensor argument(const Call& call, PyObject* index) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
      call.impls[PyLong_AsSize_t(index)]));
}

using Results = c10::SmallVector<at::Tensor, 4>;

// Let a new result be a view of an argument: it has its storage; what it lies in is `root`.
bool view(PyObject* handle, PyObject* on, const Call& call, PyObject* view_of, Ref& root) {
  size_t base = PyLong_AsSize_t(view_of);
  Ref own = storage_behind(call.tensors[base].get(), on);
  root = Ref::to(root_of(call.values[base]));
  return own && set_storage(handle, own.get());
}

// The results of a node that has several, or none: see Known.several. `made` are those of one that has run.
bool several(PyObject* of, PyObject* on, PyObject* described, const Call& call, const Concrete* made_of, Results& results) {
  Py_ssize_t count = PyTuple_GET_SIZE(described);
  c10::SmallVector<Ref, 4> outs;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* one = PyTuple_GET_ITEM(described, i);
    if (one == Py_None) {
      results.emplace_back();
      continue;
    }
    PyObject* same_as = PyTuple_GET_ITEM(one, 0);
    if (same_as != Py_None) {
      results.push_back(argument(call, same_as));
      continue;
    }
    Ref made(output.type->tp_alloc(output.type, 0)), handle, root = Ref::to(Py_None);
    if (!made) return false;
    PyObject_GC_UnTrack(made.get());
    output.set(made.get(), kOutputNode, Ref::to(of));
    output.set(made.get(), kPath, Ref::to(PyTuple_GET_ITEM(one, 1)));
    output.set(made.get(), kOutputSpec, Ref::to(PyTuple_GET_ITEM(one, 2)));
    output.set(made.get(), kOutputConcrete, Ref::to(Py_None));
    output.set(made.get(), kOutputRoot, Ref::to(Py_None));
    if (made_of != nullptr) {
      output.set(made.get(), kOutputConcrete, Ref(THPVariable_Wrap((*made_of)[i])));
      if (!note_resident(on, made.get())) return false;
    }
    results.push_back(new_handle(PyTuple_GET_ITEM(one, 3), made.get(), handle));
    if (!results.back().defined()) return false;
    PyObject* view_of = PyTuple_GET_ITEM(one, 4);
    if (view_of != Py_None && !view(handle.get(), on, call, view_of, root)) return false;
    output.set(made.get(), kOutputRoot, std::move(root));
    outs.emplace_back(PyWeakref_NewRef(made.get(), nullptr));
    if (!outs.back()) return false;
    PyObject_GC_UnTrack(outs.back().get());
  }
  Ref all = untracked_tuple(outs.size());
  if (!all) return false;
  for (size_t i = 0; i < outs.size(); i++) PyTuple_SET_ITEM(all.get(), i, outs[i].release());
  node.set(of, kOuts, std::move(all));
  return true;
}

// A node for a call, of which all is set but what it needs.
Ref new_node(PyObject* by, PyObject* like) {
  Ref seq = next_number(known.at(like, kTape)), site, scope;
  if (!seq || !marid::where(&site, &scope)) return Ref();
  if (torch::autograd::get_current_graph_task_id() >= 0) scope = Ref(PyObject_GetAttr(scope.get(), backward_name));
  if (!scope) return Ref();
  Ref made(node.type->tp_alloc(node.type, 0));
  if (!made) return Ref();
  PyObject_GC_UnTrack(made.get());
  PyObject* of = made.get();
  node.set(of, kSeq, std::move(seq));
  node.set(of, kOp, Ref::to(recorder.at(by, kRecorderOp)));
  node.set(of, kSpec, Ref::to(known.at(like, kResult)));
  node.set(of, kSite, std::move(site));
  node.set(of, kScope, std::move(scope));
  for (int slot : {kArgs, kKwargs, kRoot, kAfter, kOverwrites, kConcrete, kOuts}) node.set(of, slot, Ref::to(Py_None));
  return made;
}

// The results of a node for the user; false after an error. `made` are the tensors of one that has run.
bool give_results(PyObject* of, PyObject* like, const Call& call, const Concrete* made, Results& results) {
  PyObject *on = known.at(like, kTape), *returned = known.at(like, kReturned), *view_of = known.at(like, kViewOf);
  if (known.at(like, kPattern) != Py_None) {
    Ref handle, root;
    if (made != nullptr) {
      node.set(of, kConcrete, Ref(THPVariable_Wrap((*made)[0])));
      if (!note_resident(on, of)) return false;
    }
    results.push_back(new_handle(known.at(like, kPattern), of, handle));
    if (!results.back().defined()) return false;
    if (view_of != Py_None) {
      if (!view(handle.get(), on, call, view_of, root)) return false;
      node.set(of, kRoot, std::move(root));
    }
  } else if (returned != Py_None) {
    node.set(of, kOuts, untracked_tuple(0));
    results.push_back(argument(call, returned));
  } else {
    return several(of, on, known.at(like, kSeveral), call, made, results);
  }
  return true;
}

void note_writes(PyObject* by, PyObject* like, const Call& call) {
  if (recorder.at(by, kBumps) != Py_True) return;
  PyObject* writes = known.at(like, kWrites);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(writes); i++) {
    call.impls[PyLong_AsSize_t(PyList_GET_ITEM(writes, i))]->bump_version();
  }
}

// Add a node for a call to the tape, and its results for the user; false after an error. Until it is added, nothing
// changes.
bool add(PyObject* by, PyObject* like, const Call& call, long long room, Results& results) {
  PyObject* on = known.at(like, kTape);
  Ref left(PyLong_FromLongLong(room)), made = new_node(by, like);
  if (!left || !made) return false;
  PyObject* of = made.get();
  node.set(of, kArgs, Ref::to(call.args.get()));
  node.set(of, kKwargs, Ref::to(call.kwargs.get()));
  if (!give_results(of, like, call, nullptr, results)) return false;
  Ref entry(PyWeakref_NewRef(of, nullptr));
  if (!entry) return false;
  PyObject_GC_UnTrack(entry.get());
  // A node on the tape that failed to be ordered dies with this call: only `order` makes others refer to it, at its end.
  if (PyList_Append(tape.at(on, kEntries), entry.get()) < 0) return false;
  if (!order(of, on, call, known.at(like, kWrites))) return false;
  tape.set(on, kRoom, std::move(left));
  note_writes(by, like, call);
  return true;
}

// --- running at once ---------------------------------------------------------------------------------------------------

// Whether a call can run at once: its arguments exist, and nothing is pending, or on the device's thread, that it must see
// or could overtake.
bool is_ready(PyObject* on, const Call& call, bool writes, Concrete& concrete) {
  concrete.clear();
  if (marid_queue_busy() != 0) return false;
  if (writes && PyList_GET_SIZE(tape.at(on, kEntries)) != 0) return false;
  for (size_t i = 0; i < call.values.size(); i++) {
    concrete.push_back(concrete_tensor(call.values[i]));
    Ref own = storage_of(call.tensors[i].get());
    if (!concrete.back().defined() || !own || (own.get() != Py_None && last_write(own.get()) != nullptr)) return false;
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

// Run a call now; kUnusual where it has to be recorded, and nothing has happened.
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

// The tape of the device that a spec is of; null after an error. Borrowed.
PyObject* tape_of(PyObject* of) {
  return PyList_GetItem(tapes, PyLong_AsSsize_t(spec.at(of, kSpecDevice)));
}

// A number that has been computed; false to leave the read to Python.
bool read_number(torch::jit::Stack* stack) {
  const at::Tensor& tensor = torch::jit::peek(*stack, 0, 1).toTensor();
  if (!is_in_python(tensor)) return false;
  Ref handle(THPVariable_Wrap(tensor));
  if (!handle || Py_TYPE(handle.get()) != handle_type) return false;
  Ref value = value_of(handle.get()), own = storage_of(handle.get());
  if (!value || !own || !is_value(value.get())) return false;
  PyObject* on = tape_of(spec_of(value.get()));
  if (on == nullptr || recording > 0 || tape.at(on, kImmediate) != Py_True || any_failed()) return false;
  if (marid_queue_busy() != 0) return false;
  if (own.get() != Py_None && last_write(own.get()) != nullptr) return false;
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
  Ref handle(THPVariable_Wrap(tensor)), made;
  if (!handle || Py_TYPE(handle.get()) != handle_type) return at::Tensor();
  Ref value = value_of(handle.get());
  if (!value || !is_value(value.get())) return at::Tensor();
  // Not a copy of the tensor itself: PyTorch asks Python how to detach one that is implemented there.
  PyObject* pattern = spec.at(spec_of(value.get()), kSpecPattern);
  if (pattern == Py_None) return at::Tensor();
  PyObject* on = tape_of(spec_of(value.get()));
  Ref own = on == nullptr ? Ref() : storage_behind(handle.get(), on);
  Ref address(PyObject_GetAttr(pattern, address_name));
  if (!own || !address) return at::Tensor();
  at::Tensor second = new_handle(address.get(), value.get(), made);
  if (!second.defined() || !set_storage(made.get(), own.get())) return at::Tensor();
  return second;
}

bool same_value(const Operator& op, torch::jit::Stack* stack) {
  const c10::IValue& first = torch::jit::peek(*stack, 0, op.formals.size());
  if (op.formals.size() != 1 || !first.isTensor() || !is_in_python(first.toTensor())) return false;
  at::Tensor made = same_value(first.toTensor());
  if (!made.defined()) return false;
  torch::jit::drop(*stack, 1);
  stack->emplace_back(std::move(made));
  return true;
}

}  // namespace

at::Tensor marid::detached(const at::Tensor& tensor) {
  return handle_type == nullptr || tapes == nullptr ? at::Tensor() : same_value(tensor);
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

// Let a call take its numbers from the device's generator; `generator` is where they begin, if it runs at once. kUnusual to
// leave the call to Python, and nothing is taken.
Outcome draw(PyObject* by, PyObject* like, Call& call, bool at_once, at::Generator& generator) {
  Ref drawn(PyObject_CallFunctionObjArgs(
      draw_for, by, like, call.args.get(), call.kwargs.get(), at_once ? Py_True : Py_False, nullptr));
  if (!drawn) return Outcome::kError;
  if (drawn.get() == Py_None) return Outcome::kUnusual;
  call.kwargs = Ref::to(PyTuple_GET_ITEM(drawn.get(), 0));
  if (!at_once) return Outcome::kDone;
  Ref address(PyObject_GetAttr(PyTuple_GET_ITEM(drawn.get(), 1), address_name));
  if (!address) return Outcome::kError;
  auto* impl = static_cast<c10::GeneratorImpl*>(PyLong_AsVoidPtr(address.get()));
  generator = at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(impl));
  return Outcome::kDone;
}

// Make a tensor a view of itself: what `retarget` in frontend/record.py does with what `op.view` returns.
bool view_in_place(const Operator& op, torch::jit::Stack* stack) {
  size_t count = op.formals.size();
  at::Tensor self = torch::jit::peek(*stack, 0, count).toTensor();
  if (op.view == nullptr || !op.view_handle || !is_in_python(self)) return false;
  auto arguments = torch::jit::last(*stack, count);
  torch::jit::Stack inner(arguments.begin(), arguments.end());
  if (!marid::recorded(*op.view_handle, *op.view, &inner)) return false;
  at::Tensor view = inner.back().toTensor();
  Ref handle(THPVariable_Wrap(self)), made(THPVariable_Wrap(view));
  if (!handle || !made) return false;
  Ref value = value_of(made.get()), own = storage_of(made.get());
  if (!value || !own) return false;
  self.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
  if (!set_value(handle.get(), value.get()) || !set_storage(handle.get(), own.get())) return false;
  torch::jit::drop(*stack, count);
  stack->emplace_back(std::move(self));
  return true;
}

}  // namespace

bool marid::recorded(const c10::OperatorHandle& handle, const Operator& op, torch::jit::Stack* stack) {
  if (op.identity == nullptr || recorders == nullptr) return false;
  if (op.reads_number) return read_number(stack);
  PyObject* by = PyDict_GetItemWithError(recorders, op.identity);
  if (by == nullptr) return false;
  if (op.view_handle) return view_in_place(op, stack);
  if (recorder.at(by, kSameValue) == Py_True) return same_value(op, stack);
  const c10::IValue* given = stack->data() + stack->size() - op.formals.size();
  c10::ArrayRef<c10::IValue> arguments(given, op.formals.size());
  bool draws = recorder.at(by, kDraws) == Py_True;
  bool indexes = recorder.at(by, kIndexes) == Py_True && indexes_by_number(given[1]);
  if (recorder.at(by, kPlain) != Py_True && !draws && !indexes) return false;
  Ref held = Ref::to(by);
  Call call{recorder.at(by, kExactFloats) == Py_True, recorder.at(by, kExactLists) == Py_True};
  Ref like = known_of(op, by, given, call);
  PyObject* found = like.get();
  if (found == nullptr || known.at(found, kRepeats) != Py_True) return false;
  bool one = known.at(found, kPattern) != Py_None || known.at(found, kReturned) != Py_None;
  PyObject* described = known.at(found, kSeveral);
  if (one ? op.returns != 1 || op.returns_list : described == Py_None) return false;
  if (!one && !op.returns_list && PyTuple_GET_SIZE(described) != static_cast<Py_ssize_t>(op.returns)) return false;
  PyObject* on = known.at(found, kTape);
  bool immediate = recording == 0 && tape.at(on, kImmediate) == Py_True;
  long long left = PyLong_AsLongLong(tape.at(on, kRoom)) - PyLong_AsLongLong(known.at(found, kCost));
  if (left < 0 && !immediate) return false;  // the tape may be full
  if ((draws || !immediate) && !store_call(op, given, call)) return false;
  std::vector<c10::IValue> positioned;
  if (draws) {
    at::Generator generator;
    if (draw(by, found, call, immediate, generator) != Outcome::kDone) return false;
    positioned.assign(arguments.begin(), arguments.end());
    if (generator.defined()) positioned[*op.generator] = std::move(generator);
    arguments = positioned;
  }
  Results results;
  Outcome at_once = Outcome::kUnusual;
  if (immediate) {
    try {
      at_once = run_at_once(by, found, handle, op, arguments, call, results);
    } catch (...) {
      if (draws) Ref(PyObject_CallFunctionObjArgs(draw_failed, found, call.kwargs.get(), nullptr));
      throw;
    }
  }
  if (at_once == Outcome::kError) return false;
  if (at_once == Outcome::kUnusual) {
    results.clear();
    if (left < 0 && !draws) return false;  // what it draws it has by now
    if (!call.args && !store_call(op, given, call)) return false;
    if (!add(by, found, call, left, results)) return false;
  }
  torch::jit::drop(*stack, op.formals.size());
  if (op.returns_list) {
    c10::List<at::Tensor> list;
    for (at::Tensor& result : results) list.push_back(std::move(result));
    stack->emplace_back(std::move(list));
  } else {
    for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  }
  return true;
}

namespace {

// --- setting up ----------------------------------------------------------------------------------------------------

// configure(**names): the classes and functions that recording needs.
PyObject* configure(PyObject*, PyObject*, PyObject* names) {
  PyObject *operation_type, *node_type, *output_type, *storage_type, *recorder_type, *known_type, *tape_type, *spec_type;
  std::pair<const char*, PyObject**> wanted[] = {
      {"Operation", &operation_type}, {"Node", &node_type}, {"Output", &output_type}, {"Storage", &storage_type},
      {"Recorder", &recorder_type}, {"Known", &known_type}, {"Tape", &tape_type}, {"Spec", &spec_type}, {"not_recorded", &not_recorded},
      {"bucket", &bucket}, {"bounds", &bounds}, {"tapes", &tapes}, {"last_write", &last_write_of}, {"run_pending", &run_pending}, {"draw_for", &draw_for},
      {"draw_failed", &draw_failed}};
  for (auto [name, place] : wanted) {
    *place = PyDict_GetItemString(names, name);
    if (*place == nullptr) return PyErr_Format(PyExc_TypeError, "configure() needs %s", name);
    Py_INCREF(*place);
  }
  bool found = operation.find(operation_type, {"mutates"}) &&
      node.find(
          node_type,
          {"seq", "op", "args", "kwargs", "spec", "root", "site", "scope", "after", "overwrites", "outs", "concrete"}) &&
      output.find(output_type, {"node", "path", "spec", "root", "concrete"}) && storage.find(storage_type, {"last_read", "last_write", "handle"}) &&
      recorder.find(
          recorder_type, {"op", "plain", "draws", "indexes", "same_value", "exact_floats", "exact_lists", "known", "bumps", "deriver"}) &&
      known.find(
          known_type, {"repeats", "spec", "pattern", "view_of", "returned", "several", "writes", "tape", "cost"}) &&
      tape.find(tape_type, {"sequence", "entries", "room", "immediate"}) && spec.find(spec_type, {"pattern", "device"});
  if (!found || !marid::set_bounds(bounds)) return nullptr;
  marid::prepare_reading(bucket);
  Py_RETURN_NONE;
}

// record_calls(on): have PyTorch's operators recorded here, or leave them to Python again.
PyObject* record_calls(PyObject*, PyObject* on) {
  try {
    on == Py_True ? marid::register_kernels(not_recorded) : marid::unregister_kernels();
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
  }
  Py_RETURN_NONE;
}

// detach_directly(on): have what autograd saves detached without a detour, or as PyTorch does it again.
PyObject* detach_directly(PyObject*, PyObject* on) {
  marid::detach_in_python(on == Py_True);
  Py_RETURN_NONE;
}

// use(recorders): find recorders in this dict, by identity of the operator.
PyObject* use(PyObject*, PyObject* table) {
  Py_XSETREF(recorders, Py_NewRef(table));
  Py_RETURN_NONE;
}

// An attribute by a name in C. So PyTorch asks of each tensor that it is given whether a Python function takes the call
// over, which for handles none does; making a string of the name, and looking that up, would take it a third of a microsecond.
PyObject* attribute_of(PyObject* object, char* name) {
  if (Py_TYPE(object) == handle_type && std::strcmp(name, "__torch_function__") == 0) return Py_NewRef(torch_function);
  Ref made(PyUnicode_FromString(name));
  return made ? PyObject_GetAttr(object, made.get()) : nullptr;
}

// forget_known(): something that is known of calls has changed.
PyObject* forget_known(PyObject*, PyObject*) {
  marid::forget_known_calls();
  Py_RETURN_NONE;
}

// make_handles(type): what own tensors are.
PyObject* make_handles(PyObject*, PyObject* type) {
  torch_function = PyObject_GetAttrString(type, "__torch_function__");
  if (torch_function == nullptr) return nullptr;
  marid::prepare_handles(type);
  handle_type->tp_getattr = attribute_of;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"configure", marid::fast(configure), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"record_calls", record_calls, METH_O, nullptr},
    {"detach_directly", detach_directly, METH_O, nullptr},
    {"use", use, METH_O, nullptr},
    {"forget_known", forget_known, METH_NOARGS, nullptr},
    {"make_handles", make_handles, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "marid_native", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

namespace marid {
extern PyMethodDef kernel_functions[], cut_functions[], concretely_functions[], run_functions[], derive_functions[],
    geometry_functions[], autocast_functions[], stack_functions[], immediate_functions[], resident_functions[];
}

PyMODINIT_FUNC PyInit_marid_native() {
  backward_name = PyUnicode_InternFromString("backward");
  address_name = PyUnicode_InternFromString("_cdata");
  PyObject* made = PyModule_Create(&module);
  for (PyMethodDef* more :
       {marid::kernel_functions, marid::cut_functions, marid::concretely_functions, marid::run_functions,
        marid::derive_functions, marid::geometry_functions, marid::autocast_functions,
        marid::stack_functions, marid::immediate_functions, marid::resident_functions}) {
    if (made != nullptr && PyModule_AddFunctions(made, more) < 0) Py_CLEAR(made);
  }
  return made;
}
