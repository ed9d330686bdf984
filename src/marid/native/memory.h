// Runs whose memory is watched or planned (memory.cpp), one at a time in the process.
#pragma once
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace marid {

struct Slab;

struct MemoryPlan {
  std::vector<int64_t> sizes;    // of each block, in order of allocation
  std::vector<int64_t> offsets;  // in the slab; -1 for blocks that outlive the run
  std::vector<int64_t> events;   // k: block k is allocated; ~k: it is freed
};

struct MemoryRun {
  const MemoryPlan* plan = nullptr;  // to be followed; null when the run is watched
  Slab* slab = nullptr;
  size_t next = 0;
  bool follows = false;
  MemoryPlan seen;
  std::unordered_map<void*, int64_t> living;  // watched blocks by address
};

// Begin a run on this thread: one that is watched, or one that follows a plan of so many bytes in the arena; false when there
// is not that much memory. A watched run takes `expected` bytes beside the arena: for much, the arena is given back first.
void memory_watch(int64_t expected);
bool memory_follow(const MemoryPlan* plan, int64_t peak);

// End the watched run of this thread; it is read and freed by memory_seen.
MemoryRun* memory_end_watched();

// End a run that follows a plan; whether it left the plan. A slab of which somebody still holds a block is given up.
bool memory_end();

}  // namespace marid
