// See linear_kernels.h; built.py compiles this file for this machine's vector unit.
#include "linear_kernels.h"

#include "vectors.h"

namespace marid {
namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

template <typename T>
struct Load;  // a stretch of a matrix as vectors of floats

template <>
struct Load<float> {
  static constexpr int64_t kVectors = 1;
  static void from(const float* data, Vec* to) { to[0] = Vec::loadu(data); }
};

template <typename T>
struct Load {
  static constexpr int64_t kVectors = 2;
  static void from(const T* data, Vec* to) {
    auto [low, high] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(data));
    to[0] = low;
    to[1] = high;
  }
};

constexpr int64_t kAhead = 8192;  // bytes: the matrix is read from its beginning to its end, row behind row

// One column of the result for each of kRows rows: sums over one row of the matrix.
template <typename T, int kRows>
void column_of(const FewRows& of, int64_t column) {
  constexpr int64_t kVectors = Load<T>::kVectors, kStep = kVectors * kLanes;
  constexpr int64_t kChains = kRows == 1 ? 4 : 2;  // sums that do not wait for each other
  const T* weight = static_cast<const T*>(of.weight) + column * of.depth;
  int64_t depth = of.depth, whole = depth / kStep * kStep, k = 0;
  Vec sums[kRows][kChains];
  for (auto& row : sums) {
    for (Vec& sum : row) sum = Vec(0);
  }
  auto add = [&](int64_t chain, int64_t k) {
    Vec w[kVectors];
    __builtin_prefetch(reinterpret_cast<const char*>(weight + k) + kAhead, 0, 2);
    Load<T>::from(weight + k, w);
    for (int m = 0; m < kRows; m++) {
      for (int v = 0; v < kVectors; v++) {
        sums[m][chain] = at::vec::fmadd(w[v], Vec::loadu(of.x + m * depth + k + v * kLanes), sums[m][chain]);
      }
    }
  };
  for (; k + kChains * kStep <= whole; k += kChains * kStep) {
    for (int64_t chain = 0; chain < kChains; chain++) add(chain, k + chain * kStep);
  }
  for (; k < whole; k += kStep) add(0, k);
  for (int m = 0; m < kRows; m++) {
    Vec all = sums[m][0];
    for (int64_t chain = 1; chain < kChains; chain++) all = all + sums[m][chain];
    float sum = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, all);
    for (k = whole; k < depth; k++) sum += static_cast<float>(weight[k]) * of.x[m * depth + k];
    if (of.bias != nullptr) sum += of.bias[column];
    of.y[m * of.columns + column] = sum;
  }
}

template <typename T, int kRows>
void some(const FewRows& of, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column++) column_of<T, kRows>(of, column);
}

template <typename T>
void all(const FewRows& of, int64_t begin, int64_t end) {
  switch (of.rows) {
    case 1: some<T, 1>(of, begin, end); break;
    case 2: some<T, 2>(of, begin, end); break;
    case 3: some<T, 3>(of, begin, end); break;
    default: some<T, 4>(of, begin, end); break;
  }
  for (int64_t m = 0; m < of.rows; m++) activate(of.activation, of.y + m * of.columns + begin, end - begin);
}

void multiply(Element element, const FewRows& of, int64_t begin, int64_t end) {
  switch (element) {
    case Element::kHalf: return all<c10::Half>(of, begin, end);
    case Element::kBFloat16: return all<c10::BFloat16>(of, begin, end);
    default: return all<float>(of, begin, end);
  }
}

}  // namespace

extern void (*const multiply_few_rows)(Element, const FewRows&, int64_t, int64_t) = multiply;
extern void (*const activate_floats)(int64_t, float*, int64_t) = activate<float>;

}  // namespace marid
