// Products of a few rows by a packed matrix in integers: the numbers of the matrix as they are packed, and the rows rounded
// to 16 bits with a scale for each 32 elements. See quantized_kernels.h. For packed_words_kernels.cpp and
// packed_bytes_kernels.cpp alone, which say by what instructions 32 numbers are multiplied (`Form`). Unpacking to floats
// takes two to three times as many instructions (docs/matrix_kernels.md).
#pragma once
#include "packed_blocks.h"
#include "quantized_kernels.h"
#include "vectors.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

namespace marid {
namespace {

inline __m256i bytes_at(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline float half_at(const uint8_t* at) { return _cvtsh_ss(loaded<uint16_t>(at)); }

// By how much the bytes of a packing exceed their numbers. Those of Q8_0 are signed, and exceed them if their first bit is
// changed.
constexpr int16_t excess_of(Packing packing) {
  return packing == Packing::kQ4_0 ? 8 : packing == Packing::kQ6_K ? 32 : packing == Packing::kQ8_0 ? 128 : 0;
}

template <int kBits>
inline __m256i low_bits(__m256i bytes, int shift) {
  return _mm256_and_si256(_mm256_srli_epi16(bytes, shift), _mm256_set1_epi8((1 << kBits) - 1));
}

// Calls f(index, bytes) for each part of a block: 32 bytes.
template <Packing kPacking, typename F>
inline void each_part(const uint8_t* block, const F& f) {
  if constexpr (kPacking == Packing::kQ8_0) {
    f(0, bytes_at(block + 2));
  } else if constexpr (kPacking == Packing::kQ4_0) {
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 2)));
    f(0, low_bits<4>(_mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)), 0));
  } else if constexpr (kPacking == Packing::kQ6_K) {
#pragma GCC unroll 8
    for (int index = 0; index < 8; index++) {
      int half = index / 4, part = index % 4;
      __m256i low = low_bits<4>(bytes_at(block + half * 64 + part % 2 * 32), part < 2 ? 0 : 4);
      __m256i high = low_bits<2>(bytes_at(block + 128 + half * 32), 2 * part);
      f(index, _mm256_or_si256(low, _mm256_slli_epi16(high, 4)));
    }
  } else {
    const uint8_t* nibbles = kPacking == Packing::kQ5_K ? block + 48 : block + 16;
#pragma GCC unroll 8
    for (int part = 0; part < 8; part++) {
      __m256i numbers = low_bits<4>(bytes_at(nibbles + part / 2 * 32), part % 2 * 4);
      if constexpr (kPacking == Packing::kQ5_K) {
        numbers = _mm256_or_si256(numbers, _mm256_slli_epi16(low_bits<1>(bytes_at(block + 16), part), 4));
      }
      f(part, numbers);
    }
  }
}

// By what sums of products of the parts of a block count, in a row whose integers count by `by`, and what is taken from
// them for the parts' minima.
template <Packing kPacking>
struct Scales {
  EightFloats scales, minima, more;

  explicit Scales(const uint8_t* block) {
    if constexpr (kPacking == Packing::kQ6_K) {
      float scale = half_at(block + 208);
      auto eight = [&](const uint8_t* of) {
        __m256i whole = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(of)));
        return reinterpret_cast<EightFloats>(_mm256_cvtepi32_ps(whole)) * scale;
      };
      scales = eight(block + 192), more = eight(block + 200);
    } else {
      scales_and_minima(block + 4, scales, minima);
      scales *= half_at(block);
      minima *= half_at(block + 2);
    }
  }

  // Where Q6_K has two scales for a part, they are beside each other.
  void times(const float* by, float* found) const {
    if constexpr (kPacking == Packing::kQ6_K) {
      auto each = loaded<EightFloats>(by);
      EightFloats low = scales * __builtin_shufflevector(each, each, 0, 0, 1, 1, 2, 2, 3, 3);
      EightFloats high = more * __builtin_shufflevector(each, each, 4, 4, 5, 5, 6, 6, 7, 7);
      std::memcpy(found, &low, sizeof(low));
      std::memcpy(found + 8, &high, sizeof(high));
    } else {
      EightFloats scaled = scales * loaded<EightFloats>(by);
      std::memcpy(found, &scaled, sizeof(scaled));
    }
  }
};

// The same where a block is one part, of several columns.
template <int kColumns>
inline void scales_of(const uint8_t* from, int64_t length, float by, float* found) {
  if constexpr (kColumns == 4) {
    __m128i halves = _mm_loadu_si16(from);
    halves = _mm_insert_epi16(halves, loaded<int16_t>(from + length), 1);
    halves = _mm_insert_epi16(halves, loaded<int16_t>(from + 2 * length), 2);
    halves = _mm_insert_epi16(halves, loaded<int16_t>(from + 3 * length), 3);
    _mm_storeu_ps(found, _mm_cvtph_ps(halves) * _mm_set1_ps(by));
  } else {
    for (int n = 0; n < kColumns; n++) found[n] = half_at(from + n * length) * by;
  }
}

