// The C++ half of the device: guard, generator, hooks, allocators and one tensor helper.
//
// PyTorch asks a device guard for the current device, for streams and for events.
// The Python guard that PyTorch offers (torch._C._acc) knows one device only and ends
// the process when a Python exception passes through backward; this guard does neither.
#include "device.h"

#include "expose.h"
#include "record.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

// From PyTorch's Python half, whose headers take long to compile.
namespace torch::utils {
void set_requires_device_init(c10::DeviceType type, bool value);
}  // namespace torch::utils

namespace {

using namespace marid;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
// None before the first use: autograd starts a thread for each device with the first backward of a process, and then
// refuses to work in a fork.
std::atomic<int> device_count{0};
constinit thread_local c10::DeviceIndex current = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;
std::atomic<c10::StreamId> next_stream{1};
// Whether a thread has ever had another stream than the default one. Autograd asks for the current ones many times in each
// backward.
std::atomic<bool> had_streams{false};

// A device runs its programs in order, so every stream is ordered after every other
// and an event has happened once it is recorded.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, current}; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device old = getDevice();
    setDevice(d);
    return old;
  }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < device_count.load(), "remote_accelerator:", int(d.index()),
                " does not exist: ", device_count.load(), " device(s) are available");
    if (d.index() >= 0) current = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count.load());
  }
  c10::Device concrete(c10::Device d) const {
    return {kType, d.index() < 0 ? current : d.index()};
  }
  c10::Stream getStream(c10::Device d) const override {
    c10::Device on = concrete(d);
    if (!had_streams.load(std::memory_order_relaxed)) return c10::Stream(c10::Stream::UNSAFE, on, 0);
    auto found = current_streams.find(on.index());
    return c10::Stream(c10::Stream::UNSAFE, on, found == current_streams.end() ? 0 : found->second);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, concrete(d));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, concrete(d), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream old = getStream(s.device());
    if (s.id() != 0) had_streams = true;
    if (old.id() != s.id()) current_streams[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new char;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<char*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);

struct PositionGenerator final : c10::GeneratorImpl {
  Position position;
  explicit PositionGenerator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { position = {seed, 0, -1}; }
  void set_offset(uint64_t offset) override { position.offset = offset; position.spare = -1; }
  uint64_t get_offset() const override { return position.offset; }
  uint64_t current_seed() const override { return position.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return position.seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(Position) && state.device().is_cpu() && state.is_contiguous(),
                "a remote_accelerator generator state is a CPU tensor of ", sizeof(Position),
                " bytes, but got ", state.numel(), " elements");
    std::memcpy(&position, state.data(), sizeof(Position));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto* copy = new Position(position);
    c10::DataPtr data(copy, copy, [](void* p) { delete static_cast<Position*>(p); },
                      c10::Device(c10::DeviceType::CPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), sizeof(Position), std::move(data));
    auto impl = c10::make_intrusive<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<uint8_t>());
    impl->set_sizes_contiguous({static_cast<int64_t>(sizeof(Position))});
    return impl;
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new PositionGenerator(device().index());
    copy->position = position;
    return copy;
  }
};

// What of a TensorImpl is protected: its device, of which PyTorch's Python helper only makes index 0.
struct Inside : c10::TensorImpl {
  static void set_device(c10::TensorImpl* impl, c10::Device device) { (impl->*(&Inside::device_opt_)) = device; }
};

at::Generator make_generator(c10::DeviceIndex index) {
  return at::make_generator<PositionGenerator>(index < 0 ? current : index);
}

// What to ask for bytes that the living values of a device hold, now and at most: Python, once the device is used.
std::atomic<PyObject*> figures{nullptr};

// Both; from then on the most is that since now, where that is wanted. Zeros where Python cannot say.
std::pair<long long, long long> ask_for_figures(c10::DeviceIndex device, bool reset) {
  std::pair<long long, long long> now_and_peak;
  InterpreterLock lock;
  if (figures == nullptr) return now_and_peak;
  Ref ask = Ref::to(figures);
  Ref found(PyObject_CallFunction(ask.get(), "ii", int(device), int(reset)));
  if (!found || !PyArg_ParseTuple(found.get(), "LL", &now_and_peak.first, &now_and_peak.second)) {
    PyErr_WriteUnraisable(ask.get());  // PyTorch asks in the midst of what must not fail
  }
  return now_and_peak;
}

