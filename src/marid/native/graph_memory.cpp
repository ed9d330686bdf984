// Memory of captured graphs that others hold for a while (execute/graph_memory.py).
#include "python.h"

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

const at::Tensor* tensor_from(PyObject* given) {
  if (THPVariable_Check(given)) return &THPVariable_Unpack(given);
  PyErr_Format(PyExc_TypeError, "%R is no tensor", given);
  return nullptr;
}

// borrowed(tensor): the same tensor, in a storage that has the same memory and does not own it.
PyObject* borrowed(PyObject*, PyObject* given) {
  const at::Tensor* of = tensor_from(given);
  if (of == nullptr) return nullptr;
  const c10::Storage& owner = of->storage();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), owner.nbytes(), c10::DataPtr(owner.mutable_data(), owner.device()),
      c10::GetAllocator(owner.device_type()), true);
  at::Tensor made(of->unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
  made.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  return THPVariable_Wrap(made);
}

// exchange_memory(a, b): all that shares memory with one has that of the other from now on. Both have as many bytes.
PyObject* exchange_memory(PyObject*, PyObject* const* given, Py_ssize_t) {
  const at::Tensor *a = tensor_from(given[0]), *b = a == nullptr ? nullptr : tensor_from(given[1]);
  if (b == nullptr) return nullptr;
  c10::StorageImpl *one = a->storage().unsafeGetStorageImpl(), *other = b->storage().unsafeGetStorageImpl();
  if (one->nbytes() != other->nbytes() || one->device() != other->device()) {
    PyErr_Format(PyExc_ValueError, "%zu and %zu bytes of memory, or of other devices", one->nbytes(), other->nbytes());
    return nullptr;
  }
  c10::DataPtr before = one->set_data_ptr(std::move(other->_mutable_data_ptr_no_checks()));
  other->set_data_ptr_noswap(std::move(before));
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

PyMethodDef graph_memory_functions[] = {
    {"borrowed", borrowed, METH_O, nullptr},
    {"exchange_memory", fast(exchange_memory), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
