// What a pointwise operator walks along in its arguments, and how its result lies.
//
// ATen lays a result out by the strides of all arguments (`TensorIteratorBase`: compute_fast_setup_type, reorder_dimensions,
// allocate_or_resize_outputs). The same is worked out here.
#include "pointwise.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

namespace marid {

namespace {

constexpr int64_t kMostNumbers = 1 << 15;  // from here on, ATen shares the work among threads
constexpr size_t kMostDimensions = 8;
constexpr int64_t kExactIntegers = int64_t(1) << 53;  // up to here a double is any integer

using Sizes = c10::SmallVector<int64_t, kMostDimensions>;

std::optional<Number> number_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Number::kFloat;
    case at::kDouble: return Number::kDouble;
    case at::kLong: return Number::kLong;
    case at::kBool: return Number::kBool;
    default: return std::nullopt;
  }
}

bool is_usual(const at::Tensor& tensor) {
  return !tensor.is_neg() && !tensor._is_zerotensor() && static_cast<size_t>(tensor.dim()) <= kMostDimensions &&
      tensor.numel() > 0 && tensor.numel() <= kMostNumbers;
}

// Whether a function of numbers of a type is one of that type, or a comparison.
bool is_usual(Binary function, Number type) {
  if (compares(function)) return true;
  bool is_logical = function == Binary::kAnd || function == Binary::kOr;
  if (type == Number::kBool || is_logical) return is_logical && type == Number::kBool;
  return type != Number::kLong || function != Binary::kDivide;
}

// --- arguments -------------------------------------------------------------------------------------------------------

struct Argument {
  const void* data;
  at::IntArrayRef sizes, strides;
};

Argument argument(const at::Tensor& tensor) { return {tensor.const_data_ptr(), tensor.sizes(), tensor.strides()}; }

// A number that takes its type from the other argument, as 1 does in `x + 1`.
struct Value {
  union {
    float as_float;
    double as_double;
    int64_t as_long;
  };
  Argument argument() const { return {this, {}, {}}; }
};

// Nothing where that is not for here to say: an overflow, or a number that gives the result another type.
std::optional<Value> value_of(double number, Number type) {
  Value made{};
  if (type == Number::kDouble) {
    made.as_double = number;
  } else if (type == Number::kFloat) {
    made.as_float = static_cast<float>(number);
    if (std::isinf(made.as_float) && !std::isinf(number)) return std::nullopt;
  } else {
    return std::nullopt;
  }
  return made;
}

std::optional<Value> value_of(int64_t number, Number type) {
  if (type == Number::kLong) {
    Value made{};
    made.as_long = number;
    return made;
  }
  bool is_exact = -kExactIntegers <= number && number <= kExactIntegers;
  return is_exact ? value_of(static_cast<double>(number), type) : std::nullopt;
}

std::optional<Value> value_of(const at::Scalar& number, Number type) {
  if (number.isSymbolic()) return std::nullopt;
  if (number.isFloatingPoint()) return value_of(number.toDouble(), type);
  return number.isIntegral(/*includeBool=*/false) ? value_of(number.toLong(), type) : std::nullopt;
}

// Of the tensor that Python's half of PyTorch makes of a number.
std::optional<Value> value_of(const at::Tensor& wrapped, Number type) {
  if (wrapped.scalar_type() == at::kDouble) return value_of(*wrapped.const_data_ptr<double>(), type);
  if (wrapped.scalar_type() == at::kLong) return value_of(*wrapped.const_data_ptr<int64_t>(), type);
  return std::nullopt;
}

// --- the walk --------------------------------------------------------------------------------------------------------

// What is walked along, in the order of ATen's dimensions: the innermost first.
struct Walk {
  Sizes sizes;  // of the result
  c10::SmallVector<Dimension, kMostDimensions> dimensions;  // by dimension of the result
  c10::SmallVector<size_t, kMostDimensions> order;  // of these
};

