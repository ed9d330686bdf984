// Methods without arguments that return a tensor: `x.exp()`, `x.sum()`.
//
// As Python's operators (arithmetic.cpp), they call at once what PyTorch would call, with the interpreter's lock held.
#include "methods.h"

#include "operands.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/all.h>
#include <ATen/ops/any.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/log.h>
#include <ATen/ops/max.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/min.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/t.h>
#include <ATen/ops/tanh.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <optional>
#include <utility>

namespace marid {

bool may_call(PyObject* object, PyObject* name) {
  if (!is_own(object) || !is_usual() || torch::jit::tracer::isTracing()) return false;
  PyObject* general = _PyType_Lookup(handle_type->tp_base, name);
  return general != nullptr && Py_IS_TYPE(general, &PyMethodDescr_Type);
}

PyObject* call_general(PyObject* name, PyObject* object, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  PyTypeObject* tensors = handle_type->tp_base;
  PyObject* found = _PyType_Lookup(tensors, name);
  bool takes_self = found != nullptr && PyType_HasFeature(Py_TYPE(found), Py_TPFLAGS_METHOD_DESCRIPTOR) != 0;
  Ref method(takes_self ? Py_NewRef(found) : PyObject_GetAttr(reinterpret_cast<PyObject*>(tensors), name));
  c10::SmallVector<PyObject*, 8> arguments{object};
  arguments.append(given, given + count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
  return method ? PyObject_Vectorcall(method.get(), arguments.data(), static_cast<size_t>(count) + 1, names) : nullptr;
}

bool set_method(PyMethodDef& method) {
  Ref general(PyObject_GetAttrString(reinterpret_cast<PyObject*>(handle_type->tp_base), method.ml_name));
  Ref doc(general ? PyObject_GetAttrString(general.get(), "__doc__") : nullptr);
  if (!doc) return false;
  method.ml_doc = PyUnicode_Check(doc.get()) ? PyUnicode_AsUTF8(doc.release()) : nullptr;  // the method lives for good
  Ref made(PyDescr_NewMethod(handle_type, &method));
  return made && PyObject_SetAttrString(reinterpret_cast<PyObject*>(handle_type), method.ml_name, made.get()) == 0;
}

namespace {

using at::Tensor;

// A method, and what it calls with nothing, and with a dimension where it takes one.
struct Method {
  const char* name;
  Tensor (*call)(const Tensor& self);
  Tensor (*along)(const Tensor& self, int64_t dimension) = nullptr;
};

constexpr Method kMethods[] = {
    {"abs", [](const Tensor& x) { return x.abs(); }},
    {"all", [](const Tensor& x) { return x.all(); }, [](const Tensor& x, int64_t along) { return x.all(along); }},
    {"any", [](const Tensor& x) { return x.any(); }, [](const Tensor& x, int64_t along) { return x.any(along); }},
    {"clone", [](const Tensor& x) { return x.clone(); }},
    {"cos", [](const Tensor& x) { return x.cos(); }},
    {"erf", [](const Tensor& x) { return x.erf(); }},
    {"exp", [](const Tensor& x) { return x.exp(); }},
    {"floor", [](const Tensor& x) { return x.floor(); }},
    {"isnan", [](const Tensor& x) { return x.isnan(); }},
    {"log", [](const Tensor& x) { return x.log(); }},
    {"max", [](const Tensor& x) { return x.max(); }},
    {"mean", [](const Tensor& x) { return x.mean(); }, [](const Tensor& x, int64_t along) { return x.mean(along); }},
    {"min", [](const Tensor& x) { return x.min(); }},
    {"reciprocal", [](const Tensor& x) { return x.reciprocal(); }},
    {"relu", [](const Tensor& x) { return x.relu(); }},
    {"rsqrt", [](const Tensor& x) { return x.rsqrt(); }},
    {"sigmoid", [](const Tensor& x) { return x.sigmoid(); }},
    {"sign", [](const Tensor& x) { return x.sign(); }},
    {"sin", [](const Tensor& x) { return x.sin(); }},
    {"sqrt", [](const Tensor& x) { return x.sqrt(); }},
    {"square", [](const Tensor& x) { return x.square(); }},
    {"sum", [](const Tensor& x) { return x.sum(); }, [](const Tensor& x, int64_t along) { return x.sum(along); }},
    {"t", [](const Tensor& x) { return x.t(); }},
    {"tanh", [](const Tensor& x) { return x.tanh(); }},
};

template <size_t index>
PyObject* call(PyObject* object, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  constexpr const Method& of = kMethods[index];
  static PyObject* name = PyUnicode_InternFromString(of.name);
  if (names == nullptr && may_call(object, name)) {
    const Tensor& self = THPVariable_Unpack(object);
    if (count == 0) return guarded([&] { return THPVariable_Wrap(of.call(self)); });
    if constexpr (of.along != nullptr) {
      std::optional<int64_t> dimension = count == 1 ? whole(given[0]) : std::nullopt;
      if (dimension) return guarded([&] { return THPVariable_Wrap(of.along(self, *dimension)); });
    }
  }
  return call_general(name, object, given, count, names);
}

template <size_t... index>
bool prepare(std::index_sequence<index...>) {
  static PyMethodDef methods[] = {{kMethods[index].name, fast(call<index>), METH_FASTCALL | METH_KEYWORDS, nullptr}...};
  return (set_method(methods[index]) && ...);
}

}  // namespace

bool prepare_methods() { return prepare(std::make_index_sequence<std::size(kMethods)>()); }

}  // namespace marid
