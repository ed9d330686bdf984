// The largest or smallest number of each row of a tensor, and where it is (selections.cpp). Empty where ATen has to say it.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace marid {

enum class Selection : uint8_t { kLargest, kSmallest };

at::Tensor index_of(Selection selection, const at::Tensor& of, std::optional<int64_t> dim, bool keep);
std::tuple<at::Tensor, at::Tensor> selection_of(Selection selection, const at::Tensor& of, int64_t dim, bool keep);

// Of `outer` rows of `count` numbers, at least one, each of which is `inner` numbers behind the one before; `numbers` may be
// null. NaN counts as larger and as smaller than all others; of equal numbers the first is taken. Of floats, doubles and longs.
void select(Selection selection, at::ScalarType type, int64_t outer, int64_t count, int64_t inner, const void* from,
            void* numbers, int64_t* indices);

}  // namespace marid
