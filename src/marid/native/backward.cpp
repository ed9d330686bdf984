// Gradients that Python does not see.
//
// Tensors of the device have a Python object from the beginning, since PyTorch would give them one of another class. In a
// backward that costs more than most kernels: an object is made, and for each copy of the tensor in C++ the interpreter's lock
// is taken to count it. So where a gradient can only go to functions of autograd that are C++, it gets none. It can reach
// Python through a function that is Python, through a hook, as `.grad`, or as what `torch.autograd.grad` returns; the last get
// their objects' class when the backward is done (frontend/backward.py).
#include "backward.h"

#include "backward_graph.h"
#include "backward_pass.h"
#include "handle.h"
#include "record.h"

#include <ATen/LegacyVmapMode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>

PyObject* THPVariable_Wrap(const at::TensorBase& tensor, PyTypeObject* type);

namespace marid {

namespace {

using torch::autograd::Node;

// Whether Python sees nothing of what the functions of the graph that this thread goes through return.
bool is_graph_hidden(int64_t task) {
  thread_local int64_t known = -1;
  thread_local bool is_hidden = false;
  if (task != known) {
    const std::unordered_set<Node*>* functions = torch::autograd::get_current_graph_task_nodes_in_graph();
    known = task;
    is_hidden = functions != nullptr &&
        std::none_of(functions->begin(), functions->end(), [](Node* function) { return shows_python(*function); });
  }
  return is_hidden;
}

// The function that this thread was asked about last, and the answer.
struct Last {
  int64_t task;
  const Node* function;
  bool is_hidden;
};
constinit thread_local Last last{-1, nullptr, false};
// The code of the function from which PyTorch's engine is entered. Hooks that the engine calls have frames of their own.
PyObject* entering = nullptr;
constinit thread_local int shown = 0;  // backwards of this thread whose gradients are all shown to Python

// An object that PyTorch has made for a tensor of the device, as one of its own class, becomes one of ours.
bool give_class(PyObject* object) {
  bool is_general = reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass;
  if (!is_general || handle_of(THPVariable_Unpack(object)) == nullptr) return true;
  return PyObject_SetAttrString(object, "__class__", reinterpret_cast<PyObject*>(handle_type)) == 0;
}

void give_object(const at::Tensor& tensor) {
  if (handle_of(tensor) == nullptr) return;
  Ref object(THPVariable_Wrap(tensor, handle_type));
  if (!object || !give_class(object.get())) PyErr_WriteUnraisable(object.get());
}

}  // namespace

bool is_called_by_engine() {
  return is_called_in_pass() || (entering != nullptr && running_code() == entering);
}

bool has_transforms() {
  c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

bool is_for_autograd_alone() {
  int64_t task = torch::autograd::get_current_graph_task_id();
  if (task < 0) return false;
  if (is_called_in_pass()) return is_hidden_in_pass();
  auto function = torch::autograd::get_current_node();
  if (!function || !is_called_by_engine()) return false;
  if (task != last.task || &*function != last.function) {
    bool is_wrapped = shown > 0 || at::impl::VmapMode::current_vmap_level() > 0;  // as `is_grads_batched` wraps them
    bool is_plain = !is_wrapped && !c10::GradMode::is_enabled() && c10::impl::TorchDispatchModeTLS::stack_len() == 0;
    bool makes_grad = function->num_outputs() == 0;
    // The first function of a graph may be missing among those of its task.
    bool is_hidden = is_plain && !makes_grad && is_graph_hidden(task) && !shows_python(*function);
    last = {task, &*function, is_hidden};
  }
  return last.is_hidden;
}

void give_objects(c10::ArrayRef<c10::IValue> arguments) { each_tensor(arguments, give_object); }

namespace {

// The tensors of the device among what a backward returns get our class; false after an error.
bool give_classes(PyObject* results) {
  if (!PyTuple_Check(results)) return true;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); i++) {
    if (!give_class(PyTuple_GET_ITEM(results, i))) return false;
  }
  return true;
}

// For as long as this lives, a backward runs on the thread that called it. Under transforms of functions, which wrap gradients,
// Python sees all of them.
class OnThisThread {
 public:
  OnThisThread() : has_threads_(c10::AutogradState::get_tls_state().get_multithreading_enabled()), shows_(has_transforms()) {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    show(1);
  }
  OnThisThread(const OnThisThread&) = delete;
  OnThisThread& operator=(const OnThisThread&) = delete;
  ~OnThisThread() {
    show(-1);
    c10::AutogradState::get_tls_state().set_multithreading_enabled(has_threads_);
  }

