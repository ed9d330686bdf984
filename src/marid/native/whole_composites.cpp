#include "whole_composites.h"

#include "composites.h"
#include "immediate.h"
#include "intermediates.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

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

}  // namespace

WholeComposite::WholeComposite(const c10::FunctionSchema& schema, Flags flags, std::shared_ptr<Operator> of,
                               c10::KernelFunction apart)
    : flags_(flags),
      of_(std::move(of)),
      apart_(std::move(apart)),
      dropout_(position_of(schema, {"dropout", "dropout_p"})),
      train_(position_of(schema, {"train"})),
      batch_first_(position_of(schema, {"batch_first"})) {}

bool WholeComposite::is_same_on_the_cpu(c10::ArrayRef<c10::IValue> arguments) const {
  bool draws = dropout_ && arguments[*dropout_].toDouble() != 0 && (!train_ || arguments[*train_].toBool());
  if (draws || in_own_function() || is_autocasting() || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return false;
  bool is_flagged = false, is_differentiated = false;
  each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    is_flagged = is_flagged || tensor.requires_grad();
    is_differentiated = is_differentiated || tensor._fw_grad(0).defined();
  });
  if (is_differentiated || (is_flagged && c10::GradMode::is_enabled())) return false;
  if (!is_flagged || flags_ == Flags::kIgnored) return true;
  if (flags_ == Flags::kDecide) return false;
  const at::Tensor& first = arguments[0].toTensor();
  bool turns = batch_first_ && arguments[*batch_first_].toBool() && first.dim() == 3;
  return has_plain_rows(turns ? first.transpose(0, 1) : first);
}

void WholeComposite::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  {
    InterpreterLock lock;
    if (may_run_at_once() && is_same_on_the_cpu(torch::jit::last(*stack, op.schema().arguments().size()))) {
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
  Results results;
  Outcome outcome = run_at_once(by, op, *of_, torch::jit::last(*stack, of_->formals.size()), results);
  if (outcome == Outcome::kDone) give_back(*of_, results, stack);
  return outcome;
}

c10::KernelFunction whole_composite(const c10::FunctionSchema& schema, Flags flags, std::shared_ptr<Operator> of,
                                    c10::KernelFunction apart) {
  auto kernel = std::make_unique<WholeComposite>(schema, flags, std::move(of), std::move(apart));
  return c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel));
}

c10::KernelFunction as_pytorch_composes() {
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Composite>());
}

}  // namespace marid
