#include "factories.h"

#include "device.h"
#include "immediate.h"
#include "zeros.h"

#include <c10/core/DefaultDtype.h>

#include <vector>

namespace marid {

namespace {

// The device that a call makes its result on; -1 where Python has to say what is wrong with it.
c10::DeviceIndex device_of(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (!op.device) return -1;
  const c10::IValue& given = arguments[*op.device];
  bool is_current = given.isNone() || !given.toDevice().has_index();
  c10::DeviceIndex index = is_current ? current_device() : given.toDevice().index();
  return index < PyList_GET_SIZE(tapes) ? index : -1;
}

// The arguments as they are recorded: without the device, with the dtype that is the default now. Empty for a layout or a
// memory that Python has to refuse.
std::vector<c10::IValue> as_recorded(const Operator& op, c10::ArrayRef<c10::IValue> arguments, bool has_default_dtype) {
  std::vector<c10::IValue> plain(arguments.begin(), arguments.end());
  for (size_t i = 0; i < plain.size(); i++) {
    const Formal& formal = op.formals[i];
    if (formal.kind == Formal::kNotRecorded && !plain[i].isNone()) {
      if (i != *op.device && !is_usual(arguments.data(), i, op)) return {};
      plain[i] = c10::IValue();
    } else if (formal.kind == Formal::kDtype && has_default_dtype && plain[i].isNone()) {
      plain[i] = static_cast<int64_t>(c10::get_default_dtype_as_scalartype());
    }
  }
  return plain;
}

bool made(const c10::OperatorHandle& handle, const Operator& op, bool has_default_dtype, torch::jit::Stack* stack) {
  if (op.identity == nullptr || recorders == nullptr) return false;
  if (op.general_handle) {
    torch::jit::Stack general = with_generator(op, torch::jit::last(*stack, op.formals.size()));
    if (general.empty() || !made(*op.general_handle, *op.general, has_default_dtype, &general)) return false;
    torch::jit::drop(*stack, op.formals.size());
    stack->push_back(std::move(general.back()));
    return true;
  }
  PyObject* by = recorder_of(op);
  if (by == nullptr) return false;
  auto arguments = torch::jit::last(*stack, op.formals.size());
  c10::DeviceIndex device = device_of(op, arguments);
  if (device < 0) return false;
  Results results;
  Outcome outcome = recorder.at(by, kAtOnce) == Py_True ? make_at_once(by, handle, op, arguments, device, results)
                                                        : Outcome::kUnusual;
  if (outcome == Outcome::kError) return false;
  if (outcome == Outcome::kUnusual) {
    std::vector<c10::IValue> plain = as_recorded(op, arguments, has_default_dtype);
    if (plain.empty() || !recorded_anew(op, plain, device, results)) return false;
  }
  give_back(op, results, stack);
  return true;
}

}  // namespace

void Factory::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  bool is_made;
  {
    InterpreterLock lock;
    is_made = made(as, *of, has_default_dtype, stack);
    if (!is_made && PyErr_Occurred()) throw_python_error();
  }
  if (!is_made) call_python(op, stack, python);
  if (op.operator_name().name == "aten::_efficientzerotensor") {
    mark_zero(torch::jit::peek(*stack, 0, 1).toTensor());
  }
}

}  // namespace marid
