// A backward on the thread that asked for it.
//
// Autograd's engine serves threads for each device, and streams. For that it sets the whole state of the thread before each
// function of a graph and restores it after, finds each function in three tables, and locks its queue: some 20,000 instructions
// for a function, a third of what a step with small tensors takes. A graph of functions of the CPU and of this device needs
// nothing of that. It is one function for the engine, which sets the state once, and runs the functions of the graph with their
// hooks in the order in which the engine would have: by their sequence numbers, on a heap of the same kind. The order decides how
// gradients are added up, and so their bits. Functions that are written in Python or have hooks get tensors with Python objects;
// between the others nobody sees them.
#include "backward_pass.h"

#include "autograd_function.h"
#include "backward.h"
#include "backward_graph.h"
#include "handle.h"
#include "operands.h"
#include "record.h"

#include <ATen/LegacyVmapMode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <utility>

namespace marid {

namespace {

using at::Tensor;
using torch::autograd::Edge, torch::autograd::edge_list, torch::autograd::variable_list;
using torch::autograd::Engine, torch::autograd::Node;

// What of this thread such a backward has at the moment; one may begin in a function of another.
struct Running {
  PyObject* caller = nullptr;  // the code in Python that asked for it
  bool is_hidden = false;  // whether Python sees nothing of what the function computes that runs
};
constinit thread_local Running running;

// The one function that the engine runs.
class Pass : public Node {
 public:
  Pass(BackwardGraph graph, PyObject* caller) : graph(std::move(graph)), caller_(caller) {}
  std::string name() const override { return "MaridBackward"; }
  variable_list apply(variable_list&&) override {
    Running outer = std::exchange(running, {caller_, false});
    struct Restore {
      Running outer;
      ~Restore() { running = outer; }
    } restore{outer};
    // The last functions make what users see: `.grad`.
    graph.run([](const Node& function, bool is_shown) {
      running.is_hidden = !c10::GradMode::is_enabled() && function.num_outputs() != 0 && !is_shown;
    });
    return variable_list(num_outputs());
  }

  BackwardGraph graph;

 private:
  PyObject* caller_;  // borrowed: it runs
};

// What a backward leads to that asks for gradients. `torch.utils.checkpoint` asks the engine whether it is one.
class Asked : public Node {
 public:
  std::string name() const override { return "MaridAsked"; }
  variable_list apply(variable_list&&) override { return {}; }
};

// Whether nothing in this process or thread looks at single functions of a graph.
bool is_plain_thread() {
  if (torch::autograd::AnomalyMode::is_enabled() || at::hasCallbacks() || at::impl::VmapMode::current_vmap_level() > 0) {
    return false;
  }
  if (has_transforms() || c10::impl::TorchDispatchModeTLS::stack_len() != 0) return false;
  // PyTorch's compiled autograd makes a graph of single functions.
  static PyObject* const name = PyUnicode_InternFromString("torch._dynamo.compiled_autograd");
  static PyObject* const flag = PyUnicode_InternFromString("compiled_autograd_enabled");
  PyObject* compiled = PyDict_GetItemWithError(PyImport_GetModuleDict(), name);
  if (compiled == nullptr) return PyErr_Occurred() == nullptr || (PyErr_Clear(), false);
  Ref is_enabled(PyObject_GetAttr(compiled, flag));
  if (!is_enabled) PyErr_Clear();
  return is_enabled.get() == Py_False;
}

// The arguments of `_engine_run_backward`, where they are as those of `torch.autograd.backward` and `grad`.
struct Arguments {
  PyObject *outputs, *gradients, *inputs;
  bool keeps, creates, may_be_unreachable, accumulates;

