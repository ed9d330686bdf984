// What a tape's values hold, counted without a Python frame for each: the memory of those that exist, and what those that
// are pending will take. (graph/tape.py)
#include "resident.h"

#include "computed.h"
#include "nodes.h"

namespace {

using namespace marid;

Slots tape, spec, operation;
enum TapeSlot { kResident, kLimit };
constexpr Py_ssize_t kFewest = 4096;  // entries that are not worth looking for dead ones

// The living values among the entries, whose entries are kept; null after an error.
Ref living(PyObject* on) {
  Ref entries = Ref::to(tape.at(on, kResident)), kept(PyList_New(0)), alive(PyList_New(0));
  if (!kept || !alive) return Ref();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries.get()); i++) {
    PyObject* entry = PyList_GET_ITEM(entries.get(), i);
    Ref value = Ref::to(PyWeakref_GetObject(entry));
    if (value.get() == Py_None || concrete_of(value.get()) == Py_None) continue;
    if (PyList_Append(kept.get(), entry) < 0 || PyList_Append(alive.get(), value.get()) < 0) return Ref();
  }
  tape.set(on, kResident, std::move(kept));
  return alive;
}

// note_resident(tape, values): remember values that now hold memory.
PyObject* note_resident_values(PyObject*, PyObject* const* given, Py_ssize_t) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given[1]); i++) {
    if (!marid::note_resident(given[0], PyList_GET_ITEM(given[1], i))) return nullptr;
  }
  Py_RETURN_NONE;
}

// note_results(tape, nodes): remember what of these nodes, which have run, holds memory.
PyObject* note_results(PyObject*, PyObject* const* given, Py_ssize_t) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given[1]); i++) {
    PyObject* of = PyList_GET_ITEM(given[1], i);
    if (node.at(of, kConcrete) != Py_None && !marid::note_resident(given[0], of)) return nullptr;
    if (node.at(of, kOuts) == Py_None) continue;
    Ref outs(PySequence_Fast(node.at(of, kOuts), "results are in a list or tuple"));
    if (!outs) return nullptr;
    for (Py_ssize_t j = 0; j < PySequence_Fast_GET_SIZE(outs.get()); j++) {
      Ref out = Ref::to(PyWeakref_GetObject(PySequence_Fast_GET_ITEM(outs.get(), j)));
      if (out.get() == Py_None || output.at(out.get(), kOutputConcrete) == Py_None) continue;
      if (!marid::note_resident(given[0], out.get())) return nullptr;
    }
  }
  Py_RETURN_NONE;
}

// resident_values(tape): living values that hold memory, views included.
PyObject* resident_values(PyObject*, PyObject* on) { return note_computed(on) ? living(on).release() : nullptr; }

long long bytes_of(PyObject* of) { return of == Py_None ? 0 : PyLong_AsLongLong(spec.at(of, 0)); }

// allocated(nodes): how many bytes the results of these nodes take, or will take when they run.
PyObject* allocated(PyObject*, PyObject* nodes) {
  long long nbytes = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
    PyObject *of = PyList_GET_ITEM(nodes, i), *op = node.at(of, kOp);
    if (op == Py_None || operation.at(op, 0) == Py_True) continue;
    if (node.at(of, kRoot) == Py_None) nbytes += bytes_of(node.at(of, kSpec));
    if (node.at(of, kOuts) == Py_None) continue;
    Ref outs(PySequence_Fast(node.at(of, kOuts), "results are in a list or tuple"));
    if (!outs) return nullptr;
    for (Py_ssize_t j = 0; j < PySequence_Fast_GET_SIZE(outs.get()); j++) {
      PyObject* out = PyWeakref_GetObject(PySequence_Fast_GET_ITEM(outs.get(), j));
      if (out != Py_None && output.at(out, kOutputRoot) == Py_None) nbytes += bytes_of(output.at(out, kOutputSpec));
    }
  }
  return PyErr_Occurred() ? nullptr : PyLong_FromLongLong(nbytes);
}

// configure_resident(**names): the classes of the graph layer.
PyObject* configure_resident(PyObject*, PyObject*, PyObject* names) {
  PyObject* types[3];
  const char* wanted[] = {"Tape", "Spec", "Operation"};
  for (int i = 0; i < 3; i++) {
    types[i] = PyDict_GetItemString(names, wanted[i]);
    if (types[i] == nullptr) return PyErr_Format(PyExc_TypeError, "configure_resident() needs %s", wanted[i]);
  }
  bool found = tape.find(types[0], {"resident", "_resident_limit"}) && spec.find(types[1], {"nbytes"}) &&
      operation.find(types[2], {"view"});
  if (!found) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

bool note_resident(PyObject* on, PyObject* value) {
  // Not for Python's collector: there is one for each value, and what it refers to it does not keep.
  Ref entry(PyWeakref_NewRef(value, nullptr));
  if (!entry) return false;
  PyObject_GC_UnTrack(entry.get());
  PyObject* resident = tape.at(on, kResident);
  if (PyList_Append(resident, entry.get()) < 0) return false;
  if (PyList_GET_SIZE(resident) <= PyLong_AsSsize_t(tape.at(on, kLimit))) return true;
  Ref alive = living(on);
  if (!alive) return false;
  Ref limit(PyLong_FromSsize_t(std::max(kFewest, 2 * PyList_GET_SIZE(alive.get()))));
  if (!limit) return false;
  tape.set(on, kLimit, std::move(limit));
  return true;
}

PyMethodDef resident_functions[] = {
    {"note_resident", fast(note_resident_values), METH_FASTCALL, nullptr},
    {"note_results", fast(note_results), METH_FASTCALL, nullptr},
    {"resident_values", resident_values, METH_O, nullptr},
    {"allocated", allocated, METH_O, nullptr},
    {"configure_resident", fast(configure_resident), METH_VARARGS | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
