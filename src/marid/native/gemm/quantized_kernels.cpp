// See quantized_kernels.h; built.py compiles this file for this machine's vector unit. The formats are those of ggml
// (ggml-quants.c): an element is scale * q - minimum, where q has 4 to 8 bits, for parts of 32 elements or 16.
#include "quantized_kernels.h"

#include "packed_blocks.h"
#include "vectors.h"

#include <cstring>

namespace marid {
namespace {

using Bytes = uint8_t __attribute__((vector_size(16)));

inline float half_at(const uint8_t* at) { return static_cast<float>(c10::Half(loaded<uint16_t>(at), c10::Half::from_bits())); }

// In two steps, and of numbers without a sign: else the compiler takes the vector apart.
inline Floats as_floats(Bytes bytes) { return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats); }

// The numbers of a part, with what they are multiplied by and what is taken from each product.
struct Part {
  Floats low, high;
  float scale_low, scale_high, minimum;
};

// Calls f(index, part) for each part of a block.
template <Packing kPacking, typename F>
inline void each_part(const uint8_t* block, const F& f) {
  if constexpr (kPacking == Packing::kQ8_0) {
    float scale = half_at(block);
    Floats low = as_floats(loaded<Bytes>(block + 2) ^ 128) - 128;
    Floats high = as_floats(loaded<Bytes>(block + 18) ^ 128) - 128;
    f(0, Part{low, high, scale, scale, 0});
  } else if constexpr (kPacking == Packing::kQ4_0) {
    float scale = half_at(block);
    Bytes both = loaded<Bytes>(block + 2);
    f(0, Part{as_floats(both & 15), as_floats(both >> 4), scale, scale, 8 * scale});
  } else if constexpr (kPacking == Packing::kQ6_K) {
    float scale = half_at(block + 208);
    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const uint8_t *low = block + half * 64, *high = block + 128 + half * 32;
#pragma GCC unroll 4
      for (int part = 0; part < 4; part++) {
        const uint8_t* nibbles = low + (part & 1) * 32;
        int shift = part < 2 ? 0 : 4;
        Bytes a = ((loaded<Bytes>(nibbles) >> shift) & 15) | (((loaded<Bytes>(high) >> (2 * part)) & 3) << 4);
        Bytes b = ((loaded<Bytes>(nibbles + 16) >> shift) & 15) | (((loaded<Bytes>(high + 16) >> (2 * part)) & 3) << 4);
        int index = half * 4 + part;
        f(index, Part{as_floats(a) - 32, as_floats(b) - 32, scale * scales[2 * index], scale * scales[2 * index + 1], 0});
      }
    }
  } else {
    EightFloats scales, minima;
    scales_and_minima(block + 4, scales, minima);
    scales *= half_at(block);
    minima *= half_at(block + 2);
    const uint8_t *bits = block + 16, *nibbles = kPacking == Packing::kQ5_K ? block + 48 : block + 16;
#pragma GCC unroll 8
    for (int part = 0; part < 8; part++) {
      const uint8_t* from = nibbles + part / 2 * 32;
      Bytes a = loaded<Bytes>(from), b = loaded<Bytes>(from + 16);
      a = part % 2 == 0 ? a & 15 : a >> 4;
      b = part % 2 == 0 ? b & 15 : b >> 4;
      if constexpr (kPacking == Packing::kQ5_K) {
        a |= ((loaded<Bytes>(bits) >> part) & 1) << 4;
        b |= ((loaded<Bytes>(bits + 16) >> part) & 1) << 4;
      }
      f(part, Part{as_floats(a), as_floats(b), scales[part], scales[part], minima[part]});
    }
  }
}

template <Packing kPacking>
constexpr PackingSizes sizes() {
  return kPackings[static_cast<size_t>(kPacking)];
}

template <Packing kPacking>
void unpacked(const uint8_t* blocks, float* to, int64_t count) {
  constexpr PackingSizes of = sizes<kPacking>();
  for (int64_t done = 0; done < count; done += of.elements, blocks += of.bytes) {
    each_part<kPacking>(blocks, [&](int index, const Part& part) {
      Floats low = part.low * part.scale_low - part.minimum, high = part.high * part.scale_high - part.minimum;
      std::memcpy(to + done + index * kPart, &low, sizeof(low));
      std::memcpy(to + done + index * kPart + 16, &high, sizeof(high));
    });
  }
}

