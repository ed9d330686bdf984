// Products of matrices whose gradients are computed by one operation each.
//
// PyTorch computes the gradients of a product by two products of transposed matrices. A view costs as much on the device as a
// product of small matrices does. Where operations run at once, the function of autograd therefore calls the CPU's kernels
// itself, and the views are the CPU's. Its graph, its name, what it saves and how it computes are those of PyTorch's function
// (`MmBackward0`, `AddmmBackward0` and `BmmBackward0`, from derivatives.yaml and FunctionsManual.cpp).
#include "product_gradients.h"

#include "above_autograd.h"
#include "autograd_function.h"
#include "handle.h"
#include "immediate.h"
#include "operands.h"
#include "record.h"
#include "small/small.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/mm_ops.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace marid {

namespace {

using at::Tensor, at::Scalar;
using torch::dynamo::autograd::CompiledNodeArgs, torch::dynamo::autograd::SwapSavedVariables;
using torch::autograd::Node, torch::autograd::SavedVariable, torch::autograd::variable_list;

// What gradients are computed by.
struct Calls {
  Tensor (*product)(const Tensor& left, const Tensor& right);
  Tensor (*transposed)(const Tensor& matrix);
};

// Of tensors of the device: operations that can be recorded, and differentiated.
constexpr Calls kOperations{
    [](const Tensor& left, const Tensor& right) { return left.dim() == 3 ? left.bmm(right) : left.mm(right); },
    [](const Tensor& matrix) { return matrix.dim() == 3 ? matrix.transpose(1, 2) : matrix.t(); }};

// Of tensors of the CPU: what these operations run.
Tensor product_on_the_cpu(const Tensor& left, const Tensor& right) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("marid::product", "");
  static const auto product = op.typed<Tensor(const Tensor&, const Tensor&)>();
  return product.call(left, right);
}

Tensor transposed_on_the_cpu(const Tensor& matrix) {
  static const auto small = small_kernel<Tensor(const Tensor&, int64_t, int64_t)>("aten::transpose.int");
  Tensor made = small(matrix, -2, -1);
  return made.defined() ? made : matrix.transpose(-2, -1);
}

constexpr Calls kOnTheCpu{product_on_the_cpu, transposed_on_the_cpu};

// Whether the columns of a matrix lie behind each other. The gradient of such a one is laid out like it.
bool is_by_columns(const Tensor& matrix) {
  return matrix.dim() == 2 && matrix.stride(0) == 1 && matrix.stride(1) == matrix.size(0);
}

// What of a product its gradients depend on, beside its factors.
struct Form {
  bool adds = false;  // whether the product is added to the first argument
  bool left_is_by_columns = false, right_is_by_columns = false;
};

// The gradients of the arguments, those that are wanted. In PyTorch's order, which is that of names: of `mat1` and `mat2`, but
// of `mat2` and `self`. What another shape was added to a product gets a gradient that autograd sums up.
variable_list gradients(const Form& form, const std::vector<bool>& wanted, const Tensor& grad, const Tensor& left,
                        const Tensor& right, const Calls& call) {
  variable_list found(wanted.size());
  size_t first = form.adds, second = first + 1;
  auto to_left = [&] {
    if (!wanted[first]) return;
    found[first] = form.left_is_by_columns ? call.transposed(call.product(right, call.transposed(grad)))
                                           : call.product(grad, call.transposed(right));
  };
  if (form.adds) to_left();
  if (wanted[second]) {
    found[second] = form.right_is_by_columns ? call.transposed(call.product(call.transposed(grad), left))
                                             : call.product(call.transposed(left), grad);
  }
  if (!form.adds) to_left();
  if (form.adds && wanted[0]) found[0] = grad;
  return found;
}

// The same as an operation of the graph that PyTorch's compiled autograd makes.
variable_list gradients_in_a_graph(const variable_list& grads, const std::vector<c10::IValue>& packed) {
  torch::dynamo::autograd::PackedArgs values(packed);
  Form form;
  form.adds = values.unpack<bool>();
  form.left_is_by_columns = values.unpack<bool>();
  form.right_is_by_columns = values.unpack<bool>();
  auto wanted = values.unpack<std::vector<bool>>();
  auto left = values.unpack<Tensor>(), right = values.unpack<Tensor>();
  if (!grads[0].defined()) return variable_list(wanted.size());
  return gradients(form, wanted, grads[0], left, right, kOperations);
}

