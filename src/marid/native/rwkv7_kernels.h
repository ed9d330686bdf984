// The inner loops of RWKV-7's operators (rwkv7.cpp), compiled for the vector instructions of this machine (built.py).
#pragma once

#include "elements.h"

#include <cstdint>

namespace marid::rwkv7 {

// All arrays are contiguous and have elements of one type, but for what is said. `lengths` says how many tokens of each
// sequence there are, or is null. Sums are taken in float, or double for double.
struct TokenShift {
  const void *x, *shift, *mix;  // [batch, tokens, width], [batch, width], [count, width]
  void *mixed, *last;           // [count, batch, tokens, width], [batch, width]
  const int64_t* lengths;
  int64_t batch, tokens, width, count;
};

struct Pack {
  const void *k, *v, *a, *kk;  // [rows, heads * size]
  void* packed;                // [rows, heads, 4, size]
  int64_t rows, heads, size;
};

struct TimeMix {
  const void *r, *w, *packed;  // [batch, tokens, heads, size] twice, [batch, tokens, heads, 4, size]
  const void* state;           // [batch, heads, size, size], float or double
  void *y, *next;              // like r, like state
  const int64_t* lengths;
  int64_t batch, tokens, heads, size;
};

struct TimeFirst {
  const void *y, *r, *packed, *bonus;  // [rows, heads, size] twice, [rows, heads, 4, size], [heads, size]
  void* out;
  int64_t rows, heads, size;
};

// What is done element by element: `a`, `b` and `c` have `rows` rows of `width` elements, or are one row for all.
struct Rows {
  const void *a, *b, *c;
  void* out;
  int64_t rows, width;
  bool one_a, one_b, one_c;
  int64_t first, second, third;  // numbers of an operator: activations, whether a factor is reversed
  double number;
};

struct Kernels {
  void (*token_shift)(Element, const TokenShift&);
  void (*pack)(Element, const Pack&);
  void (*time_mix)(Element, const TimeMix&);
  void (*time_first)(Element, const TimeFirst&);
  void (*lerp)(Element, const Rows&);
  void (*blend)(Element, const Rows&);
  void (*l2_norm)(Element, const Rows&);
  void (*squared_relu)(Element, const Rows&);
  void (*add_activate)(Element, const Rows&);
  void (*control_k)(Element, const Rows&);
};

extern const Kernels kernels;

}  // namespace marid::rwkv7
