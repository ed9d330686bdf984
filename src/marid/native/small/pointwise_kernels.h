// Loops of pointwise operators over small tensors (pointwise_kernels.cpp).
#pragma once
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace marid {

enum class Binary : uint8_t {
  kAdd, kSubtract, kMultiply, kDivide, kLess, kLessEqual, kGreater, kGreaterEqual, kEqual, kNotEqual, kAnd, kOr
};
constexpr bool compares(Binary function) { return function >= Binary::kLess && function <= Binary::kNotEqual; }

enum class Unary : uint8_t { kCopy, kNegative, kAbsolute, kReciprocal, kReciprocalRoot, kSquare, kCube };

// Of two tensors and a number n, or of three: a + n b, a + n (b - a), a + n b c and a + n b / c.
enum class Scaled : uint8_t { kAdd, kLerp, kAddProduct, kAddQuotient };

enum class Number : uint8_t { kFloat, kDouble, kLong, kBool };

// A dimension that is walked along: how often, and elements from one step to the next in the result and in the arguments.
struct Dimension {
  int64_t size, result, left, right;
};
// The innermost first, along which results lie side by side; none for a single number.
using Dimensions = c10::SmallVector<Dimension, 4>;

// Each of these is rounded once, or twice in a fixed order, so bits are those of any other right kernel. (A square root is not
// among them: ATen's, from MKL, is not always the nearest number.) Comparisons give booleans, all others the type of their
// arguments. Only floating-point numbers are divided, and only booleans have kAnd and kOr.
void run_binary(Binary function, Number type, const Dimensions& along, void* result, const void* left, const void* right);
void run_unary(Unary function, Number type, const Dimensions& along, void* result, const void* from);

// The same for arrays of floating-point numbers; `c` is null where there is none. False where ATen's kernels round the product
// and the sum each, or may: those of processors that cannot do both at once.
bool run_scaled(Scaled function, Number type, int64_t count, void* result, const void* a, const void* b, const void* c,
                const void* number);

}  // namespace marid
