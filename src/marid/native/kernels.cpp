// Which operators get which kernels (kernels.h), and when.
#include "kernels.h"

#include "direct.h"
#include "factories.h"
#include "geometry_tests.h"
#include "group_norm.h"
#include "known_calls.h"
#include "product_gradients.h"
#include "reads_at_once.h"
#include "recurrent_layers.h"
#include "whole_composites.h"

#include <ATen/NestedTensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using namespace marid;

// Never freed: what is known of calls are objects of Python, which ends before this would.
auto& operators = *new std::unordered_map<c10::OperatorName, std::shared_ptr<Operator>>();
std::vector<c10::RegistrationHandleRAII>* kernels;  // which stay when the process ends
auto& registered = *new std::unordered_set<c10::OperatorName>();
auto& taking_layouts = *new std::unordered_set<c10::OperatorName>();
PyObject* not_recorded;  // names of arguments with which a call is left to Python

// Composite operators that the device takes apart in another way than PyTorch, above autograd; and those that may run at once
// as a whole.
auto& replacements = *new std::unordered_map<c10::OperatorName, c10::KernelFunction>();
auto& wholes = *new std::unordered_map<c10::OperatorName, bool>();  // and whether `in_rows`, see whole_composites.h

c10::KernelFunction taking_apart(const c10::OperatorName& name) {
  auto found = replacements.find(name);
  return found == replacements.end() ? as_pytorch_composes() : found->second;
}

}  // namespace

namespace marid {

std::shared_ptr<Operator> operator_named(const c10::OperatorName& name) {
  std::shared_ptr<Operator>& own = operators[name];
  if (own == nullptr) own = std::make_shared<Operator>();
  return own;
}

}  // namespace marid

namespace {

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  auto inner = type.containedTypes();
  return std::any_of(inner.begin(), inner.end(), [](const c10::TypePtr& one) { return holds_tensors(*one); });
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    return holds_tensors(*argument.type());
  });
}

// Operators that make their argument a view of itself, and those that return such a view.
const std::unordered_map<std::string, const char*> views_in_place{
    {"aten::t_", "aten::t"},
    {"aten::transpose_", "aten::transpose"},
    {"aten::swapaxes_", "aten::transpose"},
    {"aten::swapdims_", "aten::transpose"},
    {"aten::squeeze_", "aten::squeeze"},
    {"aten::unsqueeze_", "aten::unsqueeze"},
    {"aten::as_strided_", "aten::as_strided"},
};

// What recording needs to know of an operator.
void describe(Operator* made, const c10::FunctionSchema& schema) {
  made->calls = std::make_shared<KnownCalls>();
  auto found = views_in_place.find(schema.name());
  if (found != views_in_place.end()) {
    std::string overload = schema.name() == std::string("aten::swapaxes_") || schema.name() == std::string("aten::swapdims_") ||
            schema.name() == std::string("aten::transpose_")
        ? "int"
        : schema.overload_name();
    c10::OperatorName name(found->second, overload);
    made->view_handle = c10::Dispatcher::singleton().findSchema(name);
    auto own = operators.find(name);
    if (own != operators.end()) made->view = own->second;
  }
  for (const c10::Argument& argument : schema.arguments()) {
    Formal formal;
    formal.name = PyUnicode_InternFromString(argument.name().c_str());
    if (argument.name() == "device") made->device = made->formals.size();
    if (PySet_Contains(not_recorded, formal.name) == 1) {
      formal.kind = Formal::kNotRecorded;
    } else {
      auto type = argument.real_type();
      if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      if (type->kind() == c10::TypeKind::ScalarTypeType) formal.kind = Formal::kDtype;
      if (type->kind() == c10::TypeKind::MemoryFormatType) formal.kind = Formal::kMemoryFormat;
      if (type->kind() == c10::TypeKind::LayoutType) formal.kind = Formal::kNotRecorded;
    }
    if (argument.default_value().has_value()) formal.otherwise = &*argument.default_value();
    if (argument.name() == "generator") {
      static const c10::IValue none;
      made->generator = made->formals.size();
      formal.otherwise = &none;
    }
    formal.written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (!argument.kwarg_only() && !made->generator) made->positional++;  // draws are recorded by name
    made->formals.push_back(formal);
  }
  const auto& returns = schema.returns();
  made->returns = returns.size();
  made->reads_number = schema.name() == "aten::_local_scalar_dense";
  made->copies = schema.name() == "aten::copy_";
  made->returns_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
}

