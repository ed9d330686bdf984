// The state of dispatch in which concrete work is done.
#pragma once
#include <c10/core/DispatchKeySet.h>

#include <utility>

namespace marid {

// The keys that are included and those that are excluded (see graph/dispatch_state.py).
std::pair<c10::DispatchKeySet, c10::DispatchKeySet> keys_inside();

}  // namespace marid
