// Functions of autograd of our own, in the pointers that this version of PyTorch holds them by.
#pragma once
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace marid {

using FunctionPointer = decltype(torch::autograd::Edge::function);  // a `shared_ptr` before PyTorch 2.13

template <typename Function, typename... Arguments>
FunctionPointer make_function(Arguments&&... arguments) {
  if constexpr (std::is_same_v<FunctionPointer, std::shared_ptr<torch::autograd::Node>>) {
    return FunctionPointer(
        new Function(std::forward<Arguments>(arguments)...), [](auto* function) { deleteNode(function); });
  } else {
    return c10::make_intrusive<Function>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace marid
