// Products by packed matrices in integers of 16 bits (packed_rows.h). built.py compiles this file for this machine's vector
// unit.
#include "quantized_kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>

#include "packed_rows.h"

namespace marid {
namespace {

struct Words {
  static constexpr float kLargest = 32767;

  struct Part {
    int16_t words[kPart];
  };
  struct Numbers {
    __m256i low, high;
  };
  struct Sums {
    EightFloats low = {}, high = {};
  };

  template <int16_t kExcess, bool kSigned>
  static Numbers numbers(__m256i bytes) {
    __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
    if constexpr (kSigned) return {_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high)};
    __m256i excess = _mm256_set1_epi16(kExcess);
    return {_mm256_sub_epi16(_mm256_cvtepu8_epi16(low), excess), _mm256_sub_epi16(_mm256_cvtepu8_epi16(high), excess)};
  }

  // Adds products by 32 elements of x: `low` times those of the first half of them, `high` times those of the second.
  static void add(Sums& to, const Numbers& numbers, const Part& x, float low, float high) {
    auto at = reinterpret_cast<const __m256i*>(x.words);
    auto first = _mm256_cvtepi32_ps(_mm256_madd_epi16(numbers.low, _mm256_loadu_si256(at)));
    auto second = _mm256_cvtepi32_ps(_mm256_madd_epi16(numbers.high, _mm256_loadu_si256(at + 1)));
    to.low += reinterpret_cast<EightFloats>(first) * low;
    to.high += reinterpret_cast<EightFloats>(second) * high;
  }
  static void add(Sums& to, const Numbers& numbers, const Part& x, float scale) { add(to, numbers, x, scale, scale); }

  static float total_of(const Sums& sums) { return total(sums.low + sums.high); }

  static Part rounded(const int32_t* whole, int16_t) {
    Part made;
    for (int64_t i = 0; i < kPart; i++) made.words[i] = static_cast<int16_t>(whole[i]);
    return made;
  }
};

}  // namespace

const IntegerProducts* products_in_words() { return &kProducts<Words>; }

}  // namespace marid

#else

const marid::IntegerProducts* marid::products_in_words() { return nullptr; }

#endif
