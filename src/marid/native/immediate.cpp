// Running an operation at once on concrete tensors. When that is done is decided in frontend/ahead.py, and checked for
// each call in record.cpp: all of its arguments have run, and nothing is pending that a write could overtake.
#include "immediate.h"

#include "concretely.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace marid {

Allowance allowance;
thread_local int recording = 0;
int64_t performed = 0;

namespace {

constexpr int64_t kMostBytes = 16 << 20;
constexpr int64_t kOperations = 16384;  // without a read
constexpr size_t kQuick = 256 << 10;  // bytes that an operator reads in less time than others would wait for the lock
int64_t bytes_an_operation = 0;

bool is_own(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

}  // namespace

Below::Below(bool lets_go)
    : keys_(c10::impl::tls_local_dispatch_key_set()),
      functions_(at::impl::PythonTorchFunctionTLS::get_disabled_state()),
      thread_(lets_go ? PyEval_SaveThread() : nullptr) {
  c10::impl::LocalDispatchKeySet inside = keys_;
  auto [included, excluded] = keys_inside();
  inside.included_ = included;
  inside.excluded_ = excluded;
  c10::impl::_force_tls_local_dispatch_key_set(inside);
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
}

Below::~Below() {
  at::impl::PythonTorchFunctionTLS::set_disabled_state(functions_);
  c10::impl::_force_tls_local_dispatch_key_set(keys_);
  if (thread_ != nullptr) PyEval_RestoreThread(thread_);
}

void Allowance::renew() { operations_ = kOperations; }

bool Allowance::take(int64_t nbytes) {
  bytes_ = std::min(bytes_ + bytes_an_operation - nbytes, kMostBytes);
  if (bytes_ >= 0 && --operations_ >= 0) return true;
  bytes_ = kBytesAtFirst;  // for the next time
  return false;
}

at::Tensor concrete_tensor(PyObject* value) {
  PyObject* held = Py_TYPE(value) == node.type ? node.at(value, kConcrete) : output.at(value, kOutputConcrete);
  if (held == Py_None || !THPVariable_Check(held)) return at::Tensor();
  const at::Tensor& tensor = THPVariable_Unpack(held);
  return is_own(tensor) ? at::Tensor() : tensor;
}

void perform(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const Concrete& concrete,
             torch::jit::Stack& returned) {
  size_t next = 0;
  returned.reserve(arguments.size());
  auto placed = [&](const at::Tensor& tensor) { return is_own(tensor) ? concrete[next++] : tensor; };
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      returned.emplace_back(placed(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> items;
      for (const c10::IValue& item : argument.toListRef()) items.push_back(placed(item.toTensor()));
      returned.emplace_back(std::move(items));
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> items;
      for (const c10::IValue& item : argument.toListRef()) {
        items.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(placed(item.toTensor())));
      }
      returned.emplace_back(std::move(items));
    } else if (argument.isDevice()) {
      returned.emplace_back(c10::Device(c10::kCPU));
    } else {
      returned.push_back(argument);
    }
  }
  size_t nbytes = 0;
  for (const at::Tensor& tensor : concrete) nbytes += tensor.nbytes();
  Below below(nbytes > kQuick);
  op.callBoxed(&returned);
}

namespace {

// allow_immediate(bytes): operations may run at once, so far as each makes so many bytes.
PyObject* allow_immediate(PyObject*, PyObject* bytes) {
  bytes_an_operation = PyLong_AsLongLong(bytes);
  if (PyErr_Occurred()) return nullptr;
  allowance.renew();
  Py_RETURN_NONE;
}

// record_here(change): this thread enters (1) or leaves (-1) a block whose operations do not run at once.
PyObject* record_here(PyObject*, PyObject* change) {
  long by = PyLong_AsLong(change);
  if (by == -1 && PyErr_Occurred()) return nullptr;
  recording += static_cast<int>(by);
  Py_RETURN_NONE;
}

// performed(): how many operations have run at once.
PyObject* count(PyObject*, PyObject*) { return PyLong_FromLongLong(performed); }

}  // namespace

PyMethodDef immediate_functions[] = {
    {"allow_immediate", allow_immediate, METH_O, nullptr},
    {"record_here", record_here, METH_O, nullptr},
    {"performed", count, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