  bool read(PyObject* const* given, Py_ssize_t count, PyObject* names) {
    Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    if (count < 5 || count + named != 7) return false;
    outputs = given[0], gradients = given[1], inputs = given[4];
    PyObject* flags[4] = {given[2], given[3], nullptr, nullptr};
    for (Py_ssize_t i = 5; i < 7; i++) {
      if (i < count) {
        flags[i - 3] = given[i];
        continue;
      }
      PyObject* key = PyTuple_GET_ITEM(names, i - count);
      bool is_last = PyUnicode_CompareWithASCIIString(key, "accumulate_grad") == 0;
      if (!is_last && PyUnicode_CompareWithASCIIString(key, "allow_unreachable") != 0) return false;
      flags[is_last ? 3 : 2] = given[i];
    }
    bool* values[4] = {&keeps, &creates, &may_be_unreachable, &accumulates};
    for (int i = 0; i < 4; i++) {
      if (flags[i] == nullptr || !PyBool_Check(flags[i])) return false;
      *values[i] = flags[i] == Py_True;
    }
    bool are_tuples = PyTuple_CheckExact(outputs) && PyTuple_CheckExact(gradients) && PyTuple_CheckExact(inputs);
    return are_tuples && PyTuple_GET_SIZE(outputs) == PyTuple_GET_SIZE(gradients) && PyTuple_GET_SIZE(outputs) > 0;
  }

  bool roots(edge_list& edges, variable_list& tensors) const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); i++) {
      PyObject *output = PyTuple_GET_ITEM(outputs, i), *gradient = PyTuple_GET_ITEM(gradients, i);
      if (!is_own(output) || !THPVariable_Check(gradient)) return false;
      edges.push_back(torch::autograd::impl::gradient_edge(THPVariable_Unpack(output)));
      tensors.push_back(THPVariable_Unpack(gradient));
      const Edge& edge = edges.back();
      if (!edge.is_valid() || !fits(tensors.back(), edge.function->input_metadata(edge.input_nr))) return false;
    }
    return true;
  }

  bool asked(edge_list& edges) const {
    if (accumulates) return PyTuple_GET_SIZE(inputs) == 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); i++) {
      PyObject* input = PyTuple_GET_ITEM(inputs, i);
      if (!THPVariable_Check(input)) return false;
      const Tensor& tensor = THPVariable_Unpack(input);
      if (!tensor.requires_grad()) return false;
      FunctionPointer function = tensor.grad_fn();
      if (function == nullptr) function = torch::autograd::impl::try_get_grad_accumulator(tensor);
      if (function == nullptr && !may_be_unreachable) return false;
      edges.emplace_back(std::move(function), static_cast<uint32_t>(tensor.output_nr()));
    }
    return !edges.empty();
  }
};

// The gradients that were asked for, as PyTorch returns them.
PyObject* returned(const variable_list& results, const Arguments& arguments) {
  if (arguments.accumulates) Py_RETURN_NONE;
  Ref all(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  if (!all) throw python_error();
  for (size_t i = 0; i < results.size(); i++) {
    TORCH_CHECK(
        arguments.may_be_unreachable || results[i].defined(),
        "The differentiated Tensor at index ", i,
        " appears to not have been used in the graph. Set allow_unused=True if this is the desired behavior.");
    PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(results[i]));
  }
  return all.release();
}

}  // namespace

bool is_called_in_pass() { return running.caller != nullptr && running_code() == running.caller; }

bool is_hidden_in_pass() { return running.is_hidden; }

PyObject* run_pass(PyObject* const* given, Py_ssize_t count, PyObject* names) {
  Arguments arguments;
  if (!arguments.read(given, count, names) || !is_plain_thread()) return nullptr;
  return guarded([&]() -> PyObject* {
    edge_list roots, asked;
    variable_list gradients;
    if (!arguments.roots(roots, gradients) || !arguments.asked(asked)) return nullptr;
    BackwardGraph graph(std::move(roots), std::move(gradients), std::move(asked), arguments.keeps, arguments.creates);
    if (!graph.find() || !(arguments.may_be_unreachable || graph.reaches_all())) return nullptr;
    static const Tensor nothing = at::empty({0}, at::device(at::kCPU));
    FunctionPointer pass = make_function<Pass>(std::move(graph), running_code());
    pass->add_input_metadata(nothing);
    edge_list to;
    if (!arguments.accumulates && static_cast<Pass&>(*pass).graph.is_shown()) {
      FunctionPointer end = make_function<Asked>();
      end->add_input_metadata(nothing);
      to.emplace_back(end, 0);
      pass->add_next_edge(to.back());
    }
    {
      WithoutLock unlocked;  // `run` sets `create_graph`'s mode; the engine warns of it where gradients are added up
      Engine::get_default_engine().execute(
          {Edge(pass, 0)}, {nothing}, arguments.keeps, arguments.creates && arguments.accumulates, true, to);
    }
    return returned(static_cast<Pass&>(*pass).graph.results, arguments);
  });
}

}  // namespace marid
