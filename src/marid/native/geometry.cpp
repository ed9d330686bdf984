// Recorded geometries as C++ reads them (geometry.h), and the same comparison for programs that Python goes through.
#include "geometry.h"

#include "python.h"

#include <torch/csrc/Dtype.h>

#include <memory>

namespace {

using namespace marid;

Slots spec;
enum SpecSlot { kShape, kStride, kOffset, kDtype, kConj, kNeg, kGeometry };
constexpr const char* kName = "marid.geometry";

bool read_integers(PyObject* given, c10::SmallVector<int64_t, 5>& into) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
    into.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(given, i)));
  }
  return PyErr_Occurred() == nullptr;
}

void forget(PyObject* capsule) { delete static_cast<Geometry*>(PyCapsule_GetPointer(capsule, kName)); }

const at::Tensor* tensor_of(PyObject* given, at::Tensor& into) {
  static PyObject* name = PyUnicode_InternFromString("_cdata");
  Ref address(PyObject_GetAttr(given, name));
  auto* impl = address ? static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address.get())) : nullptr;
  if (impl == nullptr) return nullptr;
  into = at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
  return &into;
}

// Whether an object is among those of a list, or in a list of that.
bool is_among(PyObject* object, PyObject* list) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (item == object || (PyList_CheckExact(item) && is_among(object, item))) return true;
  }
  return false;
}

// agrees(result, spec, viewed or None, arguments): see geometry.h; what is no view must be none of the arguments (a list).
PyObject* agrees_in_python(PyObject*, PyObject* const* given, Py_ssize_t) {
  at::Tensor result, viewed;
  const Geometry* recorded = geometry_of(given[1]);
  if (recorded == nullptr || tensor_of(given[0], result) == nullptr) return nullptr;
  if (given[2] != Py_None) {
    return tensor_of(given[2], viewed) == nullptr ? nullptr : PyBool_FromLong(agrees(result, *recorded, &viewed));
  }
  return PyBool_FromLong(agrees(result, *recorded, nullptr) && !is_among(given[0], given[3]));
}

// configure_geometry(Spec): the class that geometries are read from.
PyObject* configure_geometry(PyObject*, PyObject* type) {
  return spec.find(type, {"shape", "stride", "offset", "dtype", "conj", "neg", "geometry"}) ? Py_NewRef(Py_None) : nullptr;
}

}  // namespace

const Geometry* marid::geometry_of(PyObject* of) {
  PyObject* kept = spec.at(of, kGeometry);
  if (kept != Py_None) return static_cast<const Geometry*>(PyCapsule_GetPointer(kept, kName));
  PyObject* dtype = spec.at(of, kDtype);
  if (!THPDtype_Check(dtype)) {
    PyErr_Format(PyExc_TypeError, "%R is no dtype", dtype);
    return nullptr;
  }
  auto made = std::make_unique<Geometry>();
  made->dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  made->conj = spec.at(of, kConj) == Py_True;
  made->neg = spec.at(of, kNeg) == Py_True;
  made->offset = PyLong_AsLongLong(spec.at(of, kOffset));
  if (!read_integers(spec.at(of, kShape), made->sizes) || !read_integers(spec.at(of, kStride), made->strides)) return nullptr;
  PyObject* capsule = PyCapsule_New(made.get(), kName, forget);
  if (capsule == nullptr) return nullptr;
  spec.set(of, kGeometry, Ref(capsule));
  return made.release();
}

namespace marid {

PyMethodDef geometry_functions[] = {
    {"agrees", fast(agrees_in_python), METH_FASTCALL, nullptr},
    {"configure_geometry", configure_geometry, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
