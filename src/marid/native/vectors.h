// What the kernels that are compiled for this machine's vector unit (*_kernels.cpp) share. For them alone.
#pragma once
#include "elements.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>
#include <vector>

namespace marid {
namespace {

// What sums are taken in.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Memory for copies of rows as the type that sums are taken in. Where rows are that themselves, there is none.
template <typename T>
struct Room {
  explicit Room(int64_t count) : numbers(std::is_same_v<T, Sum<T>> ? 0 : count) {}
  Sum<T>* at(int64_t offset) { return numbers.empty() ? nullptr : numbers.data() + offset; }
  std::vector<Sum<T>> numbers;
};

// A row as the type that sums are taken in: the row itself, or a copy in `room`.
template <typename T>
const Sum<T>* widened(const T* row, Sum<T>* room, int64_t count) {
  if constexpr (std::is_same_v<T, Sum<T>>) {
    return row;
  } else {
    for (int64_t j = 0; j < count; j++) room[j] = static_cast<Sum<T>>(row[j]);
    return room;
  }
}

// A row that is computed in `begin()`, and is in its place after `end()`.
template <typename T>
struct Written {
  Written(T* row, Sum<T>* room) : row(row), room(room) {}
  Sum<T>* begin() const {
    if constexpr (std::is_same_v<T, Sum<T>>) {
      return row;
    } else {
      return room;
    }
  }
  void end(int64_t count) const {
    if constexpr (!std::is_same_v<T, Sum<T>>) {
      for (int64_t j = 0; j < count; j++) row[j] = static_cast<T>(room[j]);
    }
  }
  T* row;
  Sum<T>* room;
};

template <typename S>
at::vec::Vectorized<S> sigmoid(const at::vec::Vectorized<S>& x) {
  return at::vec::Vectorized<S>(1) / (at::vec::Vectorized<S>(1) + x.neg().exp());
}

template <typename S>
void activate(int64_t activation, S* row, int64_t count) {
  using Vec = at::vec::Vectorized<S>;
  auto map = [&](auto f) { at::vec::map<S>(f, row, row, count); };
  switch (activation) {
    case kRelu: return map([](Vec x) { return at::vec::clamp_min(x, Vec(0)); });
    case kSquaredRelu: return map([](Vec x) { return (x = at::vec::clamp_min(x, Vec(0))) * x; });
    case kSigmoid: return map([](Vec x) { return sigmoid(x); });
    case kTanh: return map([](Vec x) { return x.tanh(); });
    case kSilu: return map([](Vec x) { return x * sigmoid(x); });
    case kExp: return map([](Vec x) { return x.exp(); });
    case kOppositeExp: return map([](Vec x) { return x.exp().neg(); });
    default: return;
  }
}

}  // namespace
}  // namespace marid
