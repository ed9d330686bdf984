// Products of a single row, whose columns threads share (multiply_row.cpp).
#pragma once

#include <cstdint>

namespace marid {

// y = x b, or y += x b. `stride` is between the columns of b where these are contiguous, else between its rows.
struct RowProduct {
  const float *x, *b;
  float* y;
  int64_t depth, stride;
  bool add;
};

// The columns in [begin, end), a multiple of four, of a b whose columns are contiguous. A sum has four lanes, which take
// every fourth product and are added up in the end; products are rounded before they are added.
extern void (*const row_in_lanes)(const RowProduct&, int64_t begin, int64_t end);

// The same of a b whose rows are contiguous: a sum is one chain along the depth, which begins with what is in y.
extern void (*const row_one_by_one)(const RowProduct&, int64_t begin, int64_t end);

// The same sums of a b whose columns are contiguous.
extern void (*const row_turned_one_by_one)(const RowProduct&, int64_t begin, int64_t end);

// They are null where the machine has no AVX2.

}  // namespace marid
