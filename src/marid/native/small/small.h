// Kernels for small tensors, where what ATen does around a loop takes longer than the loop.
//
// A pointwise operator of ATen looks at types, shapes, strides and overlaps of any kind: some 5,000 instructions, for what an
// addition of a hundred numbers does in a hundred. A view is a call of another operator or two. These kernels do the usual
// cases with the same results, bit for bit, and leave all others to ATen, with its errors.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <typeindex>
#include <vector>

namespace marid {

// What takes the arguments that an operator takes, and returns its result; undefined, empty or false where it leaves the call to
// ATen, and nothing has happened.
template <typename Signature>
struct SmallKernel;
template <typename Returned, typename... Arguments>
struct SmallKernel<Returned(Arguments...)> {
  using Function = at::Tensor (*)(Arguments...);
};
template <typename... Arguments>
struct SmallKernel<std::vector<at::Tensor>(Arguments...)> {
  using Function = std::vector<at::Tensor> (*)(Arguments...);
};
template <typename... Arguments>
struct SmallKernel<void(Arguments...)> {
  using Function = bool (*)(Arguments...);
};

inline bool is_done(const at::Tensor& result) { return result.defined(); }
inline bool is_done(const std::vector<at::Tensor>& results) { return !results.empty(); }
inline bool is_done(bool done) { return done; }

// Any of these functions, with the types of its arguments.
struct AnySmallKernel {
  template <typename Result, typename... Arguments>
  AnySmallKernel(Result (*function)(Arguments...))  // NOLINT: of which it is made
      : type(typeid(function)), function(reinterpret_cast<void (*)()>(function)) {}

  std::type_index type;
  void (*function)();
};

// That of an operator (`aten::add.Tensor`); null where there is none. (operators.cpp)
const AnySmallKernel* find_small_kernel(const std::string& name);

template <typename Signature>
typename SmallKernel<Signature>::Function small_kernel(const std::string& name) {
  using Function = typename SmallKernel<Signature>::Function;
  const AnySmallKernel* found = find_small_kernel(name);
  bool fits = found != nullptr && found->type == typeid(Function);
  return fits ? reinterpret_cast<Function>(found->function) : nullptr;
}

}  // namespace marid
