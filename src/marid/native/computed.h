// Values that were computed at once (immediate.cpp): a node is made of one when somebody asks for it.
#pragma once
#include "python.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace marid {

// The spec (graph/node.py) of what looks like a strided tensor, on a device; empty after an error.
Ref spec_like(const at::Tensor& tensor, c10::DeviceIndex device);

// What was called, and where: operations, sites and scopes live for good.
struct Origin {
  PyObject *op, *site, *scope;
};

// All with the interpreter's lock, but for the last reference to one, which may be given up without.
class Computed : public std::enable_shared_from_this<Computed> {
 private:
  struct Own {};

 public:
  // `base` is what the tensor is a view of, if it is one.
  static std::shared_ptr<Computed> make(
      at::Tensor tensor, c10::DeviceIndex device, Origin origin, const std::shared_ptr<Computed>& base);
  // Of a value that has a node, or is the output of one, and lies in this storage, if something has asked for it.
  static std::shared_ptr<Computed> of_value(at::Tensor tensor, PyObject* value, PyObject* storage);
  ~Computed();
  Computed(const Computed&) = delete;
  Computed& operator=(const Computed&) = delete;

  // The value as graph/node.py has it; borrowed. Null after an error.
  PyObject* value();

  // The storage that it lies in, with all views of it; empty where nothing has asked for it.
  Ref& storage() { return base_ ? base_->storage_ : storage_; }

  // Whether it had no value at the beginning.
  bool ran_at_once() const { return origin_.op != nullptr; }
  c10::DeviceIndex device() const { return device_; }

  // Whether anybody else has this, or what it is a view of.
  bool is_shared() const { return weak_from_this().use_count() > 1 || (base_ && base_.use_count() > 1); }

  const at::Tensor tensor;

  Computed(Own, at::Tensor tensor) : tensor(std::move(tensor)) {}

 private:
  friend bool note_computed(PyObject* on);
  void leave_list();

  c10::DeviceIndex device_ = -1;
  Origin origin_{};
  std::shared_ptr<Computed> base_;
  Ref value_, storage_;
  // In the list of those that have no node.
  bool listed_ = false;
  Computed *before_ = nullptr, *behind_ = nullptr;
};

// Give a node to all that have none and are of this tape's device, so that its list of resident values has them; false after
// an error.
bool note_computed(PyObject* on);

// spec_like asks Python: `spec_of` in frontend/handles.py.
extern PyObject* find_spec;

}  // namespace marid
