#include "factories.h"

#include "immediate.h"

#include <torch/csrc/Exceptions.h>

extern "C" int marid_current_device();  // device.cpp

namespace marid {

namespace {

// The device that a call makes its result on; -1 where Python has to say what is wrong with it.
c10::DeviceIndex device_of(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (!op.device) return -1;
  const c10::IValue& given = arguments[*op.device];
  bool is_current = given.isNone() || !given.toDevice().has_index();
  auto index = static_cast<c10::DeviceIndex>(is_current ? marid_current_device() : given.toDevice().index());
  return index < PyList_GET_SIZE(tapes) ? index : -1;
}

bool made_at_once(const c10::OperatorHandle& handle, const Operator& op, torch::jit::Stack* stack) {
  if (op.identity == nullptr || recorders == nullptr) return false;
  PyObject* by = recorder_of(op);
  if (by == nullptr || recorder.at(by, kAtOnce) != Py_True) return false;
  auto arguments = torch::jit::last(*stack, op.formals.size());
  c10::DeviceIndex device = device_of(op, arguments);
  Results results;
  if (device < 0 || make_at_once(by, handle, op, arguments, device, results) != Outcome::kDone) return false;
  give_back(op, results, stack);
  return true;
}

}  // namespace

void Factory::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  {
    InterpreterLock lock;
    if (made_at_once(op, *of, stack)) return;
    if (PyErr_Occurred()) {
      python_error error;
      error.persist();
      throw error;
    }
  }
  call_python(op, stack, python);
}

}  // namespace marid
