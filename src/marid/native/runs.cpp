// Beginning runs from Python objects and giving their results to Python, and what kernels warned of meanwhile: the part
// of a run that has to do with Python.
#include "expose.h"

#include "execute.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstring>
#include <memory>

PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

using namespace marid;

bool read_number(PyObject* given, Parameter& into) {
  Number number{};
  if (PyBool_Check(given)) {
    number.tag = 'b';
    number.i = given == Py_True;
  } else if (PyLong_CheckExact(given)) {
    number.tag = 'i';
    number.i = PyLong_AsLongLong(given);
    if (number.i == -1 && PyErr_Occurred()) return false;
  } else if (PyFloat_CheckExact(given)) {
    number.tag = 'd';
    number.d = PyFloat_AS_DOUBLE(given);
  } else if (PyComplex_CheckExact(given)) {
    number.tag = 'c';
    number.d = PyComplex_RealAsDouble(given);
    number.imaginary = PyComplex_ImagAsDouble(given);
  } else {
    number.tag = 'i';  // a Draw: generators come when they are wanted
  }
  into.numbers.push_back(number);
  return true;
}

bool read_parameters(PyObject* params, Run& run) {
  run.params.reserve(PyList_GET_SIZE(params));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
    PyObject* given = PyList_GET_ITEM(params, i);
    Parameter& into = run.params.emplace_back();
    if (!PyTuple_CheckExact(given)) {
      if (!read_number(given, into)) return false;
      continue;
    }
    into.list = true;
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(given); j++) {
      if (!read_number(PyTuple_GET_ITEM(given, j), into)) return false;
    }
  }
  return true;
}

// Put the tensors into their slots; what is no tensor comes later, from the run that makes it (queue.cpp).
bool read_inputs(PyObject* inputs, PyObject* slots, Run& run) {
  static PyObject* name = PyUnicode_InternFromString("_cdata");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); i++) {
    Ref address(PyObject_GetAttr(PyList_GET_ITEM(inputs, i), name));
    if (!address) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return false;
      PyErr_Clear();
      continue;
    }
    auto* impl = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address.get()));
    if (impl == nullptr) return false;
    run.slots[PyLong_AsSsize_t(PyTuple_GET_ITEM(slots, i))] =
        at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
  }
  return true;
}

// What was recorded of the tensors of a run, by slot: specs, or None where nothing is known.
bool read_recorded(PyObject* specs, Run& run) {
  if (specs == Py_None) return true;
  run.recorded.resize(run.slots.size());
  Py_ssize_t count = std::min(PyTuple_GET_SIZE(specs), static_cast<Py_ssize_t>(run.slots.size()));
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* spec = PyTuple_GET_ITEM(specs, i);
    if (spec == Py_None) continue;
    run.recorded[i] = geometry_of(spec);
    if (run.recorded[i] == nullptr) return false;
  }
  return true;
}

// For each instruction an argument or -1, as the bytes of an array; or None.
bool read_donors(PyObject* array, Run& run) {
  if (array == Py_None) return true;
  run.donors.resize(run.program->instructions.size());
  size_t nbytes = run.donors.size() * sizeof(int64_t);
  if (!PyBytes_Check(array) || static_cast<size_t>(PyBytes_GET_SIZE(array)) != nbytes) {
    PyErr_Format(PyExc_ValueError, "%zu bytes are needed", nbytes);
    return false;
  }
  std::memcpy(run.donors.data(), PyBytes_AS_STRING(array), nbytes);
  return true;
}

// An address of numbers, or None.
bool read_numbers(PyObject* address, int64_t*& into) {
  if (address == Py_None) return true;
  into = static_cast<int64_t*>(PyLong_AsVoidPtr(address));
  return into != nullptr;
}

// Texts for profilers, or None.
bool read_labels(PyObject* labels, Run& run) {
  if (labels == Py_None) return true;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(labels); i++) {
    const char* text = PyUnicode_AsUTF8(PyTuple_GET_ITEM(labels, i));
    if (text == nullptr) return false;
    run.labels.emplace_back(text);
  }
  return true;
}

// Of a call's arguments: program, input slots (a tuple), donors (bytes or None), inputs and params (lists), specs (a
// tuple that outlives the run), sums and spans (addresses of two numbers for each instruction, or None), labels (a tuple or None).
std::unique_ptr<Run> begin(PyObject* const* given) {
  auto run = std::make_unique<Run>();
  run->program = static_cast<const Program*>(PyLong_AsVoidPtr(given[0]));
  if (run->program == nullptr) return nullptr;
  run->slots.resize(run->program->slots);
  bool read = read_donors(given[2], *run) && read_inputs(given[3], given[1], *run) && read_recorded(given[5], *run) &&
              read_numbers(given[6], run->sums) && read_numbers(given[7], run->spans) && read_labels(given[8], *run);
  return read && read_parameters(given[4], *run) ? std::move(run) : nullptr;
}