// Inside, PyTorch does not say that kernels of its own are overridden; what it says once in a process is not used up.
struct Quiet {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard{&silent};
  c10::WarningUtils::WarnAlways always{true};
};

// Whether an operator is composed of others for the CPU, above autograd, and has no other way on the device.
bool is_composed(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::AutogradPrivateUse1);
}

bool is_in(const c10::OperatorName& name, const char* names) { return name.name.rfind(names, 0) == 0; }

// Whether PyTorch has a kernel for an operator above autograd that without gradients does nothing of its own: none is a view,
// none writes. Those of operators on lists compare lengths.
bool has_gradients_apart(const c10::OperatorHandle& op) {
  auto aliases = [](const c10::Argument& one) { return one.alias_info() != nullptr; };
  const auto &arguments = op.schema().arguments(), &returns = op.schema().returns();
  return op.hasKernelForDispatchKey(c10::DispatchKey::Autograd) && !is_in(op.operator_name(), "aten::_foreach_") &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::AutogradPrivateUse1) &&
      std::none_of(arguments.begin(), arguments.end(), aliases) && std::none_of(returns.begin(), returns.end(), aliases);
}

void register_above(const c10::OperatorName& name, c10::KernelFunction kernel) {
  kernels->push_back(c10::Dispatcher::singleton().registerImpl(
      name, c10::DispatchKey::AutogradPrivateUse1, std::move(kernel), {}, nullptr, __FILE__));
}

void register_kernel(const c10::OperatorName& name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto op = dispatcher.findSchema(name);
  if (!op || is_composed(*op)) return;
  bool takes_layouts = op->hasKernelForDispatchKey(c10::DispatchKey::BackendSelect) || is_in(name, "quantized::");
  if (takes_layouts && taking_layouts.insert(name).second) {
    // For all operators, a fallback for each of these keys would take 2 ms of the device's first use.
    for (auto key : {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCsrPrivateUse1,
                     c10::DispatchKey::QuantizedPrivateUse1}) {
      auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<OtherLayout>());
      kernels->push_back(dispatcher.registerImpl(name, key, std::move(kernel), {}, nullptr, __FILE__));
    }
  }
  if (!takes_tensors(op->schema())) return;
  if (is_in(name, "fsdp::")) return;  // PyTorch's own, which brings kernels for all devices
  // So do collectives, but theirs look for a backend of the device.
  if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) && !is_in(name, "c10d::")) return;
  if (!registered.insert(name).second) return;
  std::shared_ptr<Operator> own;
  if (is_in(name, "aten::") || is_in(name, "marid::")) {
    own = operator_named(name);
  } else {
    own = std::make_shared<Operator>();  // which is never recorded in C++: such an operator may be defined anew
  }
  c10::KernelFunction kernel;
  if (name == c10::OperatorName("aten::_reshape_alias", "")) {
    auto view = operator_named(c10::OperatorName("aten::view", ""));
    kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Reshaped>(own, view));
  } else if (auto whole = wholes.find(name); whole != wholes.end()) {
    kernel = whole_composite(op->schema(), whole->second, own, taking_apart(name));
  } else if (auto like = direct_like(*op, own)) {
    kernel = std::move(*like);
  } else if (auto direct = is_in(name, "aten::") ? direct_kernel(*op, own) : std::nullopt) {
    kernel = std::move(*direct);
    if (has_gradients_apart(*op)) register_above(name, *direct_kernel(*op, own, /*is_above=*/true));
  } else {
    kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(own));
    if (auto reading = reading_kernel(*op, kernel)) kernel = std::move(*reading);
  }
  if (auto group_norm = group_norm_kernel(*op, kernel)) kernel = std::move(*group_norm);
  if (auto comparing = geometry_test_kernel(*op, kernel)) kernel = std::move(*comparing);
  kernels->push_back(
      dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1, std::move(kernel), {}, nullptr, __FILE__));
}

