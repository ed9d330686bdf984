// marid::guard: what a replay under marid.compile holds numbers to (replay/guards.py). It raises where a test that the
// recorded function made of numbers comes out otherwise than it did then.
//
// The test is written in postfix notation, word by word: `v` and `w` take the next value and the next whole number of
// those given, `n` the next number; `add sub mul div neg abs` compute, and the last word compares. All that is computed
// is what Python computes: whole numbers are exact there, so larger ones than a double holds are no test for this.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <torch/library.h>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr double kLargest = 9007199254740992.0;  // 2**53

struct Number {
  double value;
  bool whole;
};

Number number_of(const at::Tensor& tensor) {
  c10::Scalar item = tensor.item();
  if (item.isFloatingPoint()) return {item.toDouble(), false};
  int64_t whole = item.toLong();
  TORCH_CHECK(std::abs(static_cast<double>(whole)) < kLargest, "a whole number is too large to be tested");
  return {static_cast<double>(whole), true};
}

Number computed(const std::string& word, const Number& a, const Number& b) {
  if (word == "div") {
    TORCH_CHECK(b.value != 0, "a number would be divided by zero");
    return {a.value / b.value, false};
  }
  double value = word == "add" ? a.value + b.value : word == "sub" ? a.value - b.value : a.value * b.value;
  bool whole = a.whole && b.whole;
  TORCH_CHECK(!whole || std::abs(value) < kLargest, "a whole number is too large to be tested");
  return {value, whole};
}

bool compares(const std::string& word, double a, double b) {
  if (word == "lt") return a < b;
  if (word == "le") return a <= b;
  if (word == "gt") return a > b;
  if (word == "ge") return a >= b;
  if (word == "eq") return a == b;
  TORCH_CHECK_VALUE(word == "ne", "marid::guard has no comparison named ", word);
  return a != b;
}

bool passes(at::TensorList values, at::ArrayRef<double> numbers, const std::string& test) {
  std::vector<Number> stack;
  size_t value = 0, number = 0;
  auto take = [&stack] {
    TORCH_CHECK_VALUE(!stack.empty(), "a test of marid::guard takes more than there is");
    Number top = stack.back();
    stack.pop_back();
    return top;
  };
  std::istringstream words(test);
  std::string word;
  while (words >> word) {
    if (word == "v") {
      TORCH_CHECK_VALUE(value < values.size(), "a test of marid::guard takes more values than there are");
      stack.push_back(number_of(values[value++]));
    } else if (word == "n" || word == "w") {
      TORCH_CHECK_VALUE(number < numbers.size(), "a test of marid::guard takes more numbers than there are");
      stack.push_back({numbers[number++], word == "w"});
    } else if (word == "neg" || word == "abs") {
      Number a = take();
      stack.push_back({word == "neg" ? -a.value : std::abs(a.value), a.whole});
    } else {
      Number b = take(), a = take();
      if (word.size() == 2) return compares(word, a.value, b.value);
      stack.push_back(computed(word, a, b));
    }
  }
  TORCH_CHECK_VALUE(false, "a test of marid::guard compares nothing");
}

at::Tensor guard(at::TensorList values, at::ArrayRef<double> numbers, c10::string_view test, bool outcome) {
  TORCH_CHECK(passes(values, numbers, std::string(test)) == outcome, "a test of numbers has come out otherwise");
  return at::detail::empty_cpu({0}, at::kByte);
}

TORCH_LIBRARY_FRAGMENT(marid, library) {
  library.def("guard(Tensor[] values, float[] numbers, str test, bool outcome) -> Tensor",
              {at::Tag::data_dependent_output});
  library.impl("guard", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(guard));
}

}  // namespace
