// Products of a single row in the orders in which MKL adds them up on processors that are not Intel's. built.py compiles this
// file for this machine's vector unit.
#include "row_kernels.h"

#include <algorithm>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>

namespace marid {
namespace {

using Eight = float __attribute__((vector_size(32)));

// A product that is rounded: without this, the compiler would round it together with the sum.
template <typename T>
inline T rounded(T product) {
  asm("" : "+x"(product));
  return product;
}

template <typename T>
inline T loaded(const float* from) {
  T made;
  std::memcpy(&made, from, sizeof(made));
  return made;
}

constexpr int64_t kStep = 4;  // lanes of a sum
constexpr int64_t kLine = 16;  // floats

// Some columns of a matrix whose columns are contiguous, two of them a register. What does not fill the lanes comes first, in
// lane 0.
template <int kPairs>
void columns_in_lanes(const RowProduct& of, int64_t column) {
  const float *x = of.x, *b = of.b + column * of.stride;
  int64_t stride = of.stride, first = (of.depth - 1) % kStep + 1;
  Eight sums[kPairs] = {};
  for (int n = 0; n < 2 * kPairs; n++) {
    float sum = 0;
    for (int64_t i = 0; i < first; i++) sum += rounded(x[i] * b[n * stride + i]);
    sums[n / 2][n % 2 * 4] = sum;
  }
  auto step = [&](int64_t i) {
    auto numbers = reinterpret_cast<Eight>(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(x + i)));
#pragma GCC unroll 4
    for (int pair = 0; pair < kPairs; pair++) {
      const float* from = b + 2 * pair * stride + i;
      auto both = reinterpret_cast<Eight>(_mm256_loadu2_m128(from + stride, from));
      sums[pair] += rounded(both * numbers);
    }
  };
  int64_t i = first;
  for (; i + kLine <= of.depth; i += kLine) {
    for (int n = 0; n < 2 * kPairs; n++) __builtin_prefetch(b + (n + 2 * kPairs) * stride + i, 0, 2);
#pragma GCC unroll 4
    for (int64_t j = 0; j < kLine; j += kStep) step(i + j);
  }
  for (; i < of.depth; i += kStep) step(i);
  for (int n = 0; n < 2 * kPairs; n++) {
    Eight all = sums[n / 2];
    int64_t lane = n % 2 * 4;
    float sum = (all[lane] + all[lane + 2]) + (all[lane + 1] + all[lane + 3]);
    float& y = of.y[column + n];
    y = of.add ? y + sum : sum;
  }
}

void in_lanes(const RowProduct& of, int64_t begin, int64_t end) {
  int64_t column = begin;
  for (; column + 4 <= end; column += 4) columns_in_lanes<2>(of, column);
  for (; column + 2 <= end; column += 2) columns_in_lanes<1>(of, column);
}

constexpr int64_t kTogether = 1 << 15;  // sums that stay in a cache

// Adds `kRows` rows of a matrix to sums, one after the other.
template <int kRows>
void add_rows(const RowProduct& of, int64_t row, int64_t begin, int64_t end) {
  const float *b = of.b + row * of.stride, *x = of.x + row;
  auto add = [&](int64_t column) {
    auto sums = loaded<Eight>(of.y + column);
    for (int i = 0; i < kRows; i++) sums += rounded(loaded<Eight>(b + i * of.stride + column) * x[i]);
    std::memcpy(of.y + column, &sums, sizeof(sums));
  };
  int64_t column = begin;
  for (; column + kLine <= end; column += kLine) {
    for (int i = 0; i < kRows; i++) __builtin_prefetch(b + (i + kRows) * of.stride + column, 0, 2);
    add(column);
    add(column + 8);
  }
  for (; column < end; column++) {
    float sum = of.y[column];
    for (int i = 0; i < kRows; i++) sum += rounded(b[i * of.stride + column] * x[i]);
    of.y[column] = sum;
  }
}

void one_by_one(const RowProduct& of, int64_t begin, int64_t end) {
  for (int64_t from = begin; from < end; from += kTogether) {
    int64_t to = std::min(from + kTogether, end), row = 0;
    if (!of.add) std::fill(of.y + from, of.y + to, 0.0f);
    for (; row + 4 <= of.depth; row += 4) add_rows<4>(of, row, from, to);
    for (; row < of.depth; row++) add_rows<1>(of, row, from, to);
  }
}

}  // namespace

extern void (*const row_in_lanes)(const RowProduct&, int64_t, int64_t) = in_lanes;
extern void (*const row_one_by_one)(const RowProduct&, int64_t, int64_t) = one_by_one;

}  // namespace marid

#else

namespace marid {
extern void (*const row_in_lanes)(const RowProduct&, int64_t, int64_t) = nullptr;
extern void (*const row_one_by_one)(const RowProduct&, int64_t, int64_t) = nullptr;
}  // namespace marid

#endif
