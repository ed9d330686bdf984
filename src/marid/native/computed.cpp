#include "computed.h"

#include "recorder.h"
#include "resident.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <unordered_map>
#include <vector>

namespace marid {

PyObject* find_spec;

Look::~Look() { give_up({&spec}); }

namespace {

constexpr size_t kMostLooks = 8192;
using Key = c10::SmallVector<int64_t, 16>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0x9E3779B97F4A7C15ull;
    for (int64_t word : key) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdull;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

auto& looks = *new std::unordered_map<Key, std::shared_ptr<const Look>, Hash>;

// Those that have no node, of all devices. The lock is held for some instructions.
class ListLock {
 public:
  ListLock() {
    while (held.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }
  ~ListLock() { held.clear(std::memory_order_release); }
  ListLock(const ListLock&) = delete;
  ListLock& operator=(const ListLock&) = delete;

 private:
  static std::atomic_flag held;
};
std::atomic_flag ListLock::held;
Computed* newest = nullptr;

}  // namespace

std::shared_ptr<const Look> look_of(const at::Tensor& tensor, c10::DeviceIndex device) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  Key key{device, static_cast<int64_t>(tensor.scalar_type()) << 2 | (tensor.is_conj() ? 1 : 0) | (tensor.is_neg() ? 2 : 0),
          impl.storage_offset()};
  key.append(impl.sizes().begin(), impl.sizes().end());
  key.append(impl.strides().begin(), impl.strides().end());
  auto found = looks.find(key);
  if (found != looks.end()) return found->second;
  Ref object(THPVariable_Wrap(tensor)), index(PyLong_FromLong(device));
  Ref spec(object && index ? PyObject_CallFunctionObjArgs(find_spec, object.get(), index.get(), nullptr) : nullptr);
  Ref pattern(spec ? PyObject_GetAttrString(spec.get(), "pattern") : nullptr);
  if (!pattern) return nullptr;
  auto made = std::make_shared<Look>();
  made->pattern = THPVariable_Unpack(pattern.get()).unsafeGetTensorImpl();
  made->tape = PyList_GetItem(tapes, device);
  made->spec = std::move(spec);
  if (looks.size() >= kMostLooks) looks.clear();
  looks.emplace(std::move(key), made);
  return made;
}

std::shared_ptr<Computed> Computed::make(
    at::Tensor tensor, std::shared_ptr<const Look> look, Origin origin, const std::shared_ptr<Computed>& base) {
  auto made = std::make_shared<Computed>(Own(), std::move(tensor));
  made->look_ = std::move(look);
  made->origin_ = origin;
  if (base) made->base_ = base->base_ ? base->base_ : base;
  ListLock guard;
  made->behind_ = newest;
  if (newest != nullptr) newest->before_ = made.get();
  newest = made.get();
  made->listed_ = true;
  return made;
}

std::shared_ptr<Computed> Computed::of_value(at::Tensor tensor, PyObject* value, PyObject* storage) {
  auto made = std::make_shared<Computed>(Own(), std::move(tensor));
  made->value_ = Ref(Py_NewRef(value));
  made->storage_ = Ref(Py_XNewRef(storage));
  return made;
}

void Computed::leave_list() {
  if (!listed_) return;
  ListLock guard;
  (before_ != nullptr ? before_->behind_ : newest) = behind_;
  if (behind_ != nullptr) behind_->before_ = before_;
  listed_ = false;
}

Computed::~Computed() {
  leave_list();
  give_up({&value_, &storage_});
}

PyObject* Computed::value() {
  if (value_) return value_.get();
  PyObject* below = base_ ? base_->value() : nullptr;
  Ref concrete(THPVariable_Wrap(tensor));
  Ref made = concrete ? new_node(look_->tape, origin_, look_->spec.get()) : Ref();
  if ((base_ && below == nullptr) || !made) return nullptr;
  if (base_) node.set(made.get(), kRoot, Ref::to(root_of(below)));
  node.set(made.get(), kConcrete, std::move(concrete));
  if (value_) return value_.get();  // another thread was here meanwhile
  value_ = std::move(made);
  leave_list();
  return note_resident(look_->tape, value_.get()) ? value_.get() : nullptr;
}

bool note_computed(PyObject* on) {
  std::vector<std::shared_ptr<Computed>> found;
  {
    ListLock guard;
    for (Computed* one = newest; one != nullptr; one = one->behind_) {
      if (one->look_->tape == on) found.push_back(one->weak_from_this().lock());  // null for one that is being freed
    }
  }
  return std::all_of(found.begin(), found.end(), [](auto& one) { return !one || one->value() != nullptr; });
}

}  // namespace marid
