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

constexpr int64_t kStep = 4;   // lanes of a sum
constexpr int64_t kLine = 16;  // floats

// The first products of four columns, added up one after the other.
inline __m128 first_sums(const float* x, const float* b, int64_t stride, int64_t count) {
  __m128 by_row[kStep] = {_mm_loadu_ps(b), _mm_loadu_ps(b + stride), _mm_loadu_ps(b + 2 * stride),
                          _mm_loadu_ps(b + 3 * stride)};
  _MM_TRANSPOSE4_PS(by_row[0], by_row[1], by_row[2], by_row[3]);
  __m128 sums = _mm_setzero_ps();
  for (int64_t i = 0; i < count; i++) sums = _mm_add_ps(sums, rounded(_mm_mul_ps(by_row[i], _mm_set1_ps(x[i]))));
  return sums;
}

// Four columns of a matrix whose columns are contiguous, two of them a register. What does not fill the lanes comes first,
// in lane 0.
void columns_in_lanes(const RowProduct& of, int64_t column) {
  constexpr int64_t kColumns = 4;
  const float *x = of.x, *b = of.b + column * of.stride;
  int64_t stride = of.stride, i = (of.depth - 1) % kStep + 1;
  __m128 none = _mm_setzero_ps(), first = first_sums(x, b, stride, i);
  __m128 low = _mm_unpacklo_ps(first, none), high = _mm_unpackhi_ps(first, none);  // two columns each
  __m256 sums[2] = {_mm256_set_m128(_mm_movehl_ps(none, low), _mm_movelh_ps(low, none)),
                    _mm256_set_m128(_mm_movehl_ps(none, high), _mm_movelh_ps(high, none))};
  auto step = [&](int64_t i) {
    __m256 numbers = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x + i));
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; pair++) {
      const float* from = b + 2 * pair * stride + i;
      sums[pair] = _mm256_add_ps(sums[pair], rounded(_mm256_mul_ps(_mm256_loadu2_m128(from + stride, from), numbers)));
    }
  };
  for (; i + kLine <= of.depth; i += kLine) {
    for (int n = 0; n < kColumns; n++) __builtin_prefetch(b + (n + kColumns) * stride + i, 0, 2);
#pragma GCC unroll 4
    for (int64_t j = 0; j < kLine; j += kStep) step(i + j);
  }
  for (; i < of.depth; i += kStep) step(i);
  for (auto& sum : sums) sum = _mm256_add_ps(sum, _mm256_permute_ps(sum, 0x4e));  // lanes 0 and 2, 1 and 3
  __m256 all = _mm256_hadd_ps(sums[0], sums[1]);                                 // columns 0, 0, 2, 2; 1, 1, 3, 3
  __m128 made = _mm_shuffle_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1), 0x88);
  made = _mm_shuffle_ps(made, made, 0xd8);
  float* y = of.y + column;
  _mm_storeu_ps(y, of.add ? _mm_add_ps(_mm_loadu_ps(y), made) : made);
}

void in_lanes(const RowProduct& of, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += 4) columns_in_lanes(of, column);
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
    for (; row + 8 <= of.depth; row += 8) add_rows<8>(of, row, from, to);
    for (; row + 4 <= of.depth; row += 4) add_rows<4>(of, row, from, to);
    for (; row < of.depth; row++) add_rows<1>(of, row, from, to);
  }
}

constexpr int64_t kSquare = 8;

// Rows of a square of numbers become its columns.
inline void transpose(__m256 (&square)[kSquare]) {
  __m256 pairs[kSquare], fours[kSquare];
  for (int i = 0; i < kSquare; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(square[i], square[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(square[i], square[i + 1]);
  }
  for (int i = 0; i < kSquare; i += 4) {
    for (int j = 0; j < 2; j++) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
    }
  }
  for (int i = 0; i < kSquare / 2; i++) {
    square[i] = _mm256_permute2f128_ps(fours[i], fours[i + kSquare / 2], 0x20);
    square[i + kSquare / 2] = _mm256_permute2f128_ps(fours[i], fours[i + kSquare / 2], 0x31);
  }
}

// `kSquares` times eight columns of a matrix whose columns are contiguous.
template <int kSquares>
void columns_one_by_one(const RowProduct& of, int64_t column) {
  constexpr int64_t kColumns = kSquares * kSquare;
  const float *x = of.x, *b = of.b + column * of.stride;
  int64_t stride = of.stride, i = 0;
  Eight sums[kSquares];
  for (int64_t n = 0; n < kColumns; n++) sums[n / kSquare][n % kSquare] = of.add ? of.y[column + n] : 0;
  for (; i + kSquare <= of.depth; i += kSquare) {
    __m256 squares[kSquares][kSquare];
    for (int64_t n = 0; n < kColumns; n++) {
      if (i % kLine == 0) __builtin_prefetch(b + (n + kColumns) * stride + i, 0, 2);
      squares[n / kSquare][n % kSquare] = _mm256_loadu_ps(b + n * stride + i);
    }
    for (auto& square : squares) transpose(square);
    for (int64_t j = 0; j < kSquare; j++) {
      for (int square = 0; square < kSquares; square++) {
        sums[square] += rounded(reinterpret_cast<Eight>(squares[square][j]) * x[i + j]);
      }
    }
  }
  for (; i < of.depth; i++) {
    for (int64_t n = 0; n < kColumns; n++) {
      sums[n / kSquare][n % kSquare] += rounded(b[n * stride + i] * x[i]);
    }
  }
  for (int64_t n = 0; n < kColumns; n++) of.y[column + n] = sums[n / kSquare][n % kSquare];
}

void turned_one_by_one(const RowProduct& of, int64_t begin, int64_t end) {
  int64_t column = begin;
  for (; column + 2 * kSquare <= end; column += 2 * kSquare) columns_one_by_one<2>(of, column);
  for (; column < end; column++) {
    float sum = of.add ? of.y[column] : 0;
    for (int64_t i = 0; i < of.depth; i++) sum += rounded(of.b[column * of.stride + i] * of.x[i]);
    of.y[column] = sum;
  }
}

}  // namespace

extern void (*const row_in_lanes)(const RowProduct&, int64_t, int64_t) = in_lanes;
extern void (*const row_one_by_one)(const RowProduct&, int64_t, int64_t) = one_by_one;
extern void (*const row_turned_one_by_one)(const RowProduct&, int64_t, int64_t) = turned_one_by_one;

}  // namespace marid

#else

namespace marid {
extern void (*const row_in_lanes)(const RowProduct&, int64_t, int64_t) = nullptr;
extern void (*const row_one_by_one)(const RowProduct&, int64_t, int64_t) = nullptr;
extern void (*const row_turned_one_by_one)(const RowProduct&, int64_t, int64_t) = nullptr;
}  // namespace marid

#endif
