// Memory of programs that run in this process: an allocator of CPU tensors that can watch a run and, the next time,
// put every result where a plan says.
//
// A program makes the same allocations in the same order whenever it runs. A run that is *watched* notes them and when
// each was freed; from that, execute/memory_plan.py plans offsets in one slab. A run that *follows* a plan checks every
// allocation and every free against what was noted, and takes the planned place as long as they agree. What happens out
// of order (an exception, a finalizer, another thread) ends the plan for the rest of that run, never its correctness.
//
// Outside of such runs the allocator is PyTorch's own, but for operations that run at once (free_lists.cpp). Blocks of a slab
// keep the slab alive, whoever holds them.
#include "memory.h"

#include "expose.h"
#include "free_lists.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

// A stretch of memory in which blocks have planned places.
struct marid::Slab {
  char* base = nullptr;
  size_t bytes = 0;
  int64_t users = 0;  // blocks that somebody holds
  bool retired = false;
  bool holds(const void* ptr) const {
    return static_cast<const char*>(ptr) >= base && static_cast<const char*>(ptr) < base + bytes;
  }
};

namespace {

using namespace marid;

constexpr size_t kAlign = 64;  // what PyTorch's allocator aligns to
constexpr size_t kPooled = size_t(64) << 10;  // smaller blocks are cheap to get and to give back
constexpr size_t kMapped = size_t(4) << 20;  // larger blocks are mapped on their own: what is given back is gone at once
constexpr size_t kMuch = size_t(32) << 20;  // as MUCH_BYTES in policy.py
constexpr size_t kPage = size_t(4) << 10;
constexpr size_t kHoles = size_t(256) << 20;  // that may lie free in the heap before they are given back to the system

c10::Allocator* plain() { return c10::GetDefaultCPUAllocator(); }

#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
// Bytes of the process that are in memory; 0 where the system does not tell.
int64_t resident() {
  long long pages = 0;
  FILE* file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr || std::fscanf(file, "%*s %lld", &pages) != 1) pages = 0;
  if (file != nullptr) std::fclose(file);
  return pages * sysconf(_SC_PAGESIZE);
}

// Have the C library give free pages back to the system where there are many: blocks whose sizes never come again leave holes
// that no later block fits into. Pages that were given back count as free in the heap, so it goes by what has come into memory
// since and is not in use. It looks once for as many bytes that are taken: at worst, each page is new once.
void count_taken(size_t bytes) {
  static std::atomic<size_t> taken{0};
  static std::atomic<int64_t> least{-1};  // that was in memory and not in use, since the heap was first trimmed
  if (bytes < kPooled || taken.fetch_add(bytes, std::memory_order_relaxed) + bytes < kHoles) return;
  taken = 0;
  auto heap = mallinfo2();
  int64_t unused = resident() - static_cast<int64_t>(heap.uordblks);
  if (least >= 0) least = std::min<int64_t>(least, unused);
  if (least < 0 ? heap.fordblks < kHoles : unused - least < static_cast<int64_t>(kHoles)) return;
  malloc_trim(0);
  least = std::max<int64_t>(resident() - static_cast<int64_t>(mallinfo2().uordblks), 0);
}
#else
void count_taken(size_t) {}
#endif

void* get(size_t bytes) {
  if (bytes < kMapped) {
    count_taken(bytes);
    return plain()->raw_allocate(bytes);
  }
  // Huge pages are not asked for: where the system has to make room for one, its first use takes milliseconds.
  size_t whole = (bytes + kPage - 1) / kPage * kPage;
  void* mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mapped == MAP_FAILED ? plain()->raw_allocate(bytes) : mapped;  // which raises what PyTorch raises
}
void give_back(void* ptr, size_t bytes) {
  if (bytes < kMapped) {
    plain()->raw_deallocate(ptr);
  } else {
    munmap(ptr, (bytes + kPage - 1) / kPage * kPage);
  }
}

// --- slabs and the pool, under one lock ---

struct Pool {
  std::list<std::pair<size_t, void*>> order;  // cached blocks, oldest first
  std::multimap<size_t, std::list<std::pair<size_t, void*>>::iterator> by_size;
  std::unordered_map<void*, size_t> handed_out;
  size_t cached = 0;
  size_t limit = 0;
};

std::mutex lock;
std::vector<Slab*> slabs;
Pool pool;

void drop(Slab* slab) {  // with the lock
  slabs.erase(std::find(slabs.begin(), slabs.end(), slab));
  free(slab->base);
  delete slab;
}

