// Kernels that have their operator's signature in C++, for the usual signatures: an operation that runs at once is called, and
// calls the CPU's kernel, without its arguments being boxed.
//
// Boxing costs more than memory. Each copy of a tensor that Python knows takes the interpreter's lock where nobody else in C++
// has the tensor, and so does giving the copy back (c10/util/intrusive_ptr.h, "PyObject preservation").
#pragma once
#include "above_autograd.h"
#include "immediate.h"
#include "intermediates.h"
#include "random.h"
#include "record.h"
#include "small/small.h"

#include <ATen/core/List.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace marid {

// Where an operator's own tensors are replaced by those that they stand for, in order.
struct Cursor {
  Concrete& concrete;
  size_t next = 0;

  at::Tensor& place(at::Tensor& tensor) { return handle_of(tensor) != nullptr ? concrete[next++] : tensor; }
  const at::Tensor& place(const at::Tensor& tensor) { return handle_of(tensor) != nullptr ? concrete[next++] : tensor; }
  std::optional<at::Tensor> place(const std::optional<at::Tensor>& tensor) {
    return tensor ? std::optional<at::Tensor>(place(*tensor)) : std::nullopt;
  }
  at::TensorList place(at::TensorList list) {
    next += list.size();  // all of them are the device's
    return at::TensorList(concrete.data() + next - list.size(), list.size());
  }
  at::ITensorListRef place(const at::ITensorListRef& list) {
    next += list.size();
    return at::TensorList(concrete.data() + next - list.size(), list.size());
  }
  c10::List<std::optional<at::Tensor>> place(const c10::List<std::optional<at::Tensor>>& list) {
    c10::List<std::optional<at::Tensor>> placed;
    placed.reserve(list.size());
    c10::IValue whole(list);
    for (const c10::IValue& item : whole.toListRef()) {
      placed.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(place(item.toTensor())));
    }
    return placed;
  }
  std::optional<c10::Device> place(std::optional<c10::Device>) { return std::nullopt; }  // that of the tensors
  std::optional<at::Generator> place(std::optional<at::Generator>) { return Draws::source(); }
  template <typename Other>
  Other&& place(Other&& other) {
    return std::forward<Other>(other);
  }
};

inline void add_tensors(Given& given, const at::Tensor& tensor) { given.add(tensor); }
inline void add_tensors(Given& given, const std::optional<at::Tensor>& tensor) {
  if (tensor) given.add(*tensor);
}
inline void add_to_list(Given& given, const at::Tensor& tensor) {
  given.add(tensor);
  given.is_usual = given.is_usual && handle_of(tensor) != nullptr;
}
inline void add_tensors(Given& given, at::TensorList list) {
  for (const at::Tensor& tensor : list) add_to_list(given, tensor);
}
inline void add_tensors(Given& given, const at::ITensorListRef& list) {
  for (const at::Tensor& tensor : list) add_to_list(given, tensor);
}
inline void add_tensors(Given& given, const c10::List<std::optional<at::Tensor>>& list) { given.add_indices(list); }
template <typename Other>
void add_tensors(Given&, const Other&) {}

inline void add_results(Results& results, at::Tensor& written) { results.push_back(written); }
inline void add_results(Results& results, at::Tensor&& one) { results.push_back(std::move(one)); }
inline void add_results(Results&, bool) {}
inline void add_results(Results& results, std::vector<at::Tensor>&& all) {
  for (at::Tensor& one : all) results.push_back(std::move(one));
}
template <typename... Each>
void add_results(Results& results, std::tuple<Each...>&& all) {
  std::apply([&](auto&... each) { (results.push_back(std::move(each)), ...); }, all);
}

// What results are in C++.
template <typename Returned>
struct From {
  static Returned results(Results& results) { return std::move(results[0]); }
};
template <>
struct From<std::vector<at::Tensor>> {
  static std::vector<at::Tensor> results(Results& results) {
    return {std::make_move_iterator(results.begin()), std::make_move_iterator(results.end())};
  }
};
template <typename... Each>
struct From<std::tuple<Each...>> {
  static std::tuple<Each...> results(Results& results) { return unpack(results, std::index_sequence_for<Each...>()); }
  template <size_t... index>
  static std::tuple<Each...> unpack(Results& results, std::index_sequence<index...>) {
    return {std::move(results[index])...};
  }
};

// The kernel with a signature. `Boxed` is the kernel that does what does not run at once; its `is_usual` says of arguments
// whether the operator is to be called with them as it is.
template <typename Boxed, typename Signature>
struct Direct;

template <typename Boxed, typename Returned, typename... Arguments>
struct Direct<Boxed, Returned(Arguments...)> final : c10::OperatorKernel {
  using Signature = Returned(Arguments...);

