// Indexing of the device's tensors with numbers and slices. (indexing.cpp)
#pragma once

namespace marid {

// Have the class of handles do it in C++.
void prepare_indexing();

}  // namespace marid
