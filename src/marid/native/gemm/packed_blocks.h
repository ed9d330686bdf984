// What both kernels for packed matrices share (quantized_kernels.cpp, packed_words_kernels.cpp). For them alone.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace marid {
namespace {

constexpr int64_t kPart = 32;     // elements that have a scale in common; 16 in Q6_K
constexpr int64_t kAhead = 4096;  // bytes of the matrix that are asked of memory ahead

using EightFloats = float __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(64)));

template <typename V, typename T>
inline V loaded(const T* from) {
  V made;
  std::memcpy(&made, from, sizeof(V));
  return made;
}

inline float total(EightFloats eight) {
  eight += __builtin_shufflevector(eight, eight, 4, 5, 6, 7, 0, 1, 2, 3);
  eight += __builtin_shufflevector(eight, eight, 2, 3, 0, 1, 6, 7, 4, 5);
  return eight[0] + eight[1];
}
inline float total(const Floats& sums) {
  EightFloats halves[2];
  std::memcpy(halves, &sums, sizeof(sums));
  return total(halves[0] + halves[1]);
}

// Six bits for the scale and six for the minimum of each of eight parts, in twelve bytes.
inline void scales_and_minima(const uint8_t* packed, EightFloats& scales, EightFloats& minima) {
  uint32_t words[3], found[4];
  std::memcpy(words, packed, sizeof(words));
  found[0] = words[0] & 0x3f3f3f3f;
  found[1] = (words[2] & 0x0f0f0f0f) | ((words[0] >> 6 & 0x03030303) << 4);
  found[2] = words[1] & 0x3f3f3f3f;
  found[3] = (words[2] >> 4 & 0x0f0f0f0f) | ((words[1] >> 6 & 0x03030303) << 4);
#if defined(__AVX2__)  // the compiler takes such a conversion apart
  auto floats = [](const uint32_t* of) {
    __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(of));
    return reinterpret_cast<EightFloats>(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight)));
  };
#else
  using Eight = uint8_t __attribute__((vector_size(8)));
  using EightInts = int32_t __attribute__((vector_size(32)));
  auto floats = [](const uint32_t* of) {
    return __builtin_convertvector(__builtin_convertvector(loaded<Eight>(of), EightInts), EightFloats);
  };
#endif
  scales = floats(found);
  minima = floats(found + 2);
}

}  // namespace
}  // namespace marid
