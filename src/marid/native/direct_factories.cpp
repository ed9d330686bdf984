// Kernels that have their operator's signature in C++ (direct.h), for the usual operators that make a tensor of none.
#include "device.h"
#include "factories.h"
#include "immediate.h"
#include "random.h"

#include <ATen/core/Generator.h>
#include <ATen/core/boxing/KernelFunction.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

namespace marid {

namespace {

using at::Scalar, at::Tensor, c10::SymInt, c10::SymIntArrayRef;
using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Pinned = std::optional<bool>;
using Generator = std::optional<at::Generator>;

// One whose arguments are these, and then what tensor it makes. One that draws is run as the overload that takes a generator.
template <typename... Arguments>
struct DirectFactory final : c10::OperatorKernel {
  using Plain = Tensor(Arguments..., Type, Layout, Device, Pinned);
  using Drawing = Tensor(Arguments..., Generator, Type, Layout, Device, Pinned);

  DirectFactory(const c10::OperatorHandle& op, const Factory& general)
      : op(op), typed(op.typed<Plain>()), of(general.of), boxed(c10::BoxedKernel::makeFromFunctor(std::make_unique<Factory>(general))) {}

  Tensor operator()(c10::DispatchKeySet keys, Arguments... given, Type type, Layout layout, Device device, Pinned pinned) {
    bool is_usual = (!layout || *layout == at::kStrided) && (!pinned || !*pinned);
    if (is_usual) {
      InterpreterLock lock;
      Results results;
      Outcome outcome = at_once(device, results, [&](Device on) {
        if (!of->general_handle) return typed.call(given..., type, layout, on, pinned);
        if (!drawing) drawing = of->general_handle->typed<Drawing>();
        return drawing->call(given..., Draws::source(), type, layout, on, pinned);
      });
      if (outcome == Outcome::kDone) return std::move(results[0]);
      if (outcome == Outcome::kError) throw_python_error();
    }
    return c10::impl::BoxedKernelWrapper<Plain>::call(boxed, op, keys, given..., type, layout, device, pinned);
  }

 private:
  template <typename Make>
  Outcome at_once(const Device& device, Results& results, Make make) {
    if (!may_run_at_once() || of->kernel) return Outcome::kUnusual;
    if (of->general_handle && of->general->identity == nullptr) return Outcome::kUnusual;
    PyObject* by = at_once_by(of->general_handle ? *of->general : *of);
    if (by == nullptr) return PyErr_Occurred() ? Outcome::kError : Outcome::kUnusual;
    marid::Given on;
    on.device = device && device->has_index() ? device->index() : current_device();
    auto invoke = [&](Concrete&, Results& returned) { returned.push_back(make(at::Device(at::kCPU))); };
    return run_at_once(by, on, invoke, results);
  }

  c10::OperatorHandle op;
  c10::TypedOperatorHandle<Plain> typed;
  std::optional<c10::TypedOperatorHandle<Drawing>> drawing;
  std::shared_ptr<Operator> of;
  c10::BoxedKernel boxed;
};

template <typename... Arguments>
c10::KernelFunction made(const c10::OperatorHandle& op, const Factory& general) {
  using Own = DirectFactory<Arguments...>;
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Own>(std::make_unique<Own>(op, general));
}

using Make = c10::KernelFunction (*)(const c10::OperatorHandle&, const Factory&);
const std::unordered_map<std::string, Make> factories = {
    {"aten::zeros", made<SymIntArrayRef>},
    {"aten::ones", made<SymIntArrayRef>},
    {"aten::rand", made<SymIntArrayRef>},
    {"aten::randn", made<SymIntArrayRef>},
    {"aten::full", made<SymIntArrayRef, const Scalar&>},
    {"aten::scalar_tensor", made<const Scalar&>},
    {"aten::arange", made<const Scalar&>},
    {"aten::arange.start", made<const Scalar&, const Scalar&>},
    {"aten::arange.start_step", made<const Scalar&, const Scalar&, const Scalar&>},
    {"aten::linspace", made<const Scalar&, const Scalar&, int64_t>},
    {"aten::eye", made<SymInt>},
    {"aten::randperm", made<SymInt>},
    {"aten::randint", made<SymInt, SymIntArrayRef>},
    {"aten::randint.low", made<SymInt, SymInt, SymIntArrayRef>},
};

}  // namespace

std::optional<c10::KernelFunction> direct_factory(const c10::OperatorHandle& op, const Factory& general) {
  auto found = factories.find(c10::toString(op.operator_name()));
  if (found == factories.end()) return std::nullopt;
  try {
    return found->second(op, general);
  } catch (const c10::Error&) {  // another version of PyTorch may declare one otherwise
    return std::nullopt;
  }
}

}  // namespace marid
