// What a call returns to the user: a node or its outputs, and tensors that stand for them.
#include "backward.h"
#include "recorder.h"

namespace torch::autograd {
int get_current_graph_task_id();
}

namespace marid {

PyObject* tape_of(PyObject* of) {
  return PyList_GetItem(tapes, PyLong_AsSsize_t(spec.at(of, kSpecDevice)));
}

at::Tensor new_handle(PyObject* address, PyObject* value) {
  return new_handle(static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address)), value);
}

at::Tensor argument(const Call& call, PyObject* index) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
      call.handles[PyLong_AsSize_t(index)]));
}

namespace {

// Let a new result be a view of an argument: it has its storage; what it lies in is `root`.
bool view(const at::Tensor& made, PyObject* on, const Call& call, PyObject* view_of, Ref& root) {
  size_t base = PyLong_AsSize_t(view_of);
  PyObject* own = storage_behind(call.handles[base], on);
  if (own == nullptr) return false;
  root = Ref::to(root_of(call.values[base]));
  handle_of(made)->lie_in(own);
  return true;
}

// The results of a node that has several, or none: see Known.several.
bool several(PyObject* of, PyObject* on, PyObject* described, const Call& call, Results& results) {
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
    Ref made(output.type->tp_alloc(output.type, 0)), root = Ref::to(Py_None);
    if (!made) return false;
    PyObject_GC_UnTrack(made.get());
    output.set(made.get(), kOutputNode, Ref::to(of));
    output.set(made.get(), kPath, Ref::to(PyTuple_GET_ITEM(one, 1)));
    output.set(made.get(), kOutputSpec, Ref::to(PyTuple_GET_ITEM(one, 2)));
    output.set(made.get(), kOutputConcrete, Ref::to(Py_None));
    output.set(made.get(), kOutputRoot, Ref::to(Py_None));
    results.push_back(new_handle(PyTuple_GET_ITEM(one, 3), made.get()));
    if (!results.back().defined()) return false;
    PyObject* view_of = PyTuple_GET_ITEM(one, 4);
    if (view_of != Py_None && !view(results.back(), on, call, view_of, root)) return false;
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

}  // namespace

namespace {

// Where the backward that runs in this thread was called; sites and scopes live for good.
struct Backward {
  int task = -1;
  PyObject *site = nullptr, *scope = nullptr;
};
constinit thread_local Backward known_backward;

}  // namespace

bool find_origin(PyObject* by, Origin* origin) {
  origin->op = recorder.at(by, kRecorderOp);
  int task = torch::autograd::get_current_graph_task_id();
  bool from_engine = task >= 0 && is_called_by_engine();
  if (from_engine && known_backward.task == task) {
    origin->site = known_backward.site;
    origin->scope = known_backward.scope;
    return true;
  }
  if (!marid::where(&origin->site, &origin->scope)) return false;
  if (task >= 0) origin->scope = backward_of(origin->scope);
  if (from_engine) known_backward = {task, origin->site, origin->scope};
  return true;
}

Ref new_node(PyObject* on, const Origin& origin, PyObject* spec) {
  Ref seq = next_number(on), made(seq ? node.type->tp_alloc(node.type, 0) : nullptr);
  if (!made) return Ref();
  PyObject_GC_UnTrack(made.get());
  PyObject* of = made.get();
  node.set(of, kSeq, std::move(seq));
  node.set(of, kOp, Ref::to(origin.op));
  node.set(of, kSpec, Ref::to(spec));
  node.set(of, kSite, Ref::to(origin.site));
  node.set(of, kScope, Ref::to(origin.scope));
  for (int slot : {kArgs, kKwargs, kRoot, kAfter, kOverwrites, kConcrete, kOuts}) node.set(of, slot, Ref::to(Py_None));
  return made;
}

bool give_results(PyObject* of, PyObject* like, const Call& call, Results& results) {
  PyObject *on = known.at(like, kTape), *returned = known.at(like, kReturned), *view_of = known.at(like, kViewOf);
  if (known.at(like, kPattern) != Py_None) {
    Ref root;
    results.push_back(new_handle(known.at(like, kPattern), of));
    if (!results.back().defined()) return false;
    if (view_of != Py_None) {
      if (!view(results.back(), on, call, view_of, root)) return false;
      node.set(of, kRoot, std::move(root));
    }
  } else if (returned != Py_None) {
    node.set(of, kOuts, untracked_tuple(0));
    results.push_back(argument(call, returned));
  } else {
    return several(of, on, known.at(like, kSeveral), call, results);
  }
  return true;
}

void note_writes(PyObject* by, const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (recorder.at(by, kBumps) != Py_True) return;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!op.formals[i].written || !arguments[i].isTensorList()) continue;
    for (const c10::IValue& item : arguments[i].toListRef()) item.toTensor().unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace marid
