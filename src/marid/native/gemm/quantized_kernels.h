// Products by matrices whose elements are packed as in GGUF files, and unpacking them (quantized.cpp).
#pragma once
#include "elements.h"

#include <array>
#include <cstdint>
#include <string_view>

namespace marid {

enum class Packing : int64_t { kQ4_0, kQ8_0, kQ4_K, kQ5_K, kQ6_K };

struct PackingSizes {
  std::string_view name;
  int64_t elements, bytes;  // of a block
};

inline constexpr std::array<PackingSizes, 5> kPackings{
    {{"Q4_0", 32, 18}, {"Q8_0", 32, 34}, {"Q4_K", 256, 144}, {"Q5_K", 256, 176}, {"Q6_K", 256, 210}}};

// y[m, n] = activation(sum over k of x[m, k] * matrix[n, k] + bias[n]) for the columns in [begin, end). `sums` has the
// sums of x over 32 elements each, [rows, depth / 32], and `scales` by what `words`, x in integers, are multiplied.
struct PackedRows {
  const float *x, *sums, *bias, *scales;
  const int16_t* words;
  const uint8_t* matrix;
  float* y;
  int64_t rows, depth, columns;  // 4 rows at most
  int64_t activation;
};

extern void (*const multiply_packed)(Packing, const PackedRows&, int64_t begin, int64_t end);

// The same by `words`, and making these of `count` elements of x: false where some are not finite. Both are null where
// the machine's vector unit does not have what they take (packed_words_kernels.cpp).
extern void (*const multiply_words)(Packing, const PackedRows&, int64_t begin, int64_t end);
extern bool (*const round_rows)(const float* x, int64_t count, int16_t* words, float* scales);

// `count` elements, whole blocks, as floats.
extern void (*const unpack)(Packing, const uint8_t* blocks, float* to, int64_t count);

}  // namespace marid