// False where sizes do not go together, or there are many numbers.
bool broadcast(const Argument& left, const Argument& right, Walk* walk) {
  size_t count = std::max(left.sizes.size(), right.sizes.size());
  auto of = [count](const Argument& argument, size_t i) {
    size_t more = count - argument.sizes.size();
    return i < more ? std::pair<int64_t, int64_t>{1, 0} : std::pair{argument.sizes[i - more], argument.strides[i - more]};
  };
  int64_t numbers = 1;
  for (size_t i = 0; i < count; i++) {
    auto [left_size, left_stride] = of(left, i);
    auto [right_size, right_stride] = of(right, i);
    int64_t size = std::max(left_size, right_size);
    if ((left_size != size && left_size != 1) || (right_size != size && right_size != 1)) return false;
    numbers *= size;
    if (numbers > kMostNumbers) return false;
    walk->sizes.push_back(size);
    walk->dimensions.push_back({size, 0, left_size == size ? left_stride : 0, right_size == size ? right_stride : 0});
  }
  return true;
}

// Whether ATen takes a dimension out of another one: 1 for that, -1 where it does not, 0 where arguments do not say.
int is_outside(const Dimension& inner, const Dimension& outer) {
  for (auto [one, other] : {std::pair{inner.left, outer.left}, std::pair{inner.right, outer.right}}) {
    if (one == 0 || other == 0) continue;
    if (one != other) return one < other ? -1 : 1;
    if (inner.size > outer.size) return 1;
  }
  return 0;
}

void find_order(Walk* walk) {
  auto& order = walk->order;
  for (size_t i = walk->sizes.size(); i-- > 0;) order.push_back(i);
  for (size_t i = 1; i < order.size(); i++) {
    size_t own = i;
    for (size_t other = i; other-- > 0;) {
      int outside = is_outside(walk->dimensions[order[other]], walk->dimensions[order[own]]);
      if (outside < 0) break;
      if (outside > 0) std::swap(order[other], order[std::exchange(own, other)]);
    }
  }
}

// Have the result lie in the order of its dimensions.
void lay_out(Walk* walk) {
  int64_t stride = 1;
  for (size_t i : walk->order) {
    walk->dimensions[i].result = stride;
    stride *= walk->dimensions[i].size;
  }
}

// Dimensions that are walked along as one, where they are. Nothing where results would not lie side by side.
std::optional<Dimensions> merged(const Walk& walk) {
  Dimensions along;
  for (size_t i : walk.order) {
    const Dimension& own = walk.dimensions[i];
    if (own.size == 1) continue;
    if (!along.empty()) {
      Dimension& inner = along.back();
      auto follows = [&](int64_t Dimension::*stride) { return own.*stride == inner.*stride * inner.size; };
      if (follows(&Dimension::result) && follows(&Dimension::left) && follows(&Dimension::right)) {
        inner.size *= own.size;
        continue;
      }
    }
    along.push_back(own);
  }
  if (!along.empty() && along[0].result != 1) return std::nullopt;
  return along;
}

Sizes result_strides(const Walk& walk) {
  Sizes strides;
  for (const Dimension& dimension : walk.dimensions) strides.push_back(dimension.result);
  return strides;
}

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) { return at::Tensor(at::detail::empty_cpu(sizes, type)); }
at::Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, type));
}

// Where arguments have the same sizes, ATen has shorter rules for those without gaps.
enum class Layout { kContiguous, kSameStrides, kChannelsLast, kOther };
Layout layout_of(const at::Tensor& left, const at::Tensor& right) {
  if (left.sizes() != right.sizes()) return Layout::kOther;
  if (left.is_contiguous() && right.is_contiguous()) return Layout::kContiguous;
  auto all = [&](at::MemoryFormat format) { return left.is_contiguous(format) && right.is_contiguous(format); };
  if (all(at::MemoryFormat::ChannelsLast)) return Layout::kChannelsLast;
  return left.is_non_overlapping_and_dense() && left.strides() == right.strides() ? Layout::kSameStrides : Layout::kOther;
}

at::Tensor empty_like(const at::Tensor& of, at::ScalarType type, Layout layout) {
  return layout == Layout::kContiguous ? empty(of.sizes(), type) : empty(of.sizes(), of.strides(), type);
}

at::Tensor run(Binary function, Number type, at::ScalarType of_result, const Argument& left, const Argument& right) {
  Walk walk;
  if (!broadcast(left, right, &walk)) return {};
  find_order(&walk);
  lay_out(&walk);
  std::optional<Dimensions> along = merged(walk);
  if (!along) return {};
  at::Tensor result = empty(walk.sizes, result_strides(walk), of_result);
  run_binary(function, type, *along, result.mutable_data_ptr(), left.data, right.data);
  return result;
}

at::ScalarType type_of_result(Binary function, const at::Tensor& of) {
  return compares(function) ? at::kBool : of.scalar_type();
}

