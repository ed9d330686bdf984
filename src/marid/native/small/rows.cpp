// Rows of a tensor that indices name: `x[i]`, `x[i, j]`, `embedding(i, x)`. A row is whatever lies behind the dimensions that
// are indexed, and is copied as one piece; ATen's loops take a number after the other.
#include "rows.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
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

// Which rows all of the indices name together; empty where there is no such row.
std::vector<int64_t> named_rows(const Tensor& self, const Indices& indices) {
  std::vector<int64_t> found(static_cast<size_t>(indices.each[0]->numel()));
  for (size_t dimension = 0; dimension < indices.count; dimension++) {
    const auto* numbers = indices.each[dimension]->const_data_ptr<int64_t>();
    int64_t size = self.size(static_cast<int64_t>(dimension));
    for (size_t i = 0; i < found.size(); i++) {
      int64_t number = numbers[i];
      if (number < 0) number += size;
      if (number < 0 || number >= size) return {};
      found[i] = found[i] * size + number;
    }
  }
  return found;
}

// Rows of so many bytes each, of which there are `total`. A number is looked at where it is used: whose memory it is may
// write to it meanwhile.
struct Copy {
  const int64_t* rows;
  int64_t total, nbytes;
  const char* from;
  char* to;

  bool exists(int64_t row) const { return static_cast<uint64_t>(row) < static_cast<uint64_t>(total); }

  template <typename Row>
  bool rows_as(int64_t begin, int64_t end) const {
    const auto* given = reinterpret_cast<const Row*>(from);
    auto* made = reinterpret_cast<Row*>(to);
    for (int64_t i = begin; i < end; i++) {
      int64_t row = rows[i];
      if (!exists(row)) return false;
      made[i] = given[row];
    }
    return true;
  }

  // Pieces of rows, `pieces` of each.
  bool some(int64_t begin, int64_t end, int64_t pieces) const {
    switch (nbytes) {
      case 1: return rows_as<int8_t>(begin, end);
      case 2: return rows_as<int16_t>(begin, end);
      case 4: return rows_as<int32_t>(begin, end);
      case 8: return rows_as<int64_t>(begin, end);
    }
    for (int64_t i = begin; i < end; i++) {
      int64_t row = rows[i / pieces], start = i % pieces * kPiece;
      if (!exists(row)) return false;
      size_t length = static_cast<size_t>(std::min(kPiece, nbytes - start));
      std::memcpy(to + i / pieces * nbytes + start, from + row * nbytes + start, length);
    }
    return true;
  }

  // False where a row does not exist.
  bool all(int64_t count) const {
    int64_t pieces = (nbytes + kPiece - 1) / kPiece, grain = std::max<int64_t>(1, kGrain / std::min(nbytes, kPiece));
    std::atomic<bool> is_whole{true};
    at::parallel_for(0, count * pieces, grain, [&](int64_t begin, int64_t end) {
      if (!some(begin, end, pieces)) is_whole = false;
    });
    return is_whole;
  }
};

Tensor rows_of(const Tensor& self, const Indices& indices) {
  if (!is_usual(self, indices)) return {};
  const Tensor& first = *indices.each[0];
  int64_t count = first.numel(), total = 1;
  for (size_t i = 0; i < indices.count; i++) total *= self.size(static_cast<int64_t>(i));
  at::DimVector sizes(first.sizes().begin(), first.sizes().end());
  sizes.append(self.sizes().begin() + static_cast<std::ptrdiff_t>(indices.count), self.sizes().end());
  Tensor made = at::detail::empty_cpu(sizes, self.options());
  Copy copy{first.const_data_ptr<int64_t>(), total, static_cast<int64_t>(made.nbytes()) / count,
            static_cast<const char*>(self.const_data_ptr()), static_cast<char*>(made.mutable_data_ptr())};
  if (indices.count == 1 && copy.all(count)) return made;  // with its own numbers
  if (!indices.may_be_negative) return {};
  std::vector<int64_t> rows = named_rows(self, indices);
  copy.rows = rows.data();
  return !rows.empty() && copy.all(count) ? made : Tensor();
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