struct ProductBackward : Node {
  variable_list apply(variable_list&& grads) override {
    Tensor left, right;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      // As they are saved, in PyTorch's order of names: hooks for saved tensors, as checkpoints are, count them.
      if (form.adds) left = saved_left.unpack();
      right = saved_right.unpack();
      if (!form.adds) left = saved_left.unpack();
    }
    if (!grads[0].defined()) return variable_list(num_outputs());
    // Gradients that will be differentiated are composed of operations that can be, and so are those that are recorded.
    bool may_be_whole = !c10::GradMode::is_enabled() && c10::impl::TorchDispatchModeTLS::stack_len() == 0;
    variable_list found;
    if (may_be_whole && run_whole(grads[0], left, right, found)) return found;
    return gradients(form, wanted(), grads[0], left, right, kOperations);
  }

  // What is saved of the left or of the right factor; undefined where the other one requires no gradient.
  Tensor saved(bool of_right) {
    std::lock_guard<std::mutex> guard(mutex_);
    return (of_right ? saved_right : saved_left).unpack();
  }

  void release_variables() override {
    std::lock_guard<std::mutex> guard(mutex_);
    saved_left.reset_data();
    saved_right.reset_data();
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    for (bool one : {form.adds, form.left_is_by_columns, form.right_is_by_columns}) args.collect(one);
    args.collect(saved_left, false);
    args.collect(saved_right, false);
  }

  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& saved) override {
    saved.before(saved_left);
    saved.before(saved_right);
    torch::dynamo::autograd::PackedArgs values;
    for (bool one : {form.adds, form.left_is_by_columns, form.right_is_by_columns}) values.pack(one);
    values.pack(wanted());
    values.pack(saved_left.unpack());
    values.pack(saved_right.unpack());
    std::vector<at::TypePtr> types;
    for (const c10::IValue& one : values.vec()) types.push_back(one.isTensor() ? at::TensorType::get() : one.type());
    const auto& python = torch::dynamo::autograd::getPyCompilerInterface();
    PyObject* compiler = saved.get_py_compiler();
    std::string bound = python->bind_function(compiler, "ProductBackward", gradients_in_a_graph, types, true, true);
    auto looks = torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        torch::dynamo::autograd::get_input_metadata(next_edges()));
    variable_list found = python->call_function(compiler, "apply_functional", bound, grads, values.vec(), looks);
    saved.after(saved_left);
    saved.after(saved_right);
    return found;
  }

  SavedVariable saved_left, saved_right;  // each where the other one requires a gradient
  Form form;
  c10::DimVector added_sizes;

 private:
  std::vector<bool> wanted() const {
    std::vector<bool> found(num_outputs());
    for (size_t i = 0; i < found.size(); i++) found[i] = task_should_compute_output(i);
    return found;
  }

  // The gradients as one operation; false where it cannot run at once.
  bool run_whole(const Tensor& grad, const Tensor& left, const Tensor& right, variable_list& found) {
    InterpreterLock lock;  // also for what is known of operators
    if (!may_run_at_once()) return false;
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::linear_backward", "");
    static const std::shared_ptr<Operator> own = operator_named(op.operator_name());
    if (own->identity == nullptr && !make_recorder(op)) throw_python_error();
    PyObject* by = at_once_by(*own);
    if (by == nullptr) return false;
    Given given;
    for (const Tensor* each : {&grad, &left, &right}) given.add(*each);
    Results results;
    auto invoke = [&](Concrete& concrete, Results& returned) {
      size_t next = 0;
      auto placed = [&](const Tensor& tensor) { return tensor.defined() ? concrete[next++] : Tensor(); };
      Tensor on_cpu[3] = {placed(grad), placed(left), placed(right)};
      variable_list made = gradients(form, wanted(), on_cpu[0], on_cpu[1], on_cpu[2], kOnTheCpu);
      if (form.adds && made[0].defined()) made[0] = at::sum_to(std::move(made[0]), added_sizes);
      for (Tensor& one : made) returned.push_back(std::move(one));
    };
    Outcome outcome = run_at_once(by, given, invoke, results);
    if (outcome == Outcome::kError) throw_python_error();
    if (outcome != Outcome::kDone) return false;
    found.assign(std::make_move_iterator(results.begin()), std::make_move_iterator(results.end()));
    return true;
  }
};

// The functions by the names that PyTorch has for them, and for what they save.
struct MmBackward final : ProductBackward {
  static constexpr const char *kName = "MmBackward0", *kLeft = "_saved_self", *kRight = "_saved_mat2";
  std::string name() const override { return kName; }
};
struct BmmBackward final : ProductBackward {
  static constexpr const char *kName = "BmmBackward0", *kLeft = "_saved_self", *kRight = "_saved_mat2";
  std::string name() const override { return kName; }
};
struct AddmmBackward final : ProductBackward {
  static constexpr const char *kName = "AddmmBackward0", *kLeft = "_saved_mat1", *kRight = "_saved_mat2";
  std::string name() const override { return kName; }
};

template <bool right>
PyObject* saved_factor(PyObject* function, void*) {
  return guarded([&] {
    auto& cdata = reinterpret_cast<torch::autograd::THPCppFunction*>(function)->cdata;
    return THPVariable_Wrap(static_cast<ProductBackward&>(*cdata).saved(right));
  });
}

