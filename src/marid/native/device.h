// The devices as PyTorch's C++ knows them (device.cpp).
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace marid {

// The device that is current on this thread.
c10::DeviceIndex current_device();

// A position in the Mersenne Twister stream of `seed`; frontend/random.py gives it meaning.
struct Position {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
  int64_t spare = -1;
  bool operator==(const Position& other) const {
    return seed == other.seed && offset == other.offset && spare == other.spare;
  }
};

// Where a generator of the devices stands; null for one of another device.
Position* position_of(const at::Generator& generator);

}  // namespace marid