 private:
  void show(int change) {
    if (!shows_) return;
    shown += change;
    last.task = -1;
  }
  bool has_threads_, shows_;
};

// The error that was raised loses Marid's frames.
void fold_error(PyObject* fold) {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  if (!Ref(PyObject_CallOneArg(fold, error))) PyErr_WriteUnraisable(fold);
  Py_XDECREF(trace);
  PyErr_Restore(type, error, PyException_GetTraceback(error));
}

// Whether a backward may go through its graph here: what runs it is PyTorch's, which only logs beside that, and does not.
bool may_pass(PyObject* log) {
  if (log == Py_None) return false;
  static PyObject* const method = PyUnicode_InternFromString("isEnabledFor");
  static PyObject* const debug = PyLong_FromLong(10);
  PyObject* given[2] = {log, debug};
  Ref is_enabled(PyObject_VectorcallMethod(method, given, 2, nullptr));
  if (!is_enabled) PyErr_Clear();
  return is_enabled.get() == Py_False;
}

// What `on_this_thread` returns, with its arguments.
PyObject* run_on_this_thread(PyObject* of, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  Ref found;
  {
    OnThisThread whole;
    if (may_pass(PyTuple_GET_ITEM(of, 2))) found = Ref(run_pass(given, count, names));
    if (!found && PyErr_Occurred() == nullptr && has_backward_ends()) {
      PyErr_SetString(PyExc_RuntimeError, "autograd's engine would go through the histories of its inputs");
    } else if (!found && PyErr_Occurred() == nullptr) {
      found = Ref(PyObject_Vectorcall(PyTuple_GET_ITEM(of, 0), given, static_cast<size_t>(count), names));
    }
    if (found && !give_classes(found.get())) found = Ref();
  }
  if (!found) fold_error(PyTuple_GET_ITEM(of, 1));
  return found.release();
}
PyMethodDef on_this_thread_method = {
    "_engine_run_backward", fast(run_on_this_thread), METH_FASTCALL | METH_KEYWORDS, nullptr};

// on_this_thread(run, code, fold, log): see frontend/backward.py. `code` is that of the function from which the engine is
// entered, `log` the logger of autograd, or None if `run` is not PyTorch's own.
PyObject* on_this_thread(PyObject*, PyObject* const* given, Py_ssize_t) {
  Py_XSETREF(entering, Py_NewRef(given[1]));
  Ref held(PyTuple_Pack(3, given[0], given[2], given[3]));
  return held ? PyCFunction_New(&on_this_thread_method, held.get()) : nullptr;
}

}  // namespace

namespace {

std::vector<at::Tensor> unpacked(PyObject* tensors) {
  std::vector<at::Tensor> found;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
    found.push_back(THPVariable_Unpack(PyList_GET_ITEM(tensors, i)));
  }
  return found;
}

// end_backwards_at(tensors): backwards of this thread go no further than to the functions that made these.
PyObject* end_at(PyObject*, PyObject* tensors) {
  end_backwards_at(unpacked(tensors));
  Py_RETURN_NONE;
}

// meets_hooks(tensors): whether a function that a backward from these goes through has hooks.
PyObject* has_hooked(PyObject*, PyObject* tensors) { return PyBool_FromLong(meets_hooks(unpacked(tensors))); }

}  // namespace

PyMethodDef backward_functions[] = {
    {"end_backwards_at", end_at, METH_O, nullptr},
    {"meets_hooks", has_hooked, METH_O, nullptr},
    {"on_this_thread", fast(on_this_thread), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
