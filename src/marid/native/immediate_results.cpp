#include "immediate_results.h"

#include "geometry.h"
#include "zeros.h"

#include <utility>

namespace marid {

// Whether a tensor can be one of the device's.
bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return tensor.layout() == at::kStrided && tensor.is_cpu() && !tensor.is_quantized() && !tensor.is_nested() &&
      !impl.key_set().has(c10::DispatchKey::Python);
}

Outcome ImmediateResults::take(at::Tensor result) {
  if (!result.defined()) {
    results_.emplace_back();
    return Outcome::kDone;
  }
  std::shared_ptr<Computed> base;
  bool views_zero = false;
  for (size_t i = 0; i < given_.concrete.size(); i++) {
    if (result.is_same(given_.concrete[i])) {
      results_.push_back(at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
          given_.handles[i])));
      return Outcome::kDone;
    }
    if (!base && result.has_storage() && given_.concrete[i].storage().is_alias_of(result.storage())) {
      base = given_.handles[i]->computed();
      views_zero = given_.handles[i]->is_zero;
    }
  }
  if (!is_plain(result)) {
    TORCH_CHECK(!writes_, "marid: an operator that writes has returned a tensor that is not strided, or not on the CPU");
    return Outcome::kUnusual;
  }
  if (base || is_owned(result.storage())) {
    Outcome outcome = give(std::move(result), base);
    if (views_zero && outcome == Outcome::kDone) mark_zero(results_.back());
    return outcome;
  }
  if (!writes_) return Outcome::kUnusual;
  Below below(false);
  return give(result.clone(), base);
}

Outcome ImmediateResults::give(at::Tensor tensor, const std::shared_ptr<Computed>& base) {
  if (!base) nbytes_ += static_cast<int64_t>(tensor.nbytes());
  if (origin_.op == nullptr && !find_origin(by_, &origin_)) return Outcome::kError;
  results_.push_back(new_handle(Computed::make(std::move(tensor), given_.device, origin_, base)));
  return results_.back().defined() ? Outcome::kDone : Outcome::kError;
}

}  // namespace marid
