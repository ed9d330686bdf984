// The functions of autograd that a backward goes through, found and run without autograd's engine (backward_pass.cpp).
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_metadata.h>

#include <cstdint>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace marid {

// Whether a function of autograd is written in Python.
bool is_python(const torch::autograd::Node& function);

// Whether it is, has hooks, or has another one inside that is or does.
bool shows_python(torch::autograd::Node& function);

// Whether a gradient is what the function that it goes to expects, so that autograd would take it as it is.
bool fits(const at::Tensor& gradient, const torch::autograd::InputMetadata& expected);

// From now on, backwards of this thread go no further than to the functions that made these tensors.
void end_backwards_at(const std::vector<at::Tensor>& tensors);
bool has_backward_ends();

// Whether a function that a backward from these tensors goes through has hooks.
bool meets_hooks(const std::vector<at::Tensor>& tensors);

class BackwardGraph {
 public:
  using Node = torch::autograd::Node;

  // From `roots`, which get `gradients`. `asked` are the edges whose gradients are the results; without any, the last functions
  // add them to `.grad`. `keeps` and `creates` are `retain_graph` and `create_graph`.
  BackwardGraph(
      torch::autograd::edge_list roots, torch::autograd::variable_list gradients, torch::autograd::edge_list asked, bool keeps,
      bool creates);

  // Find the functions; false if another accelerator has part in it, or a tensor whose operations are Python.
  bool find();

  // Whether they lead to all that was asked for.
  bool reaches_all() const;

  // Whether Python sees gradients of one.
  bool is_shown() const { return is_shown_; }

  // Run them, in a function that autograd's engine runs; `before` is told of each, and whether Python sees its gradients.
  void run(c10::function_ref<void(const Node&, bool)> before);

  // The gradients that were asked for.
  torch::autograd::variable_list results;

 private:
  using ExecInfo = torch::autograd::GraphTask::ExecInfo;

  // A function, while a backward goes through it.
  struct Step {
    Node* function;
    uint32_t edges = 0;  // where in `next_` the functions stand that its gradients go to
    uint32_t waiting = 0;  // gradients that have to come
    ExecInfo* info = nullptr;  // what is asked of it, where not all gradients are
    bool runs = true, is_python = false;
    torch::autograd::variable_list inputs;
  };

  // What is ready to run, ordered as by autograd's queue.
  struct Ready {
    uint64_t sequence;
    uint32_t step;
    bool operator<(const Ready& other) const { return sequence < other.sequence; }
  };

  std::pair<uint32_t, bool> place(Node* function);
  bool reach(Node* root);
  bool enter(uint32_t at);
  void leave(uint32_t at, size_t edges);
  void give(uint32_t at, uint32_t input, at::Tensor&& gradient);
  bool call(Step& step, bool is_shown, torch::autograd::variable_list& outputs);

  torch::autograd::edge_list roots_;
  torch::autograd::variable_list gradients_;
  torch::autograd::edge_list asked_;
  bool keeps_, creates_;
  bool is_shown_ = false;
  uint64_t least_ = UINT64_MAX;  // functions below this topological number lead to nothing that was asked for
  std::vector<Step> steps_;
  std::vector<uint32_t> next_;
  ska::flat_hash_map<Node*, uint32_t> places_;
  std::unordered_map<Node*, ExecInfo> info_;
  std::priority_queue<Ready> ready_;
};

}  // namespace marid
