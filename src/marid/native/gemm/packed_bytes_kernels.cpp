// Products by packed matrices in integers of 8 bits (packed_rows.h), by the instructions of AVX-512 VNNI: each multiplies 32
// unsigned bytes by 32 signed ones and adds up four products. Of the 16 bits of an element each half is multiplied by
// itself. A processor with AVX-512 may not have these instructions, so it is asked when the program runs.
#include "quantized_kernels.h"

#if defined(__AVX512VL__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

// What others may link too is compiled without these instructions.
#include "packed_blocks.h"
#include "vectors.h"

namespace marid {
namespace {
bool has_instructions() { return __builtin_cpu_supports("avx512vnni"); }
}  // namespace
}  // namespace marid

#pragma GCC push_options
#pragma GCC target("avx512vnni")
#include "packed_rows.h"

namespace marid {
namespace {

struct Bytes {
  static constexpr float kLargest = 127 * 256 + 127;

  // An element is 256 times its byte in `high` and its byte in `low`. `less` is what the excess of a packing's bytes adds,
  // with the other sign, to the sums of four products each.
  struct Part {
    int8_t high[kPart], low[kPart];
    int32_t less[kPart / 4];
  };
  using Sums = EightFloats;

  template <int16_t, bool kSigned>
  static __m256i numbers(__m256i bytes) {
    return kSigned ? _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)) : bytes;
  }

  static void add(Sums& to, __m256i numbers, const Part& x, float low, float high) {
    to += products(numbers, x) * reinterpret_cast<EightFloats>(_mm256_set_m128(_mm_set1_ps(high), _mm_set1_ps(low)));
  }
  static void add(Sums& to, __m256i numbers, const Part& x, float scale) { to += products(numbers, x) * scale; }

  static float total_of(const Sums& sums) { return total(sums); }

  static Part rounded(const int32_t* whole, int16_t excess) {
    Part made;
    for (int64_t i = 0; i < kPart; i++) {
      made.low[i] = static_cast<int8_t>(whole[i]);
      made.high[i] = static_cast<int8_t>((whole[i] - made.low[i]) >> 8);
    }
    for (int64_t i = 0; i < kPart / 4; i++) {
      const int32_t* four = whole + 4 * i;
      made.less[i] = -excess * (four[0] + four[1] + four[2] + four[3]);
    }
    return made;
  }

 private:
  static EightFloats products(__m256i numbers, const Part& x) {
    __m256i of_high = _mm256_dpbusd_epi32(_mm256_setzero_si256(), numbers, loaded<__m256i>(x.high));
    __m256i of_low = _mm256_dpbusd_epi32(loaded<__m256i>(x.less), numbers, loaded<__m256i>(x.low));
    __m256i sums = _mm256_add_epi32(_mm256_slli_epi32(of_high, 8), of_low);
    return reinterpret_cast<EightFloats>(_mm256_cvtepi32_ps(sums));
  }
};

}  // namespace

const IntegerProducts* products_in_bytes() { return has_instructions() ? &kProducts<Bytes> : nullptr; }

}  // namespace marid
#pragma GCC pop_options

#else

const marid::IntegerProducts* marid::products_in_bytes() { return nullptr; }

#endif
