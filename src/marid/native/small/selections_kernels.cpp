#include "selections.h"

#include <algorithm>
#include <type_traits>

namespace marid {

namespace {

constexpr int64_t kLanes = 32;  // numbers that are compared together
constexpr int64_t kShort = 32;  // numbers of a row that is looked through one by one

template <Selection selection, typename T>
bool is_before(T one, T other) {
  return selection == Selection::kLargest ? one > other : one < other;
}

template <Selection selection, typename T>
bool takes_over(T one, T best) {
  return is_before<selection>(one, best) || (one != one && best == best);
}

// As many bits as a number has, which is how the compiler compares several numbers at once.
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// The best of `count` numbers, a multiple of kLanes, of which none may be NaN; `has_nan` says if one is.
template <Selection selection, typename T>
T best_of(const T* row, int64_t count, bool* has_nan) {
  T best[kLanes];
  Bits<T> nan[kLanes] = {};
  std::copy(row, row + kLanes, best);
  for (int64_t at = 0; at < count; at += kLanes) {
    for (int64_t j = 0; j < kLanes; j++) nan[j] |= row[at + j] != row[at + j];
    for (int64_t j = 0; j < kLanes; j++) best[j] = is_before<selection>(row[at + j], best[j]) ? row[at + j] : best[j];
  }
  *has_nan = std::any_of(nan, nan + kLanes, [](Bits<T> one) { return one != 0; });
  T found = best[0];
  for (T one : best) found = is_before<selection>(one, found) ? one : found;
  return found;
}

// The first of `count` numbers for which a condition holds; `count` where there is none.
template <typename T, typename Condition>
int64_t first_where(const T* row, int64_t count, Condition condition) {
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    Bits<T> any = 0;
    for (int64_t j = 0; j < kLanes; j++) any |= condition(row[at + j]);
    if (any != 0) break;
  }
  return std::find_if(row + at, row + count, condition) - row;
}

template <Selection selection, typename T>
int64_t index_in(const T* row, int64_t count) {
  if (count <= kShort) {
    int64_t index = 0;
    for (int64_t i = 1; i < count; i++) index = takes_over<selection>(row[i], row[index]) ? i : index;
    return index;
  }
  int64_t whole = count / kLanes * kLanes;
  bool has_nan = false;
  T best = best_of<selection>(row, whole, &has_nan);
  int64_t index = has_nan ? first_where(row, whole, [](T one) { return one != one; })
                          : first_where(row, whole, [best](T one) { return one == best; });
  for (int64_t i = whole; i < count; i++) index = takes_over<selection>(row[i], row[index]) ? i : index;
  return index;
}

template <Selection selection, typename T>
void select_from(int64_t outer, int64_t count, int64_t inner, const T* from, T* numbers, int64_t* indices) {
  for (int64_t i = 0; i < outer; i++, from += count * inner, indices += inner) {
    if (inner == 1) {
      *indices = index_in<selection>(from, count);
    } else {
      std::fill(indices, indices + inner, 0);
      for (int64_t k = 1; k < count; k++) {
        for (int64_t j = 0; j < inner; j++) {
          if (takes_over<selection>(from[k * inner + j], from[indices[j] * inner + j])) indices[j] = k;
        }
      }
    }
    if (numbers == nullptr) continue;
    for (int64_t j = 0; j < inner; j++) *numbers++ = from[indices[j] * inner + j];
  }
}

template <Selection selection>
void select_as(at::ScalarType type, int64_t outer, int64_t count, int64_t inner, const void* from, void* numbers,
               int64_t* indices) {
  auto of = [&](auto like) {
    using T = decltype(like);
    select_from<selection>(outer, count, inner, static_cast<const T*>(from), static_cast<T*>(numbers), indices);
  };
  if (type == at::kFloat) return of(float());
  return type == at::kDouble ? of(double()) : of(int64_t());
}

}  // namespace

void select(Selection selection, at::ScalarType type, int64_t outer, int64_t count, int64_t inner, const void* from,
            void* numbers, int64_t* indices) {
  auto as = selection == Selection::kLargest ? select_as<Selection::kLargest> : select_as<Selection::kSmallest>;
  as(type, outer, count, inner, from, numbers, indices);
}

}  // namespace marid
