// Where the blocks of a planned run lie: offsets in one slab, worked out once for each program (execute/memory_plan.py).
#include "expose.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

using namespace marid;

struct Lifetime {
  int64_t bytes, birth, death;
};

// Offsets for blocks in the given order, each in the tightest gap left by those placed that live at the same time.
int64_t place(const std::vector<Lifetime>& blocks, const std::vector<int64_t>& order, std::vector<int64_t>& offsets) {
  std::vector<std::pair<int64_t, int64_t>> placed;  // offset, block; sorted
  int64_t peak = 0;
  for (int64_t block : order) {
    const Lifetime& own = blocks[block];
    int64_t best = -1, tightest = INT64_MAX, end = 0;
    for (auto [offset, other] : placed) {
      if (blocks[other].birth >= own.death || blocks[other].death <= own.birth) continue;
      int64_t gap = offset - end;
      if (gap >= own.bytes && gap < tightest) {
        tightest = gap;
        best = end;
      }
      end = std::max(end, offset + blocks[other].bytes);
    }
    offsets[block] = best >= 0 ? best : end;
    peak = std::max(peak, offsets[block] + own.bytes);
    std::pair<int64_t, int64_t> entry{offsets[block], block};
    placed.insert(std::upper_bound(placed.begin(), placed.end(), entry), entry);
  }
  return peak;
}

// Offsets of blocks (bytes, aligned; alive from birth to before death) such that no two that live at the same time overlap;
// before them the size of the slab. `lower` is the largest sum of living bytes, which no placement can go below.
std::pair<int64_t, std::vector<int64_t>> memory_place(const std::vector<int64_t>& bytes, const std::vector<int64_t>& births,
                                                      const std::vector<int64_t>& deaths, int64_t lower) {
  auto count = static_cast<int64_t>(bytes.size());
  std::vector<Lifetime> blocks(count);
  std::vector<int64_t> order(count), trial(count), offsets(count);
  for (int64_t i = 0; i < count; i++) {
    blocks[i] = {bytes[i], births[i], deaths[i]};
    order[i] = i;
  }
  auto area = [&](int64_t i) { return double(blocks[i].bytes) * double(blocks[i].death - blocks[i].birth); };
  int64_t peak = INT64_MAX;
  for (int attempt = 0; attempt < 3 && peak > lower; attempt++) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      if (attempt == 0) return blocks[a].bytes > blocks[b].bytes;
      if (attempt == 1) return area(a) > area(b);
      return blocks[a].birth < blocks[b].birth;
    });
    int64_t reached = place(blocks, order, trial);
    if (reached < peak) {
      peak = reached;
      offsets = trial;
    }
  }
  return {count == 0 ? 0 : peak, std::move(offsets)};
}

}  // namespace

namespace marid {

PyMethodDef placement_functions[] = {
    released<memory_place>("memory_place"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
