// Kernels for small tensors, where what ATen does around a loop takes longer than the loop.
//
// A pointwise operator of ATen looks at types, shapes, strides and overlaps of any kind: some 5,000 instructions, for what an
// addition of a hundred numbers does in a hundred. A view is a call of another operator or two. These kernels do the usual
// cases with the same results, bit for bit, and leave all others to ATen, with its errors.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <utility>
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
template <typename... Each, typename... Arguments>
struct SmallKernel<std::tuple<Each...>(Arguments...)> {
  using Function = std::tuple<Each...> (*)(Arguments...);
};
template <typename... Arguments>
struct SmallKernel<void(Arguments...)> {
  using Function = bool (*)(Arguments...);
};

inline bool is_done(const at::Tensor& result) { return result.defined(); }
inline bool is_done(const std::vector<at::Tensor>& results) { return !results.empty(); }
template <typename... Each>
bool is_done(const std::tuple<Each...>& results) { return std::get<0>(results).defined(); }
inline bool is_done(bool done) { return done; }

// Any of these functions, with the types of its arguments.
struct AnySmallKernel {
  template <typename Result, typename... Arguments>
  AnySmallKernel(Result (*function)(Arguments...))  // NOLINT: of which it is made
      : type(typeid(function)), function(reinterpret_cast<void (*)()>(function)), boxed(call<Result, Arguments...>) {}

  // Compute the result of the arguments on a stack, in whose place it is then; false where that is left to ATen.
  bool operator()(torch::jit::Stack& stack) const { return boxed(function, stack); }

  std::type_index type;
  void (*function)();

 private:
  // An argument of a stack, which keeps it: ATen is called with it where this kernel is not the one.
  template <typename Argument>
  static decltype(auto) unboxed(c10::IValue& given) {
    if constexpr (std::is_same_v<std::decay_t<Argument>, at::Tensor>) {
      return (given.toTensor());
    } else {
      c10::IValue copy(given);
      return c10::impl::ivalue_to_arg<std::decay_t<Argument>, /*AllowDeprecatedTypes=*/true>::call(copy);
    }
  }

  // Programs may run on an accelerator, whose memory these kernels cannot read.
  static bool is_on_host(const c10::IValue& given) {
    if (given.isTensor()) return !given.toTensor().defined() || given.toTensor().is_cpu();
    if (!given.isTensorList() && !given.isOptionalTensorList()) return true;
    for (const c10::IValue& item : given.toListRef()) {
      if (!is_on_host(item)) return false;
    }
    return true;
  }

  template <typename Result, typename... Arguments, size_t... index>
  static Result call_with(void (*function)(), c10::IValue* given, std::index_sequence<index...>) {
    return reinterpret_cast<Result (*)(Arguments...)>(function)(unboxed<Arguments>(given[index])...);
  }

  template <typename Result, typename... Arguments>
  static bool call(void (*function)(), torch::jit::Stack& stack) {
    constexpr size_t count = sizeof...(Arguments);
    c10::IValue* given = stack.data() + stack.size() - count;
    if (!std::all_of(given, given + count, is_on_host)) return false;
    Result made = call_with<Result, Arguments...>(function, given, std::make_index_sequence<count>());
    if (!is_done(made)) return false;
    torch::jit::drop(stack, count);
    put(stack, std::move(made));
    return true;
  }

  static void put(torch::jit::Stack&, bool) {}
  static void put(torch::jit::Stack& stack, at::Tensor made) { stack.emplace_back(std::move(made)); }
  static void put(torch::jit::Stack& stack, std::vector<at::Tensor> made) { stack.emplace_back(std::move(made)); }
  template <typename... Each>
  static void put(torch::jit::Stack& stack, std::tuple<Each...> made) {
    std::apply([&](auto&... each) { (stack.emplace_back(std::move(each)), ...); }, made);
  }

  bool (*boxed)(void (*)(), torch::jit::Stack&);
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