template <Packing kPacking, int kRows>
void columns(const PackedRows& of, int64_t begin, int64_t end) {
  constexpr PackingSizes sized = sizes<kPacking>();
  int64_t blocks = of.depth / sized.elements, parts = of.depth / kPart;
  for (int64_t column = begin; column < end; column++) {
    const uint8_t* row = of.matrix + column * blocks * sized.bytes;
    Floats sums[kRows][2] = {};
    float taken[kRows] = {};
    for (int64_t block = 0; block < blocks; block++) {
      const uint8_t* from = row + block * sized.bytes;
      for (int64_t line = 0; line < sized.bytes; line += 64) __builtin_prefetch(from + kAhead + line, 0, 2);
      int64_t at = block * (sized.elements / kPart);
      each_part<kPacking>(from, [&](int index, const Part& part) {
        for (int m = 0; m < kRows; m++) {
          const float* x = of.x + m * of.depth + (at + index) * kPart;
          if constexpr (kPacking == Packing::kQ6_K) {
            sums[m][0] += part.low * (loaded<Floats>(x) * part.scale_low);
            sums[m][1] += part.high * (loaded<Floats>(x + 16) * part.scale_high);
          } else {
            sums[m][index % 2] += (part.low * loaded<Floats>(x) + part.high * loaded<Floats>(x + 16)) * part.scale_low;
          }
          if constexpr (kPacking != Packing::kQ8_0 && kPacking != Packing::kQ6_K) {
            taken[m] += part.minimum * of.sums[m * parts + at + index];
          }
        }
      });
    }
    for (int m = 0; m < kRows; m++) {
      float sum = total(sums[m][0] + sums[m][1]) - taken[m];
      of.y[m * of.columns + column] = of.bias == nullptr ? sum : sum + of.bias[column];
    }
  }
}

template <Packing kPacking>
void some_rows(const PackedRows& of, int64_t begin, int64_t end) {
  switch (of.rows) {
    case 1: columns<kPacking, 1>(of, begin, end); break;
    case 2: columns<kPacking, 2>(of, begin, end); break;
    case 3: columns<kPacking, 3>(of, begin, end); break;
    default: columns<kPacking, 4>(of, begin, end); break;
  }
  for (int64_t m = 0; m < of.rows; m++) activate(of.activation, of.y + m * of.columns + begin, end - begin);
}

template <template <Packing> class K, typename... Args>
void packed_as(Packing packing, const Args&... args) {
  switch (packing) {
    case Packing::kQ4_0: return K<Packing::kQ4_0>::run(args...);
    case Packing::kQ8_0: return K<Packing::kQ8_0>::run(args...);
    case Packing::kQ4_K: return K<Packing::kQ4_K>::run(args...);
    case Packing::kQ5_K: return K<Packing::kQ5_K>::run(args...);
    case Packing::kQ6_K: return K<Packing::kQ6_K>::run(args...);
  }
}

template <Packing kPacking>
struct Multiply {
  static void run(const PackedRows& of, int64_t begin, int64_t end) { some_rows<kPacking>(of, begin, end); }
};

template <Packing kPacking>
struct Unpack {
  static void run(const uint8_t* blocks, float* to, int64_t count) { unpacked<kPacking>(blocks, to, count); }
};

void multiply(Packing packing, const PackedRows& of, int64_t begin, int64_t end) {
  packed_as<Multiply>(packing, of, begin, end);
}

void unpack_blocks(Packing packing, const uint8_t* blocks, float* to, int64_t count) {
  packed_as<Unpack>(packing, blocks, to, count);
}

}  // namespace

extern void (*const multiply_packed)(Packing, const PackedRows&, int64_t, int64_t) = multiply;
extern void (*const unpack)(Packing, const uint8_t*, float*, int64_t) = unpack_blocks;

}  // namespace marid
