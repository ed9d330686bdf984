// The values of a tape that hold memory (resident.cpp).
#pragma once
#include "python.h"

#include <algorithm>

namespace marid {

// Remember that a value holds memory: `Tape.note_resident` for one. False after an error.
bool note_resident(PyObject* tape, PyObject* value);

}  // namespace marid
