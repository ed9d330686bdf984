#include "immediate_results.h"

#include "geometry.h"

#include <utility>

namespace marid {

// Whether a tensor can be one of the device's.
bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return tensor.layout() == at::kStrided && tensor.is_cpu() && !tensor.is_quantized() && !tensor.is_nested() &&
      !impl.key_set().has(c10::DispatchKey::Python);
}

namespace {

// Whether two tensors of the CPU would be the same on the device but for what they hold.
bool look_alike(const at::Tensor& first, const at::Tensor& second) {
  const c10::TensorImpl &one = *first.unsafeGetTensorImpl(), &other = *second.unsafeGetTensorImpl();
  return one.sizes() == other.sizes() && one.strides() == other.strides() && one.storage_offset() == other.storage_offset() &&
      one.dtype() == other.dtype() && one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

}  // namespace

Outcome ImmediateResults::take(at::Tensor result) {
  if (!result.defined()) {
    results_.emplace_back();
    return Outcome::kDone;
  }
  std::shared_ptr<Computed> base;
  for (size_t i = 0; i < given_.concrete.size(); i++) {
    if (result.is_same(given_.concrete[i])) {
      results_.push_back(at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
          given_.handles[i])));
      return Outcome::kDone;
    }
    if (!base && result.has_storage() && given_.concrete[i].storage().is_alias_of(result.storage())) {
      base = given_.handles[i]->computed();
    }
  }
  if (!is_plain(result)) {
    TORCH_CHECK(!writes_, "marid: an operator that writes has returned a tensor that is not strided, or not on the CPU");
    return Outcome::kUnusual;
  }
  if (base || is_owned(result.storage())) return give(std::move(result), base);
  if (!writes_) return Outcome::kUnusual;
  Below below(false);
  return give(result.clone(), base);
}

Outcome ImmediateResults::give(at::Tensor tensor, const std::shared_ptr<Computed>& base) {
  if (!base) nbytes_ += static_cast<int64_t>(tensor.nbytes());
  if (origin_.op == nullptr && !find_origin(by_, &origin_)) return Outcome::kError;
  std::shared_ptr<const Look> look = look_like(tensor);
  if (!look) return Outcome::kError;
  const c10::TensorImpl* pattern = look->pattern;
  results_.push_back(new_handle(pattern, Computed::make(std::move(tensor), std::move(look), origin_, base)));
  return results_.back().defined() ? Outcome::kDone : Outcome::kError;
}

// Results often look like the first argument. While a kernel ran, another thread may have let that stand for something else.
std::shared_ptr<const Look> ImmediateResults::look_like(const at::Tensor& tensor) const {
  if (!given_.handles.empty()) {
    const std::shared_ptr<Computed>& first = given_.handles[0]->computed();
    bool known = first && first->shared_look() && first->tensor.is_same(given_.concrete[0]);
    if (known && look_alike(tensor, first->tensor)) return first->shared_look();
  }
  return look_of(tensor, given_.device);
}

}  // namespace marid
