// Blocks of memory of operations that run at once, which the next ones of the same size have again (free_lists.cpp).
#pragma once
#include <cstddef>

#include <utility>

namespace marid {

// Whether what this thread allocates comes from its free lists.
extern constinit thread_local bool uses_free_lists;

class UsesFreeLists {
 public:
  UsesFreeLists() : before_(std::exchange(uses_free_lists, true)) {}
  UsesFreeLists(const UsesFreeLists&) = delete;
  UsesFreeLists& operator=(const UsesFreeLists&) = delete;
  ~UsesFreeLists() { uses_free_lists = before_; }

 private:
  bool before_;
};

// A block of at least so many bytes; null where there is none, and none is to be kept. It is an ordinary block of PyTorch's
// own allocator, which may free it; `put_block` does so or keeps it.
void* take_block(size_t bytes);
void put_block(void* block);

// Give back what this thread keeps.
void free_blocks();

}  // namespace marid
