// The operators that products of matrices are run by: marid::product (mm, bmm), marid::product_add (addmm) and
// marid::linear. They do what ATen's do, bit for bit, with another kernel where that is known to give the same bits.
//
// Known means tried, with the kernel of ATen beside ours on random numbers: for each *class* of products (depth, layouts,
// threads, powers of two between which rows and columns lie), once the class has been run often enough to pay for it.
// What stretches BLAS adds up, and whether our kernel is faster on this machine, is found out once for a process.
//
// oneDNN writes code for each *shape* of tiles (depth, distances of rows, what is left of rows and columns behind whole
// tiles), which takes some 50 us and is never given back. So a shape must have come before, and there is a limit to them.
#include "product.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/library.h>

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace {

using marid::Matrices;
using marid::Product;

constexpr int64_t kLeast = 16;         // rows and columns: below, BLAS has kernels that add up in other orders
constexpr int64_t kLeastDepth = 8;
constexpr int64_t kMostDepth = 1 << 14;
constexpr int64_t kLargest = 1 << 10;  // rows and columns that are tried; larger ones are of its class
constexpr size_t kMostShapes = 512;    // some 0.1 MB of code each, for each thread
constexpr size_t kMostEntries = 1 << 16;  // of shapes that came, and of classes

// Set by marid_products_configure.
std::atomic<bool> enabled{true}, also_slower{false};
std::atomic<int64_t> uses_before{2};  // a class is tried when it came so often before,
std::atomic<double> work_before{4e7};  // and that many operations of work with it
std::atomic<int64_t> given_block{-1};
std::atomic<int64_t> count{0};

// How deep the stretches are that BLAS adds up; 0 where it is not known, for the whole depth.
std::atomic<int64_t> block{0};

enum Added { kNothing, kRow, kMatrix };

// --- classes ---------------------------------------------------------------------------------------------------------

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

// Whether there is something between rows, or columns where those are what lies in a row.
bool has_gaps(const Matrices& given, int64_t rows, int64_t columns) {
  return given.column == 1 ? given.row != columns : given.column != rows;
}

uint64_t key_of(const Product& p, Added added) {
  uint64_t key = static_cast<uint64_t>(p.depth);
  auto add = [&](uint64_t value, int bits) { key = key << bits | value; };
  add(magnitude(p.rows), 4);
  add(magnitude(p.columns), 4);
  add(added, 2);
  add(p.batch > 1, 1);
  add(p.a.column != 1, 1);
  add(p.b.column != 1, 1);
  add(has_gaps(p.a, p.rows, p.depth), 1);
  add(has_gaps(p.b, p.depth, p.columns), 1);
  add(static_cast<uint64_t>(at::get_num_threads()) & 0xffff, 16);
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

// A product like `p`, but not larger than what is tried, of random numbers.
struct Trial {
  Product product;
  Added added;
  std::vector<float> a, b, bias, by_blas, by_us;

  Trial(const Product& p, Added added) : product(p), added(added) {
    auto cut = [](int64_t size) { return size <= kLargest ? size : kLargest + size % 64; };
    product.rows = cut(p.rows);
    product.columns = cut(p.columns);
    product.batch = std::min<int64_t>(p.batch, 2);
    fill(product.a, a, product.rows, product.depth, has_gaps(p.a, p.rows, p.depth), 1);
    fill(product.b, b, product.depth, product.columns, has_gaps(p.b, p.depth, p.columns), 2);
    bias = numbers(added == kRow ? product.columns : added == kMatrix ? product.rows * product.columns : 0, 3);
    by_blas.resize(product.batch * product.rows * product.columns);
    by_us.resize(by_blas.size());
  }

  static void fill(Matrices& matrices, std::vector<float>& memory, int64_t rows, int64_t columns, bool gaps,
                   uint32_t seed) {
    bool by_rows = matrices.column == 1;
    int64_t inner = by_rows ? columns : rows, outer = by_rows ? rows : columns;
    int64_t stride = inner + (gaps ? 64 : 0);
    (by_rows ? matrices.row : matrices.column) = stride;
    matrices.batch = outer * stride;
    memory = numbers(2 * outer * stride, seed);
    matrices.data = memory.data();
  }

  void run_blas() {
    const Product& p = product;
    bool batched = p.batch > 1;
    at::Tensor left = view_of(p.a, p.batch, p.rows, p.depth, batched);
    at::Tensor right = view_of(p.b, p.batch, p.depth, p.columns, batched);
    at::Tensor out = view_of({by_blas.data(), p.rows * p.columns, p.columns, 1}, p.batch, p.rows, p.columns, batched);
    if (batched) {
      at::bmm_out(out, left, right);
    } else if (added == kNothing) {
      at::mm_out(out, left, right);
    } else {
      std::vector<int64_t> sizes{p.columns}, strides{1};
      if (added == kMatrix) sizes = {p.rows, p.columns}, strides = {p.columns, 1};
      at::addmm_out(out, view_of(bias.data(), sizes, strides), left, right);
    }
  }

  void run_ours(int64_t deep) {
    product.c = by_us.data();
    product.add = added != kNothing;
    for (size_t at = 0; product.add && at < by_us.size(); at += bias.size()) {
      std::copy(bias.begin(), bias.end(), by_us.begin() + static_cast<std::ptrdiff_t>(at));
    }
    marid::multiply(product, marid::tiles_of(product), deep);
  }

  bool agrees() const { return std::memcmp(by_blas.data(), by_us.data(), by_us.size() * sizeof(float)) == 0; }
};

Product example(int64_t rows, int64_t depth, int64_t columns) {
  return {1, rows, columns, depth, {nullptr, 0, depth, 1}, {nullptr, 0, columns, 1}, nullptr, false};
}

// --- the machine -----------------------------------------------------------------------------------------------------

constexpr int kTries = 3;

struct Machine {
  int tries = 0;
  bool faster = false;

  static int64_t block_of_blas() {
    for (int64_t deep : {192, 256, 320, 384, 512, 128, 336, 448, 640, 768, 1024}) {
      Trial half(example(48, deep + deep / 2, 48), kNothing), more(example(48, 2 * deep + deep / 2, 48), kNothing);
      half.run_blas();
      half.run_ours(deep);
      if (!half.agrees()) continue;
      more.run_blas();
      more.run_ours(deep);
      if (more.agrees()) return deep;
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
    if (faster) block = given_block >= 0 ? given_block.load() : block_of_blas();
  }
};

struct Known {
  std::mutex trying, lock;  // the first for the machine, the second for the rest
  std::unordered_map<uint64_t, Class> classes;
  std::unordered_map<uint64_t, Shape> shapes;
  size_t admitted = 0;
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

Verdict judge(Known& all, uint64_t key, const Product& p, uint64_t shape) {
  std::lock_guard<std::mutex> held(all.lock);
  Class* own = entry(all.classes, key);
  Shape* tiles = entry(all.shapes, shape);
  if (own == nullptr || tiles == nullptr) return {};
  if (!own->ours.has_value()) {
    bool due = own->uses >= uses_before && own->work >= work_before;
    own->uses++;
    own->work += 2.0 * static_cast<double>(p.batch * p.rows) * static_cast<double>(p.columns * p.depth);
    tiles->uses++;
    if (due) own->ours = false;  // until it was tried
    return {false, due};
  }
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
    all.machine.measure();
    if (!all.machine.faster) return all.machine.tries < kTries ? std::nullopt : std::optional<bool>(false);
    Trial trial(p, added);
    trial.run_blas();
    trial.run_ours(block);
    return trial.agrees();
  } catch (const std::exception&) {  // a kernel that cannot be had here: ATen's own is used, now and later
    return false;
  }
}

// Whether to use our kernel, having tried it where that is due.
bool choose(const Product& p, Added added, uint64_t shape) {
  Known& all = known();
  uint64_t key = key_of(p, added);
  Verdict verdict = judge(all, key, p, shape);
  if (!verdict.try_now) return verdict.ours;
  std::optional<bool> ours = tried(all, p, added);
  {
    std::lock_guard<std::mutex> held(all.lock);
    if (ours.has_value()) {
      all.classes[key].ours = ours;
    } else {
      all.classes.erase(key);
    }
  }
  return ours.value_or(false) && judge(all, key, p, shape).ours;
}

// --- the operators ---------------------------------------------------------------------------------------------------

bool is_plain(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
         !tensor.is_neg();
}

// Products may be asked to round their factors, which is oneDNN's affair then; or not to use it at all.
bool is_exact() {
  at::Context& context = at::globalContext();
  if (!enabled || !marid::can_multiply() || !context.userEnabledMkldnn()) return false;
  auto precision = context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::NONE || precision == at::Float32Precision::IEEE;
}

std::optional<Matrices> matrices_of(const at::Tensor& tensor) {
  int64_t dims = tensor.dim(), rows = tensor.size(dims - 2), columns = tensor.size(dims - 1);
  int64_t row = tensor.stride(dims - 2), column = tensor.stride(dims - 1);
  if (!(column == 1 && row >= columns) && !(row == 1 && column >= rows)) return std::nullopt;
  return Matrices{tensor.const_data_ptr<float>(), dims == 3 ? tensor.stride(0) : 0, row, column};
}

// The result of a product in the faster way, or an undefined tensor.
at::Tensor multiplied(const at::Tensor& a, const at::Tensor& b, const at::Tensor* bias) {
  int64_t dims = a.dim();
  if ((dims != 2 && dims != 3) || b.dim() != dims || !is_plain(a) || !is_plain(b)) return {};
  Product p{};
  p.batch = dims == 3 ? a.size(0) : 1;
  p.rows = a.size(dims - 2);
  p.depth = a.size(dims - 1);
  p.columns = b.size(dims - 1);
  if (p.rows < kLeast || p.columns < kLeast || p.depth < kLeastDepth || p.depth > kMostDepth || p.batch < 1 ||
      b.size(dims - 2) != p.depth || (dims == 3 && b.size(0) != p.batch) || !is_exact()) {
    return {};
  }
  Added added = kNothing;
  if (bias != nullptr) {
    bool row = bias->dim() == 1 && bias->size(0) == p.columns;
    bool matrix = bias->dim() == 2 && bias->size(0) == p.rows && bias->size(1) == p.columns;
    if (!is_plain(*bias) || !(row || matrix)) return {};
    added = row ? kRow : kMatrix;
  }
  auto left = matrices_of(a), right = matrices_of(b);
  if (!left || !right) return {};
  p.a = *left;
  p.b = *right;
  p.add = bias != nullptr;
  marid::Tiles tiles = marid::tiles_of(p);
  if (!choose(p, added, marid::shape_of(p, tiles))) return {};
  std::array<int64_t, 3> sizes{p.batch, p.rows, p.columns};
  at::Tensor made = at::detail::empty_cpu(at::IntArrayRef(sizes).slice(3 - dims), at::TensorOptions(at::kFloat));
  if (bias != nullptr) made.copy_(*bias);
  p.c = made.mutable_data_ptr<float>();
  marid::multiply(p, tiles, block);
  count++;
  return made;
}

at::Tensor product(const at::Tensor& self, const at::Tensor& other) {
  at::Tensor made = multiplied(self, other, nullptr);
  if (made.defined()) return made;
  return self.dim() == 3 ? at::bmm(self, other) : at::mm(self, other);
}

at::Tensor product_add(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                       const at::Scalar& alpha) {
  if (beta.equal(1) && alpha.equal(1)) {
    at::Tensor made = multiplied(a, b, &self);
    if (made.defined()) return made;
  }
  return at::addmm(self, a, b, beta, alpha);
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  bool has_bias = bias.has_value() && bias->defined();
  if (input.dim() >= 2 && weight.dim() == 2 && input.is_contiguous() && input.numel() > 0 && is_plain(input)) {
    at::Tensor made = multiplied(input.view({-1, input.size(-1)}), weight.t(), has_bias ? &*bias : nullptr);
    if (made.defined()) {
      std::vector<int64_t> sizes = input.sizes().vec();
      sizes.back() = weight.size(0);
      return made.view(sizes);
    }
  }
  return at::linear(input, weight, bias);
}

TORCH_LIBRARY_FRAGMENT(marid, library) {
  library.def("product(Tensor self, Tensor mat2) -> Tensor");
  library.def("product_add(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor");
  library.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  library.impl("product", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(product));
  library.impl("product_add", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(product_add));
  library.impl("linear", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(linear));
}

const at::Tensor& tensor_of(AtenTensorHandle handle) { return *reinterpret_cast<at::Tensor*>(handle); }

template <typename F>
AOTITorchError returned(AtenTensorHandle* result, F make) {
  try {
    *result = reinterpret_cast<AtenTensorHandle>(new at::Tensor(make()));
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception&) {
    return AOTI_TORCH_FAILURE;
  }
}

}  // namespace

extern "C" {

// Begin anew: use our kernel or not (0, 1, 2: also where it is slower), try a class after so many uses and operations of
// work. `block` is for tests: how deep the stretches of BLAS are taken to be; -1 to find out.
void marid_products_configure(int on, int64_t uses, double work, int64_t block) {
  Known& all = known();
  std::scoped_lock held(all.trying, all.lock);
  enabled = on != 0;
  also_slower = on == 2;
  uses_before = uses;
  work_before = work;
  given_block = block;
  all.classes.clear();
  all.shapes.clear();
  all.machine = Machine();
}

// How many products our kernel has computed.
int64_t marid_products_count() { return count; }

// What compiled parts call (execute/compiled/lower.py).
AOTITorchError aoti_torch_cpu_product(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle* result) {
  return returned(result, [&] { return product(tensor_of(a), tensor_of(b)); });
}
AOTITorchError aoti_torch_cpu_product_add(AtenTensorHandle bias, AtenTensorHandle a, AtenTensorHandle b,
                                          AtenTensorHandle* result) {
  return returned(result, [&] { return product_add(tensor_of(bias), tensor_of(a), tensor_of(b), 1, 1); });
}

}  // extern "C"
