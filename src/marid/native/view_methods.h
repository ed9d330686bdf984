// Methods of the device's tensors that return views. (view_methods.cpp)
#pragma once

namespace marid {

// Give them to the class of handles; false after an error.
bool prepare_view_methods();

}  // namespace marid
