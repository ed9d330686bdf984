#include "pointwise_kernels.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace marid {

namespace {

// Call `row(result, left, right)` at the beginning of each row.
template <typename Row>
void each_row(const Dimensions& along, Row row) {
  c10::SmallVector<int64_t, 4> at(along.size(), 0);
  int64_t result = 0, left = 0, right = 0;
  for (;;) {
    row(result, left, right);
    size_t level = 1;
    for (; level < along.size(); level++) {
      const Dimension& outer = along[level];
      result += outer.result;
      left += outer.left;
      right += outer.right;
      if (++at[level] < outer.size) break;
      result -= outer.result * outer.size;
      left -= outer.left * outer.size;
      right -= outer.right * outer.size;
      at[level] = 0;
    }
    if (level >= along.size()) return;
  }
}

constexpr Dimension kOne{1, 1, 1, 1};

template <typename Result, typename T, typename Function>
void map_two(const Dimensions& along, void* result, const void* left, const void* right, Function function) {
  const Dimension inner = along.empty() ? kOne : along[0];
  const int64_t count = inner.size;
  each_row(along, [&](int64_t at_result, int64_t at_left, int64_t at_right) {
    Result* to = static_cast<Result*>(result) + at_result;
    const T *a = static_cast<const T*>(left) + at_left, *b = static_cast<const T*>(right) + at_right;
    if (inner.left == 1 && inner.right == 1) {
      for (int64_t j = 0; j < count; j++) to[j] = function(a[j], b[j]);
    } else if (inner.left == 1 && inner.right == 0) {
      const T number = *b;
      for (int64_t j = 0; j < count; j++) to[j] = function(a[j], number);
    } else if (inner.left == 0 && inner.right == 1) {
      const T number = *a;
      for (int64_t j = 0; j < count; j++) to[j] = function(number, b[j]);
    } else {
      for (int64_t j = 0; j < count; j++) to[j] = function(a[j * inner.left], b[j * inner.right]);
    }
  });
}

template <typename T, typename Function>
void map_one(const Dimensions& along, void* result, const void* from, Function function) {
  const Dimension inner = along.empty() ? kOne : along[0];
  each_row(along, [&](int64_t at_result, int64_t at_left, int64_t) {
    T* to = static_cast<T*>(result) + at_result;
    const T* a = static_cast<const T*>(from) + at_left;
    if (inner.left == 1) {
      for (int64_t j = 0; j < inner.size; j++) to[j] = function(a[j]);
    } else {
      for (int64_t j = 0; j < inner.size; j++) to[j] = function(a[j * inner.left]);
    }
  });
}

// Integers of two's complement go round, as ATen's do.
template <typename T, typename Function>
T around(T a, T b, Function function) {
  if constexpr (std::is_same_v<T, int64_t>) {
    return static_cast<int64_t>(function(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
  } else {
    return function(a, b);
  }
}

template <typename T>
void run_binary(Binary function, const Dimensions& along, void* result, const void* left, const void* right) {
  auto run = [&](auto f) { map_two<T, T>(along, result, left, right, f); };
  auto compare = [&](auto f) { map_two<bool, T>(along, result, left, right, f); };
  switch (function) {
    case Binary::kLess: return compare([](T a, T b) { return a < b; });
    case Binary::kLessEqual: return compare([](T a, T b) { return a <= b; });
    case Binary::kGreater: return compare([](T a, T b) { return a > b; });
    case Binary::kGreaterEqual: return compare([](T a, T b) { return a >= b; });
    case Binary::kEqual: return compare([](T a, T b) { return a == b; });
    case Binary::kNotEqual: return compare([](T a, T b) { return a != b; });
    default: break;
  }
  if constexpr (std::is_same_v<T, bool>) {
    if (function == Binary::kAnd) run([](T a, T b) { return a && b; });
    if (function == Binary::kOr) run([](T a, T b) { return a || b; });
  } else {
    if (function == Binary::kAdd) run([](T a, T b) { return around(a, b, [](auto x, auto y) { return x + y; }); });
    if (function == Binary::kSubtract) run([](T a, T b) { return around(a, b, [](auto x, auto y) { return x - y; }); });
    if (function == Binary::kMultiply) run([](T a, T b) { return around(a, b, [](auto x, auto y) { return x * y; }); });
  }
  if constexpr (std::is_floating_point_v<T>) {
    if (function == Binary::kDivide) run([](T a, T b) { return a / b; });
  }
}

template <typename T>
void run_unary(Unary function, const Dimensions& along, void* result, const void* from) {
  auto run = [&](auto f) { map_one<T>(along, result, from, f); };
  if (function == Unary::kCopy) return run([](T a) { return a; });
  if constexpr (std::is_floating_point_v<T>) {
    switch (function) {
      case Unary::kNegative: return run([](T a) { return -a; });
      case Unary::kAbsolute: return run([](T a) { return std::abs(a); });
      case Unary::kReciprocal: return run([](T a) { return T(1) / a; });
      case Unary::kReciprocalRoot: return run([](T a) { return T(1) / std::sqrt(a); });
      case Unary::kSquare: return run([](T a) { return a * a; });
      case Unary::kCube: return run([](T a) { return a * a * a; });
      default: return;
    }
  }
}

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
constexpr bool kAddsProducts = true;
#else
constexpr bool kAddsProducts = false;
#endif

template <typename T>
void run_scaled(Scaled function, int64_t count, T* to, const T* a, const T* b, const T* c, T number) {
  auto run = [&](auto f) {
    for (int64_t i = 0; i < count; i++) to[i] = f(i);
  };
  switch (function) {
    case Scaled::kAdd: return run([&](int64_t i) { return std::fma(number, b[i], a[i]); });
    case Scaled::kAddProduct: return run([&](int64_t i) { return std::fma(number * b[i], c[i], a[i]); });
    case Scaled::kAddQuotient: return run([&](int64_t i) { return a[i] + number * b[i] / c[i]; });
    case Scaled::kLerp:  // from the nearer end
      if (std::abs(number) < T(0.5)) return run([&](int64_t i) { return std::fma(number, b[i] - a[i], a[i]); });
      return run([&](int64_t i) { return std::fma(number - 1, b[i] - a[i], b[i]); });
  }
}

// Call `with` a value of a type.
template <typename With>
void of_type(Number type, With with) {
  switch (type) {
    case Number::kFloat: return with(float());
    case Number::kDouble: return with(double());
    case Number::kLong: return with(int64_t());
    case Number::kBool: return with(bool());
  }
}

}  // namespace

void run_binary(Binary function, Number type, const Dimensions& along, void* result, const void* left, const void* right) {
  of_type(type, [&](auto zero) { run_binary<decltype(zero)>(function, along, result, left, right); });
}

bool run_scaled(Scaled function, Number type, int64_t count, void* result, const void* a, const void* b, const void* c,
                const void* number) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    auto numbers = [](const void* of) { return static_cast<const T*>(of); };
    run_scaled<T>(function, count, static_cast<T*>(result), numbers(a), numbers(b), numbers(c), *numbers(number));
    return true;
  };
  if (!kAddsProducts) return false;
  if (type == Number::kFloat) return run(float());
  return type == Number::kDouble && run(double());
}

void run_unary(Unary function, Number type, const Dimensions& along, void* result, const void* from) {
  of_type(type, [&](auto zero) { run_unary<decltype(zero)>(function, along, result, from); });
}

}  // namespace marid
