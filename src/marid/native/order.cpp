// The order of reads and writes: what a node must see, and who may still have to read what it writes. graph/tape.py has the
// rule.
#include "recorder.h"

#include <utility>

namespace marid {

PyObject* last_write(PyObject* of) {
  PyObject* write = storage.at(of, kLastWrite);
  if (write == Py_None) return nullptr;
  if (node.at(write, kArgs) != Py_None || is_in_flight(write)) return write;
  if (any_failed() && Ref(PyObject_CallOneArg(last_write_of, of)).get() == write) return write;
  storage.set(of, kLastWrite, Ref::to(Py_None));
  return nullptr;
}

Ref next_number(PyObject* on) {
  PyObject* sequence = tape.at(on, kSequence);
  return Ref(Py_TYPE(sequence)->tp_iternext(sequence));
}

PyObject* storage_behind(Handle* handle, PyObject* on) {
  if (handle->memory() != nullptr) return handle->memory();
  Ref number = next_number(on), made(storage.type->tp_alloc(storage.type, 0));
  if (!number || !made) return nullptr;
  storage.set(made.get(), kLastRead, std::move(number));
  storage.set(made.get(), kLastWrite, Ref::to(Py_None));
  storage.set(made.get(), kStorageHandle, Ref::to(Py_None));
  handle->lie_in(made.get());
  return handle->memory();
}

bool order(PyObject* of, PyObject* on, const Call& call, PyObject* writes) {
  c10::SmallVector<PyObject*, 8> storages;  // null where nothing has asked for it
  for (Handle* handle : call.handles) storages.push_back(handle->memory());
  c10::SmallVector<size_t, 8> written;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(writes); i++) {
    written.push_back(PyLong_AsSize_t(PyList_GET_ITEM(writes, i)));
    storages[written.back()] = storage_behind(call.handles[written.back()], on);
    if (storages[written.back()] == nullptr) return false;
  }
  c10::SmallVector<PyObject*, 8> after, overwrites;
  for (PyObject* own : storages) {
    if (own == nullptr) continue;
    if (PyObject* write = last_write(own)) after.push_back(write);
    if (PyErr_Occurred()) return false;
  }
  for (size_t index : written) {
    PyObject* own = storages[index];
    PyObject* write = storage.at(own, kLastWrite);
    long long read_at = PyLong_AsLongLong(storage.at(own, kLastRead));
    long long written_at = write == Py_None ? 0 : PyLong_AsLongLong(node.at(write, kSeq));
    if (read_at > written_at) overwrites.push_back(root_of(call.values[index]));
  }
  for (auto [found, index] : {std::pair(&after, kAfter), std::pair(&overwrites, kOverwrites)}) {
    if (found->empty()) continue;
    Ref all = untracked_tuple(found->size());
    if (!all) return false;
    for (size_t i = 0; i < found->size(); i++) PyTuple_SET_ITEM(all.get(), i, Py_NewRef((*found)[i]));
    node.set(of, index, std::move(all));
  }
  for (PyObject* own : storages) {
    if (own != nullptr) storage.set(own, kLastRead, Ref::to(node.at(of, kSeq)));
  }
  for (size_t index : written) {
    storage.set(storages[index], kLastWrite, Ref::to(of));
    storage.set(storages[index], kLastRead, Ref(PyLong_FromLong(0)));
  }
  return true;
}

}  // namespace marid
