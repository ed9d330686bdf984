// Recording a call that is like one recorded before, without running Python.
//
// frontend/record.py says what recording is and does all of it, for any call and without a compiler; `dispatch` does the
// same for the usual ones: calls with own tensors, numbers, texts, None, a few other types and lists of these, whose key
// is known, and which return one new tensor, a view, or an argument. Everything else is handed over as it came.
//
// Nodes, storages and what is known of calls are Python objects with __slots__, read and written where the slots lie.
#include "python.h"

#include <ATen/core/TensorBase.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <exception>
#include <unordered_map>

PyObject* THPVariable_Wrap(const at::TensorBase& tensor, PyTypeObject* type);
namespace torch::autograd {
int get_current_graph_task_id();
}

namespace {

using marid::Ref;
using marid::Slots;

// --- what `configure` is told ----------------------------------------------------------------------------------------

Slots operation, node, output, storage, recorder, known, tape;
enum OperationSlot { kMutates };
enum NodeSlot { kSeq, kOp, kArgs, kKwargs, kSpec, kRoot, kSite, kScope, kAfter, kOverwrites, kOuts, kConcrete };
enum OutputSlot { kOutputSpec, kOutputRoot };
enum StorageSlot { kLastRead, kLastWrite };
enum RecorderSlot { kRecorderOp, kPlain, kExactFloats, kKnown };
enum KnownSlot { kRepeats, kResult, kPattern, kViewOf, kReturned, kWrites, kTape, kCost };
enum TapeSlot { kSequence, kEntries, kRoom };

PyTypeObject* handle_type;
PyObject *other_types, *not_recorded;  // sets: see frontend/calls.py
PyObject *bucket, *sites, *internal, *capture_site, *thread_state;  // see frontend/calls.py, semantics/scopes.py
PyObject *storage_of, *append, *record, *overflow;  // see frontend/record.py
PyObject* recorders;  // by identity of the operator
PyObject *value_name, *storage_name, *scope_name, *backward_name;  // "_value", "_storage", "scope", "backward"
PyObject *unit, *large, *yes, *no;

bool is_value(PyObject* object) { return Py_TYPE(object) == node.type || Py_TYPE(object) == output.type; }
PyObject* spec_of(PyObject* value) {
  return Py_TYPE(value) == node.type ? node.at(value, kSpec) : output.at(value, kOutputSpec);
}
PyObject* root_of(PyObject* value) {
  PyObject* root = Py_TYPE(value) == node.type ? node.at(value, kRoot) : output.at(value, kOutputRoot);
  return root == Py_None ? value : root;
}

// --- reading a call --------------------------------------------------------------------------------------------------

enum class Outcome { kError, kUnusual, kDone };

struct Call {
  Ref key, args, kwargs;
  // In order of appearance, and what they stand for; kept by the arguments that were given and those that are recorded.
  c10::SmallVector<PyObject*, 8> tensors, values;
};

// A tuple that no reference cycle can go through. Nodes refer only to what is older, so neither they nor what they hold
// need Python's collector, which would else walk all of them again and again, and then everything else in the process.
Ref untracked_tuple(size_t size) {
  Ref made(PyTuple_New(static_cast<Py_ssize_t>(size)));
  if (made) PyObject_GC_UnTrack(made.get());
  return made;
}

// The key and the value of one argument.
Outcome read(PyObject* arg, bool exact, Call& call, PyObject** part, PyObject** stored) {
  PyTypeObject* type = Py_TYPE(arg);
  if (type == handle_type) {
    Ref value(PyObject_GetAttr(arg, value_name));
    if (!value) return Outcome::kError;
    if (!is_value(value.get())) return Outcome::kUnusual;
    call.tensors.push_back(arg);
    call.values.push_back(value.get());
    *part = Py_NewRef(spec_of(value.get()));
    *stored = value.release();
    return Outcome::kDone;
  }
  if (type == &PyList_Type || type == &PyTuple_Type) {
    Py_ssize_t count = PySequence_Fast_GET_SIZE(arg);
    Ref parts = untracked_tuple(count), items = untracked_tuple(count);
    if (!parts || !items) return Outcome::kError;
    for (Py_ssize_t i = 0; i < count; i++) {
      PyObject *one, *other;
      Outcome outcome = read(PySequence_Fast_GET_ITEM(arg, i), true, call, &one, &other);
      if (outcome != Outcome::kDone) return outcome;
      PyTuple_SET_ITEM(parts.get(), i, one);
      PyTuple_SET_ITEM(items.get(), i, other);
    }
    *part = parts.release();
    *stored = items.release();
    return Outcome::kDone;
  }
  if (type == &PyFloat_Type) {
    double number = PyFloat_AS_DOUBLE(arg);
    if (exact) {
      *part = PyTuple_Pack(1, arg);  // not equal to the integer
    } else if (0 <= number && number <= 1) {
      *part = Py_NewRef(unit);
    } else {
      *part = 1 < number && number <= 127 ? Py_NewRef(large) : PyObject_CallOneArg(bucket, arg);
    }
    if (*part == nullptr) return Outcome::kError;
  } else if (type == &PyBool_Type) {
    *part = Py_NewRef(arg == Py_True ? yes : no);
  } else if (type == &PyComplex_Type) {
    *part = Py_NewRef(reinterpret_cast<PyObject*>(type));
  } else if (type == &PyLong_Type || type == &PyUnicode_Type || arg == Py_None) {
    *part = Py_NewRef(arg);
  } else {
    int own_key = PySet_Contains(other_types, reinterpret_cast<PyObject*>(type));
    if (own_key != 1) return own_key < 0 ? Outcome::kError : Outcome::kUnusual;
    *part = Py_NewRef(arg);
  }
  *stored = Py_NewRef(arg);
  return Outcome::kDone;
}

Outcome read_call(PyObject* args, PyObject* kwargs, bool exact, Call& call) {
  Py_ssize_t positional = PyTuple_GET_SIZE(args);
  Py_ssize_t named = kwargs == nullptr || kwargs == Py_None ? 0 : PyDict_GET_SIZE(kwargs);
  call.key = untracked_tuple(positional + 2 * named);
  call.args = untracked_tuple(positional);
  call.kwargs = named == 0 ? Ref::to(Py_None) : untracked_tuple(named);
  if (!call.key || !call.args || !call.kwargs) return Outcome::kError;
  PyObject *part, *stored;
  for (Py_ssize_t i = 0; i < positional; i++) {
    Outcome outcome = read(PyTuple_GET_ITEM(args, i), exact, call, &part, &stored);
    if (outcome != Outcome::kDone) return outcome;
    PyTuple_SET_ITEM(call.key.get(), i, part);
    PyTuple_SET_ITEM(call.args.get(), i, stored);
  }
  if (named == 0) return Outcome::kDone;
  PyObject *name, *arg;
  Py_ssize_t at = 0, i = 0;
  while (PyDict_Next(kwargs, &at, &name, &arg)) {
    int unread = PySet_Contains(not_recorded, name);
    if (unread != 0) return unread < 0 ? Outcome::kError : Outcome::kUnusual;
    Outcome outcome = read(arg, exact, call, &part, &stored);
    if (outcome != Outcome::kDone) return outcome;
    PyTuple_SET_ITEM(call.key.get(), positional + 2 * i, Py_NewRef(name));
    PyTuple_SET_ITEM(call.key.get(), positional + 2 * i + 1, part);
    Ref value(stored);
    Ref pair = untracked_tuple(2);
    if (!pair) return Outcome::kError;
    PyTuple_SET_ITEM(pair.get(), 0, Py_NewRef(name));
    PyTuple_SET_ITEM(pair.get(), 1, value.release());
    PyTuple_SET_ITEM(call.kwargs.get(), i++, pair.release());
  }
  return Outcome::kDone;
}

Ref tensors_of(const Call& call) {
  Ref list(PyList_New(static_cast<Py_ssize_t>(call.tensors.size())));
  for (size_t i = 0; list && i < call.tensors.size(); i++) PyList_SET_ITEM(list.get(), i, Py_NewRef(call.tensors[i]));
  return list;
}

// For each of some objects, where it is first among them.
Ref first_occurrences(const c10::SmallVector<PyObject*, 8>& objects) {
  Ref all(PyTuple_New(static_cast<Py_ssize_t>(objects.size())));
  for (size_t i = 0; all && i < objects.size(); i++) {
    PyObject* place = PyLong_FromSize_t(std::find(objects.begin(), objects.end(), objects[i]) - objects.begin());
    if (place == nullptr) return Ref();
    PyTuple_SET_ITEM(all.get(), i, place);
  }
  return all;
}

// Recorder.key_of: where an argument is written, which of them share memory is part of the key.
Ref full_key(const Call& call) {
  c10::SmallVector<PyObject*, 8> roots;
  bool shared = false;
  for (PyObject* value : call.values) {
    PyObject* root = root_of(value);
    shared = shared || std::find(roots.begin(), roots.end(), root) != roots.end();
    roots.push_back(root);
  }
  if (!shared) return Ref::to(call.key.get());
  Ref of_roots = first_occurrences(roots), of_tensors = first_occurrences(call.tensors);
  return of_roots && of_tensors ? Ref(PyTuple_Pack(3, call.key.get(), of_roots.get(), of_tensors.get())) : Ref();
}

// --- where it was written ------------------------------------------------------------------------------------------

// What `sites` holds for a code object; both are kept for good.
std::unordered_map<PyCodeObject*, PyObject*> tables;

PyObject* table_of(PyCodeObject* code) {
  auto found = tables.find(code);
  if (found != tables.end()) return found->second;
  Ref identity(PyLong_FromVoidPtr(code));
  PyObject* table = identity ? PyDict_GetItemWithError(sites, identity.get()) : nullptr;
  if (table != nullptr) tables.emplace(code, table);
  return table;
}

// capture_site, for lines that it has seen.
Ref site_of(PyFrameObject* innermost) {
  Ref frame = innermost == nullptr ? Ref() : Ref::to(reinterpret_cast<PyObject*>(innermost));
  while (frame) {
    auto* at = reinterpret_cast<PyFrameObject*>(frame.get());
    Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
    PyObject* table = table_of(reinterpret_cast<PyCodeObject*>(code.get()));
    if (table == nullptr) break;
    if (table != internal) {
      Ref instruction(PyLong_FromLong(PyFrame_GetLasti(at)));
      PyObject* site = instruction ? PyDict_GetItemWithError(table, instruction.get()) : nullptr;
      if (site != nullptr) return Ref::to(site);
      break;
    }
    frame = Ref(reinterpret_cast<PyObject*>(PyFrame_GetBack(at)));
  }
  if (PyErr_Occurred()) return Ref();
  return Ref(PyObject_CallOneArg(capture_site, frame ? frame.get() : Py_None));
}

Ref current_scope() {
  Ref scope(PyObject_GetAttr(thread_state, scope_name));
  if (!scope || torch::autograd::get_current_graph_task_id() < 0) return scope;
  return Ref(PyObject_GetAttr(scope.get(), backward_name));
}

// --- the order of reads and writes -----------------------------------------------------------------------------------

// The pending write that a reader must see, if any; borrowed.
PyObject* last_write(PyObject* of) {
  PyObject* write = storage.at(of, kLastWrite);
  if (write == Py_None) return nullptr;
  if (node.at(write, kArgs) != Py_None) return write;
  storage.set(of, kLastWrite, Ref::to(Py_None));
  return nullptr;
}

// The storage of a tensor, made when it has none.
Ref storage_behind(PyObject* tensor) {
  Ref own(PyObject_GetAttr(tensor, storage_name));
  return own.get() == Py_None ? Ref(PyObject_CallOneArg(storage_of, tensor)) : std::move(own);
}

// Note what the node must see and, for what it writes, who may still have to read. Everything that can fail comes first.
bool order(PyObject* of, const Call& call, PyObject* writes) {
  c10::SmallVector<Ref, 8> storages;
  for (PyObject* tensor : call.tensors) {
    storages.emplace_back(PyObject_GetAttr(tensor, storage_name));
    if (!storages.back()) return false;
  }
  c10::SmallVector<size_t, 8> written;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(writes); i++) {
    written.push_back(PyLong_AsSize_t(PyList_GET_ITEM(writes, i)));
    storages[written.back()] = storage_behind(call.tensors[written.back()]);
    if (!storages[written.back()]) return false;
  }
  c10::SmallVector<PyObject*, 8> after, overwrites;
  for (const Ref& own : storages) {
    if (own.get() == Py_None) continue;
    if (PyObject* write = last_write(own.get())) after.push_back(write);
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

// A handle copied from a pattern, of which `address` is the TensorImpl.
Ref new_handle(PyObject* address, PyObject* value) {
  auto* pattern = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address));
  auto copy = pattern->shallow_copy_and_detach(c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true);
  copy->set_python_dispatch(true);
  Ref handle(THPVariable_Wrap(at::TensorBase(std::move(copy)), handle_type));
  if (!handle || PyObject_SetAttr(handle.get(), value_name, value) < 0) return Ref();
  return handle;
}

