// Products of matrices whose gradients are computed by one operation each (product_gradients.cpp).
#pragma once
#include <torch/library.h>

namespace marid {

// Give products their kernels above autograd.
void register_product_gradients(torch::Library& above);

}  // namespace marid