// Several columns together, whose sums do not wait for each other.
template <typename Form, Packing kPacking, int kRows, int kColumns>
inline void some_columns(const PackedRows& of, int64_t column) {
  constexpr PackingSizes sized = kPackings[static_cast<size_t>(kPacking)];
  constexpr int64_t kParts = sized.elements / kPart;
  constexpr bool kMinima = kPacking == Packing::kQ4_K || kPacking == Packing::kQ5_K;
  constexpr bool kOne = kParts == 1;
  int64_t blocks = of.depth / sized.elements, parts = of.depth / kPart, length = blocks * sized.bytes;
  auto rounded = reinterpret_cast<const typename Form::Part*>(of.rounded);
  typename Form::Sums sums[kColumns][kRows] = {};
  EightFloats taken[kColumns][kRows] = {};
  for (int64_t block = 0; block < blocks; block++) {
    const uint8_t* from = of.matrix + column * length + block * sized.bytes;
    int64_t at = block * kParts;
    float ones[kRows][kColumns];
    if constexpr (kOne) {
      for (int m = 0; m < kRows; m++) scales_of<kColumns>(from, length, of.scales[m * parts + at], ones[m]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < kColumns; n++, from += length) {
      for (int64_t line = 0; line < sized.bytes; line += 64) __builtin_prefetch(from + kAhead + line, 0, 2);
      float scaled[kRows][16];
      if constexpr (!kOne) {
        Scales<kPacking> of_block(from);
        for (int m = 0; m < kRows; m++) {
          of_block.times(of.scales + m * parts + at, scaled[m]);
          if constexpr (kMinima) taken[n][m] += of_block.minima * loaded<EightFloats>(of.sums + m * parts + at);
        }
      }
      each_part<kPacking>(from, [&](int index, __m256i bytes) {
        auto numbers = Form::template numbers<excess_of(kPacking), kPacking == Packing::kQ8_0>(bytes);
        for (int m = 0; m < kRows; m++) {
          const typename Form::Part& x = rounded[m * parts + at + index];
          if constexpr (kPacking == Packing::kQ6_K) {
            Form::add(sums[n][m], numbers, x, scaled[m][2 * index], scaled[m][2 * index + 1]);
          } else {
            Form::add(sums[n][m], numbers, x, kOne ? ones[m][n] : scaled[m][index]);
          }
        }
      });
    }
  }
  for (int n = 0; n < kColumns; n++) {
    for (int m = 0; m < kRows; m++) {
      float sum = Form::total_of(sums[n][m]);
      if constexpr (kMinima) sum -= total(taken[n][m]);
      of.y[m * of.columns + column + n] = of.bias == nullptr ? sum : sum + of.bias[column + n];
    }
  }
}

template <typename Form, Packing kPacking, int kRows>
void columns(const PackedRows& of, int64_t begin, int64_t end) {
  constexpr int kColumns = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
  int64_t column = begin;
  for (; column + kColumns <= end; column += kColumns) some_columns<Form, kPacking, kRows, kColumns>(of, column);
  for (; column < end; column++) some_columns<Form, kPacking, kRows, 1>(of, column);
}

template <typename Form, Packing kPacking>
void some_rows(const PackedRows& of, int64_t begin, int64_t end) {
  switch (of.rows) {
    case 1: return columns<Form, kPacking, 1>(of, begin, end);
    case 2: return columns<Form, kPacking, 2>(of, begin, end);
    case 3: return columns<Form, kPacking, 3>(of, begin, end);
    default: return columns<Form, kPacking, 4>(of, begin, end);
  }
}

template <typename Form>
void multiply(Packing packing, const PackedRows& of, int64_t begin, int64_t end) {
  switch (packing) {
    case Packing::kQ4_0: some_rows<Form, Packing::kQ4_0>(of, begin, end); break;
    case Packing::kQ8_0: some_rows<Form, Packing::kQ8_0>(of, begin, end); break;
    case Packing::kQ4_K: some_rows<Form, Packing::kQ4_K>(of, begin, end); break;
    case Packing::kQ5_K: some_rows<Form, Packing::kQ5_K>(of, begin, end); break;
    case Packing::kQ6_K: some_rows<Form, Packing::kQ6_K>(of, begin, end); break;
  }
  for (int64_t m = 0; m < of.rows; m++) activate(of.activation, of.y + m * of.columns + begin, end - begin);
}

// The bits of the largest of 32 magnitudes: those of floats that are not negative are in the order of the floats.
inline int32_t largest_of(const float* x) {
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < 4; i++) {
    __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + 8 * i));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  int32_t eight[8], found = 0;
  std::memcpy(eight, &largest, sizeof(eight));
  for (int32_t one : eight) found = std::max(found, one);
  return found;
}

// A number that is not finite has no place in integers.
template <typename Form>
bool round_parts(Packing packing, const float* x, int64_t count, uint8_t* rounded, float* scales, float* sums) {
  auto to = reinterpret_cast<typename Form::Part*>(rounded);
  for (int64_t part = 0; part < count / kPart; part++, x += kPart) {
    int32_t bits = largest_of(x);
    if (bits >= 0x7f800000) return false;
    scales[part] = loaded<float>(&bits) / Form::kLargest;
    float inverse = scales[part] < FLT_MIN ? 0 : 1 / scales[part];
    int32_t whole[kPart];
    EightFloats sum = {};
    for (int i = 0; i < 4; i++) {
      auto eight = loaded<EightFloats>(x + 8 * i);
      sum += eight;
      __m256i integers = _mm256_cvtps_epi32(reinterpret_cast<__m256>(eight * inverse));
      std::memcpy(whole + 8 * i, &integers, sizeof(integers));
    }
    sums[part] = total(sum);
    to[part] = Form::rounded(whole, excess_of(packing));
  }
  return true;
}

template <typename Form>
constexpr IntegerProducts kProducts{sizeof(typename Form::Part), round_parts<Form>, multiply<Form>};

}  // namespace
}  // namespace marid
