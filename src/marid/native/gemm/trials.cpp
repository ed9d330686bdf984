// Chooses the kernel of products, by trying ours beside ATen's on random numbers.
//
// What is tried is a *class* of products: depth, layouts, what is added, threads, and between which powers of two rows and
// columns lie; once it has been run often enough to pay for it. A trial takes some milliseconds, so they keep a distance, or
// one run of a program would have all of them. What stretches BLAS adds up, and whether the microkernel is faster on this
// machine, is found out once for a process. That threads may share a single row is worth it anywhere, but for its bits.
//
// oneDNN writes code for each *shape* of tiles (multiply.cpp), which takes some 50 us and is never given back. So a shape
// must have come before, and there is a limit to them.
#include "trials.h"

#include "expose.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using namespace marid;

constexpr int64_t kLargest = 1 << 10;     // rows and columns that are tried; larger ones are of its class
constexpr int64_t kLargestOfRow = 1 << 8;  // columns, for a single row
constexpr int64_t kFew = 16;               // rows or columns
constexpr size_t kMostShapes = 512;       // some 0.1 MB of code each, for each thread
constexpr size_t kMostEntries = 1 << 16;  // of shapes that came, and of classes
constexpr int kTries = 3;                 // measurements of a machine on which our kernel does not seem to be faster

// Set by __init__.py.
std::atomic<bool> enabled{false}, also_slower{false};
std::atomic<int64_t> uses_before{0};  // a class is tried when it came so often before,
std::atomic<double> work_before{0};   // and that many operations of work with it
std::atomic<double> share{1};         // of the time that trials take at most
std::atomic<int64_t> given_block{-1};

std::atomic<int64_t> block{0};
std::atomic<bool> row_order{false};

int64_t magnitude(int64_t size) { return std::bit_width(static_cast<uint64_t>(std::min(size, kLargest))); }

struct Class {
  int64_t uses = 0;
  double work = 0;
  std::optional<bool> ours;
};

struct Shape {
  int64_t uses = 0;
  bool admitted = false;
};

bool is_row(const Product& p) { return p.rows == 1; }

// Whether there is something between rows, or columns where those are what lies in a row.
bool has_gaps(const Matrices& given, int64_t rows, int64_t columns) {
  return given.column == 1 ? given.row != columns : given.column != rows;
}

// Of few rows or columns BLAS may give some to each thread, which adds sums up otherwise then: sizes are told apart there.
uint64_t key_of(const Product& p, Added added) {
  uint64_t key = 0;
  auto add = [&](uint64_t value) {
    key = (key ^ value) * 0x9e3779b97f4a7c15u;
    key ^= key >> 32;
  };
  bool few = !is_row(p) && std::min(p.rows, p.columns) < kFew;
  add(p.depth);
  add(few ? p.rows : magnitude(p.rows));
  add(few ? p.columns : magnitude(p.columns));
  add(few);
  add(added);
  add(p.batched);
  add(p.turned);
  add(p.of_vector);
  add(is_row(p) && p.batch > 1);
  add(p.a.column != 1);
  add(p.b.column != 1);
  add(has_gaps(p.a, p.rows, p.depth));
  add(has_gaps(p.b, p.depth, p.columns));
  add(is_row(p) && p.columns % 4 != 0);  // the last columns may be added up otherwise
  add(at::get_num_threads());
  return key;
}

// --- trying ----------------------------------------------------------------------------------------------------------

// Numbers between -1 and 1 that no two sums of them are likely to agree by chance. Memory of its own: what a run
// allocates is planned.
std::vector<float> numbers(size_t count, uint32_t seed) {
  std::vector<float> made(count);
  for (float& number : made) {
    seed = seed * 1664525u + 1013904223u;
    number = static_cast<float>(static_cast<int32_t>(seed)) * (1.0f / 2147483648.0f);
  }
  return made;
}

at::Tensor view_of(const float* data, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::from_blob(const_cast<float*>(data), sizes, strides, at::TensorOptions(at::kFloat));
}

at::Tensor view_of(const Matrices& given, int64_t batch, int64_t rows, int64_t columns, bool batched) {
  if (!batched) return view_of(given.data, {rows, columns}, {given.row, given.column});
  return view_of(given.data, {batch, rows, columns}, {given.batch, given.row, given.column});
}

// A product like `p`, but not larger than what is tried, of random numbers; or of the very matrix b, whatever its size.
struct Trial {
  Product product;
  Added added;
  std::vector<float> a, b, bias, by_blas, by_us;
  bool in_blas_order = row_order;  // of a single row

