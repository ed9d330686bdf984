// The order of reads and writes: what a node must see, and who may still have to read what it writes. graph/tape.py has the
// rule.
#include "recorder.h"

#include <utility>

namespace marid {

PyObject* last_write(PyObject* of) {
  PyObject* write = storage.at(of, kLastWrite);
  if (write == Py_None) return nullptr;
  if (node.at(write, kArgs) != Py_None) return write;
  if (any_failed() && Ref(PyObject_CallOneArg(last_write_of, of)).get() == write) return write;
  storage.set(of, kLastWrite, Ref::to(Py_None));
  return nullptr;
}

Ref next_number(PyObject* on) {
  PyObject* sequence = tape.at(on, kSequence);
  return Ref(Py_TYPE(sequence)->tp_iternext(sequence));
}

Ref storage_behind(PyObject* tensor, PyObject* on) {
  Ref own = storage_of(tensor);
  if (own.get() != Py_None) return own;
  Ref number = next_number(on), made(storage.type->tp_alloc(storage.type, 0));
  if (!number || !made) return Ref();
  storage.set(made.get(), kLastRead, std::move(number));
  storage.set(made.get(), kLastWrite, Ref::to(Py_None));
  storage.set(made.get(), kStorageHandle, Ref::to(Py_None));
  return set_storage(tensor, made.get()) ? std::move(made) : Ref();
}

bool order(PyObject* of, PyObject* on, const Call& call, PyObject* writes) {
  c10::SmallVector<Ref, 8> storages;
  for (const Ref& tensor : call.tensors) {
    storages.push_back(storage_of(tensor.get()));
    if (!storages.back()) return false;
  }
  c10::SmallVector<size_t, 8> written;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(writes); i++) {
    written.push_back(PyLong_AsSize_t(PyList_GET_ITEM(writes, i)));
    storages[written.back()] = storage_behind(call.tensors[written.back()].get(), on);
    if (!storages[written.back()]) return false;
  }
  c10::SmallVector<PyObject*, 8> after, overwrites;
  for (const Ref& own : storages) {
    if (own.get() == Py_None) continue;
    if (PyObject* write = last_write(own.get())) after.push_back(write);
    if (PyErr_Occurred()) return false;
  }
  for (size_t index : written) {
    PyObject* own = storages[index].get();
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
  for (const Ref& own : storages) {
    if (own.get() != Py_None) storage.set(own.get(), kLastRead, Ref::to(node.at(of, kSeq)));
  }
  for (size_t index : written) {
    storage.set(storages[index].get(), kLastWrite, Ref::to(of));
    storage.set(storages[index].get(), kLastRead, Ref(PyLong_FromLong(0)));
  }
  return true;
}

}  // namespace marid
