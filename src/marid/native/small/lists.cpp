#include "lists.h"

#include "pointwise.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addcdiv.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/sub.h>

#include <vector>

namespace marid {

namespace {

using at::ArrayRef, at::Scalar, at::Tensor, at::TensorList;
using Tensors = std::vector<Tensor>;

// What is done to one tensor of a list, or to one of each list: here, or else by ATen.

template <Binary function>
Tensor small_or_aten(const Tensor& one, const auto& other) {
  Tensor result = pointwise(function, one, other);
  if (result.defined()) return result;
  if constexpr (function == Binary::kAdd) return one.add(other);
  if constexpr (function == Binary::kSubtract) return one.sub(other);
  if constexpr (function == Binary::kMultiply) return one.mul(other);
  if constexpr (function == Binary::kDivide) return one.div(other);
}

template <Binary function>
void small_or_aten_in_place(const Tensor& one, const auto& other) {
  if (pointwise_in_place(function, one, other).defined()) return;
  if constexpr (function == Binary::kAdd) one.add_(other);
  if constexpr (function == Binary::kSubtract) one.sub_(other);
  if constexpr (function == Binary::kMultiply) one.mul_(other);
  if constexpr (function == Binary::kDivide) one.div_(other);
}

Tensor sum(const Tensor& one, const Tensor& other, const Scalar& factor) {
  Tensor result = is_one(factor) ? pointwise(Binary::kAdd, one, other) : scaled(Scaled::kAdd, one, other, nullptr, factor);
  return result.defined() ? result : one.add(other, factor);
}

void add_in_place(const Tensor& one, const Tensor& other, const Scalar& factor) {
  Tensor done = is_one(factor) ? pointwise_in_place(Binary::kAdd, one, other)
                               : scaled(Scaled::kAdd, one, other, nullptr, factor, true);
  if (!done.defined()) one.add_(other, factor);
}

void interpolate_in_place(const Tensor& one, const Tensor& other, const Scalar& weight) {
  if (!scaled(Scaled::kLerp, one, other, nullptr, weight, true).defined()) one.lerp_(other, weight);
}

template <Scaled function>
void small_or_aten_in_place(const Tensor& one, const Tensor& second, const Tensor& third, const Scalar& factor) {
  if (scaled(function, one, second, &third, factor, true).defined()) return;
  if constexpr (function == Scaled::kAddProduct) one.addcmul_(second, third, factor);
  if constexpr (function == Scaled::kAddQuotient) one.addcdiv_(second, third, factor);
}

// ATen says what is wrong with lists of other lengths than the first.
bool fit(TensorList first, const auto&... others) { return !first.empty() && ((others.size() == first.size()) && ...); }

// The second argument of a call for one tensor: its own, or the same for all.
const Tensor& at(TensorList list, size_t i) { return list[i]; }
const Scalar& at(ArrayRef<Scalar> list, size_t i) { return list[i]; }
const Tensor& at(const Tensor& one, size_t) { return one; }
const Scalar& at(const Scalar& one, size_t) { return one; }
bool fits(TensorList first, TensorList list) { return fit(first, list); }
bool fits(TensorList first, ArrayRef<Scalar> list) { return fit(first, list); }
bool fits(TensorList first, const Tensor& one) { return fit(first) && one.dim() == 0; }
bool fits(TensorList first, const Scalar&) { return fit(first); }

template <Binary function, typename Other>
Tensors each(TensorList list, Other other) {
  if (!fits(list, other)) return {};
  Tensors results;
  results.reserve(list.size());
  for (size_t i = 0; i < list.size(); i++) results.push_back(small_or_aten<function>(list[i], at(other, i)));
  return results;
}

template <Binary function, typename Other>
bool each_in_place(TensorList list, Other other) {
  if (!fits(list, other)) return false;
  for (size_t i = 0; i < list.size(); i++) small_or_aten_in_place<function>(list[i], at(other, i));
  return true;
}

Tensors sums(TensorList list, TensorList other, const Scalar& factor) {
  if (!fit(list, other)) return {};
  Tensors results;
  results.reserve(list.size());
  for (size_t i = 0; i < list.size(); i++) results.push_back(sum(list[i], other[i], factor));
  return results;
}

template <void (*function)(const Tensor&, const Tensor&, const Scalar&)>
bool pairs_in_place(TensorList list, TensorList other, const Scalar& number) {
  if (!fit(list, other)) return false;
  for (size_t i = 0; i < list.size(); i++) function(list[i], other[i], number);
  return true;
}

template <Scaled function, typename Numbers>
bool triples_in_place(TensorList list, TensorList second, TensorList third, Numbers numbers) {
  if (!fit(list, second, third) || !fits(list, numbers)) return false;
  for (size_t i = 0; i < list.size(); i++) small_or_aten_in_place<function>(list[i], second[i], third[i], at(numbers, i));
  return true;
}

Tensors negatives(TensorList list) {
  Tensors results;
  for (const Tensor& one : list) {
    Tensor result = pointwise(Unary::kNegative, one);
    results.push_back(result.defined() ? std::move(result) : one.neg());
  }
  return results;
}

}  // namespace

const std::unordered_map<std::string, AnySmallKernel> list_kernels{
    {"aten::_foreach_add.Scalar", each<Binary::kAdd, const Scalar&>},
    {"aten::_foreach_mul.Scalar", each<Binary::kMultiply, const Scalar&>},
    {"aten::_foreach_div.Scalar", each<Binary::kDivide, const Scalar&>},
    {"aten::_foreach_add.List", sums},
    {"aten::_foreach_mul.List", each<Binary::kMultiply, TensorList>},
    {"aten::_foreach_div.List", each<Binary::kDivide, TensorList>},
    {"aten::_foreach_neg", negatives},
    {"aten::_foreach_add_.Scalar", each_in_place<Binary::kAdd, const Scalar&>},
    {"aten::_foreach_sub_.Scalar", each_in_place<Binary::kSubtract, const Scalar&>},
    {"aten::_foreach_mul_.Scalar", each_in_place<Binary::kMultiply, const Scalar&>},
    {"aten::_foreach_div_.Scalar", each_in_place<Binary::kDivide, const Scalar&>},
    {"aten::_foreach_add_.ScalarList", each_in_place<Binary::kAdd, ArrayRef<Scalar>>},
    {"aten::_foreach_mul_.ScalarList", each_in_place<Binary::kMultiply, ArrayRef<Scalar>>},
    {"aten::_foreach_div_.ScalarList", each_in_place<Binary::kDivide, ArrayRef<Scalar>>},
    {"aten::_foreach_mul_.List", each_in_place<Binary::kMultiply, TensorList>},
    {"aten::_foreach_div_.List", each_in_place<Binary::kDivide, TensorList>},
    {"aten::_foreach_mul_.Tensor", each_in_place<Binary::kMultiply, const Tensor&>},
    {"aten::_foreach_add_.List", pairs_in_place<add_in_place>},
    {"aten::_foreach_lerp_.Scalar", pairs_in_place<interpolate_in_place>},
    {"aten::_foreach_addcmul_.Scalar", triples_in_place<Scaled::kAddProduct, const Scalar&>},
    {"aten::_foreach_addcmul_.ScalarList", triples_in_place<Scaled::kAddProduct, ArrayRef<Scalar>>},
    {"aten::_foreach_addcdiv_.Scalar", triples_in_place<Scaled::kAddQuotient, const Scalar&>},
    {"aten::_foreach_addcdiv_.ScalarList", triples_in_place<Scaled::kAddQuotient, ArrayRef<Scalar>>},
};

}  // namespace marid