  Direct(const c10::OperatorHandle& op, std::shared_ptr<Operator> of, bool is_above)
      : op(op),
        gradients(is_above ? std::optional(kernel_above_autograd(op)) : std::nullopt),
        typed(op.typed<Signature>()),
        small(small_kernel<Signature>(c10::toString(op.operator_name()))),
        of(of),
        boxed(c10::BoxedKernel::makeFromFunctor(std::make_unique<Boxed>(of))) {}

  Returned operator()(c10::DispatchKeySet keys, Arguments... arguments) {
    if (!gradients) return on_device(keys, std::forward<Arguments>(arguments)...);
    if (!is_next_below(keys) || (needs_gradient(arguments) || ...)) {
      Saves copies;
      return gradients->template call<Returned, Arguments...>(op, keys, std::forward<Arguments>(arguments)...);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    return on_device(keys & c10::after_ADInplaceOrView_keyset, std::forward<Arguments>(arguments)...);
  }

  Returned on_device(c10::DispatchKeySet keys, Arguments... arguments) {
    InterpreterLock lock;
    PyObject* by = may_run_at_once() ? at_once_by(*of) : nullptr;
    if (by != nullptr && Boxed::is_usual(arguments...)) {
      Given given;
      given.takes_host = of->copies || kMoves;
      (add_tensors(given, arguments), ...);
      Results results;
      const c10::TypedOperatorHandle<Signature>& called = performer();
      auto invoke = [&](Concrete& concrete, Results& returned) {
        Cursor cursor{concrete};
        // In braces, so that one is placed after the other.
        std::tuple<decltype(cursor.place(std::forward<Arguments>(arguments)))...> placed{
            cursor.place(std::forward<Arguments>(arguments))...};
        if (small != nullptr) {
          auto made = std::apply([&](auto&&... each) { return small(each...); }, placed);
          if (is_done(made)) {
            performed_small.fetch_add(1, std::memory_order_relaxed);
            return add_results(returned, std::move(made));
          }
        }
        auto call = [&](auto&&... each) -> decltype(auto) { return called.call(each...); };
        if constexpr (std::is_void_v<Returned>) {
          std::apply(call, placed);
        } else {
          add_results(returned, std::apply(call, placed));
        }
      };
      Outcome outcome = at_once(by, given, invoke, results, arguments...);
      if (outcome == Outcome::kDone) {
        if (recorder.at(by, kBumps) == Py_True) bump_versions(arguments...);
        return returned(results, arguments...);
      }
      if (outcome == Outcome::kError) throw_python_error();
    }
    return c10::impl::BoxedKernelWrapper<Signature>::call(boxed, op, keys, std::forward<Arguments>(arguments)...);
  }

  // Whether the operator takes a tensor from one device to another, or from and to the host: it says where to.
  static constexpr bool kMoves = requires(Arguments... arguments) { Boxed::target(arguments...); };

  static Outcome at_once(PyObject* by, Given& given, Invoke invoke, Results& results, Arguments... arguments) {
    if constexpr (kMoves) return move_at_once(by, given, Boxed::target(arguments...), invoke, results);
    return run_at_once(by, given, invoke, results);
  }

  // The operator that is run: it is not known which before there is a recorder.
  const c10::TypedOperatorHandle<Signature>& performer() {
    if (!of->kernel) return typed;
    if (!ours) ours = of->kernel->typed<Signature>();
    return *ours;
  }

  c10::OperatorHandle op;
  std::optional<c10::KernelFunction> gradients;  // PyTorch's kernel, where this takes its place above autograd
  c10::TypedOperatorHandle<Signature> typed;
  typename SmallKernel<Signature>::Function small;  // null where there is none
  std::optional<c10::TypedOperatorHandle<Signature>> ours;
  std::shared_ptr<Operator> of;
  c10::BoxedKernel boxed;

 private:
  // Of the list that an operator has written to, which is its first argument.
  template <typename First, typename... Others>
  static void bump_versions(First& first, Others&...) {
    if constexpr (std::is_same_v<First, at::TensorList>) {
      for (const at::Tensor& one : first) one.unsafeGetTensorImpl()->bump_version();
    }
  }

  template <typename First, typename... Others>
  static Returned returned(Results& results, First& first, Others&...) {
    if constexpr (std::is_same_v<Returned, at::Tensor&>) {
      return first;  // what an operator that writes in place returns
    } else if constexpr (!std::is_void_v<Returned>) {
      return From<Returned>::results(results);
    }
  }
};

// A kernel for an operator whose signature is among the usual ones; none for others. With `is_above`, one for the place of PyTorch's
// above autograd, to which it leaves calls that need gradients. (direct.cpp)
std::optional<c10::KernelFunction> direct_kernel(
    const c10::OperatorHandle& op, const std::shared_ptr<Operator>& of, bool is_above = false);

}  // namespace marid
