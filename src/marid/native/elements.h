// Types of elements and activations, as kernels are told of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

namespace marid {

enum class Element { kDouble, kFloat, kHalf, kBFloat16 };
enum Activation : int64_t { kNone, kRelu, kSquaredRelu, kSigmoid, kTanh, kSilu, kExp, kOppositeExp, kActivations };

inline constexpr std::array<std::string_view, kActivations> kActivationNames{
    "none", "relu", "squared_relu", "sigmoid", "tanh", "silu", "exp", "opposite_exp"};

inline int64_t activation_named(c10::string_view name, const char* function) {
  auto found = std::find(kActivationNames.begin(), kActivationNames.end(), std::string_view(name.data(), name.size()));
  TORCH_CHECK_VALUE(found != kActivationNames.end(), function, "() does not know the activation '", name, "'");
  return found - kActivationNames.begin();
}

inline Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return Element::kDouble;
    case at::kFloat: return Element::kFloat;
    case at::kHalf: return Element::kHalf;
    case at::kBFloat16: return Element::kBFloat16;
    default: TORCH_CHECK(false, "there is no kernel for elements of ", type);
  }
}

// The tensor with this type and all of its elements in order; itself, if it is that.
inline at::Tensor plain(const at::Tensor& tensor, at::ScalarType type) {
  if (tensor.scalar_type() == type && tensor.is_contiguous() && !tensor.is_neg()) return tensor;
  return tensor.to(type).contiguous().resolve_neg();
}

}  // namespace marid
