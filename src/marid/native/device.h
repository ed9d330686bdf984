// The devices as PyTorch's C++ knows them (device.cpp).
#pragma once
#include <c10/core/Device.h>

namespace marid {

// The device that is current on this thread.
c10::DeviceIndex current_device();

}  // namespace marid
