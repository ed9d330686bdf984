// What a composite operator computes on its way, in C++.
//
// Tensors of the device have a Python object from the beginning, since PyTorch would give them one of another class. Between the
// operators of a composite nobody in Python sees them. There the object costs as much as a kernel: it is made and freed, both
// with the interpreter's lock, and so is each copy of the tensor, as those that autograd saves, that a backward gives back.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

namespace marid {

// As long as one lives, what operations at once return in this thread has no Python object, but for what Python calls
// meanwhile. Where hooks for saved tensors, modes or transforms would see it, it has one as ever.
class Intermediates {
 public:
  Intermediates();
  ~Intermediates();
  Intermediates(const Intermediates&) = delete;
  Intermediates& operator=(const Intermediates&) = delete;

  // The same for what the composite itself returns, which Python sees unless the composite is one in another.
  void give(c10::ArrayRef<c10::IValue> results) const;
  at::Tensor give(at::Tensor result) const;

 private:
  const void* outer_;
};

// Whether what is computed now is such an intermediate result. With the interpreter's lock.
bool is_intermediate();

// As long as one lives, in a kernel of PyTorch above autograd, what this thread copies is saved for gradients: a result of the
// operation, without the way that it was computed in. Such a copy has no object, but where hooks for saved tensors see it.
class Saves {
 public:
  Saves();
  ~Saves() { calling_ = outer_; }
  Saves(const Saves&) = delete;
  Saves& operator=(const Saves&) = delete;

  // Whether a copy that is made now is one of these.
  static bool now();

 private:
  static constinit thread_local const void* calling_;
  const void* outer_;
};

}  // namespace marid
