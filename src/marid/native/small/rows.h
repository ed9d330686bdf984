// Rows of a tensor that indices name (rows.cpp). Undefined where ATen has to find them, or to raise an error.
#pragma once
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>

namespace marid {

at::Tensor rows_indexed(const at::Tensor& self, const c10::List<std::optional<at::Tensor>>& indices);
at::Tensor rows_selected(const at::Tensor& self, int64_t dimension, const at::Tensor& index);
at::Tensor rows_embedded(const at::Tensor& weight, const at::Tensor& indices, c10::SymInt padding, bool scale, bool sparse);

}  // namespace marid
