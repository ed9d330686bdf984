// Indexing of the device's tensors with numbers, slices, `None` and `...`: `x[i, j]`, `x[:, 1:3]`.
//
// PyTorch makes a view for each number and slice, and nobody sees those between the first and the last. Where operations run at
// once and need no gradients, one view is made here; elsewhere the operators are called that PyTorch would call
// (ATen/TensorIndexing.h). All other indices, and those that are out of range, are left to PyTorch. So is writing (`x[i] = y`)
// of what needs gradients, or does not fit the view.
#include "indexing.h"

#include "above_autograd.h"
#include "intermediates.h"
#include "operands.h"
#include "small/views.h"
#include "views_at_once.h"

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/select.h>
#include <ATen/ops/slice.h>
#include <ATen/ops/unsqueeze.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <limits>
#include <optional>

namespace marid {

namespace {

using at::Tensor;
using Indices = c10::SmallVector<Index, 6>;

// One bound of a slice.
std::optional<int64_t> bound(PyObject* object, int64_t usual) { return object == Py_None ? usual : whole(object); }

std::optional<Index> index_of(PyObject* object) {
  if (object == Py_None) return Index{Index::kNewDimension};
  if (object == Py_Ellipsis) return Index{Index::kRest};
  if (auto found = whole(object)) return Index{Index::kNumber, *found};
  if (!PySlice_Check(object)) return std::nullopt;
  auto* slice = reinterpret_cast<PySliceObject*>(object);
  auto start = bound(slice->start, 0), stop = bound(slice->stop, std::numeric_limits<int64_t>::max());
  auto step = bound(slice->step, 1);
  if (!start || !stop || !step || *step < 1) return std::nullopt;
  return Index{Index::kSlice, *start, *stop, *step};
}

// Whether indices fit a tensor; what `...` stands for is noted.
bool fit(const Tensor& self, Indices& indices) {
  int64_t left = self.dim(), rests = 0, dimension = 0;
  for (const Index& one : indices) {
    left -= one.kind == Index::kNumber || one.kind == Index::kSlice ? 1 : 0;
    rests += one.kind == Index::kRest ? 1 : 0;
  }
  if (left < 0 || rests > 1) return false;
  for (Index& one : indices) {
    if (one.kind == Index::kRest) one.start = left;
    int64_t size = one.kind == Index::kNumber ? self.sizes()[dimension] : 0;
    if (one.kind == Index::kNumber && (one.start < -size || one.start >= size)) return false;
    dimension += one.kind == Index::kNewDimension ? 0 : one.kind == Index::kRest ? left : 1;
  }
  return true;
}

// The indices, where they are all of these kinds and fit a tensor.
std::optional<Indices> read(const Tensor& self, PyObject* given) {
  Indices indices;
  bool is_tuple = PyTuple_CheckExact(given);
  for (Py_ssize_t i = 0; i < (is_tuple ? PyTuple_GET_SIZE(given) : 1); i++) {
    auto found = index_of(is_tuple ? PyTuple_GET_ITEM(given, i) : given);
    if (!found) return std::nullopt;
    indices.push_back(*found);
  }
  return fit(self, indices) ? std::optional(std::move(indices)) : std::nullopt;
}

// The operator that PyTorch would call last; null where all that is left is an alias.
const Operator* last_operator(const Indices& indices) {
  static const auto select = operator_named(c10::OperatorName("aten::select", "int"));
  static const auto slice = operator_named(c10::OperatorName("aten::slice", "Tensor"));
  static const auto unsqueeze = operator_named(c10::OperatorName("aten::unsqueeze", ""));
  for (size_t i = indices.size(); i-- > 0;) {
    if (indices[i].kind == Index::kNumber) return select.get();
    if (indices[i].kind == Index::kSlice) return slice.get();
    if (indices[i].kind == Index::kNewDimension) return unsqueeze.get();
  }
  return nullptr;
}

// The view that all of the indices make, where that runs at once; else undefined.
Tensor view_of(const Tensor& self, const Indices& indices) {
  const Operator* last = last_operator(indices);
  if (last == nullptr) return {};
  return view_at_once(self, *last, [&](const Tensor& concrete) { return indexed(concrete, indices); });
}

// One view after the other. `alone` is an index without a tuple, for which PyTorch leaves no slice out.
Tensor views(const Tensor& self, const Indices& indices, bool alone) {
  std::optional<Intermediates> inside;
  if (!alone) inside.emplace();
  Tensor found = self;
  int64_t dimension = 0;
  for (const Index& one : indices) {
    switch (one.kind) {
      case Index::kNumber: found = at::select(found, dimension, one.start); break;
      case Index::kSlice:
        if (alone || one.start != 0 || found.sizes()[dimension] > one.stop || one.step != 1) {
          found = at::slice(found, dimension, one.start, one.stop, one.step);
        }
        dimension++;
        break;
      case Index::kNewDimension: found = at::unsqueeze(found, dimension++); break;
      case Index::kRest: dimension += one.start; break;
    }
  }
  if (found.is_same(self)) found = at::alias(found);
  return inside ? inside->give(std::move(found)) : found;
}

// The indices that are read here.
std::optional<Indices> indices_of(PyObject* object, PyObject* given) {
  if (!is_own(object) || !is_usual() || torch::jit::tracer::isTracing()) return std::nullopt;
  const Tensor& self = THPVariable_Unpack(object);
  return handle_of(self) != nullptr ? read(self, given) : std::nullopt;
}

PyObject* subscript(PyObject* object, PyObject* given) {
  std::optional<Indices> indices = indices_of(object, given);
  if (!indices) return handle_type->tp_base->tp_as_mapping->mp_subscript(object, given);
  return guarded([&] {
    const Tensor& self = THPVariable_Unpack(object);
    Tensor found = view_of(self, *indices);
    return THPVariable_Wrap(found.defined() ? found : views(self, *indices, !PyTuple_Check(given)));
  });
}

// Whether a tensor, or a number, can be written into a view as it is. PyTorch leaves out leading dimensions of one element; it
// makes a tensor of a number and copies that, which it refuses where it sees that elements share memory; filling does not.
bool fits(const Tensor& view, const Tensor& value) {
  return at::is_expandable_to(value.sizes(), view.sizes()) && view.device() == value.device() && !needs_gradient(value);
}
bool fits(const Tensor& view, const at::Scalar&) { return at::has_internal_overlap(view) != at::MemOverlap::Yes; }

// What is copied has the view's shape, as PyTorch gives it that: so it sees that both are the same memory, element by element.
void write(Tensor& view, const Tensor& value) {
  view.copy_(value.sizes() == view.sizes() ? value : value.expand(view.sizes()));
}
void write(Tensor& view, const at::Scalar& value) { view.fill_(value); }

// Write into the view that the indices make; false where that is left to PyTorch.
template <typename Value>
bool written(const Tensor& self, const Indices& indices, const Value& value) {
  Tensor view = view_of(self, indices);
  if (!view.defined() || !fits(view, value)) return false;
  write(view, value);
  return true;
}

int assign(PyObject* object, PyObject* given, PyObject* value) {
  std::optional<Indices> indices = value == nullptr ? std::nullopt : indices_of(object, given);
  if (indices) {
    const Tensor& self = THPVariable_Unpack(object);
    Ref done(guarded([&]() -> PyObject* {
      if (is_own(value)) return Py_NewRef(written(self, *indices, THPVariable_Unpack(value)) ? Py_True : Py_False);
      auto as_number = number(value);
      return Py_NewRef(as_number && written(self, *indices, *as_number) ? Py_True : Py_False);
    }));
    if (!done) return -1;
    if (done.get() == Py_True) return 0;
  }
  return handle_type->tp_base->tp_as_mapping->mp_ass_subscript(object, given, value);
}

}  // namespace

void prepare_indexing() {
  handle_type->tp_as_mapping->mp_subscript = subscript;
  handle_type->tp_as_mapping->mp_ass_subscript = assign;
}

}  // namespace marid