at::Tensor run_with_value(Binary function, const at::Tensor& tensor, const auto& number, bool is_left) {
  std::optional<Number> type = number_type(tensor.scalar_type());
  if (!type || !is_usual(function, *type) || !is_usual(tensor)) return {};
  std::optional<Value> value = value_of(number, *type);
  if (!value) return {};
  at::ScalarType of_result = type_of_result(function, tensor);
  return is_left ? run(function, *type, of_result, value->argument(), argument(tensor))
                 : run(function, *type, of_result, argument(tensor), value->argument());
}

}  // namespace

at::Tensor pointwise(Binary function, const at::Tensor& left, const at::Tensor& right) {
  bool left_is_number = left.unsafeGetTensorImpl()->is_wrapped_number();
  if (left_is_number != right.unsafeGetTensorImpl()->is_wrapped_number()) {
    return run_with_value(function, left_is_number ? right : left, left_is_number ? left : right, left_is_number);
  }
  std::optional<Number> type = number_type(left.scalar_type());
  if (left_is_number || !type || left.scalar_type() != right.scalar_type()) return {};
  if (!is_usual(function, *type) || !is_usual(left) || !is_usual(right)) return {};
  at::ScalarType of_result = type_of_result(function, left);
  Layout layout = layout_of(left, right);
  if (layout == Layout::kChannelsLast) return {};
  if (layout == Layout::kOther) return run(function, *type, of_result, argument(left), argument(right));
  at::Tensor result = empty_like(left, of_result, layout);
  Dimensions along{{left.numel(), 1, 1, 1}};
  run_binary(function, *type, along, result.mutable_data_ptr(), left.const_data_ptr(), right.const_data_ptr());
  return result;
}

at::Tensor pointwise(Binary function, const at::Tensor& left, const at::Scalar& right) {
  return run_with_value(function, left, right, false);
}

at::Tensor pointwise(Binary function, const at::Scalar& left, const at::Tensor& right) {
  return run_with_value(function, right, left, true);
}

at::Tensor pointwise(Unary function, const at::Tensor& of) {
  std::optional<Number> type = number_type(of.scalar_type());
  if (!type || *type == Number::kLong || *type == Number::kBool || !is_usual(of)) return {};
  Layout layout = layout_of(of, of);
  if (layout == Layout::kChannelsLast) return {};
  if (layout != Layout::kOther) {
    at::Tensor result = empty_like(of, of.scalar_type(), layout);
    run_unary(function, *type, {{of.numel(), 1, 1, 1}}, result.mutable_data_ptr(), of.const_data_ptr());
    return result;
  }
  Walk walk;
  if (!broadcast(argument(of), argument(of), &walk)) return {};
  find_order(&walk);
  lay_out(&walk);
  std::optional<Dimensions> along = merged(walk);
  if (!along) return {};
  at::Tensor result = empty(walk.sizes, result_strides(walk), of.scalar_type());
  run_unary(function, *type, *along, result.mutable_data_ptr(), of.const_data_ptr());
  return result;
}

at::Tensor copy_of(const at::Tensor& of, std::optional<at::MemoryFormat> format) {
  std::optional<Number> type = number_type(of.scalar_type());
  bool keeps_strides = !format || *format == at::MemoryFormat::Preserve;
  if (!type || !is_usual(of) || !(keeps_strides ? of.is_contiguous() : *format == at::MemoryFormat::Contiguous)) return {};
  at::Tensor result = empty(of.sizes(), of.scalar_type());
  if (keeps_strides && result.strides() != of.strides()) return {};  // of dimensions of one element
  Walk walk;
  if (!broadcast(argument(of), argument(of), &walk)) return {};
  for (size_t i = walk.sizes.size(); i-- > 0;) walk.order.push_back(i);
  lay_out(&walk);
  std::optional<Dimensions> along = merged(walk);
  if (!along) return {};
  run_unary(Unary::kCopy, *type, *along, result.mutable_data_ptr(), of.const_data_ptr());
  return result;
}

// --- in place --------------------------------------------------------------------------------------------------------

