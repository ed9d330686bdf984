// A call as it is read (call.cpp) and recorded (record.cpp).
#pragma once
#include "handle.h"
#include "nodes.h"
#include "record.h"

#include <c10/util/SmallVector.h>

namespace marid {

enum class Outcome { kError, kUnusual, kDone };

struct Call {
  bool exact, exact_lists;  // whether floating-point numbers are part of the key, alone and in lists
  Ref key, args, kwargs;
  // In order of appearance, and what they stand for; kept by the stack and by the arguments that are recorded.
  c10::SmallVector<Handle*, 8> handles;
  c10::SmallVector<PyObject*, 8> values;
};

// A tuple that no reference cycle can go through. Nodes refer only to what is older, so neither they nor what they hold
// need Python's collector, which would else walk all of them again and again, and then everything else in the process.
Ref untracked_tuple(size_t size);

// The key and the value of one argument; both are new references, and may be null where the outcome is not kDone.
Outcome read_argument(const c10::IValue& arg, bool exact, Call& call, PyObject** key, PyObject** stored);

// A call as Python would be given it: without what is as the schema has it anyway.
Outcome read_call(const Operator& op, const c10::IValue* given_args, Call& call);

// The arguments alone of a call whose tensors have been read (known_calls.cpp); false after an error.
bool store_call(const Operator& op, const c10::IValue* given_args, Call& call);

// Whether an argument is what the schema has where none is given.
bool is_default(const c10::IValue& arg, const Formal& formal);

// Whether an argument that is not recorded says what Python's half of PyTorch always says.
bool is_usual(const c10::IValue* given_args, size_t index, const Operator& op);

// Recorder.key_of: where an argument is written, which of them share memory is part of the key.
Ref full_key(const Call& call);

// For each of the tensors of a call, which is the first that lies in the same memory, and the first that is the same tensor;
// nothing where each has memory of its own.
struct Sharing {
  c10::SmallVector<size_t, 8> roots, tensors;
};
Sharing sharing(const Call& call);

// `bucket` of frontend/calls.py says in which range a number lies.
void prepare_reading(PyObject* bucket);

}  // namespace marid
