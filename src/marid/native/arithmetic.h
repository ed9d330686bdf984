// Python's operators on tensors of the device. (arithmetic.cpp)
#pragma once

namespace marid {

// Have the class of handles compute them in C++; false after an error.
bool prepare_arithmetic();

}  // namespace marid