void trim(size_t limit) {  // with the lock
  while (pool.cached > limit) {
    auto oldest = pool.order.begin();
    auto [first, last] = pool.by_size.equal_range(oldest->first);
    for (auto at = first; at != last; ++at) {
      if (at->second == oldest) {
        pool.by_size.erase(at);
        break;
      }
    }
    pool.cached -= oldest->first;
    give_back(oldest->second, oldest->first);
    pool.order.erase(oldest);
  }
}

void* take(size_t bytes) {
  if (bytes < kPooled) return plain()->raw_allocate(bytes);
  {
    std::lock_guard<std::mutex> held(lock);
    auto found = pool.by_size.lower_bound(bytes);
    if (found != pool.by_size.end() && found->first <= bytes + bytes / 8) {
      void* ptr = found->second->second;
      pool.handed_out[ptr] = found->first;
      pool.cached -= found->first;
      pool.order.erase(found->second);
      pool.by_size.erase(found);
      return ptr;
    }
  }
  void* ptr = get(bytes);
  std::lock_guard<std::mutex> held(lock);
  pool.handed_out[ptr] = bytes;
  return ptr;
}

// --- the arena: one slab that all planned runs put their blocks in, one run at a time ---

constexpr int kWindow = 64;  // runs after which a slab that none of them needed is made smaller

struct {
  Slab* slab = nullptr;
  size_t needed = 0;  // by the recent runs
  int runs = 0;
} arena;

// Give the slab up, with the lock; its memory goes when nobody holds a block of it.
void give_arena_up() {
  if (arena.slab == nullptr) return;
  arena.slab->retired = true;
  if (arena.slab->users == 0) drop(arena.slab);
  arena.slab = nullptr;
}

// A slab of at least so many bytes, or null; a much larger one is replaced when no recent run needed it.
Slab* reserve(size_t bytes) {
  std::lock_guard<std::mutex> held(lock);
  arena.needed = std::max(arena.needed, bytes);
  if (++arena.runs >= kWindow) {
    if (arena.slab != nullptr && arena.needed < arena.slab->bytes / 2) give_arena_up();
    arena.needed = 0;
    arena.runs = 0;
  }
  if (arena.slab != nullptr && arena.slab->bytes >= bytes) return arena.slab;
  give_arena_up();
  void* base = nullptr;
  if (posix_memalign(&base, kAlign, std::max<size_t>(bytes, 1)) != 0) return nullptr;
  auto* slab = new Slab;
  slab->bytes = bytes;
  slab->base = static_cast<char*>(base);
  slabs.push_back(slab);
  arena.slab = slab;
  return slab;
}

// --- runs ---

thread_local MemoryRun* current = nullptr;

void* allocate_in(MemoryRun* run, size_t bytes) {
  if (run->plan != nullptr) {
    const MemoryPlan& plan = *run->plan;
    if (run->follows) {
      int64_t block = run->next < plan.events.size() ? plan.events[run->next] : -1;
      run->follows = block >= 0 && plan.sizes[block] == static_cast<int64_t>(bytes);
      if (run->follows) {
        run->next++;
        if (plan.offsets[block] >= 0) {
          std::lock_guard<std::mutex> held(lock);
          run->slab->users++;
          return run->slab->base + plan.offsets[block];
        }
      }
    }
    return take(bytes);
  }
  void* ptr = take(bytes);
  int64_t block = static_cast<int64_t>(run->seen.sizes.size());
  run->seen.sizes.push_back(static_cast<int64_t>(bytes));
  run->seen.events.push_back(block);
  run->living[ptr] = block;
  return ptr;
}

void note_free(MemoryRun* run, void* ptr) {
  if (run->plan == nullptr) {
    auto found = run->living.find(ptr);
    if (found == run->living.end()) return;
    run->seen.events.push_back(~found->second);
    run->living.erase(found);
  } else if (run->follows && run->slab->holds(ptr)) {
    const MemoryPlan& plan = *run->plan;
    int64_t block = run->next < plan.events.size() ? ~plan.events[run->next] : -1;
    run->follows = block >= 0 && run->slab->base + plan.offsets[block] == ptr;
    if (run->follows) run->next++;
  }
}

