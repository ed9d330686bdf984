// Kernels that have their operator's signature in C++ (direct.h), for the usual operators that make a tensor of none, and for
// those that draw one like another.
#include "device.h"
#include "factories.h"
#include "immediate.h"
#include "kernels.h"
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

bool is_dense(const Layout& layout, const Pinned& pinned) {
  return (!layout || *layout == at::kStrided) && (!pinned || !*pinned);
}

// One whose arguments are these, and then what tensor it makes. One that draws is run as the overload that takes a generator.
template <typename... Arguments>
struct DirectFactory final : c10::OperatorKernel {
  using Plain = Tensor(Arguments..., Type, Layout, Device, Pinned);
  using Drawing = Tensor(Arguments..., Generator, Type, Layout, Device, Pinned);

  DirectFactory(const c10::OperatorHandle& op, const Factory& general)
      : op(op),
        typed(op.typed<Plain>()),
        of(general.of),
        boxed(c10::BoxedKernel::makeFromFunctor(std::make_unique<Factory>(general))) {}

  Tensor operator()(c10::DispatchKeySet keys, Arguments... given, Type type, Layout layout, Device device, Pinned pinned) {
    if (is_dense(layout, pinned)) {
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
    {"aten::logspace", made<const Scalar&, const Scalar&, int64_t, double>},
    {"aten::tril_indices", made<int64_t, int64_t, int64_t>},
    {"aten::triu_indices", made<int64_t, int64_t, int64_t>},
    {"aten::fft_fftfreq", made<int64_t, double>},
    {"aten::fft_rfftfreq", made<int64_t, double>},
    {"aten::hann_window", made<int64_t>},
    {"aten::hann_window.periodic", made<int64_t, bool>},
    {"aten::hamming_window", made<int64_t>},
    {"aten::hamming_window.periodic", made<int64_t, bool>},
};

// One that draws a tensor like another: run as the overload that takes a generator, too.
template <typename... Arguments>
struct DirectLike final : c10::OperatorKernel {
  using Format = std::optional<at::MemoryFormat>;
  using Plain = Tensor(const Tensor&, Arguments..., Type, Layout, Device, Pinned, Format);
  using Drawing = Tensor(const Tensor&, Arguments..., Generator, Type, Layout, Device, Pinned, Format);

  DirectLike(const c10::OperatorHandle& op, const std::shared_ptr<Operator>& of)
      : op(op), of(of), boxed(c10::BoxedKernel::makeFromFunctor(std::make_unique<Kernel>(of))) {}

  Tensor operator()(c10::DispatchKeySet keys, const Tensor& self, Arguments... given, Type type, Layout layout, Device device,
                    Pinned pinned, Format format) {
    if (is_dense(layout, pinned) && (!device || *device == self.device()) && may_run_at_once()) {
      InterpreterLock lock;
      Results results;
      bool is_known = of->general_handle && of->general->identity != nullptr;
      PyObject* by = is_known ? at_once_by(*of->general) : nullptr;
      if (by != nullptr) {
        if (!drawing) drawing = of->general_handle->typed<Drawing>();
        marid::Given like;
        like.add(self);
        auto invoke = [&](Concrete& concrete, Results& returned) {
          returned.push_back(drawing->call(concrete[0], given..., Draws::source(), type, layout, {}, pinned, format));
        };
        Outcome outcome = run_at_once(by, like, invoke, results);
        if (outcome == Outcome::kDone) return std::move(results[0]);
        if (outcome == Outcome::kError) throw_python_error();
      }
    }
    return c10::impl::BoxedKernelWrapper<Plain>::call(boxed, op, keys, self, given..., type, layout, device, pinned, format);
  }

  c10::OperatorHandle op;
  std::optional<c10::TypedOperatorHandle<Drawing>> drawing;
  std::shared_ptr<Operator> of;
  c10::BoxedKernel boxed;
};

template <typename... Arguments>
c10::KernelFunction like(const c10::OperatorHandle& op, const std::shared_ptr<Operator>& of) {
  using Own = DirectLike<Arguments...>;
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Own>(std::make_unique<Own>(op, of));
}

using MakeLike = c10::KernelFunction (*)(const c10::OperatorHandle&, const std::shared_ptr<Operator>&);
const std::unordered_map<std::string, MakeLike> likes = {
    {"aten::rand_like", like<>},
    {"aten::randn_like", like<>},
    {"aten::randint_like", like<SymInt>},
    {"aten::randint_like.low_dtype", like<SymInt, SymInt>},
};

// The kernel of an operator that is found by its name, made with what is known of the operator; none for others.
template <typename Makers, typename Known>
std::optional<c10::KernelFunction> found_in(const Makers& makers, const c10::OperatorHandle& op, const Known& known) {
  auto found = makers.find(c10::toString(op.operator_name()));
  if (found == makers.end()) return std::nullopt;
  try {
    return found->second(op, known);
  } catch (const c10::Error&) {  // another version of PyTorch may declare one otherwise
    return std::nullopt;
  }
}

}  // namespace

std::optional<c10::KernelFunction> direct_factory(const c10::OperatorHandle& op, const Factory& general) {
  return found_in(factories, op, general);
}

std::optional<c10::KernelFunction> direct_like(const c10::OperatorHandle& op, const std::shared_ptr<Operator>& of) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;  // asked of each operator that there is
  return found_in(likes, op, of);
}

}  // namespace marid