namespace {

// The walk of a function of the elements of `own`, and of another argument, that are written over.
std::optional<Dimensions> along_in_place(const Argument& own, const Argument& other) {
  Walk walk;
  if (!broadcast(own, other, &walk) || own.sizes != at::IntArrayRef(walk.sizes)) return std::nullopt;
  for (size_t i = walk.sizes.size(); i-- > 0;) walk.order.push_back(i);
  for (Dimension& dimension : walk.dimensions) dimension.result = dimension.left;
  std::optional<Dimensions> along = merged(walk);
  if (!along) return std::nullopt;
  for (size_t i = 1; i < along->size(); i++) {  // elements that are one to ATen, which refuses to write to them
    if ((*along)[i].result < (*along)[i - 1].result * (*along)[i - 1].size) return std::nullopt;
  }
  return along;
}

at::Tensor run_in_place(Binary function, Number type, const at::Tensor& self, const Argument& other) {
  void* result = self.mutable_data_ptr();  // which may be another from here on, where memory is copied on a write
  std::optional<Dimensions> along = along_in_place(argument(self), other);
  if (!along) return {};
  run_binary(function, type, *along, result, self.const_data_ptr(), other.data);
  return self;
}

std::optional<Number> type_in_place(Binary function, const at::Tensor& self) {
  std::optional<Number> type = number_type(self.scalar_type());
  return type && is_usual(function, *type) && is_usual(self) ? type : std::nullopt;
}

at::Tensor run_with_value_in_place(Binary function, const at::Tensor& self, const auto& number) {
  std::optional<Number> type = type_in_place(function, self);
  std::optional<Value> value = type ? value_of(number, *type) : std::nullopt;
  return value ? run_in_place(function, *type, self, value->argument()) : at::Tensor();
}

}  // namespace

at::Tensor pointwise_in_place(Binary function, const at::Tensor& self, const at::Tensor& other) {
  if (other.unsafeGetTensorImpl()->is_wrapped_number()) return run_with_value_in_place(function, self, other);
  std::optional<Number> type = type_in_place(function, self);
  if (!type || other.scalar_type() != self.scalar_type() || !is_usual(other)) return {};
  // ATen says whether the memory of the two overlaps, where it may.
  if (self.storage().is_alias_of(other.storage())) return {};
  return run_in_place(function, *type, self, argument(other));
}

at::Tensor pointwise_in_place(Binary function, const at::Tensor& self, const at::Scalar& other) {
  return run_with_value_in_place(function, self, other);
}

at::Tensor pointwise_in_place(Unary function, const at::Tensor& self, const at::Tensor& from) {
  std::optional<Number> type = number_type(self.scalar_type());
  bool fits = type && (function == Unary::kCopy || *type == Number::kFloat || *type == Number::kDouble);
  if (!fits || from.scalar_type() != self.scalar_type() || !is_usual(self) || !is_usual(from)) return {};
  if (self.storage().is_alias_of(from.storage())) return {};
  void* result = self.mutable_data_ptr();
  std::optional<Dimensions> along = along_in_place(argument(self), argument(from));
  if (!along) return {};
  for (Dimension& one : *along) one.left = one.right;  // what is read
  run_unary(function, *type, *along, result, from.const_data_ptr());
  return self;
}

// --- of two or three tensors and a number ----------------------------------------------------------------------------

namespace {

bool is_flat(const at::Tensor& tensor, const at::Tensor& like) {
  return is_usual(tensor) && tensor.is_contiguous() && tensor.scalar_type() == like.scalar_type() &&
      tensor.sizes() == like.sizes();
}

}  // namespace

at::Tensor scaled(Scaled function, const at::Tensor& a, const at::Tensor& b, const at::Tensor* c, const at::Scalar& number,
                  bool in_place) {
  std::optional<Number> type = number_type(a.scalar_type());
  if (!type || !is_flat(a, a) || !is_flat(b, a) || (c != nullptr && !is_flat(*c, a))) return {};
  std::optional<Value> value = value_of(number, *type);
  if (!value) return {};
  if (in_place) {  // ATen says whether memory overlaps, where it may
    if (a.storage().is_alias_of(b.storage()) || (c != nullptr && a.storage().is_alias_of(c->storage()))) return {};
  }
  at::Tensor result = in_place ? a : empty(a.sizes(), a.scalar_type());
  void* to = result.mutable_data_ptr();  // where memory is copied on a write, `a` has another from here on
  const void* third = c == nullptr ? nullptr : c->const_data_ptr();
  bool done = run_scaled(function, *type, a.numel(), to, a.const_data_ptr(), b.const_data_ptr(), third, &*value);
  return done ? result : at::Tensor();
}

}  // namespace marid
