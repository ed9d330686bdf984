#include "computed.h"

#include "recorder.h"
#include "resident.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace marid {

PyObject* find_spec;

namespace {

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

Ref spec_like(const at::Tensor& tensor, c10::DeviceIndex device) {
  Ref object(THPVariable_Wrap(tensor)), index(PyLong_FromLong(device));
  return object && index ? Ref(PyObject_CallFunctionObjArgs(find_spec, object.get(), index.get(), nullptr)) : Ref();
}

std::shared_ptr<Computed> Computed::make(
    at::Tensor tensor, c10::DeviceIndex device, Origin origin, const std::shared_ptr<Computed>& base) {
  auto made = std::make_shared<Computed>(Own(), std::move(tensor));
  made->device_ = device;
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
  PyObject* on = PyList_GetItem(tapes, device_);
  Ref concrete(THPVariable_Wrap(tensor)), spec = spec_like(tensor, device_);
  Ref made = concrete && spec ? new_node(on, origin_, spec.get()) : Ref();
  if ((base_ && below == nullptr) || !made) return nullptr;
  if (base_) node.set(made.get(), kRoot, Ref::to(root_of(below)));
  node.set(made.get(), kConcrete, std::move(concrete));
  if (value_) return value_.get();  // another thread was here meanwhile
  value_ = std::move(made);
  leave_list();
  return note_resident(on, value_.get()) ? value_.get() : nullptr;
}

bool note_computed(PyObject* on) {
  std::vector<std::shared_ptr<Computed>> found;
  {
    ListLock guard;
    for (Computed* one = newest; one != nullptr; one = one->behind_) {
      if (PyList_GetItem(tapes, one->device_) == on) found.push_back(one->weak_from_this().lock());  // null for one that is being freed
    }
  }
  return std::all_of(found.begin(), found.end(), [](auto& one) { return !one || one->value() != nullptr; });
}

}  // namespace marid
