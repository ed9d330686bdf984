// Products of float32 matrices in the order of summation of BLAS: with oneDNN's microkernel, and of a single row.
#pragma once

#include <cstdint>

namespace marid {

// One matrix, or several of a shape: where they are, and how far apart matrices, rows and columns lie, in elements.
// Either columns or rows lie next to each other.
struct Matrices {
  const float* data;
  int64_t batch, row, column;
};

// c = a b, or c += a b: `rows` by `depth` times `depth` by `columns`; c is contiguous.
struct Product {
  int64_t batch, rows, columns, depth;
  Matrices a, b;
  float* c;
  bool add;
  bool batched;    // one of bmm's, if only of one pair
  bool turned;     // a single row: the transposed product of a matrix by a column
  bool of_vector;  // which mv computes
};

// Whether this build has the microkernel.
bool can_multiply();

// Tiles of the result: `height` rows each, `down` by `across` of them a matrix.
struct Tiles {
  int64_t height, down, across;
  bool by_rows;  // tiles beside each other come one after the other, else those below each other
  bool pack;     // b is copied, tile by tile
};

Tiles tiles_of(const Product& product);

// What the microkernel writes code for, as a hash.
uint64_t shape_of(const Product& product, const Tiles& tiles);

// Each sum is one chain of fused multiply-adds a stretch of the depth, and the stretches are added one after the other:
// `block` is how deep a stretch is at most, 0 for no limit.
void multiply(const Product& product, const Tiles& tiles, int64_t block);

// In how many parts of its columns it is worth to compute the product of a single row by ATen's kernels at the same time.
int64_t parts_of_row(const Product& product);

// Whether there is a kernel for products of a single row, each, in the order in which BLAS may add them up.
bool can_multiply_row(const Product& product);

// Products of a single row: by that kernel, or by ATen's own in each part.
void multiply_row(const Product& product, int64_t parts, bool in_blas_order);

}  // namespace marid
