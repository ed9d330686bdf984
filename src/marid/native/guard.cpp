// marid::guard: what a replay under marid.compile holds a number to (replay/guards.py). It raises where the number that a
// test of the function looked at now fails or passes that test otherwise than when the function was recorded.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <torch/library.h>

namespace {

// Whole numbers and doubles both fit, so that they compare as in Python.
long double exactly(const c10::Scalar& number) {
  if (number.isFloatingPoint()) return static_cast<long double>(number.toDouble());
  return static_cast<long double>(number.toLong());
}

bool passes(long double value, c10::string_view test, long double number) {
  if (test == "lt") return value < number;
  if (test == "le") return value <= number;
  if (test == "gt") return value > number;
  if (test == "ge") return value >= number;
  if (test == "eq") return value == number;
  TORCH_CHECK_VALUE(test == "ne", "marid::guard has no test named ", test);
  return value != number;
}

at::Tensor guard(const at::Tensor& value, c10::string_view test, const c10::Scalar& number, bool outcome) {
  TORCH_CHECK(passes(exactly(value.item()), test, exactly(number)) == outcome, "a test of a number has come out otherwise");
  return at::detail::empty_cpu({0}, at::kByte);
}

TORCH_LIBRARY_FRAGMENT(marid, library) {
  library.def("guard(Tensor value, str test, Scalar number, bool outcome) -> Tensor", {at::Tag::data_dependent_output});
  library.impl("guard", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(guard));
}

}  // namespace
