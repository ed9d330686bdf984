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
// sums of x over 32 elements each, [rows, depth / 32]; `rounded` has x in integers, and `scales` by what these are multiplied.
struct PackedRows {
  const float *x, *sums, *bias, *scales;
  const uint8_t *rounded, *matrix;
  float* y;
  int64_t rows, depth, columns;  // 4 rows at most
  int64_t activation;
};

extern void (*const multiply_packed)(Packing, const PackedRows&, int64_t begin, int64_t end);

// The same in integers (packed_rows.h).
struct IntegerProducts {
  size_t bytes;  // that 32 elements of x take in integers
  // Makes them of `count` elements of x for a matrix that is packed so, with a scale and a sum for each 32: false where some
  // of x are not finite.
  bool (*round)(Packing, const float* x, int64_t count, uint8_t* rounded, float* scales, float* sums);
  void (*multiply)(Packing, const PackedRows&, int64_t begin, int64_t end);
};

// Null where the machine's vector unit does not have the instructions.
const IntegerProducts* products_in_words();
const IntegerProducts* products_in_bytes();

// `count` elements, whole blocks, as floats.
extern void (*const unpack)(Packing, const uint8_t* blocks, float* to, int64_t count);

}  // namespace marid
