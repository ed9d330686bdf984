// The Python module: what recording is told of Python's half, and the functions of all files.
#include "immediate.h"
#include "known_calls.h"
#include "recorder.h"

#include <cstring>
#include <exception>

namespace marid {

Slots operation, storage, recorder, known, tape, spec;
PyObject *tapes, *last_write_of, *run_pending, *draw_for, *dispatch, *make_recorder_of, *resize_memory, *recorders, *address_name;

}  // namespace marid

namespace {

using namespace marid;

PyObject* torch_function;  // of handles
PyObject *not_recorded, *bucket, *bounds;  // see frontend/calls.py

// configure(**names): the classes and functions that recording needs.
PyObject* configure(PyObject*, PyObject*, PyObject* names) {
  PyObject *operation_type, *storage_type, *recorder_type, *known_type, *tape_type, *spec_type;
  std::pair<const char*, PyObject**> wanted[] = {
      {"Operation", &operation_type}, {"Storage", &storage_type},
      {"Recorder", &recorder_type}, {"Known", &known_type}, {"Tape", &tape_type}, {"Spec", &spec_type}, {"not_recorded", &not_recorded},
      {"bucket", &bucket}, {"bounds", &bounds}, {"tapes", &tapes}, {"last_write", &last_write_of}, {"run_pending", &run_pending}, {"draw_for", &draw_for},
      {"dispatch", &dispatch}, {"recorder_of", &make_recorder_of}, {"resize_memory", &resize_memory}, {"spec_of", &find_spec}};
  for (auto [name, place] : wanted) {
    *place = PyDict_GetItemString(names, name);
    if (*place == nullptr) return PyErr_Format(PyExc_TypeError, "configure() needs %s", name);
    Py_INCREF(*place);
  }
  bool found = operation.find(operation_type, {"mutates"}) &&
      storage.find(storage_type, {"last_read", "last_write", "handle"}) &&
      recorder.find(
          recorder_type, {"op", "plain", "draws", "indexes", "same_value", "exact_floats", "exact_lists", "known", "bumps",
                          "deriver", "at_once", "at_once_by_rule"}) &&
      known.find(
          known_type, {"repeats", "spec", "pattern", "view_of", "returned", "several", "writes", "tape", "cost"}) &&
      tape.find(tape_type, {"sequence", "entries", "budget", "immediate"}) && spec.find(spec_type, {"pattern", "device"});
  if (!found || !marid::set_bounds(bounds)) return nullptr;
  marid::prepare_reading(bucket);
  Py_RETURN_NONE;
}

// record_calls(): have operators on tensors of the device recorded, also those that are new since the last call.
PyObject* record_calls(PyObject*, PyObject*) {
  try {
    marid::register_kernels(not_recorded);
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
  }
  Py_RETURN_NONE;
}

// new_handle(pattern, value, alone): a tensor of the device that looks like a pattern, given by its address.
PyObject* new_handle(PyObject*, PyObject* const* given, Py_ssize_t) {
  auto* pattern = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(given[0]));
  if (pattern == nullptr) return nullptr;
  at::Tensor made = marid::new_handle(pattern, given[1], given[2] == Py_True);
  return made.defined() ? THPVariable_Wrap(made) : nullptr;
}

// use(recorders): find recorders in this dict, by identity of the operator. To be said again when one is taken out of it.
PyObject* use(PyObject*, PyObject* table) {
  Py_XSETREF(recorders, Py_NewRef(table));
  marid::uses_of_tables++;
  Py_RETURN_NONE;
}

// An attribute by a name in C. So PyTorch asks of each tensor that it is given whether a Python function takes the call
// over, which for handles none does; making a string of the name, and looking that up, would take it a third of a microsecond.
PyObject* attribute_of(PyObject* object, char* name) {
  if (Py_TYPE(object) == handle_type && std::strcmp(name, "__torch_function__") == 0) return Py_NewRef(torch_function);
  Ref made(PyUnicode_FromString(name));
  return made ? PyObject_GetAttr(object, made.get()) : nullptr;
}

// forget_known(): something that is known of calls has changed.
PyObject* forget_known(PyObject*, PyObject*) {
  marid::forget_known_calls();
  Py_RETURN_NONE;
}

// make_handles(type): what own tensors are.
PyObject* make_handles(PyObject*, PyObject* type) {
  torch_function = PyObject_GetAttrString(type, "__torch_function__");
  if (torch_function == nullptr) return nullptr;
  if (!marid::prepare_handles(type)) return nullptr;
  handle_type->tp_getattr = attribute_of;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"configure", marid::fast(configure), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"record_calls", record_calls, METH_NOARGS, nullptr},
    {"new_handle", marid::fast(new_handle), METH_FASTCALL, nullptr},
    {"use", use, METH_O, nullptr},
    {"forget_known", forget_known, METH_NOARGS, nullptr},
    {"make_handles", make_handles, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "marid_native", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

namespace marid {
extern PyMethodDef kernel_functions[], cut_functions[], bind_functions[], concretely_functions[], run_functions[], derive_functions[],
    geometry_functions[], autocast_functions[], stack_functions[], immediate_functions[], reading_functions[], resident_functions[],
    host_call_functions[], graph_memory_functions[], device_functions[], memory_functions[], placement_functions[],
    program_functions[], execute_functions[], compiled_functions[], queue_functions[], product_functions[], quantized_functions[],
    trial_functions[], state_functions[], instance_check_functions[], backward_functions[], random_functions[],
    tuple_functions[], handle_functions[];
}

PyMODINIT_FUNC PyInit_marid_native() {
  address_name = PyUnicode_InternFromString("_cdata");
  PyObject* made = PyModule_Create(&module);
  for (PyMethodDef* more :
       {marid::kernel_functions, marid::cut_functions, marid::bind_functions, marid::concretely_functions, marid::run_functions,
        marid::derive_functions, marid::geometry_functions, marid::autocast_functions, marid::host_call_functions,
        marid::stack_functions, marid::immediate_functions, marid::reading_functions, marid::resident_functions,
        marid::graph_memory_functions,
        marid::device_functions, marid::memory_functions, marid::placement_functions, marid::program_functions,
        marid::execute_functions, marid::compiled_functions, marid::queue_functions, marid::product_functions,
        marid::quantized_functions, marid::trial_functions, marid::state_functions, marid::instance_check_functions,
        marid::backward_functions, marid::random_functions, marid::tuple_functions,
        marid::handle_functions}) {
    if (made != nullptr && PyModule_AddFunctions(made, more) < 0) Py_CLEAR(made);
  }
  return made;
}