// Operators that are defined later, as `torch.library` does. A listener is called while the dispatcher is locked, so their
// kernels are registered as soon as Python is back in its loop.
std::mutex pending_lock;
std::vector<c10::OperatorName> pending;
auto& later = *new std::unordered_map<c10::OperatorName, std::vector<c10::RegistrationHandleRAII>>();

int register_pending(void*) {
  std::vector<c10::OperatorName> names;
  {
    std::lock_guard<std::mutex> guard(pending_lock);
    names.swap(pending);
  }
  for (const c10::OperatorName& name : names) {
    if (kernels == nullptr) break;
    size_t before = kernels->size();
    register_kernel(name);
    for (; kernels->size() > before; kernels->pop_back()) later[name].push_back(std::move(kernels->back()));
  }
  return 0;
}

// leave_composed(name, overload): an operator that was defined later has just been said to be composed of others, above autograd.
PyObject* leave_composed(PyObject*, PyObject* const* given, Py_ssize_t) {
  const char *text = PyUnicode_AsUTF8(given[0]), *overload = PyUnicode_AsUTF8(given[1]);
  if (text == nullptr || overload == nullptr) return nullptr;
  c10::OperatorName name(text, overload);
  auto op = c10::Dispatcher::singleton().findSchema(name);
  if (op && is_composed(*op) && later.erase(name) != 0) registered.erase(name);
  Py_RETURN_NONE;
}

struct Listener final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    if (!listening) return;
    std::lock_guard<std::mutex> guard(pending_lock);
    pending.push_back(op.operator_name());
    if (pending.size() == 1) Py_AddPendingCall(register_pending, nullptr);
  }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {}

  bool listening = false;  // it is told of all that are there when it is added
};

void listen() {
  auto own = std::make_unique<Listener>();
  Listener* listener = own.get();
  static auto& handle = *new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::move(own)));
  static_cast<void>(handle);
  listener->listening = true;
}

// register_factory(name, overload, kernel, has_default_dtype, recorded): an operator without an argument that is a tensor, which
// is recorded as the one of another name. What C++ does not know how to do, this kernel in Python does.
PyObject* register_factory(PyObject*, PyObject* const* given, Py_ssize_t) {
  const char *text = PyUnicode_AsUTF8(given[0]), *overload = PyUnicode_AsUTF8(given[1]);
  if (text == nullptr || overload == nullptr) return nullptr;
  c10::OperatorName name(text, overload);
  auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op || !registered.insert(name).second) Py_RETURN_NONE;
  const char* recorded = PyUnicode_AsUTF8(given[4]);
  auto as = recorded != nullptr ? c10::Dispatcher::singleton().findSchema({recorded, overload}) : std::nullopt;
  if (!as) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
  Factory general(*as, Py_NewRef(given[2]), given[3] == Py_True);
  auto direct = as->operator_name() == name ? direct_factory(*op, general) : std::nullopt;
  auto kernel = direct ? std::move(*direct) : c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Factory>(general));
  static auto& factories = *new std::vector<c10::RegistrationHandleRAII>();  // which stay when the process ends
  factories.push_back(c10::Dispatcher::singleton().registerImpl(
      name, c10::DispatchKey::PrivateUse1, std::move(kernel), {}, nullptr, __FILE__));
  Py_RETURN_NONE;
}

// replace(name, overload, function): above autograd, this function is called in place of the operator.
PyObject* replace(PyObject*, PyObject* const* given, Py_ssize_t) {
  const char *name = PyUnicode_AsUTF8(given[0]), *overload = PyUnicode_AsUTF8(given[1]);
  if (name == nullptr || overload == nullptr) return nullptr;
  auto kernel = std::make_unique<Replaced>(Py_NewRef(given[2]));
  replacements[c10::OperatorName(name, overload)] = c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel));
  Py_RETURN_NONE;
}

