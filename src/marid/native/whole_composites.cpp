#include "whole_composites.h"

#include "composites.h"
#include "intermediates.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/variable.h>

namespace marid {

namespace {

struct Composite final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    c10::Dispatcher::singleton().callBoxedForDispatchKey(op, c10::DispatchKey::CompositeImplicitAutograd, stack);
  }
};

std::optional<size_t> position_of(const c10::FunctionSchema& schema, std::initializer_list<const char*> names) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    for (const char* name : names) {
      if (schema.arguments()[i].name() == name) return i;
    }
  }
  return std::nullopt;
}

// Whether a tensor can require gradients here: one that was made in inference mode can only there.
bool can_be_flagged(const at::Tensor& tensor) { return !tensor.is_inference() || c10::InferenceMode::is_enabled(); }

// The same tensor without what autograd knows of it.
at::Tensor bare(const at::Tensor& tensor) {
  at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  auto copy = impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true);
  return at::Tensor(std::move(copy));
}

// What a composite operator is made of may depend on whether its tensors require gradients, though nobody differentiates
// now. So the CPU is given tensors that require them where ours do, and makes views of these as it makes them for the user,
// whose state of dispatch has `keys`: they require gradients too. Autograd itself has nothing to do.
class AsTheUserCalls {
 public:
  bool is_view = false;  // whether a result lies in the memory of an argument

  AsTheUserCalls(const Given& given, Concrete& concrete, c10::impl::LocalDispatchKeySet keys, bool flags)
      : concrete_(concrete), plain_(concrete) {
    bool any = false;
    for (size_t i = 0; flags && i < concrete_.size(); i++) {
      if (!given.handles[i]->requires_grad() || !can_be_flagged(concrete_[i])) continue;
      concrete_[i] = bare(concrete_[i]);
      concrete_[i].unsafeGetTensorImpl()->set_requires_grad(true);
      any = true;
    }
    keys.excluded_ = keys.excluded_ | c10::autograd_dispatch_keyset;
    if (any) dispatch_.emplace(keys);
  }

  AsTheUserCalls(const AsTheUserCalls&) = delete;
  AsTheUserCalls& operator=(const AsTheUserCalls&) = delete;
  ~AsTheUserCalls() { concrete_ = std::move(plain_); }

  // A result as the device keeps it.
  at::Tensor taken(at::Tensor result) {
    for (size_t i = 0; i < concrete_.size(); i++) {
      if (result.is_same(concrete_[i])) return plain_[i];
      is_view = is_view || (result.defined() && result.storage().is_alias_of(concrete_[i].storage()));
    }
    bool is_known = result.defined() && torch::autograd::impl::get_autograd_meta(result) != nullptr;
    return is_known ? bare(result) : std::move(result);
  }

 private:
  Concrete& concrete_;
  Concrete plain_;
  std::optional<c10::impl::ForceDispatchKeyGuard> dispatch_;
};

}  // namespace

WholeComposite::WholeComposite(const c10::FunctionSchema& schema, bool in_rows, std::shared_ptr<Operator> of,
                               c10::KernelFunction apart)
    : in_rows_(in_rows),
      of_(std::move(of)),
      apart_(std::move(apart)),
      dropout_(position_of(schema, {"dropout", "dropout_p"})),
      train_(position_of(schema, {"train"})),
      batch_first_(position_of(schema, {"batch_first"})),
      batch_sizes_(position_of(schema, {"batch_sizes"})) {}

bool WholeComposite::may_run_whole(c10::ArrayRef<c10::IValue> arguments) const {
  bool draws = dropout_ && arguments[*dropout_].toDouble() != 0 && (!train_ || arguments[*train_].toBool());
  if (draws || in_own_function() || is_autocasting() || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return false;
  bool is_differentiated = false;
  each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    bool is_flagged = c10::GradMode::is_enabled() && tensor.requires_grad();
    is_differentiated = is_differentiated || is_flagged || tensor._fw_grad(0).defined();
  });
  return !is_differentiated;
}

bool WholeComposite::may_decide_by_flags(c10::ArrayRef<c10::IValue> arguments) const {
  if (!in_rows_) return true;
  const at::Tensor& first = arguments[0].toTensor();
  bool turns = batch_first_ && arguments[*batch_first_].toBool() && first.dim() == 3;
  if (!turns) return !has_plain_rows(first);
  int64_t row = first.size(2);  // with the first two dimensions exchanged, and no view made to look
  return first.stride(2) != 1 || first.stride(0) != row || first.stride(1) != row * first.size(0);
}

// The sizes of packed sequences are the host's.
Given WholeComposite::given_of(c10::ArrayRef<c10::IValue> arguments) const {
  if (!batch_sizes_) return Given(arguments);
  Given given(arguments.slice(0, *batch_sizes_)), rest(arguments.slice(*batch_sizes_ + 1));
  for (Handle* handle : rest.handles) {
    given.is_usual = given.is_usual && handle->device().index() == given.device;
    given.handles.push_back(handle);
  }
  given.is_usual = given.is_usual && rest.is_usual && !rest.has_host;
  return given;
}

void WholeComposite::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  {
    InterpreterLock lock;
    if (may_run_at_once() && may_run_whole(torch::jit::last(*stack, op.schema().arguments().size()))) {
      Outcome outcome = run_whole(op, stack);
      if (outcome == Outcome::kError) throw_python_error();
      if (outcome == Outcome::kDone) return;
    }
  }
  Intermediates inside;
  apart_.callBoxed(op, keys, stack);
  inside.give(torch::jit::last(*stack, op.schema().returns().size()));
}

Outcome WholeComposite::run_whole(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (of_->identity == nullptr && !make_recorder(op)) return Outcome::kError;
  PyObject* by = recorder_of(*of_);
  if (by == nullptr) return PyErr_Occurred() ? Outcome::kError : Outcome::kUnusual;
  c10::ArrayRef<c10::IValue> arguments = torch::jit::last(*stack, of_->formals.size());
  Given given = given_of(arguments);
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  bool is_view = false, flags = may_decide_by_flags(arguments);
  auto invoke = [&](Concrete& concrete, Results& returned) {
    AsTheUserCalls call(given, concrete, keys, flags);
    call_concretely(op, arguments, concrete, returned);
    for (at::Tensor& one : returned) one = call.taken(std::move(one));
    is_view = call.is_view;
  };
  Results results;
  Outcome outcome = is_usual_call(*of_, arguments) ? run_at_once(by, given, invoke, results) : Outcome::kUnusual;
  if (outcome == Outcome::kDone && is_view) return Outcome::kUnusual;  // autograd has to see it made
  if (outcome == Outcome::kDone) give_back(*of_, results, stack);
  return outcome;
}

c10::KernelFunction whole_composite(const c10::FunctionSchema& schema, bool in_rows, std::shared_ptr<Operator> of,
                                    c10::KernelFunction apart) {
  auto kernel = std::make_unique<WholeComposite>(schema, in_rows, std::move(of), std::move(apart));
  return c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel));
}

c10::KernelFunction as_pytorch_composes() {
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Composite>());
}

}  // namespace marid
