// Composite operators that run at once as a whole (whole_composites.cpp).
#pragma once
#include "immediate.h"
#include "record.h"
#include "recorder.h"

#include <ATen/core/boxing/KernelFunction.h>

#include <memory>
#include <optional>

namespace marid {

// The kernel of a composite operator. Where operations run at once and nobody differentiates, the CPU composes the operator, of
// concrete tensors: one operation in place of many. Else `apart` composes it of operations on ours.
class WholeComposite final : public c10::OperatorKernel {
 public:
  // `in_rows`: it is composed alike, whatever requires gradients, where the rows of its first argument lie behind each other.
  WholeComposite(const c10::FunctionSchema& schema, bool in_rows, std::shared_ptr<Operator> of, c10::KernelFunction apart);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  bool may_run_whole(c10::ArrayRef<c10::IValue> arguments) const;
  bool may_decide_by_flags(c10::ArrayRef<c10::IValue> arguments) const;
  Given given_of(c10::ArrayRef<c10::IValue> arguments) const;
  Outcome run_whole(const c10::OperatorHandle& op, torch::jit::Stack* stack);

  bool in_rows_;
  std::shared_ptr<Operator> of_;
  c10::KernelFunction apart_;
  std::optional<size_t> dropout_, train_, batch_first_, batch_sizes_;  // which argument it is
};

c10::KernelFunction whole_composite(const c10::FunctionSchema& schema, bool in_rows, std::shared_ptr<Operator> of,
                                    c10::KernelFunction apart);

// PyTorch's own kernel of a composite operator.
c10::KernelFunction as_pytorch_composes();

}  // namespace marid
