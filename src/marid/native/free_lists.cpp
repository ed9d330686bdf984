// Free lists of small blocks, one set for each thread.
//
// Operations that run at once make and drop results of few sizes, over and over. Aligned memory costs the C library some 1,200
// instructions to find and to free, and comes from other places each time; a list gives the block that was freed last, which
// is still in the processor's cache. Sizes are rounded up to classes, at most an eighth apart.
#include "free_lists.h"

#include <c10/core/CPUAllocator.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <array>
#include <bit>
#include <memory>
#include <utility>

namespace marid {

constinit thread_local bool uses_free_lists = false;

#if defined(__GLIBC__)

namespace {

constexpr size_t kStep = 64;  // what PyTorch's allocator aligns to
constexpr size_t kStepped = 1024;  // up to here, classes are that far apart
constexpr size_t kFirst = kStepped / kStep, kEighths = 8;
constexpr int kFirstLog = std::countr_zero(kStepped), kLastLog = 22;
constexpr size_t kLargest = size_t(1) << kLastLog;
constexpr size_t kMost = size_t(32) << 20;  // bytes that a thread keeps
constexpr size_t kClasses = kFirst + (kLastLog - kFirstLog) * kEighths;

// The smallest class of blocks that hold so many bytes; there are some, and no more than kLargest.
constexpr size_t class_above(size_t bytes) {
  if (bytes <= kStepped) return (bytes - 1) / kStep;
  int log = std::bit_width(bytes - 1) - 1;
  size_t eighth = ((bytes - 1) >> (log - 3)) % kEighths;
  return kFirst + (log - kFirstLog) * kEighths + eighth;
}

constexpr size_t bytes_of(size_t kind) {
  if (kind < kFirst) return (kind + 1) * kStep;
  size_t log = (kind - kFirst) / kEighths + kFirstLog, eighth = (kind - kFirst) % kEighths;
  return (size_t(1) << log) + ((eighth + 1) << (log - 3));
}
static_assert(bytes_of(class_above(1)) == kStep && bytes_of(class_above(kStepped)) == kStepped);
static_assert(bytes_of(class_above(kStepped + 1)) == kStepped / 8 * 9 && class_above(kLargest) == kClasses - 1);
static_assert(bytes_of(class_above(5000)) >= 5000 && bytes_of(class_above(5000) - 1) < 5000);

struct Block {
  Block* next;
};

struct Lists {
  std::array<Block*, kClasses> first{};
  size_t kept = 0;

  void clear() {
    for (Block*& list : first) {
      while (list != nullptr) c10::GetDefaultCPUAllocator()->raw_deallocate(std::exchange(list, list->next));
    }
    kept = 0;
  }
};

// This thread's; null before the first block. A pointer alone is found in less time than an object with a destructor.
constinit thread_local Lists* lists = nullptr;
constinit thread_local bool ended = false;  // it has no lists any more

struct Owner {
  std::unique_ptr<Lists> made{new Lists};
  ~Owner() {
    lists = nullptr;
    ended = true;
    made->clear();
  }
};

Lists* lists_of_thread() {
  if (lists == nullptr && !ended) {
    static thread_local Owner owner;
    lists = owner.made.get();
  }
  return lists;
}

// Whether PyTorch's blocks are the C library's, which then says how large they are.
bool sizes_are_known() {
  static const bool known = [] {
    for (size_t bytes : {kStep, size_t(5000), size_t(100000)}) {
      void* block = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
      size_t usable = malloc_usable_size(block);
      c10::GetDefaultCPUAllocator()->raw_deallocate(block);
      if (usable < bytes || usable > bytes + 4096) return false;
    }
    return true;
  }();
  return known;
}

}  // namespace

void* take_block(size_t bytes) {
  if (bytes == 0 || bytes > kLargest || !sizes_are_known()) return nullptr;
  Lists* own = lists_of_thread();
  if (own == nullptr) return nullptr;
  size_t kind = class_above(bytes);
  if (Block* block = own->first[kind]) {
    own->first[kind] = block->next;
    own->kept -= bytes_of(kind);
    return block;
  }
  return c10::GetDefaultCPUAllocator()->raw_allocate(bytes_of(kind));
}

void put_block(void* block) {
  size_t usable = block == nullptr ? 0 : malloc_usable_size(block);
  Lists* own = usable < kStep || usable >= 2 * kLargest ? nullptr : lists_of_thread();
  if (own == nullptr) return c10::GetDefaultCPUAllocator()->raw_deallocate(block);
  size_t kind = usable >= kLargest ? kClasses - 1 : class_above(usable);
  if (bytes_of(kind) > usable) kind--;
  if (own->kept + bytes_of(kind) > kMost) return c10::GetDefaultCPUAllocator()->raw_deallocate(block);
  own->kept += bytes_of(kind);
  own->first[kind] = new (block) Block{own->first[kind]};
}

void free_blocks() {
  if (lists != nullptr) lists->clear();
}

#else  // the size of a block cannot be asked for

void* take_block(size_t) { return nullptr; }
void put_block(void* block) { c10::GetDefaultCPUAllocator()->raw_deallocate(block); }
void free_blocks() {}

#endif

}  // namespace marid
