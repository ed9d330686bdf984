// The device's own thread (queue.cpp).
#pragma once

namespace marid {

// Whether what was handed over to it is not all done.
bool queue_is_busy();

}  // namespace marid
