// Random numbers of operations that run at once (random.cpp).
#pragma once
#include "python.h"

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace marid {

// For as long as this lives, an operation of this thread draws where the generator stands that it was given, or else that of
// its device. What it has taken, perhaps before it failed, is seen on the one that gave it; the other is moved on at the end. The
// interpreter's lock is held all the time, so nobody else takes the same numbers.
class Draws {
 public:
  Draws(bool draws, c10::DeviceIndex device, const at::Generator& given);
  Draws(const Draws&) = delete;
  Draws& operator=(const Draws&) = delete;
  ~Draws();

  bool begin();  // false after an error
  bool end();  // false after an error
  void undo();  // the operation is done once more, by another way: it has taken nothing

  // A generator of the CPU that gives this thread's operation its numbers.
  static const at::Generator& source();

 private:
  struct Position* given_;  // where the generator stands that was given; null where none was
  PyObject* of_;  // else the generator of the device; null for an operation that draws nothing. Borrowed
  bool is_begun_ = false;
};

}  // namespace marid
