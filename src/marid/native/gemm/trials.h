// Which products our kernel computes.
#pragma once

#include "multiply.h"

#include <cstdint>
#include <optional>

namespace marid {

// What is added to a product: nothing, a row to each of its rows, or a matrix.
enum Added { kNothing, kRow, kMatrix };

// Whether a kernel of ours is known to be faster than ATen's for a product and to give its bits, having tried it where that is
// due. `shape` is that of its tiles; a single row has none.
bool choose(const Product& product, Added added, std::optional<uint64_t> shape);

// Whether BLAS adds up the product of a single row as our kernels do, once one was chosen.
bool rows_are_in_blas_order();

// How deep the stretches are that BLAS adds up, once a product was chosen; 0 for the whole depth.
int64_t block_of_blas();

}  // namespace marid