// compose(name, overload, in_rows): the operator may run at once as a whole, as `WholeComposite` is told.
PyObject* compose(PyObject*, PyObject* const* given, Py_ssize_t) {
  const char *name = PyUnicode_AsUTF8(given[0]), *overload = PyUnicode_AsUTF8(given[1]);
  if (name == nullptr || overload == nullptr) return nullptr;
  wholes[c10::OperatorName(name, overload)] = given[2] == Py_True;
  Py_RETURN_NONE;
}

// adopt(name, overload, identity, asks_autocast, kernel, general): the operator (`aten::add`, `Tensor`) is recorded by the
// recorder that is found by this number; under autocast not without asking Python, if that is said. `kernel` names the operator
// that is run in its place, `general` the overload as which it is recorded, if there are such.
PyObject* adopt(PyObject*, PyObject* const* given, Py_ssize_t) {
  const char *name = PyUnicode_AsUTF8(given[0]), *overload = PyUnicode_AsUTF8(given[1]);
  const char *kernel = PyUnicode_AsUTF8(given[4]), *general = PyUnicode_AsUTF8(given[5]);
  if (name == nullptr || overload == nullptr || kernel == nullptr || general == nullptr) return nullptr;
  c10::OperatorName full(name, overload);
  auto found = operators.find(full);
  if (found != operators.end()) {
    Operator& own = *found->second;
    if (own.identity == nullptr) describe(&own, c10::Dispatcher::singleton().findSchema(full)->schema());
    Py_XSETREF(own.identity, Py_NewRef(given[2]));
    own.asks_autocast = given[3] == Py_True;
    own.kernel = c10::Dispatcher::singleton().findSchema(c10::OperatorName(kernel, overload));
    if (*general != '\0') {
      c10::OperatorName full_general(name, general);
      own.general_handle = c10::Dispatcher::singleton().findSchema(full_general);
      own.general = operator_named(full_general);
    }
  }
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

namespace {

// What takes composite operators apart, or runs them as a whole, above autograd.
void register_all_above() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const NamedKernels& own : {kernels_of_cells(), kernels_of_recurrent_layers()}) replacements.insert(own.begin(), own.end());
  for (const auto& [name, kernel] : replacements) {
    if (!wholes.count(name)) register_above(name, kernel);
  }
  for (const auto& [name, in_rows] : wholes) {
    auto op = dispatcher.findSchema(name);
    if (op) register_above(name, whole_composite(op->schema(), in_rows, operator_named(name), taking_apart(name)));
  }
}

}  // namespace

// Give each of PyTorch's operators on tensors, and of ours, our kernel for tensors of the device. There are thousands: what is
// known of one is found out when it is first recorded. Again: give one to those that are new.
void register_kernels(PyObject* names_not_recorded) {
  Quiet quiet;
  auto& dispatcher = c10::Dispatcher::singleton();
  bool first = kernels == nullptr;
  if (first) {
    not_recorded = Py_NewRef(names_not_recorded);
    auto* above = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
    register_composites(*above);
    register_product_gradients(*above);
    // Autograd asks this of each leaf, and nothing may be thrown there.
    auto* nested = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::NestedTensorPrivateUse1, __FILE__, __LINE__);
    nested->impl("_nested_tensor_size", [](const at::Tensor& self) { return at::native::get_nested_sizes(self); });
    kernels = new std::vector<c10::RegistrationHandleRAII>();
    register_all_above();
  }
  const auto names = dispatcher.getAllOpNames();
  operators.reserve(names.size());
  registered.reserve(names.size());
  kernels->reserve(names.size());
  for (const c10::OperatorName& name : names) register_kernel(name);
  if (first) listen();
}

PyMethodDef kernel_functions[] = {
    {"adopt", fast(adopt), METH_FASTCALL, nullptr},
    {"register_factory", fast(register_factory), METH_FASTCALL, nullptr},
    {"leave_composed", fast(leave_composed), METH_FASTCALL, nullptr},
    {"replace", fast(replace), METH_FASTCALL, nullptr},
    {"compose", fast(compose), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
