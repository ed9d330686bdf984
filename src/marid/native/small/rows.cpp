// Rows of a tensor that indices name: `x[i]`, `x[i, j]`, `embedding(i, x)`. A row is whatever lies behind the dimensions that
// are indexed, and is copied as one piece; ATen's loops take a number after the other.
#include "rows.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

namespace marid {

namespace {

using at::Tensor;

constexpr size_t kMostIndices = 4;
constexpr int64_t kPiece = 1 << 18;  // bytes that are copied at a time
constexpr int64_t kGrain = 1 << 16;  // bytes that one thread copies

// The indices of some dimensions, from the first on, all of one shape.
struct Indices {
  size_t count = 0;
  std::array<const Tensor*, kMostIndices> each{};
  bool may_be_negative = false;
};

// Whether its strides are those of a new tensor, of dimensions of one element too: ATen lays results out like these.
bool is_in_order(const Tensor& tensor) {
  int64_t next = 1;
  for (int64_t i = tensor.dim() - 1; i >= 0; i--) {
    if (tensor.stride(i) != next) return false;
    next *= std::max<int64_t>(tensor.size(i), 1);
  }
  return true;
}

bool is_usual(const Tensor& self, const Indices& indices) {
  const Tensor& first = *indices.each[0];
  for (size_t i = 0; i < indices.count; i++) {
    const Tensor& index = *indices.each[i];
    if (index.scalar_type() != at::kLong || !is_in_order(index) || index._is_zerotensor()) return false;
    if (i > 0 && index.sizes() != first.sizes()) return false;
  }
  bool is_plain = self.layout() == at::kStrided && is_in_order(self) && !self.is_neg() && !self.is_conj() &&
      !self._is_zerotensor() && !self.is_quantized();
  return is_plain && self.dim() >= static_cast<int64_t>(indices.count) && self.numel() > 0 && first.numel() > 0;
}

// Which rows the indices name: their own numbers where there is one index that counts from the first row on.
struct Rows {
  const int64_t* each = nullptr;  // null where there is no such row
  std::vector<int64_t> found;
};

Rows rows_of_one(const Tensor& index, int64_t size) {
  const auto* numbers = index.const_data_ptr<int64_t>();
  int64_t count = index.numel();
  bool is_outside = false;
  for (int64_t i = 0; i < count; i++) is_outside |= static_cast<uint64_t>(numbers[i]) >= static_cast<uint64_t>(size);
  return is_outside ? Rows() : Rows{numbers, {}};
}

Rows rows_of_all(const Tensor& self, const Indices& indices) {
  std::vector<int64_t> found(static_cast<size_t>(indices.each[0]->numel()));
  for (size_t dimension = 0; dimension < indices.count; dimension++) {
    const auto* numbers = indices.each[dimension]->const_data_ptr<int64_t>();
    int64_t size = self.size(static_cast<int64_t>(dimension));
    for (size_t i = 0; i < found.size(); i++) {
      int64_t number = numbers[i] < 0 ? numbers[i] + size : numbers[i];
      if (number < 0 || number >= size) return {};
      found[i] = found[i] * size + number;
    }
  }
  const int64_t* each = found.data();
  return {each, std::move(found)};
}

template <typename Piece>
void copy_pieces(const int64_t* rows, const char* from, char* to, int64_t begin, int64_t end) {
  const auto* pieces = reinterpret_cast<const Piece*>(from);
  auto* made = reinterpret_cast<Piece*>(to);
  for (int64_t i = begin; i < end; i++) made[i] = pieces[rows[i]];
}

// `count` rows of so many bytes each.
void copy(const int64_t* rows, int64_t count, int64_t nbytes, const char* from, char* to) {
  int64_t pieces = (nbytes + kPiece - 1) / kPiece, piece = std::min(nbytes, kPiece);
  at::parallel_for(0, count * pieces, std::max<int64_t>(1, kGrain / piece), [&](int64_t begin, int64_t end) {
    switch (nbytes) {
      case 1: return copy_pieces<int8_t>(rows, from, to, begin, end);
      case 2: return copy_pieces<int16_t>(rows, from, to, begin, end);
      case 4: return copy_pieces<int32_t>(rows, from, to, begin, end);
      case 8: return copy_pieces<int64_t>(rows, from, to, begin, end);
    }
    for (int64_t i = begin; i < end; i++) {
      int64_t row = i / pieces, start = i % pieces * piece;
      size_t length = static_cast<size_t>(std::min(piece, nbytes - start));
      std::memcpy(to + row * nbytes + start, from + rows[row] * nbytes + start, length);
    }
  });
}

Tensor rows_of(const Tensor& self, const Indices& indices) {
  if (!is_usual(self, indices)) return {};
  const Tensor& first = *indices.each[0];
  int64_t count = first.numel();
  Rows rows = indices.count == 1 ? rows_of_one(first, self.size(0)) : Rows();
  if (rows.each == nullptr && indices.may_be_negative) rows = rows_of_all(self, indices);
  if (rows.each == nullptr) return {};
  at::DimVector sizes(first.sizes().begin(), first.sizes().end());
  sizes.append(self.sizes().begin() + static_cast<std::ptrdiff_t>(indices.count), self.sizes().end());
  Tensor made = at::detail::empty_cpu(sizes, self.options());
  int64_t nbytes = static_cast<int64_t>(made.nbytes()) / count;
  copy(rows.each, count, nbytes, static_cast<const char*>(self.const_data_ptr()), static_cast<char*>(made.mutable_data_ptr()));
  return made;
}

}  // namespace

Tensor rows_indexed(const Tensor& self, const c10::List<std::optional<Tensor>>& list) {
  if (list.empty() || list.size() > kMostIndices) return {};
  Indices indices{list.size(), {}, true};
  size_t next = 0;
  c10::IValue whole(list);
  for (const c10::IValue& item : whole.toListRef()) {
    if (!item.isTensor() || !item.toTensor().defined()) return {};
    indices.each[next++] = &item.toTensor();
  }
  return rows_of(self, indices);
}

Tensor rows_selected(const Tensor& self, int64_t dimension, const Tensor& index) {
  bool is_first = dimension == 0 && index.dim() == 1;
  return is_first ? rows_of(self, {1, {&index}, false}) : Tensor();
}

Tensor rows_embedded(const Tensor& weight, const Tensor& indices, c10::SymInt, bool, bool) {
  return weight.dim() == 2 ? rows_of(weight, {1, {&indices}, false}) : Tensor();
}

}  // namespace marid
