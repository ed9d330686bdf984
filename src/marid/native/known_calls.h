// What is known of calls like one that was recorded before, found by the arguments as PyTorch has them.
//
// The whole key of a call is made of Python objects (frontend/calls.py), by which everything that is known is kept
// (`Recorder.known`). This is the cache in front of it: the same key as a row of numbers, without an object made.
#pragma once
#include "call.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace marid {

using Words = c10::SmallVector<uint64_t, 64>;

// Read a call into a row of numbers that decides its key, and its tensors into `call`; false for a call that is unusual, or
// after an error. Specs stand for themselves by their addresses, so whoever keeps the row keeps them alive.
bool read_words(const Operator& op, const c10::IValue* given, Call& call, Words& words);

class KnownCalls {
 public:
  // What is known of such calls, borrowed; null where nothing is.
  PyObject* find(const Words& words);
  // Keep it; `keeps` holds what the row refers to by address.
  void keep(const Words& words, Ref known, Ref keeps);

 private:
  struct Entry {
    std::vector<uint64_t> words;
    Ref known, keeps;
  };
  std::unordered_multimap<uint64_t, Entry> entries_;
  int64_t generation_ = 0;
};

// Have nothing found until it is kept again: something that was known has changed.
void forget_known_calls();

// The bounds of `bucket` in frontend/calls.py, in order.
bool set_bounds(PyObject* numbers);

}  // namespace marid