// run_begin(...): a run that has not begun, by its address.
PyObject* run_begin(PyObject*, PyObject* const* given, Py_ssize_t) {
  std::unique_ptr<Run> run = begin(given);
  return run == nullptr ? nullptr : PyLong_FromVoidPtr(run.release());
}

PyObject* wrapped(const std::vector<at::Tensor>& tensors) {
  Ref all(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t i = 0; all && i < tensors.size(); i++) {
    PyObject* tensor = THPVariable_Wrap(tensors[i]);
    if (tensor == nullptr) return nullptr;
    PyList_SET_ITEM(all.get(), static_cast<Py_ssize_t>(i), tensor);
  }
  return all.release();
}

// The same, given to a task, if there is one, before any Python runs: no interrupt can lose them.
PyObject* delivered(const std::vector<at::Tensor>& tensors, PyObject* task) {
  PyObject* all = wrapped(tensors);
  if (all != nullptr && task != Py_None) deliver(task, all);
  return all;
}

std::vector<at::Tensor> in_slots(const Run& run, PyObject* slots) {
  std::vector<at::Tensor> found;
  found.reserve(PyTuple_GET_SIZE(slots));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); i++) {
    found.push_back(run.slots[PyLong_AsSsize_t(PyTuple_GET_ITEM(slots, i))]);
  }
  return found;
}

// run_once(..., output slots, seconds, task or None): the results of a whole run; where it did not come to its end, how
// far it came (a `Status`) and its address.
PyObject* run_once(PyObject*, PyObject* const* given, Py_ssize_t) {
  std::unique_ptr<Run> run = begin(given);
  if (run == nullptr) return nullptr;
  double seconds = PyFloat_AsDouble(given[10]);
  Status status;
  {
    WithoutLock others;
    status = go(*run, nullptr, seconds);
  }
  if (status != kRunDone) return Py_BuildValue("iN", status, PyLong_FromVoidPtr(run.release()));
  std::vector<at::Tensor> results = in_slots(*run, given[9]);
  release_objects(*run);
  {
    WithoutLock others;
    run.reset();  // what it frees takes its time
  }
  return delivered(results, given[11]);
}

// run_tensors(run, slots, task or None): the tensors in these slots.
PyObject* run_tensors(PyObject*, PyObject* const* given, Py_ssize_t) {
  auto* run = static_cast<const Run*>(PyLong_AsVoidPtr(given[0]));
  return run == nullptr ? nullptr : delivered(in_slots(*run, given[1]), given[2]);
}

// --- what kernels warn of --------------------------------------------------------------------------------------------

Warnings* warnings_begin() { return new Warnings; }

// What was warned of until the end of that, in this thread or another.
PyObject* warnings_of(Warnings* given) {
  std::unique_ptr<Warnings> warnings(given);
  Ref texts(PyList_New(0));
  for (const std::string& text : warnings->kept) {
    Ref own(texts ? PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace") : nullptr);
    if (!own || PyList_Append(texts.get(), own.get()) < 0) return nullptr;
  }
  return texts.release();
}

// End it, and say what was warned of.
PyObject* warnings_end(Warnings* warnings) {
  warnings->end();
  return warnings_of(warnings);
}

// switches(): what kernels ask of the process (remote/wire/kernel_settings.py), as one number.
PyObject* switches(PyObject*, PyObject*) {
  at::Context& context = at::globalContext();
  long long key = 0;
  for (auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV, at::Float32Op::RNN})
    key = key << 3 | static_cast<long long>(context.float32Precision(at::Float32Backend::MKLDNN, op));
  key = key << 8 | static_cast<long long>(c10::typeMetaToScalarType(at::get_default_dtype()));
  for (bool one : {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(),
                   context.deterministicFillUninitializedMemory(), context.userEnabledMkldnn()})
    key = key << 1 | static_cast<long long>(one);
  return PyLong_FromLongLong(key);
}

}  // namespace

namespace marid {

PyMethodDef run_functions[] = {
    {"run_begin", fast(run_begin), METH_FASTCALL, nullptr},
    {"run_once", fast(run_once), METH_FASTCALL, nullptr},
    {"run_tensors", fast(run_tensors), METH_FASTCALL, nullptr},
    {"switches", switches, METH_NOARGS, nullptr},
    held<warnings_begin>("warnings_begin"),
    held<warnings_end>("warnings_end"),
    held<warnings_of>("warnings_of"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
