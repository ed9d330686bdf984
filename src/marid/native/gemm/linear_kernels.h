// Products of a few rows by a matrix that is read once, at the speed of memory (fast_linear.cpp).
#pragma once
#include "elements.h"

#include <cstdint>

namespace marid {

constexpr int64_t kMostRows = 4;

// y[m, n] = activation(sum over k of x[m, k] * weight[n, k] + bias[n]) for the columns in [begin, end). x, bias and y are
// floats; the weight has elements of a type that is summed up in float.
struct FewRows {
  const float *x, *bias;
  const void* weight;
  float* y;
  int64_t rows, depth, columns;  // kMostRows at most
  int64_t activation;
};

extern void (*const multiply_few_rows)(Element, const FewRows&, int64_t begin, int64_t end);

// What the plain loops over many elements do in a kernel: activates `count` floats.
extern void (*const activate_floats)(int64_t activation, float* data, int64_t count);

}  // namespace marid
