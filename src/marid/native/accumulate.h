// How gradients that are added up lie in memory; see accumulate.cpp.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

namespace marid {

// Whether the first argument of `add.Tensor` may be a gradient to which autograd adds another one, itself and not for a
// function of the graph.
bool may_add_up(const at::Tensor& first);

// Whether such arguments on a stack are gradients that autograd adds up, where it would add into the first.
bool adds_up_gradients(const torch::jit::Stack& stack);

// Replace the sum on top of a stack by one that is laid out as its first term, where it is not.
void add_up(const at::Tensor& first, const at::Tensor& second, torch::jit::Stack* stack);

}  // namespace marid