// Add a node for a call to the tape; the result for the user.
Ref add(PyObject* by, PyObject* like, const Call& call) {
  PyObject* on = known.at(like, kTape);
  PyObject* sequence = tape.at(on, kSequence);
  Ref seq(Py_TYPE(sequence)->tp_iternext(sequence));
  Ref site = site_of(PyEval_GetFrame());
  Ref scope = current_scope();
  if (!seq || !site || !scope) return Ref();
  Ref made(node.type->tp_alloc(node.type, 0));
  if (!made) return Ref();
  PyObject_GC_UnTrack(made.get());
  PyObject* of = made.get();
  node.set(of, kSeq, std::move(seq));
  node.set(of, kOp, Ref::to(recorder.at(by, kRecorderOp)));
  node.set(of, kArgs, Ref::to(call.args.get()));
  node.set(of, kKwargs, Ref::to(call.kwargs.get()));
  node.set(of, kSpec, Ref::to(known.at(like, kResult)));
  node.set(of, kRoot, Ref::to(Py_None));
  node.set(of, kSite, std::move(site));
  node.set(of, kScope, std::move(scope));
  node.set(of, kAfter, Ref::to(Py_None));
  node.set(of, kOverwrites, Ref::to(Py_None));
  node.set(of, kConcrete, Ref::to(Py_None));
  node.set(of, kOuts, Ref::to(Py_None));

  PyObject* returned = known.at(like, kReturned);
  PyObject* view_of = known.at(like, kViewOf);
  Ref result;
  if (returned != Py_None) {
    node.set(of, kOuts, untracked_tuple(0));
    result = Ref::to(call.tensors[PyLong_AsSize_t(returned)]);
  } else {
    result = new_handle(known.at(like, kPattern), of);
    if (!result) return Ref();
  }
  Ref entry(PyWeakref_NewRef(of, nullptr));
  if (entry) PyObject_GC_UnTrack(entry.get());
  if (!entry || !order(of, call, known.at(like, kWrites))) return Ref();
  if (view_of != Py_None) {
    size_t base = PyLong_AsSize_t(view_of);
    Ref own = storage_behind(call.tensors[base]);
    if (!own || PyObject_SetAttr(result.get(), storage_name, own.get()) < 0) return Ref();
    node.set(of, kRoot, Ref::to(root_of(call.values[base])));
  }
  if (PyList_Append(tape.at(on, kEntries), entry.get()) < 0) return Ref();
  long long room = PyLong_AsLongLong(tape.at(on, kRoom)) - PyLong_AsLongLong(known.at(like, kCost));
  tape.set(on, kRoom, Ref(PyLong_FromLongLong(room)));
  if (room < 0 && !Ref(PyObject_CallOneArg(overflow, on))) return Ref();
  return result;
}