void release(void* ptr) {
  if (ptr == nullptr) return;
  if (current != nullptr) note_free(current, ptr);
  {
    std::lock_guard<std::mutex> held(lock);
    for (Slab* slab : slabs) {
      if (!slab->holds(ptr)) continue;
      if (--slab->users == 0 && slab->retired) drop(slab);
      return;
    }
    auto found = pool.handed_out.find(ptr);
    if (found != pool.handed_out.end()) {
      size_t bytes = found->second;
      pool.handed_out.erase(found);
      if (bytes <= pool.limit) {
        pool.order.emplace_back(bytes, ptr);
        pool.by_size.emplace(bytes, std::prev(pool.order.end()));
        pool.cached += bytes;
        trim(pool.limit);
        return;
      }
      give_back(ptr, bytes);
      return;
    }
  }
  plain()->raw_deallocate(ptr);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (current == nullptr && uses_free_lists) {
      if (void* block = take_block(bytes)) return {block, block, &put_block, c10::Device(c10::DeviceType::CPU)};
    }
    if (current == nullptr || bytes == 0) {
      count_taken(bytes);
      return plain()->allocate(bytes);
    }
    void* ptr = allocate_in(current, bytes);
    return {ptr, ptr, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t bytes) const override { default_copy_data(dest, src, bytes); }
};

Allocator allocator;
c10::Allocator* replaced = nullptr;  // PyTorch's own, or whose it was

// Become the allocator of CPU tensors; or, later, change how many bytes the pool may keep.
void memory_install(size_t pool_limit) {
  {
    std::lock_guard<std::mutex> held(lock);
    pool.limit = pool_limit;
    trim(pool.limit);
  }
  if (c10::GetCPUAllocator() != &allocator) {
    replaced = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&allocator, 1);
  }
  static const bool watching = [] {
    // A child starts with the lock open, whatever other threads were doing.
    pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { lock.unlock(); });
    return true;
  }();
  (void)watching;
}

// Let the allocator of CPU tensors be what it was, unless somebody has replaced ours. Blocks of ours stay good.
void memory_uninstall() {
  if (c10::GetCPUAllocator() == &allocator && replaced != nullptr) c10::SetCPUAllocator(replaced, 1);
}

MemoryPlan* memory_plan(std::vector<int64_t> sizes, std::vector<int64_t> offsets, std::vector<int64_t> events) {
  return new MemoryPlan{std::move(sizes), std::move(offsets), std::move(events)};
}
void memory_forget(MemoryPlan* plan) { delete plan; }

// What a run was seen to allocate, once: sizes, and events.
std::pair<std::vector<int64_t>, std::vector<int64_t>> memory_seen(MemoryRun* given) {
  std::unique_ptr<MemoryRun> run(given);
  return {std::move(run->seen.sizes), std::move(run->seen.events)};
}

// Give the arena's memory back; between runs.
void memory_release() {
  std::lock_guard<std::mutex> held(lock);
  give_arena_up();
}
size_t memory_arena_bytes() {
  std::lock_guard<std::mutex> held(lock);
  return arena.slab == nullptr ? 0 : arena.slab->bytes;
}

size_t memory_cached() {
  std::lock_guard<std::mutex> held(lock);
  return pool.cached;
}
// Give back what is kept to be used again; what PyTorch's allocator has kept as well.
void memory_trim() {
  {
    std::lock_guard<std::mutex> held(lock);
    trim(0);
  }
  free_blocks();
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace

namespace marid {

void memory_watch(int64_t expected) {
  if (static_cast<size_t>(expected) >= kMuch) {
    std::lock_guard<std::mutex> held(lock);
    give_arena_up();
  }
  current = new MemoryRun;
}

bool memory_follow(const MemoryPlan* plan, int64_t peak) {
  Slab* slab = reserve(static_cast<size_t>(peak));
  if (slab == nullptr) return false;
  current = new MemoryRun{plan, slab, 0, true, {}, {}};
  return true;
}

MemoryRun* memory_end_watched() { return std::exchange(current, nullptr); }

bool memory_end() {
  std::unique_ptr<MemoryRun> run(memory_end_watched());
  std::lock_guard<std::mutex> held(lock);
  if (run->slab->users != 0 && run->slab == arena.slab) give_arena_up();
  return !run->follows || run->next != run->plan->events.size();
}

PyMethodDef memory_functions[] = {
    released<memory_install>("memory_install"),
    held<memory_uninstall>("memory_uninstall"),
    held<memory_plan>("memory_plan"),
    held<memory_forget>("memory_forget"),
    released<memory_watch>("memory_watch"),
    released<memory_follow>("memory_follow"),
    held<memory_end_watched>("memory_end_watched"),
    held<memory_end>("memory_end"),
    held<memory_seen>("memory_seen"),
    released<memory_release>("memory_release"),
    held<memory_arena_bytes>("memory_arena_bytes"),
    held<memory_cached>("memory_cached"),
    released<memory_trim>("memory_trim"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