  Trial(const Product& p, Added added, bool same_b = false) : product(p), added(added) {
    int64_t largest = is_row(p) ? kLargestOfRow : kLargest;
    auto cut = [&](int64_t size) { return same_b || size <= largest ? size : largest + size % 64; };
    product.rows = cut(p.rows);
    product.columns = cut(p.columns);
    product.batch = std::min<int64_t>(p.batch, 2);
    fill(product.a, a, product.batch, product.rows, product.depth, has_gaps(p.a, p.rows, p.depth), 1);
    if (!same_b) fill(product.b, b, product.batch, product.depth, product.columns, has_gaps(p.b, p.depth, p.columns), 2);
    bool is_single = added == kRow && p.turned;  // a number for the one column
    bias = numbers(added == kNothing ? 0 : is_single ? 1 : product.columns * (added == kMatrix ? product.rows : 1), 3);
    by_blas.resize(product.batch * product.rows * product.columns);
    by_us.resize(by_blas.size());
  }

  static void fill(Matrices& matrices, std::vector<float>& memory, int64_t batch, int64_t rows, int64_t columns,
                   bool gaps, uint32_t seed) {
    bool by_rows = matrices.column == 1;
    int64_t inner = by_rows ? columns : rows, outer = by_rows ? rows : columns;
    int64_t stride = inner + (gaps ? 64 : 0);
    bool is_like_column = rows == 1 && matrices.row == 1;  // see multiply_row.cpp
    (by_rows ? matrices.row : matrices.column) = is_like_column ? 1 : stride;
    matrices.batch = outer * stride;
    memory = numbers(batch * outer * stride, seed);
    matrices.data = memory.data();
  }

  void run_blas() {
    const Product& p = product;
    int64_t rows = p.turned ? p.columns : p.rows, columns = p.turned ? p.rows : p.columns;
    at::Tensor left = view_of(p.a, p.batch, p.rows, p.depth, p.batched);
    at::Tensor right = view_of(p.b, p.batch, p.depth, p.columns, p.batched);
    if (p.turned) std::tie(left, right) = std::pair(right.transpose(-1, -2), left.transpose(-1, -2));
    at::Tensor out = view_of({by_blas.data(), rows * columns, columns, 1}, p.batch, rows, columns, p.batched);
    if (p.of_vector) {
      out = view_of(by_blas.data(), {rows}, {1});
      at::mv_out(out, left, right.select(1, 0));
    } else if (p.batched) {
      at::bmm_out(out, left, right);
    } else if (added == kNothing) {
      at::mm_out(out, left, right);
    } else {
      std::vector<int64_t> sizes{columns}, strides{1};
      if (added == kMatrix) sizes = {rows, columns}, strides = {columns, 1};
      at::addmm_out(out, view_of(bias.data(), sizes, strides), left, right);
    }
  }

  void run_ours(int64_t deep) {
    product.c = by_us.data();
    product.add = added != kNothing;
    for (size_t at = 0; product.add && at < by_us.size(); at += bias.size()) {
      std::copy(bias.begin(), bias.end(), by_us.begin() + static_cast<std::ptrdiff_t>(at));
    }
    if (is_row(product)) {
      multiply_row(product, at::get_num_threads(), in_blas_order);
    } else {
      multiply(product, tiles_of(product), deep);
    }
  }

  bool is_right(int64_t deep) {
    run_blas();
    run_ours(deep);
    return agrees();
  }

  bool agrees() const { return std::memcmp(by_blas.data(), by_us.data(), by_us.size() * sizeof(float)) == 0; }
};

Product example(int64_t rows, int64_t depth, int64_t columns) {
  return {1, rows, columns, depth, {nullptr, 0, depth, 1}, {nullptr, 0, columns, 1}, nullptr, false, false, false, false};
}

// --- the machine -----------------------------------------------------------------------------------------------------

struct Machine {
  int tries = 0;
  bool faster = false, knows_rows = false;

  // Both layouts, depths that fill lanes and do not, with a bias and without, one product and two.
  void find_row_order() {
    if (std::exchange(knows_rows, true)) return;
    auto is_right = [](const Product& p, Added added) {
      Trial trial(p, added);
      trial.in_blas_order = true;
      return trial.is_right(0);
    };
    row_order = false;
    for (int64_t depth : {64, 77, 102, 247}) {
      for (bool by_columns : {false, true}) {
        Product p = example(1, depth, 96);
        if (by_columns) p.b = {nullptr, 0, 1, depth};
        if (!is_right(p, kNothing) || !is_right(p, kRow)) return;
        p.batch = 2, p.batched = true;
        if (!is_right(p, kNothing)) return;
        p.a.row = 1;
        if (!is_right(p, kNothing)) return;
      }
    }
    row_order = true;
  }

  static int64_t find_block() {
    for (int64_t deep : {192, 256, 320, 384, 512, 128, 336, 448, 640, 768, 1024}) {
      Trial half(example(48, deep + deep / 2, 48), kNothing), more(example(48, 2 * deep + deep / 2, 48), kNothing);
      if (half.is_right(deep) && more.is_right(deep)) return deep;
    }
    return 0;
  }

