// Products of a few rows by a packed matrix in integers: the numbers of the matrix as they are packed, and the rows
// rounded to 16 bits with a scale for each 32 elements. See quantized_kernels.h; built.py compiles this file for this
// machine's vector unit. Unpacking to floats takes two to three times as many instructions (docs/matrix_kernels.md).
#include "quantized_kernels.h"

#include "packed_blocks.h"
#include "vectors.h"

#include <cfloat>
#include <cmath>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>

namespace marid {
namespace {

constexpr float kLargest = 32767;

inline __m256i bytes_at(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline float half_at(const uint8_t* at) { return _cvtsh_ss(loaded<uint16_t>(at)); }

// 32 numbers of 16 bits.
struct Words {
  __m256i low, high;
};
inline Words from_unsigned(__m256i bytes, int16_t less = 0) {
  __m256i by = _mm256_set1_epi16(less);
  return {_mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes)), by),
          _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm256_extracti128_si256(bytes, 1)), by)};
}
inline Words from_signed(__m256i bytes) {
  return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
          _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1))};
}
struct Sums {
  EightFloats low = {}, high = {};
};
// Adds products by 32 elements of x: `low` times those of the first half of them, `high` times those of the second.
inline void add(Sums& to, const Words& words, const int16_t* x, float low, float high) {
  auto at = reinterpret_cast<const __m256i*>(x);
  auto first = _mm256_cvtepi32_ps(_mm256_madd_epi16(words.low, _mm256_loadu_si256(at)));
  auto second = _mm256_cvtepi32_ps(_mm256_madd_epi16(words.high, _mm256_loadu_si256(at + 1)));
  to.low += reinterpret_cast<EightFloats>(first) * low;
  to.high += reinterpret_cast<EightFloats>(second) * high;
}
inline void add(Sums& to, const Words& words, const int16_t* x, float scale) { add(to, words, x, scale, scale); }
inline float total(const Sums& a, const Sums& b) { return total((a.low + b.low) + (a.high + b.high)); }

template <int kBits>
inline __m256i low_bits(__m256i bytes, int shift) {
  return _mm256_and_si256(_mm256_srli_epi16(bytes, shift), _mm256_set1_epi8((1 << kBits) - 1));
}

// Calls f(index, words) for each part of a block.
template <Packing kPacking, typename F>
inline void each_part(const uint8_t* block, const F& f) {
  if constexpr (kPacking == Packing::kQ8_0) {
    f(0, from_signed(bytes_at(block + 2)));
  } else if constexpr (kPacking == Packing::kQ4_0) {
    __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 2));
    f(0, from_unsigned(low_bits<4>(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), 0), 8));
  } else if constexpr (kPacking == Packing::kQ6_K) {
#pragma GCC unroll 8
    for (int index = 0; index < 8; index++) {
      int half = index / 4, part = index % 4;
      __m256i low = low_bits<4>(bytes_at(block + half * 64 + part % 2 * 32), part < 2 ? 0 : 4);
      __m256i high = low_bits<2>(bytes_at(block + 128 + half * 32), 2 * part);
      f(index, from_unsigned(_mm256_or_si256(low, _mm256_slli_epi16(high, 4)), 32));
    }
  } else {
    const uint8_t* nibbles = kPacking == Packing::kQ5_K ? block + 48 : block + 16;
#pragma GCC unroll 8
    for (int part = 0; part < 8; part++) {
      __m256i numbers = low_bits<4>(bytes_at(nibbles + part / 2 * 32), part % 2 * 4);
      if constexpr (kPacking == Packing::kQ5_K) {
        numbers = _mm256_or_si256(numbers, _mm256_slli_epi16(low_bits<1>(bytes_at(block + 16), part), 4));
      }
      f(part, from_unsigned(numbers));
    }
  }
}

// By what sums of products of the parts of a block count, in a row whose integers count by `by`, and what is taken from
// them for the parts' minima.
template <Packing kPacking>
struct Scales {
  EightFloats scales, minima;
  float one, sixteen[16];

  explicit Scales(const uint8_t* block) {
    if constexpr (kPacking == Packing::kQ6_K) {
      float scale = half_at(block + 208);
      auto halves = reinterpret_cast<const int8_t*>(block + 192);
      for (int i = 0; i < 16; i++) sixteen[i] = scale * halves[i];
    } else if constexpr (kPacking == Packing::kQ4_K || kPacking == Packing::kQ5_K) {
      scales_and_minima(block + 4, scales, minima);
      scales *= half_at(block);
      minima *= half_at(block + 2);
    } else {
      one = half_at(block);
    }
  }