// Without an allocator PyTorch dereferences a null pointer where a storage is asked for, and `torch.accelerator` wants
// one that knows figures.
struct NoAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t) override {
    TORCH_CHECK(false, "remote_accelerator has no storages of its own: make a tensor there instead");
  }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not implemented"); }
  bool initialized() override { return figures.load() != nullptr; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto [now, peak] = ask_for_figures(device, false);
    for (auto* of : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*of)[0].current = now;
      (*of)[0].peak = peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { ask_for_figures(device, true); }
};
NoAllocator no_allocator;
const bool allocator_registered = (c10::SetAllocator(kType, &no_allocator), true);

// "Pinned" memory: the device reads ordinary memory, so that is what it is; but it says that it is pinned. Before the
// first use there is none, as in a process without an accelerator.
std::mutex pinned_lock;
std::map<const char*, std::pair<size_t, c10::DataPtr>> pinned;

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr memory = c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes);
    void* at = memory.get();
    if (at == nullptr) return memory;
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.insert_or_assign(static_cast<const char*>(at), std::pair(bytes, std::move(memory)));
    return {at, at, forget, c10::Device(c10::DeviceType::CPU)};
  }
  static void forget(void* at) {
    c10::DataPtr memory;
    std::lock_guard<std::mutex> held(pinned_lock);
    auto found = pinned.find(static_cast<const char*>(at));
    if (found == pinned.end()) return;
    memory = std::move(found->second.second);
    pinned.erase(found);
  }
  static bool has(const void* pointer) {
    const char* at = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> held(pinned_lock);
    auto found = pinned.upper_bound(at);
    return found != pinned.begin() && at < std::prev(found)->first + std::prev(found)->second.first;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return device_count.load() > 0; }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return make_generator(index); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::has(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(device_count.load() > 0, "Cannot access accelerator device when none is available.");
    return &pinned_allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};
Hooks hooks;

// What REGISTER_GENERATOR_PRIVATEUSE1 does, without its warning at every import.
const bool generator_registered = (at::GetGeneratorPrivate() = make_generator, true);

// Tell PyTorch of the hooks, unless it has others already.
void register_hooks() {
  if (at::isPrivateUse1HooksRegistered()) return;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::setHostAllocator(kType, &pinned_allocator);
}
// Have PyTorch call `_lazy_init` again, before the next use in this process.
void require_init() { torch::utils::set_requires_device_init(kType, true); }
// Let PyTorch ask a function (device, whether to reset the most) for bytes now and at most; None to end that.
void set_figures(PyObject* ask) { Ref old(figures.exchange(ask == Py_None ? nullptr : Py_NewRef(ask))); }

void set_device_count(int count) { device_count = count; }
void set_current_device(c10::DeviceIndex index) { current = index; }

// Make of a tensor that nobody else uses yet the data-less pattern from which lazy tensors are copied.
void set_geometry(c10::TensorImpl* tensor, c10::DeviceIndex device, const std::vector<int64_t>& sizes,
                  const std::vector<int64_t>& strides, int64_t offset) {
  c10::Device on(kType, device);
  Inside::set_device(tensor, on);
  tensor->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, on)));
  tensor->set_sizes_and_strides(sizes, strides, offset);
}

}  // namespace

namespace marid {

c10::DeviceIndex current_device() { return current; }

Position* position_of(const at::Generator& generator) {
  auto* own = dynamic_cast<PositionGenerator*>(generator.unsafeGetGeneratorImpl());
  return own == nullptr ? nullptr : &own->position;
}

PyMethodDef device_functions[] = {
    held<register_hooks>("register_hooks"),
    held<require_init>("require_init"),
    held<set_figures>("set_figures"),
    held<set_device_count>("set_device_count"),
    held<set_current_device>("set_current_device"),
    held<current_device>("current_device"),
    held<set_geometry>("set_geometry"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
