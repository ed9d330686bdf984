#include "views.h"

#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace marid {

namespace {

using Numbers = at::DimVector;

at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  if (self.is_quantized()) return {};
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

// A dimension that may be counted from the end, of so many; -1 for none of them.
int64_t dimension_of(int64_t given, int64_t count) {
  int64_t found = given < 0 ? given + count : given;
  return found >= 0 && found < count ? found : -1;
}

// The numbers, where all are that.
std::optional<at::IntArrayRef> plain(c10::SymIntArrayRef numbers) { return c10::asIntArrayRefSlowOpt(numbers); }

struct Geometry {
  explicit Geometry(const at::Tensor& of)
      : sizes(of.sizes().begin(), of.sizes().end()),
        strides(of.strides().begin(), of.strides().end()),
        offset(of.storage_offset()) {}
  void swap(int64_t first, int64_t second) {
    std::swap(sizes[first], sizes[second]);
    std::swap(strides[first], strides[second]);
  }
  void insert(int64_t dimension) {
    int64_t stride = dimension == static_cast<int64_t>(sizes.size()) ? 1 : sizes[dimension] * strides[dimension];
    sizes.insert(sizes.begin() + dimension, 1);
    strides.insert(strides.begin() + dimension, stride);
  }
  void erase(int64_t dimension) {
    sizes.erase(sizes.begin() + dimension);
    strides.erase(strides.begin() + dimension);
  }
  // `index` is inside of the dimension, perhaps counted from its end.
  void select(int64_t dimension, int64_t index) {
    offset += (index < 0 ? index + sizes[dimension] : index) * strides[dimension];
    erase(dimension);
  }
  void slice(int64_t dimension, int64_t from, int64_t to, int64_t by) {
    int64_t size = sizes[dimension];
    auto inside = [&](int64_t place, int64_t lowest) { return std::clamp(place < 0 ? place + size : place, lowest, size); };
    int64_t first = inside(from, 0), last = inside(to, first);
    offset += first * strides[dimension];
    sizes[dimension] = (last - first + by - 1) / by;
    strides[dimension] *= by;
  }
  at::Tensor of(const at::Tensor& self) const { return view(self, sizes, strides, offset); }
  Numbers sizes, strides;
  int64_t offset;
};

}  // namespace

at::Tensor alias_of(const at::Tensor& self) { return view(self, self.sizes(), self.strides(), self.storage_offset()); }

at::Tensor transposed(const at::Tensor& self) { return self.dim() == 2 ? transposed(self, 0, 1) : at::Tensor(); }

at::Tensor transposed(const at::Tensor& self, int64_t first, int64_t second) {
  int64_t one = dimension_of(first, self.dim()), other = dimension_of(second, self.dim());
  if (one < 0 || other < 0) return {};
  Geometry made(self);
  made.swap(one, other);
  return made.of(self);
}

at::Tensor permuted(const at::Tensor& self, at::IntArrayRef dimensions) {
  int64_t count = self.dim();
  if (static_cast<int64_t>(dimensions.size()) != count || count > 64) return {};
  Geometry made(self);
  uint64_t seen = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t from = dimension_of(dimensions[i], count);
    if (from < 0 || (seen >> from & 1) != 0) return {};
    seen |= uint64_t(1) << from;
    made.sizes[i] = self.sizes()[from];
    made.strides[i] = self.strides()[from];
  }
  return made.of(self);
}

at::Tensor viewed(const at::Tensor& self, c10::SymIntArrayRef given) {
  std::optional<at::IntArrayRef> sizes = plain(given);
  if (!sizes || self.numel() == 0) return {};
  int64_t count = 1, open = 0;
  for (int64_t size : *sizes) {
    if (size == -1) {
      open++;
    } else if (size <= 0 || count > self.numel()) {
      return {};
    } else {
      count *= size;
    }
  }
  if (open > 1 || (open == 1 ? self.numel() % count != 0 : self.numel() != count)) return {};
  Numbers own = at::infer_size_dv(*sizes, self.numel());
  std::optional<Numbers> strides = at::detail::computeStride(self.sizes(), self.strides(), own);
  return strides ? view(self, own, *strides, self.storage_offset()) : at::Tensor();
}

at::Tensor expanded(const at::Tensor& self, c10::SymIntArrayRef given, bool) {
  std::optional<at::IntArrayRef> sizes = plain(given);
  if (!sizes || static_cast<int64_t>(sizes->size()) < self.dim()) return {};
  auto made = at::inferExpandGeometry_dimvector(self.sizes(), self.strides(), *sizes);
  return view(self, made.sizes, made.strides, self.storage_offset());
}

at::Tensor unsqueezed(const at::Tensor& self, int64_t given) {
  int64_t dimension = dimension_of(given, self.dim() + 1);
  if (dimension < 0) return {};
  Geometry made(self);
  made.insert(dimension);
  return made.of(self);
}

at::Tensor squeezed(const at::Tensor& self, int64_t given) {
  int64_t dimension = dimension_of(given, self.dim());
  if (dimension < 0) return {};
  Geometry made(self);
  if (made.sizes[dimension] == 1) made.erase(dimension);
  return made.of(self);
}

at::Tensor selected(const at::Tensor& self, int64_t given, c10::SymInt position) {
  int64_t dimension = dimension_of(given, self.dim());
  std::optional<int64_t> number = position.maybe_as_int();
  int64_t index = dimension < 0 || !number ? -1 : dimension_of(*number, self.sizes()[dimension]);
  if (index < 0) return {};
  Geometry made(self);
  made.select(dimension, index);
  return made.of(self);
}

at::Tensor sliced(const at::Tensor& self, int64_t given, std::optional<c10::SymInt> start, std::optional<c10::SymInt> end,
                  c10::SymInt step) {
  constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();
  int64_t dimension = dimension_of(given, self.dim());
  std::optional<int64_t> from = start ? start->maybe_as_int() : 0, to = end ? end->maybe_as_int() : kEnd;
  std::optional<int64_t> by = step.maybe_as_int();
  if (dimension < 0 || !from || !to || !by || *by <= 0) return {};
  Geometry made(self);
  made.slice(dimension, *from, *to, *by);
  return made.of(self);
}

at::Tensor indexed(const at::Tensor& self, c10::ArrayRef<Index> indices) {
  Geometry made(self);
  int64_t dimension = 0;
  for (const Index& one : indices) {
    switch (one.kind) {
      case Index::kNumber: made.select(dimension, one.start); break;
      case Index::kSlice: made.slice(dimension++, one.start, one.stop, one.step); break;
      case Index::kNewDimension: made.insert(dimension++); break;
      case Index::kRest: dimension += one.start; break;
    }
  }
  return made.of(self);
}

}  // namespace marid
