// Methods that return views: `x.view(2, -1)`, `x.transpose(0, 1)`.
//
// PyTorch reads arguments by the signatures that it knows, lets the interpreter's lock go, and passes two kernels above the
// device's. Where the arguments are whole numbers, and the view is made at once and needs no gradients, these methods make it;
// else they call PyTorch's function, with the lock. Other arguments they leave to the methods of `torch.Tensor`.
#include "methods.h"
#include "operands.h"
#include "small/views.h"
#include "views_at_once.h"

#include <ATen/ops/expand.h>
#include <ATen/ops/permute.h>
#include <ATen/ops/reshape.h>
#include <ATen/ops/squeeze.h>
#include <ATen/ops/transpose.h>
#include <ATen/ops/unsqueeze.h>
#include <ATen/ops/view.h>

#include <c10/util/SmallVector.h>

#include <utility>

namespace marid {

namespace {

using at::Tensor;
using Numbers = c10::SmallVector<int64_t, 6>;

// A method: the operator that it calls, whether it takes a list of numbers, and else how many; the view, undefined where
// PyTorch has to make it, or to raise an error; and PyTorch's function.
struct Method {
  const char *name, *of, *overload;
  bool takes_list;
  size_t count;
  Tensor (*make)(const Tensor& concrete, const Numbers& numbers);
  Tensor (*call)(const Tensor& self, const Numbers& numbers);
};

Tensor viewed_as(const Tensor& concrete, const Numbers& sizes) { return viewed(concrete, c10::fromIntArrayRefSlow(sizes)); }

constexpr Method kView = {"view", "aten::view", "", true, 0, viewed_as,
                          [](const Tensor& of, const Numbers& sizes) { return of.view(sizes); }};
constexpr Method kReshape = {"reshape", "aten::view", "", true, 0, viewed_as,
                             [](const Tensor& of, const Numbers& sizes) { return of.reshape(sizes); }};
constexpr Method kPermute = {"permute", "aten::permute", "", true, 0,
                             [](const Tensor& of, const Numbers& by) { return permuted(of, by); },
                             [](const Tensor& of, const Numbers& by) { return of.permute(by); }};
constexpr Method kExpand = {"expand", "aten::expand", "", true, 0,
                            [](const Tensor& of, const Numbers& to) {
                              return expanded(of, c10::fromIntArrayRefSlow(to), false);
                            },
                            [](const Tensor& of, const Numbers& to) { return of.expand(to); }};
constexpr Method kTranspose = {"transpose", "aten::transpose", "int", false, 2,
                               [](const Tensor& of, const Numbers& by) { return transposed(of, by[0], by[1]); },
                               [](const Tensor& of, const Numbers& by) { return of.transpose(by[0], by[1]); }};
constexpr Method kUnsqueeze = {"unsqueeze", "aten::unsqueeze", "", false, 1,
                               [](const Tensor& of, const Numbers& at) { return unsqueezed(of, at[0]); },
                               [](const Tensor& of, const Numbers& at) { return of.unsqueeze(at[0]); }};
constexpr Method kSqueeze = {"squeeze", "aten::squeeze", "dim", false, 1,
                             [](const Tensor& of, const Numbers& at) { return squeezed(of, at[0]); },
                             [](const Tensor& of, const Numbers& at) { return of.squeeze(at[0]); }};

// The arguments, or the items of a tuple or list that is the only one, where all are whole numbers.
template <const Method& of>
bool read(PyObject* const* given, Py_ssize_t count, Numbers& numbers) {
  if (of.takes_list && count == 1 && (PyTuple_Check(given[0]) || PyList_CheckExact(given[0]))) {
    count = PySequence_Fast_GET_SIZE(given[0]);
    given = PySequence_Fast_ITEMS(given[0]);
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    auto found = whole(given[i]);
    if (!found) return false;
    numbers.push_back(*found);
  }
  return of.takes_list ? !numbers.empty() : numbers.size() == of.count;
}

template <const Method& of>
PyObject* call(PyObject* object, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  static PyObject* name = PyUnicode_InternFromString(of.name);
  Numbers numbers;
  bool is_plain = names == nullptr && may_call(object, name);
  if (!is_plain || !read<of>(given, count, numbers)) return call_general(name, object, given, count, names);
  static const auto operation = operator_named(c10::OperatorName(of.of, of.overload));
  const Tensor& self = THPVariable_Unpack(object);
  return guarded([&] {
    auto make = [&](const Tensor& concrete) { return of.make(concrete, numbers); };
    Tensor made = handle_of(self) != nullptr ? view_at_once(self, *operation, make) : Tensor();
    return THPVariable_Wrap(made.defined() ? std::move(made) : of.call(self, numbers));
  });
}

template <const Method& of>
bool prepare() {
  static PyMethodDef method = {of.name, fast(call<of>), METH_FASTCALL | METH_KEYWORDS, nullptr};
  return set_method(method);
}

}  // namespace

bool prepare_view_methods() {
  return prepare<kView>() && prepare<kReshape>() && prepare<kPermute>() && prepare<kExpand>() && prepare<kTranspose>() &&
      prepare<kUnsqueeze>() && prepare<kSqueeze>();
}

}  // namespace marid