// The class that Python sees of a function: its name, and what it saves.
template <typename Function>
void show() {
  using namespace torch::autograd;
  static PyTypeObject type;
  static PyGetSetDef properties[] = {
      THP_FUNCTION_DEFAULT_PROPERTIES,
      {Function::kLeft, saved_factor<false>, nullptr, nullptr, nullptr},
      {Function::kRight, saved_factor<true>, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  _initFunctionPyTypeObject(type, Function::kName, properties, nullptr);
  registerCppFunction(typeid(Function), &type);
}

// A product's argument as autograd sees it.
struct Argument {
  bool is_usual, requires_grad;
  explicit Argument(const Tensor& tensor)
      : is_usual(handle_of(tensor) != nullptr && c10::isFloatingType(tensor.scalar_type()) && !tensor._fw_grad(0).defined()),
        requires_grad(tensor.requires_grad()) {}
};

// The function of a product's gradients, where it is ours; null where PyTorch's is to be taken, or none is needed.
template <typename Function>
FunctionPointer function_of(const Tensor* added, const Tensor& left, const Tensor& right) {
  if (!c10::GradMode::is_enabled()) return {};
  Argument of_left(left), of_right(right), of_added(added != nullptr ? *added : left);
  if (!of_left.is_usual || !of_right.is_usual || !of_added.is_usual) return {};
  if (!of_left.requires_grad && !of_right.requires_grad && !of_added.requires_grad) return {};
  {
    InterpreterLock lock;
    if (!runs_at_once(left.device().index())) return {};
  }
  FunctionPointer pointer = make_function<Function>();
  auto& function = static_cast<ProductBackward&>(*pointer);
  function.form = {added != nullptr, is_by_columns(left), is_by_columns(right)};
  if (added != nullptr) {
    function.set_next_edges(torch::autograd::collect_next_edges(*added, left, right));
    function.added_sizes = c10::DimVector(added->sizes());
  } else {
    function.set_next_edges(torch::autograd::collect_next_edges(left, right));
  }
  auto save_left = [&] {
    if (of_right.requires_grad) function.saved_left = SavedVariable(left, false);
  };
  if (function.form.adds) save_left();
  if (of_left.requires_grad) function.saved_right = SavedVariable(right, false);
  if (!function.form.adds) save_left();
  return pointer;
}

// What is called where the function of gradients is not ours: PyTorch's kernel, or without gradients none.
template <typename Op>
Tensor call_without_function(c10::DispatchKeySet keys, const auto&... arguments) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  static const auto kernel = kernel_above_autograd(op);
  if (!is_next_below(keys) || (needs_gradient(arguments) || ...)) {
    return kernel.template call<Tensor, decltype(arguments)...>(op, keys, arguments...);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return Op::redispatch(keys & c10::after_ADInplaceOrView_keyset, arguments...);
}

template <typename Op>
Tensor with_function(const FunctionPointer& function, c10::DispatchKeySet keys, auto&&... arguments) {
  Tensor made;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    made = Op::redispatch(keys & c10::after_autograd_keyset, arguments...);
  }
  torch::autograd::set_history(made, function);
  return made;
}

Tensor mm(c10::DispatchKeySet keys, const Tensor& left, const Tensor& right) {
  FunctionPointer function = function_of<MmBackward>(nullptr, left, right);
  return function ? with_function<at::_ops::mm>(function, keys, left, right) : call_without_function<at::_ops::mm>(keys, left, right);
}

Tensor bmm(c10::DispatchKeySet keys, const Tensor& left, const Tensor& right) {
  FunctionPointer function = function_of<BmmBackward>(nullptr, left, right);
  return function ? with_function<at::_ops::bmm>(function, keys, left, right) : call_without_function<at::_ops::bmm>(keys, left, right);
}

Tensor addmm(c10::DispatchKeySet keys, const Tensor& added, const Tensor& left, const Tensor& right, const Scalar& beta,
             const Scalar& alpha) {
  bool is_sum = beta.equal(1) && alpha.equal(1);
  FunctionPointer function = is_sum ? function_of<AddmmBackward>(&added, left, right) : FunctionPointer();
  return function ? with_function<at::_ops::addmm>(function, keys, added, left, right, beta, alpha)
                  : call_without_function<at::_ops::addmm>(keys, added, left, right, beta, alpha);
}

}  // namespace

void register_product_gradients(torch::Library& above) {
  show<MmBackward>();
  show<BmmBackward>();
  show<AddmmBackward>();
  above.impl("mm", TORCH_FN(mm));
  above.impl("bmm", TORCH_FN(bmm));
  above.impl("addmm", TORCH_FN(addmm));
}

}  // namespace marid