  // Where Q6_K has two scales for a part, they are beside each other.
  void times(const float* by, float* found) const {
    if constexpr (kPacking == Packing::kQ6_K) {
      for (int i = 0; i < 16; i++) found[i] = sixteen[i] * by[i / 2];
    } else if constexpr (kPacking == Packing::kQ4_K || kPacking == Packing::kQ5_K) {
      EightFloats scaled = scales * loaded<EightFloats>(by);
      std::memcpy(found, &scaled, sizeof(scaled));
    } else {
      found[0] = one * by[0];
    }
  }
};

template <Packing kPacking, int kRows>
void columns(const PackedRows& of, int64_t begin, int64_t end) {
  constexpr PackingSizes sized = kPackings[static_cast<size_t>(kPacking)];
  constexpr int64_t kParts = sized.elements / kPart;
  constexpr bool kMinima = kPacking == Packing::kQ4_K || kPacking == Packing::kQ5_K;
  int64_t blocks = of.depth / sized.elements, parts = of.depth / kPart;
  for (int64_t column = begin; column < end; column++) {
    const uint8_t* row = of.matrix + column * blocks * sized.bytes;
    Sums sums[kRows][2];
    EightFloats taken[kRows] = {};
    for (int64_t block = 0; block < blocks; block++) {
      const uint8_t* from = row + block * sized.bytes;
      for (int64_t line = 0; line < sized.bytes; line += 64) __builtin_prefetch(from + kAhead + line, 0, 2);
      int64_t at = block * kParts;
      Scales<kPacking> of_block(from);
      float scaled[kRows][16];
      for (int m = 0; m < kRows; m++) {
        of_block.times(of.scales + m * parts + at, scaled[m]);
        if constexpr (kMinima) taken[m] += of_block.minima * loaded<EightFloats>(of.sums + m * parts + at);
      }
      each_part<kPacking>(from, [&](int index, const Words& words) {
        for (int m = 0; m < kRows; m++) {
          const int16_t* x = of.words + m * of.depth + (at + index) * kPart;
          if constexpr (kPacking == Packing::kQ6_K) {
            add(sums[m][index % 2], words, x, scaled[m][2 * index], scaled[m][2 * index + 1]);
          } else {
            add(sums[m][index % 2], words, x, scaled[m][index]);
          }
        }
      });
    }
    for (int m = 0; m < kRows; m++) {
      float sum = total(sums[m][0], sums[m][1]);
      if constexpr (kMinima) sum -= total(taken[m]);
      of.y[m * of.columns + column] = of.bias == nullptr ? sum : sum + of.bias[column];
    }
  }
}

template <Packing kPacking>
void some_rows(const PackedRows& of, int64_t begin, int64_t end) {
  switch (of.rows) {
    case 1: return columns<kPacking, 1>(of, begin, end);
    case 2: return columns<kPacking, 2>(of, begin, end);
    case 3: return columns<kPacking, 3>(of, begin, end);
    default: return columns<kPacking, 4>(of, begin, end);
  }
}

void multiply(Packing packing, const PackedRows& of, int64_t begin, int64_t end) {
  switch (packing) {
    case Packing::kQ4_0: some_rows<Packing::kQ4_0>(of, begin, end); break;
    case Packing::kQ8_0: some_rows<Packing::kQ8_0>(of, begin, end); break;
    case Packing::kQ4_K: some_rows<Packing::kQ4_K>(of, begin, end); break;
    case Packing::kQ5_K: some_rows<Packing::kQ5_K>(of, begin, end); break;
    case Packing::kQ6_K: some_rows<Packing::kQ6_K>(of, begin, end); break;
  }
  for (int64_t m = 0; m < of.rows; m++) activate(of.activation, of.y + m * of.columns + begin, end - begin);
}

// A number that is not finite has no place in integers.
bool round_parts(const float* x, int64_t count, int16_t* words, float* scales) {
  for (int64_t part = 0; part < count / kPart; part++, x += kPart, words += kPart) {
    float largest = 0, difference = 0;  // infinite or NaN less itself is NaN
    for (int64_t i = 0; i < kPart; i++) {
      largest = std::max(largest, std::fabs(x[i]));
      difference += x[i] - x[i];
    }
    if (difference != 0) return false;
    scales[part] = largest / kLargest;
    float inverse = scales[part] < FLT_MIN ? 0 : 1 / scales[part];
    for (int64_t i = 0; i < kPart; i++) words[i] = static_cast<int16_t>(_mm_cvtss_si32(_mm_set_ss(x[i] * inverse)));
  }
  return true;
}

}  // namespace

extern void (*const multiply_words)(Packing, const PackedRows&, int64_t, int64_t) = multiply;
extern bool (*const round_rows)(const float*, int64_t, int16_t*, float*) = round_parts;

}  // namespace marid

#else

namespace marid {

extern void (*const multiply_words)(Packing, const PackedRows&, int64_t, int64_t) = nullptr;
extern bool (*const round_rows)(const float*, int64_t, int16_t*, float*) = nullptr;

}  // namespace marid

#endif
