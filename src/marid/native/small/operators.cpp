// Which operators have a kernel for small tensors.
#include "lists.h"
#include "pointwise.h"
#include "rows.h"
#include "selections.h"
#include "small.h"
#include "views.h"

#include <optional>
#include <tuple>
#include <unordered_map>

namespace marid {

namespace {

using at::Scalar, at::Tensor;

template <Binary function>
Tensor binary(const Tensor& left, const Tensor& right) { return pointwise(function, left, right); }
template <Binary function>
Tensor binary_number(const Tensor& left, const Scalar& right) { return pointwise(function, left, right); }
template <Binary function>
Tensor binary_scaled(const Tensor& left, const Tensor& right, const Scalar& factor) {
  if (is_one(factor)) return pointwise(function, left, right);
  return function == Binary::kAdd ? scaled(Scaled::kAdd, left, right, nullptr, factor) : Tensor();
}
template <Binary function>
Tensor binary_number_scaled(const Tensor& left, const Scalar& right, const Scalar& factor) {
  return is_one(factor) ? pointwise(function, left, right) : Tensor();
}
Tensor subtracted_from(const Tensor& self, const Scalar& number, const Scalar& factor) {
  return is_one(factor) ? pointwise(Binary::kSubtract, number, self) : Tensor();
}
template <Binary function>
Tensor in_place(Tensor& self, const Tensor& other) { return pointwise_in_place(function, self, other); }
template <Binary function>
Tensor in_place_number(Tensor& self, const Scalar& other) { return pointwise_in_place(function, self, other); }
template <Binary function>
Tensor in_place_scaled(Tensor& self, const Tensor& other, const Scalar& factor) {
  if (is_one(factor)) return pointwise_in_place(function, self, other);
  return function == Binary::kAdd ? scaled(Scaled::kAdd, self, other, nullptr, factor, true) : Tensor();
}
template <Binary function>
Tensor in_place_number_scaled(Tensor& self, const Scalar& other, const Scalar& factor) {
  return is_one(factor) ? pointwise_in_place(function, self, other) : Tensor();
}
template <Unary function>
Tensor unary(const Tensor& of) { return pointwise(function, of); }

Tensor copy_in_place(Tensor& self, const Tensor& from, bool) { return pointwise_in_place(Unary::kCopy, self, from); }

Tensor interpolated(const Tensor& start, const Tensor& end, const Scalar& weight) {
  return scaled(Scaled::kLerp, start, end, nullptr, weight);
}
Tensor interpolate(Tensor& self, const Tensor& end, const Scalar& weight) {
  return scaled(Scaled::kLerp, self, end, nullptr, weight, true);
}
template <Scaled function>
Tensor triple(const Tensor& self, const Tensor& second, const Tensor& third, const Scalar& factor) {
  return scaled(function, self, second, &third, factor);
}
template <Scaled function>
Tensor triple_in_place(Tensor& self, const Tensor& second, const Tensor& third, const Scalar& factor) {
  return scaled(function, self, second, &third, factor, true);
}

Tensor power(const Tensor& base, const Scalar& exponent) {
  if (!exponent.isFloatingPoint() && !exponent.isIntegral(/*includeBool=*/false)) return {};
  double value = exponent.toDouble();
  if (value == 2) return pointwise(Unary::kSquare, base);
  if (value == 3) return pointwise(Unary::kCube, base);
  if (value == -0.5) return pointwise(Unary::kReciprocalRoot, base);
  return value == -1 ? pointwise(Unary::kReciprocal, base) : Tensor();
}

template <Selection selection>
Tensor index(const Tensor& of, std::optional<int64_t> dim, bool keep) { return index_of(selection, of, dim, keep); }
template <Selection selection>
std::tuple<Tensor, Tensor> selected_of(const Tensor& of, int64_t dim, bool keep) {
  return selection_of(selection, of, dim, keep);
}

}  // namespace

const AnySmallKernel* find_small_kernel(const std::string& name) {
  static const std::unordered_map<std::string, AnySmallKernel> kernels{
      {"aten::add.Tensor", binary_scaled<Binary::kAdd>},
      {"aten::sub.Tensor", binary_scaled<Binary::kSubtract>},
      {"aten::mul.Tensor", binary<Binary::kMultiply>},
      {"aten::div.Tensor", binary<Binary::kDivide>},
      {"aten::lt.Tensor", binary<Binary::kLess>},
      {"aten::le.Tensor", binary<Binary::kLessEqual>},
      {"aten::gt.Tensor", binary<Binary::kGreater>},
      {"aten::ge.Tensor", binary<Binary::kGreaterEqual>},
      {"aten::eq.Tensor", binary<Binary::kEqual>},
      {"aten::ne.Tensor", binary<Binary::kNotEqual>},
      {"aten::bitwise_and.Tensor", binary<Binary::kAnd>},
      {"aten::bitwise_or.Tensor", binary<Binary::kOr>},
      {"aten::logical_and", binary<Binary::kAnd>},
      {"aten::logical_or", binary<Binary::kOr>},
      {"aten::add.Scalar", binary_number_scaled<Binary::kAdd>},
      {"aten::sub.Scalar", binary_number_scaled<Binary::kSubtract>},
      {"aten::rsub.Scalar", subtracted_from},
      {"aten::mul.Scalar", binary_number<Binary::kMultiply>},
      {"aten::div.Scalar", binary_number<Binary::kDivide>},
      {"aten::lt.Scalar", binary_number<Binary::kLess>},
      {"aten::le.Scalar", binary_number<Binary::kLessEqual>},
      {"aten::gt.Scalar", binary_number<Binary::kGreater>},
      {"aten::ge.Scalar", binary_number<Binary::kGreaterEqual>},
      {"aten::eq.Scalar", binary_number<Binary::kEqual>},
      {"aten::ne.Scalar", binary_number<Binary::kNotEqual>},
      {"aten::add_.Tensor", in_place_scaled<Binary::kAdd>},
      {"aten::sub_.Tensor", in_place_scaled<Binary::kSubtract>},
      {"aten::mul_.Tensor", in_place<Binary::kMultiply>},
      {"aten::div_.Tensor", in_place<Binary::kDivide>},
      {"aten::add_.Scalar", in_place_number_scaled<Binary::kAdd>},
      {"aten::sub_.Scalar", in_place_number_scaled<Binary::kSubtract>},
      {"aten::mul_.Scalar", in_place_number<Binary::kMultiply>},
      {"aten::div_.Scalar", in_place_number<Binary::kDivide>},
      {"aten::lerp.Scalar", interpolated},
      {"aten::lerp_.Scalar", interpolate},
      {"aten::addcmul", triple<Scaled::kAddProduct>},
      {"aten::addcmul_", triple_in_place<Scaled::kAddProduct>},
      {"aten::addcdiv", triple<Scaled::kAddQuotient>},
      {"aten::addcdiv_", triple_in_place<Scaled::kAddQuotient>},
      {"aten::neg", unary<Unary::kNegative>},
      {"aten::abs", unary<Unary::kAbsolute>},
      {"aten::rsqrt", unary<Unary::kReciprocalRoot>},
      {"aten::reciprocal", unary<Unary::kReciprocal>},
      {"aten::pow.Tensor_Scalar", power},
      {"aten::argmax", index<Selection::kLargest>},
      {"aten::argmin", index<Selection::kSmallest>},
      {"aten::max.dim", selected_of<Selection::kLargest>},
      {"aten::min.dim", selected_of<Selection::kSmallest>},
      {"aten::index.Tensor", rows_indexed},
      {"aten::index_select", rows_selected},
      {"aten::embedding", rows_embedded},
      {"aten::copy_", copy_in_place},
      {"aten::clone", copy_of},
      {"aten::detach", alias_of},
      {"aten::alias", alias_of},
      {"aten::t", static_cast<Tensor (*)(const Tensor&)>(transposed)},
      {"aten::transpose.int", static_cast<Tensor (*)(const Tensor&, int64_t, int64_t)>(transposed)},
      {"aten::permute", permuted},
      {"aten::view", viewed},
      {"aten::_unsafe_view", viewed},
      {"aten::expand", expanded},
      {"aten::unsqueeze", unsqueezed},
      {"aten::squeeze.dim", squeezed},
      {"aten::select.int", selected},
      {"aten::slice.Tensor", sliced},
  };
  for (const auto* table : {&kernels, &list_kernels}) {
    auto found = table->find(name);
    if (found != table->end()) return &found->second;
  }
  return nullptr;
}

}  // namespace marid