  void measure() {
    if (faster || tries++ >= kTries) return;  // other work on the machine may have come between
    Trial trial(example(256, 128, 256), kNothing);
    using clock = std::chrono::steady_clock;
    auto best_blas = clock::duration::max(), best_ours = clock::duration::max();
    for (int turn = 0; turn < 8; turn++) {
      auto start = clock::now();
      trial.run_blas();
      auto between = clock::now();
      trial.run_ours(0);
      auto end = clock::now();
      best_blas = std::min(best_blas, between - start);
      best_ours = std::min(best_ours, end - between);
    }
    faster = best_ours * 10 < best_blas * 9 || also_slower;
    if (faster) block = given_block >= 0 ? given_block.load() : find_block();
  }
};

using Clock = std::chrono::steady_clock;

struct Known {
  std::mutex trying, lock;  // the first for the machine, the second for the rest
  std::unordered_map<uint64_t, Class> classes;
  std::unordered_map<uint64_t, Shape> shapes;
  size_t admitted = 0;
  Clock::time_point next;  // trial, at the earliest
  Machine machine;
};

Known& known() {
  static auto* made = [] {
    auto* all = new Known;  // never destroyed: threads may still run at exit
    pthread_atfork(nullptr, nullptr, [] {  // whoever held a lock is not there any more
      new (&known().trying) std::mutex;
      new (&known().lock) std::mutex;
    });
    return all;
  }();
  return *made;
}

template <typename Value>
Value* entry(std::unordered_map<uint64_t, Value>& entries, uint64_t key) {
  auto found = entries.find(key);
  if (found != entries.end()) return &found->second;
  return entries.size() < kMostEntries ? &entries[key] : nullptr;
}

// Whether to use our kernel, as far as is known; and whether it is to be tried now.
struct Verdict {
  bool ours = false, try_now = false;
};

Verdict judge(Known& all, uint64_t key, const Product& p, std::optional<uint64_t> shape) {
  std::lock_guard<std::mutex> held(all.lock);
  Class* own = entry(all.classes, key);
  Shape* tiles = shape ? entry(all.shapes, *shape) : nullptr;
  if (own == nullptr || (shape && tiles == nullptr)) return {};
  if (!own->ours.has_value()) {
    bool due = own->uses >= uses_before && own->work >= work_before && Clock::now() >= all.next;
    own->uses++;
    own->work += 2.0 * static_cast<double>(p.batch * p.rows) * static_cast<double>(p.columns * p.depth);
    if (tiles != nullptr) tiles->uses++;
    if (due) own->ours = false;  // until it was tried
    return {false, due};
  }
  if (tiles == nullptr) return {*own->ours, false};
  if (*own->ours && !tiles->admitted && tiles->uses++ >= uses_before && all.admitted < kMostShapes) {
    tiles->admitted = true;
    all.admitted++;
  }
  return {*own->ours && tiles->admitted, false};
}

// What a trial says of the class; nothing where the machine has to be measured again.
std::optional<bool> tried(Known& all, const Product& p, Added added) {
  std::lock_guard<std::mutex> held(all.trying);
  try {
    if (is_row(p)) {  // of a large matrix BLAS might make parts of its own
      all.machine.find_row_order();
      if (!row_order && parts_of_row(p) < 2) return false;
      return Trial(p, added).is_right(0) && Trial(p, kNothing, true).is_right(0);
    }
    all.machine.measure();
    if (!all.machine.faster) return all.machine.tries < kTries ? std::nullopt : std::optional<bool>(false);
    return Trial(p, added).is_right(block);
  } catch (const std::exception&) {  // a kernel that cannot be had here: ATen's own is used, now and later
    return false;
  }
}

void products_enable(bool on) { enabled = on; }

// Begin anew: use our kernel also where it is slower or not, try a class after so many uses and operations of work, and
// within that part of the time. `block` is for tests: how deep the stretches of BLAS are taken to be; -1 to find out.
void products_configure(bool slower, int64_t uses, double work, double part, int64_t block) {
  Known& all = known();
  std::scoped_lock held(all.trying, all.lock);
  also_slower = slower;
  uses_before = uses;
  work_before = work;
  share = part;
  given_block = block;
  all.classes.clear();
  all.shapes.clear();
  all.next = {};
  all.machine = Machine();
}

}  // namespace

namespace marid {

int64_t block_of_blas() { return block; }
bool rows_are_in_blas_order() { return row_order; }

bool choose(const Product& p, Added added, std::optional<uint64_t> shape) {
  if (!enabled) return false;
  Known& all = known();
  uint64_t key = key_of(p, added);
  Verdict verdict = judge(all, key, p, shape);
  if (!verdict.try_now) return verdict.ours;
  Clock::time_point start = Clock::now();
  std::optional<bool> ours = tried(all, p, added);
  {
    std::lock_guard<std::mutex> held(all.lock);
    Clock::time_point end = Clock::now();
    all.next = end + std::chrono::duration_cast<Clock::duration>((end - start) * (1 / share - 1));
    if (ours.has_value()) {
      all.classes[key].ours = ours;
    } else {
      all.classes.erase(key);
    }
  }
  return ours.value_or(false) && judge(all, key, p, shape).ours;
}

PyMethodDef trial_functions[] = {
    held<products_enable>("products_enable"),
    released<products_configure>("products_configure"),  // waits for a trial
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
