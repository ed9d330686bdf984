// Multiplies matrices tile by tile with the microkernel (brgemm) that ATen exports for its own attention kernels.
//
// BLAS adds up a sum in stretches: it works through the depth in blocks that fit into a cache. With the same stretches
// the microkernel gives the same bits (trials.cpp finds out which those are, and whether it is so). On processors on
// which MKL does not use all of the vector units it takes half of the time.
#include "multiply.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#if defined(__x86_64__) && defined(CPUBLAS_BRGEMM_F32F32F32) && __has_include(<fbgemm/Utils.h>)
#define MARID_HAS_MICROKERNEL 1
#include <fbgemm/Utils.h>
#else
#define MARID_HAS_MICROKERNEL 0
#endif

namespace marid {

#if MARID_HAS_MICROKERNEL

namespace {

constexpr int64_t kTile = 64;         // rows and columns of a tile of the result
constexpr int64_t kSmallest = 16;     // rows of a tile where there would be too few for all threads
constexpr int64_t kWorthPacking = 4;  // tiles that a packed panel of b serves

int64_t divided(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// Where stretches begin, and the end: blocks as BLAS makes them. Less than two blocks are halved.
std::vector<int64_t> stretches(int64_t depth, int64_t block) {
  if (block <= 0 || depth <= block) return {0, depth};
  if (depth < 2 * block) return {0, depth / 2, depth};
  std::vector<int64_t> found;
  for (int64_t start = 0; start < depth; start += block) found.push_back(start);
  found.push_back(depth);
  return found;
}

// A part of a matrix, laid out row by row.
struct Panel {
  const float* data;
  int64_t stride;
};

// The panel as it lies there, or packed into `buffer`.
Panel panel_of(const float* data, int64_t row, int64_t column, int64_t rows, int64_t columns, bool pack,
               std::vector<float>& buffer) {
  if (!pack) return {data, row};
  if (static_cast<int64_t>(buffer.size()) < rows * columns) buffer.resize(rows * columns);
  if (column == 1) {
    for (int64_t i = 0; i < rows; i++) std::memcpy(&buffer[i * columns], data + i * row, columns * sizeof(float));
  } else {
    fbgemm::transpose_simd<float>(columns, rows, data, column, buffer.data(), columns);
  }
  return {buffer.data(), columns};
}

}  // namespace

bool can_multiply() { return true; }

Tiles tiles_of(const Product& p) {
  Tiles made{kTile, 0, divided(p.columns, kTile), p.a.column != 1, false};
  int64_t wanted = 4 * at::get_num_threads();
  while (made.height > kSmallest && p.batch * divided(p.rows, made.height) * made.across < wanted) made.height /= 2;
  made.down = divided(p.rows, made.height);
  // Whichever matrix must be packed is walked through once; the other is read again for each of its panels.
  made.pack = p.b.column != 1 || (made.down >= kWorthPacking && !made.by_rows);
  return made;
}

uint64_t shape_of(const Product& p, const Tiles& tiles) {
  return c10::get_hash(p.depth, p.columns, tiles.height, std::min(p.rows / tiles.height, int64_t{1}),
                       p.rows % tiles.height, p.a.column == 1 ? p.a.row : -1, tiles.pack ? -1 : p.b.row, p.add);
}

void multiply(const Product& p, const Tiles& tiles, int64_t block) {
  std::vector<int64_t> starts = stretches(p.depth, block);
  int64_t height = tiles.height, down = tiles.down, across = tiles.across;
  at::parallel_for(0, p.batch * down * across, 1, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> of_a, of_b;
    int64_t packed_a = -1, packed_b = -1;
    Panel a{}, b{};
    for (int64_t index = begin; index < end; index++) {
      int64_t matrix = index / (down * across), rest = index % (down * across);
      int64_t i = tiles.by_rows ? rest / across : rest % down, j = tiles.by_rows ? rest % across : rest / down;
      int64_t row = i * height, rows = std::min(height, p.rows - row);
      int64_t column = j * kTile, columns = std::min(kTile, p.columns - column);
      if (int64_t id = matrix * down + i; id != packed_a) {
        a = panel_of(p.a.data + matrix * p.a.batch + row * p.a.row, p.a.row, p.a.column, rows, p.depth,
                     p.a.column != 1, of_a);
        packed_a = id;
      }
      if (int64_t id = matrix * across + j; id != packed_b) {
        b = panel_of(p.b.data + matrix * p.b.batch + column * p.b.column, p.b.row, p.b.column, p.depth, columns,
                     tiles.pack, of_b);
        packed_b = id;
      }
      float* c = p.c + (matrix * p.rows + row) * p.columns + column;
      for (size_t s = 0; s + 1 < starts.size(); s++) {
        at::native::cpublas::brgemm(rows, columns, starts[s + 1] - starts[s], a.stride, b.stride, p.columns,
                                    p.add || s > 0, a.data + starts[s], b.data + starts[s] * b.stride, c, false);
      }
    }
    at::native::cpublas::brgemm_release(false);
  });
}

#else

bool can_multiply() { return false; }
Tiles tiles_of(const Product&) { return {}; }
uint64_t shape_of(const Product&, const Tiles&) { return 0; }
void multiply(const Product&, const Tiles&, int64_t) { throw std::logic_error("there is no microkernel"); }

#endif

}  // namespace marid