// dispatch(cls, func, types, args=(), kwargs=None): `__torch_dispatch__`.
PyObject* dispatch(PyObject*, PyObject* const* given, Py_ssize_t count) try {
  if (count < 3 || count > 5) {
    PyErr_SetString(PyExc_TypeError, "__torch_dispatch__ takes an operator, types, arguments and keyword arguments");
    return nullptr;
  }
  PyObject* func = given[1];
  Ref empty = count > 3 ? Ref() : Ref(PyTuple_New(0));
  PyObject* args = count > 3 ? given[3] : empty.get();
  PyObject* kwargs = count > 4 ? given[4] : Py_None;
  Ref identity(PyLong_FromVoidPtr(func));
  if (!identity) return nullptr;
  PyObject* by = PyDict_GetItemWithError(recorders, identity.get());
  if (by != nullptr && recorder.at(by, kPlain) == Py_True && PyTuple_CheckExact(args)) {
    Ref held = Ref::to(by);
    Call call;
    Outcome outcome = read_call(args, kwargs, recorder.at(by, kExactFloats) == Py_True, call);
    if (outcome == Outcome::kDone) {
      bool mutates = operation.at(recorder.at(by, kRecorderOp), kMutates) == Py_True;
      Ref key = mutates ? full_key(call) : Ref::to(call.key.get());
      PyObject* found = key ? PyDict_GetItemWithError(recorder.at(by, kKnown), key.get()) : nullptr;
      if (found != nullptr && known.at(found, kRepeats) == Py_True) {
        Ref like = Ref::to(found);
        bool several = known.at(found, kPattern) == Py_None && known.at(found, kReturned) == Py_None;
        if (!several) return add(by, found, call).release();
        Ref tensors = tensors_of(call);
        PyObject* frame = reinterpret_cast<PyObject*>(PyEval_GetFrame());
        if (!tensors) return nullptr;
        return PyObject_CallFunctionObjArgs(
            append, by, found, call.args.get(), call.kwargs.get(), tensors.get(), frame ? frame : Py_None, nullptr);
      }
    }
  }
  if (PyErr_Occurred()) return nullptr;
  return PyObject_CallFunctionObjArgs(record, func, args, kwargs, nullptr);
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

// take(args, kwargs or None, exact): key, args, kwargs and tensors of a usual call, or None.
PyObject* take(PyObject*, PyObject* const* given, Py_ssize_t) {
  Call call;
  Outcome outcome = read_call(given[0], given[1], given[2] == Py_True, call);
  if (outcome == Outcome::kError) return nullptr;
  if (outcome == Outcome::kUnusual) Py_RETURN_NONE;
  Ref tensors = tensors_of(call);
  if (!tensors) return nullptr;
  return PyTuple_Pack(4, call.key.get(), call.args.get(), call.kwargs.get(), tensors.get());
}

// --- setting up ----------------------------------------------------------------------------------------------------

// configure(**names): the classes and functions that recording needs.
PyObject* configure(PyObject*, PyObject*, PyObject* names) {
  PyObject *operation_type, *node_type, *output_type, *storage_type, *recorder_type, *known_type, *tape_type;
  std::pair<const char*, PyObject**> wanted[] = {
      {"Operation", &operation_type}, {"Node", &node_type}, {"Output", &output_type}, {"Storage", &storage_type},
      {"Recorder", &recorder_type}, {"Known", &known_type}, {"Tape", &tape_type}, {"other_types", &other_types},
      {"not_recorded", &not_recorded}, {"bucket", &bucket}, {"sites", &sites}, {"internal", &internal},
      {"capture_site", &capture_site}, {"state", &thread_state}, {"storage_of", &storage_of}, {"append", &append},
      {"record", &record}, {"overflow", &overflow}};
  for (auto [name, place] : wanted) {
    *place = PyDict_GetItemString(names, name);
    if (*place == nullptr) return PyErr_Format(PyExc_TypeError, "configure() needs %s", name);
    Py_INCREF(*place);
  }
  bool found = operation.find(operation_type, {"mutates"}) &&
      node.find(
          node_type,
          {"seq", "op", "args", "kwargs", "spec", "root", "site", "scope", "after", "overwrites", "outs", "concrete"}) &&
      output.find(output_type, {"spec", "root"}) && storage.find(storage_type, {"last_read", "last_write"}) &&
      recorder.find(recorder_type, {"op", "plain", "exact_floats", "known"}) &&
      known.find(known_type, {"repeats", "spec", "pattern", "view_of", "returned", "writes", "tape", "cost"}) &&
      tape.find(tape_type, {"sequence", "entries", "room"});
  if (!found) return nullptr;
  Py_RETURN_NONE;
}

// use(recorders): find recorders in this dict, by identity of the operator.
PyObject* use(PyObject*, PyObject* table) {
  Py_XSETREF(recorders, Py_NewRef(table));
  Py_RETURN_NONE;
}

// make_handles(type): what own tensors are.
PyObject* make_handles(PyObject*, PyObject* type) {
  handle_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  Py_RETURN_NONE;
}

template <typename Function>
PyCFunction function(Function fast) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fast));
}

PyMethodDef functions[] = {
    {"dispatch", function(dispatch), METH_FASTCALL, nullptr},
    {"take", function(take), METH_FASTCALL, nullptr},
    {"configure", function(configure), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"use", use, METH_O, nullptr},
    {"make_handles", make_handles, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "marid_native", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_marid_native() {
  value_name = PyUnicode_InternFromString("_value");
  storage_name = PyUnicode_InternFromString("_storage");
  scope_name = PyUnicode_InternFromString("scope");
  backward_name = PyUnicode_InternFromString("backward");
  unit = PyUnicode_InternFromString("unit");
  large = PyUnicode_InternFromString("large");
  yes = PyUnicode_InternFromString("True");
  no = PyUnicode_InternFromString("False");
  return PyModule_Create(&module);
}
