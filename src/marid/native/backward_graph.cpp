#include "backward_graph.h"

#include "backward.h"
#include "handle.h"
#include "python.h"

#include <ATen/ops/add.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/python_hook.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <unordered_set>

namespace marid {

namespace {

using at::Tensor;
using torch::autograd::Edge, torch::autograd::edge_list, torch::autograd::variable_list;
using torch::autograd::InputBuffer, torch::autograd::InputMetadata, torch::autograd::Node;

constexpr uint32_t kNone = UINT32_MAX;

// The function that a write through a view has inside of its own, or null. PyTorch does not export the types of all functions,
// but for their names.
Node* inner(Node& function) {
  using torch::autograd::CopySlices;
  bool writes = std::strcmp(typeid(function).name(), typeid(CopySlices).name()) == 0;
  return writes ? &*static_cast<CopySlices&>(function).fn : nullptr;
}

// What a function returned, as the functions that it goes to expect it.
void check(const Node& function, variable_list& gradients) {
  const edge_list& edges = function.next_edges();
  bool fit = edges.size() == gradients.size();
  for (size_t i = 0; fit && i < edges.size(); i++) {
    fit = !edges[i].is_valid() || fits(gradients[i], edges[i].function->input_metadata(edges[i].input_nr));
  }
  if (fit) return;
  torch::autograd::validate_outputs(edges, gradients, [&](const std::string& what) {
    return "Function " + function.name() + " returned an " + what;
  });
}

// Another gradient of one that has come.
void add(Node* function, variable_list& inputs, uint32_t at, Tensor&& gradient) {
  if (handle_of(gradient) != nullptr) {
    inputs[at] = at::add(inputs[at], gradient);
    return;
  }
  InputBuffer buffer(inputs.size());  // as autograd does on the CPU
  buffer.buffer = std::move(inputs);
  buffer.add(at, std::move(gradient), std::nullopt, std::nullopt, function);
  inputs = std::move(buffer.buffer);
}

// Whether hooks of a tensor are an empty dictionary: each was removed, or the tensor was unpickled, which gives it one.
bool is_idle(const torch::autograd::FunctionPreHook& hooks) {
  if (std::strcmp(typeid(hooks).name(), "N5torch8autograd23PyFunctionTensorPreHookE") != 0) return false;
  PyObject* given = static_cast<const torch::autograd::PyFunctionTensorPreHook&>(hooks).dict;
  return PyDict_Check(given) && PyDict_GET_SIZE(given) == 0;
}

bool has_tensor_hooks(Node& function) {
  for (const auto& hook : function.tensor_pre_hooks()) {
    if (!is_idle(*hook)) return true;
  }
  return false;
}

bool has_hooks(Node& function) {
  return !function.pre_hooks().empty() || !function.post_hooks().empty() || has_tensor_hooks(function) ||
      !function.retains_grad_hooks().empty();
}

thread_local std::unordered_set<const Node*> ends;

// Whether a function computes with tensors of a class whose operations are Python (`__torch_dispatch__`), which sees gradients.
bool is_of_subclass(Node& function) {
  for (uint32_t i = 0; i < function.num_inputs(); i++) {
    if (function.input_metadata(i).is_tensor_subclass()) return true;
  }
  return false;
}

// Whether a function may run here.
bool may_run(Node& function) {
  if (is_of_subclass(function)) return false;
  Node* within = inner(function);
  if (within != nullptr && shows_python(*within)) return false;
  c10::DeviceType type = function.device().type();
  return type == c10::DeviceType::CPU || type == c10::DeviceType::PrivateUse1;
}

// The gradients of a function's results, after the hooks of these tensors.
variable_list call_tensor_hooks(Node& function, variable_list gradients) {
  for (const auto& hook : function.tensor_pre_hooks()) {
    if (!is_idle(*hook)) gradients = (*hook)(gradients);
  }
  for (const auto& [_, hook] : function.retains_grad_hooks()) gradients = (*hook)(gradients);
  return gradients;
}

}  // namespace

void end_backwards_at(const std::vector<Tensor>& tensors) {
  ends.clear();
  for (const Tensor& tensor : tensors) {
    if (tensor.grad_fn() != nullptr) ends.insert(&*tensor.grad_fn());
  }
}

bool has_backward_ends() { return !ends.empty(); }

bool meets_hooks(const std::vector<Tensor>& tensors) {
  std::unordered_set<Node*> seen;
  std::vector<Node*> pending;
  auto meet = [&](Node* function) {
    if (function != nullptr && ends.count(function) == 0 && seen.insert(function).second) pending.push_back(function);
  };
  for (const Tensor& tensor : tensors) {
    if (tensor.grad_fn() != nullptr) meet(&*tensor.grad_fn());
  }
  while (!pending.empty()) {
    Node* function = pending.back();
    pending.pop_back();
    if (has_hooks(*function)) return true;
    for (const Edge& edge : function->next_edges()) meet(edge.function.get());
  }
  return false;
}

bool is_python(const Node& function) { return std::strcmp(typeid(function).name(), "N5torch8autograd6PyNodeE") == 0; }

bool shows_python(Node& function) {
  if (has_hooks(function) || is_python(function)) return true;
  Node* within = inner(function);
  return within != nullptr && shows_python(*within);
}

bool fits(const Tensor& gradient, const InputMetadata& expected) {
  if (!gradient.defined()) return true;
  if (expected.was_default_constructed() || expected.is_nested_tensor()) return false;
  if (gradient.layout() != expected.layout() || gradient.layout() != c10::kStrided) return false;
  if constexpr (requires { expected.grad_dtype(); }) {
    if (expected.grad_dtype() && *expected.grad_dtype() != gradient.scalar_type()) return false;
  }
  if (gradient.dtype() != expected.dtype() || gradient.device() != expected.device()) return false;
  if (gradient.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
  c10::SymIntArrayRef shape = expected.shape_as_dim_vector();
  at::IntArrayRef sizes = gradient.sizes();
  return std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end(), [](int64_t size, const c10::SymInt& of) {
    return !of.is_heap_allocated() && of.as_int_unchecked() == size;
  });
}

BackwardGraph::BackwardGraph(
    edge_list roots, variable_list gradients, edge_list asked, bool keeps, bool creates)
    : roots_(std::move(roots)),
      gradients_(std::move(gradients)),
      asked_(std::move(asked)),
      keeps_(keeps),
      creates_(creates) {}

bool BackwardGraph::find() {
  results.resize(asked_.size());
  for (size_t i = 0; i < asked_.size(); i++) {
    if (asked_[i].function == nullptr) continue;
    ExecInfo& info = info_[&*asked_[i].function];
    if (!info.captures_) info.captures_ = std::make_unique<std::vector<ExecInfo::Capture>>();
    info.captures_->emplace_back(static_cast<int>(asked_[i].input_nr), static_cast<int>(i));
    least_ = std::min(least_, asked_[i].function->topological_nr());
  }
  if (asked_.empty()) least_ = 0;
  else if (info_.empty()) return false;
  for (const Edge& root : roots_) {
    if (!reach(&*root.function)) return false;
  }
  for (const Edge& root : roots_) steps_[places_.at(&*root.function)].waiting++;
  // Autograd's engine begins with a single root whether or not that leads to what is asked for: its hooks are called.
  if (roots_.size() == 1) steps_[0].runs = true;
  return true;
}

bool BackwardGraph::reaches_all() const {
  return std::all_of(asked_.begin(), asked_.end(), [&](const Edge& edge) {
    return edge.function != nullptr && places_.find(&*edge.function) != places_.end();
  });
}

void BackwardGraph::run(c10::function_ref<void(const Node&, bool)> before) {
  auto* asked = torch::autograd::get_current_graph_task_exec_info();
  const_cast<std::remove_const_t<std::remove_pointer_t<decltype(asked)>>&>(*asked).merge(info_);
  if (is_shown_) {  // Python may ask which functions will run
    auto* functions = torch::autograd::get_current_graph_task_nodes_in_graph();
    for (size_t i = roots_.size() == 1 ? 1 : 0; i < steps_.size(); i++) {  // a single root does not count for the engine
      const_cast<std::unordered_set<Node*>&>(*functions).insert(steps_[i].function);
    }
  }
  c10::AutoGradMode mode(creates_);
  for (size_t i = 0; i < roots_.size(); i++) {
    give(places_.at(&*roots_[i].function), roots_[i].input_nr, std::move(gradients_[i]));
  }
  while (!ready_.empty()) {
    uint32_t at = ready_.top().step;
    ready_.pop();
    Node& function = *steps_[at].function;
    bool is_shown = steps_[at].is_python || has_hooks(function);  // a hook may have been registered meanwhile
    before(function, is_shown);
    variable_list outputs;
    if (!call(steps_[at], is_shown, outputs)) continue;
    const edge_list& edges = function.next_edges();
    for (size_t i = 0; i < outputs.size(); i++) {
      uint32_t next = next_[steps_[at].edges + i];
      if (next != kNone) give(next, edges[i].input_nr, std::move(outputs[i]));
    }
  }
}

// The place of a function among the steps, and whether it is new there.
std::pair<uint32_t, bool> BackwardGraph::place(Node* function) {
  auto [found, is_new] = places_.emplace(function, static_cast<uint32_t>(steps_.size()));
  if (is_new) steps_.push_back({function});
  return {found->second, is_new};
}

// Find a function and those that it leads to, the last ones first: a function has to run if one that it leads to has.
bool BackwardGraph::reach(Node* root) {
  auto [at, is_new] = place(root);
  if (!is_new) return true;
  std::vector<std::pair<uint32_t, size_t>> way;  // steps, and how many of their edges have been followed
  if (!enter(at)) return false;
  way.emplace_back(at, 0);
  while (!way.empty()) {
    auto& [step, edge] = way.back();
    const edge_list& edges = steps_[step].function->next_edges();
    bool is_end = !ends.empty() && ends.count(steps_[step].function) != 0;
    if (edge == edges.size() || is_end || steps_[step].function->topological_nr() < least_) {
      leave(step, edge);
      way.pop_back();
      continue;
    }
    Node* next = edges[edge].function.get();
    uint32_t slot = steps_[step].edges + static_cast<uint32_t>(edge++);
    if (next == nullptr) continue;
    auto [child, is_first] = place(next);
    next_[slot] = child;
    steps_[child].waiting++;
    if (!is_first) continue;
    if (!enter(child)) return false;
    way.emplace_back(child, 0);
  }
  return true;
}

bool BackwardGraph::enter(uint32_t at) {
  Step& step = steps_[at];
  step.edges = static_cast<uint32_t>(next_.size());
  next_.resize(next_.size() + step.function->num_outputs(), kNone);
  step.is_python = is_python(*step.function);
  is_shown_ = is_shown_ || step.is_python || has_hooks(*step.function);
  return may_run(*step.function);
}

void BackwardGraph::leave(uint32_t at, size_t edges) {
  if (asked_.empty()) return;
  Step& step = steps_[at];
  bool is_needed = false;
  for (size_t i = 0; i < edges; i++) {
    uint32_t next = next_[step.edges + i];
    is_needed = is_needed || (next != kNone && steps_[next].runs);
  }
  step.info = &info_[step.function];
  step.info->needed_ = is_needed;
  step.runs = step.info->should_execute();
}

// A gradient of a function has come.
void BackwardGraph::give(uint32_t at, uint32_t input, Tensor&& gradient) {
  Step& step = steps_[at];
  bool is_last = --step.waiting == 0;
  if (!step.runs) return;
  if (step.inputs.empty()) step.inputs.resize(step.function->num_inputs());
  if (gradient.defined()) {
    if (step.inputs[input].defined()) add(step.function, step.inputs, input, std::move(gradient));
    else step.inputs[input] = std::move(gradient);
  }
  if (is_last) ready_.push({step.function->sequence_nr(), at});
}

// Call a function and its hooks, in the order of autograd's engine; false if its gradients were all that was asked for.
bool BackwardGraph::call(Step& step, bool is_shown, variable_list& outputs) {
  Node& function = *step.function;
  variable_list inputs = std::move(step.inputs);
  if (is_shown) {
    InterpreterLock lock;
    for (const Tensor& one : inputs) give_objects(c10::IValue(one));
  }
  bool is_needed = step.info == nullptr || step.info->needed_;
  if (!is_needed) inputs = call_tensor_hooks(function, std::move(inputs));
  if (step.info != nullptr && step.info->captures_) {
    for (const auto& capture : *step.info->captures_) results[capture.output_idx_] = inputs[capture.input_idx_];
  }
  if (!is_needed) return false;
  inputs = call_tensor_hooks(function, std::move(inputs));
  for (const auto& hook : function.pre_hooks()) inputs = (*hook)(inputs);
  if (!keeps_) function.will_release_variables();
  bool keeps_inputs = !function.post_hooks().empty();
  outputs = function(keeps_inputs ? variable_list(inputs) : std::move(inputs));
  check(function, outputs);
  for (const auto& hook : function.post_hooks()) outputs = (*hook)(outputs, inputs);
  if (!keeps_) function.release_variables();
  return true;
}

}  // namespace marid
