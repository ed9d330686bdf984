// What an operator that ran at once (immediate.cpp) has returned, as tensors of the device.
#pragma once
#include "immediate.h"

namespace marid {

// Whether a tensor can be one of the device's.
bool is_plain(const at::Tensor& tensor);

class ImmediateResults {
 public:
  ImmediateResults(PyObject* by, const Given& given, bool writes, Results& results)
      : by_(by), given_(given), writes_(writes), results_(results) {}

  // Add a result. kUnusual where this is no tensor that can be recorded; an operator that has written cannot be done again.
  Outcome take(at::Tensor result);

  // How many bytes of memory are new.
  int64_t nbytes() const { return nbytes_; }

 private:
  Outcome give(at::Tensor tensor, const std::shared_ptr<Computed>& base);

  PyObject* by_;
  const Given& given_;
  bool writes_;
  Results& results_;
  Origin origin_{};
  int64_t nbytes_ = 0;
};

}  // namespace marid
