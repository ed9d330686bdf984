// Autocast's kernels for the device: PyTorch's own casts, with its cache of casts, and what it does with the operators
// on its lists (aten/src/ATen/autocast_mode.h). The lists are those of frontend/autocast.py.
#include "python.h"
#include "record.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// From a header that takes long to compile.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKey kAutocast = c10::DispatchKey::AutocastPrivateUse1;

enum class Policy { kLower, kFull, kFullUnlessDtype, kPromote };

std::optional<Policy> policy_of(std::string_view name) {
  if (name == "lower") return Policy::kLower;
  if (name == "full") return Policy::kFull;
  if (name == "full unless dtype") return Policy::kFullUnlessDtype;
  if (name == "promote") return Policy::kPromote;
  return std::nullopt;
}

bool is_eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice && tensor.is_floating_point() &&
      tensor.scalar_type() != at::kDouble;
}

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  }
}

c10::IValue cast(at::ScalarType type, const c10::IValue& value) {
  if (value.isTensor()) return at::autocast::cached_cast(type, value.toTensor(), kDevice);
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> made;
  each_tensor(value, [&](const at::Tensor& tensor) { made.push_back(at::autocast::cached_cast(type, tensor, kDevice)); });
  return made;
}

at::ScalarType widest(c10::ArrayRef<c10::IValue> values) {
  at::ScalarType lower = at::autocast::get_autocast_dtype(kDevice), found = lower;
  for (const c10::IValue& value : values) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      TORCH_CHECK(found != at::kDouble, "promote type is double in at::autocast::prioritize");
      if (!is_eligible(tensor)) return;
      bool full = found == at::kFloat || tensor.scalar_type() == at::kFloat;
      TORCH_CHECK(
          full || (found == lower && tensor.scalar_type() == lower),
          "Unexpected floating ScalarType in at::autocast::prioritize");
      if (full) found = at::kFloat;
    });
  }
  return found;
}

// The kernel of one operator on a list: the operator again, without autocast, on what was cast.
struct Listed final : c10::OperatorKernel {
  explicit Listed(Policy policy) : policy(policy) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard without(kAutocast);
    const auto& formals = op.schema().arguments();
    c10::IValue* values = stack->data() + stack->size() - formals.size();
    if (policy == Policy::kFullUnlessDtype) {
      if (values[0].isTensor() && is_eligible(values[0].toTensor())) choose_dtype(formals, values);
    } else {
      at::ScalarType type = policy == Policy::kFull ? at::kFloat
          : policy == Policy::kLower                ? at::autocast::get_autocast_dtype(kDevice)
                                                    : widest(c10::ArrayRef<c10::IValue>(values, formals.size()));
      // From the last to the first, as PyTorch's compiler evaluates them: gradients are added up in the order of casts.
      for (size_t i = formals.size(); i-- > 0;) values[i] = cast(type, values[i]);
    }
    op.callBoxed(stack);
  }

  static void choose_dtype(const std::vector<c10::Argument>& formals, c10::IValue* values) {
    for (size_t i = 0; i < formals.size(); i++) {
      auto type = formals[i].real_type();
      if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      if (type->kind() == c10::TypeKind::ScalarTypeType && values[i].isNone()) values[i] = at::kFloat;
    }
  }

  Policy policy;
};

torch::Library* library = nullptr;  // stays when the process ends

// autocasts(lists): the operators that autocast handles for the device from now on, and no others; by policy.
PyObject* autocasts(PyObject*, PyObject* lists) {
  std::vector<std::pair<Policy, std::string>> wanted;
  PyObject *key, *names;
  for (Py_ssize_t position = 0; PyDict_Next(lists, &position, &key, &names);) {
    const char* text = PyUnicode_AsUTF8(key);
    if (text == nullptr) return nullptr;
    auto policy = policy_of(text);
    if (!policy) return PyErr_Format(PyExc_ValueError, "%R is no policy", key);
    marid::Ref items(PySequence_Fast(names, "names of operators are wanted"));
    if (!items) return nullptr;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); i++) {
      const char* name = PyUnicode_AsUTF8(PySequence_Fast_GET_ITEM(items.get(), i));
      if (name == nullptr) return nullptr;
      wanted.emplace_back(*policy, name);
    }
  }
  try {
    delete std::exchange(library, nullptr);
    if (wanted.empty()) Py_RETURN_NONE;
    library = new torch::Library(torch::Library::IMPL, "aten", kAutocast, __FILE__, __LINE__);
    for (const auto& [policy, name] : wanted) {
      auto kernel = std::make_unique<Listed>(policy);
      library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
    }
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
  }
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

bool is_autocasting() { return !c10::impl::tls_is_dispatch_key_excluded(kAutocast); }

PyMethodDef autocast_functions[] = {
    {"autocasts", autocasts, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
