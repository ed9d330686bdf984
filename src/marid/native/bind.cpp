// Naming what must run: `bind` in graph/program.py, which says what a key is; and handing out what it has made.
#include "nodes.h"

#include <unordered_map>
#include <vector>

namespace {

using namespace marid;

Slots task;
enum TaskSlot { kTaskKey, kInputs, kInputSlots, kParams, kTaskSlots, kResults, kOutputs, kEscaping, kNodes, kSpecs };

PyTypeObject* draw_type;
PyObject* minus[5];  // marks in a key, by `Mark`

enum Mark { kParam, kList, kKeywords, kInput, kEscapes };

struct Binding {
  Ref inputs, input_slots, params, slots, results, outputs, escaping;
  std::vector<PyObject*> key;  // owned
  std::vector<PyObject*> specs;  // by slot
  std::unordered_map<PyObject*, Py_ssize_t> slot_of, inner;
  ~Binding() {
    for (PyObject* part : key) Py_DECREF(part);
  }
  void put(PyObject* part) { key.push_back(Py_NewRef(part)); }
  void put(Mark mark) { put(minus[mark]); }
  bool number(PyObject* value) {  // the next slot
    Ref slot(PyLong_FromSsize_t(static_cast<Py_ssize_t>(slot_of.size())));
    if (!slot || PyDict_SetItem(slots.get(), value, slot.get()) < 0) return false;
    slot_of.emplace(value, static_cast<Py_ssize_t>(slot_of.size()));
    specs.push_back(is_node(value) ? node.at(value, kSpec) : output.at(value, kOutputSpec));
    return true;
  }
  bool put_number(Py_ssize_t number) {
    PyObject* part = PyLong_FromSsize_t(number);
    if (part != nullptr) key.push_back(part);
    return part != nullptr;
  }
};

bool is_numbers(PyObject* tuple) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
    PyObject* item = PyTuple_GET_ITEM(tuple, i);
    if (!PyLong_CheckExact(item) && !PyFloat_CheckExact(item) && !PyBool_Check(item)) return false;
  }
  return true;
}

bool bind_argument(Binding& to, PyObject* arg) {
  if (is_value(arg)) {
    auto found = to.slot_of.find(arg);
    if (found != to.slot_of.end()) {
      to.inner[arg]++;
      return to.put_number(found->second);
    }
    Py_ssize_t slot = static_cast<Py_ssize_t>(to.slot_of.size());
    Ref number(PyLong_FromSsize_t(slot));
    if (!number || !to.number(arg) || PyList_Append(to.inputs.get(), concrete_of(arg)) < 0 ||
        PyList_Append(to.input_slots.get(), number.get()) < 0) {
      return false;
    }
    to.put(kInput);
    return to.put_number(slot);
  }
  PyTypeObject* type = Py_TYPE(arg);
  if (type == &PyFloat_Type || type == &PyLong_Type || type == &PyComplex_Type || type == draw_type ||
      (type == &PyTuple_Type && is_numbers(arg))) {
    to.put(kParam);
    return PyList_Append(to.params.get(), arg) == 0;
  }
  if (type == &PyTuple_Type) {
    to.put(kList);
    if (!to.put_number(PyTuple_GET_SIZE(arg))) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arg); i++) {
      if (!bind_argument(to, PyTuple_GET_ITEM(arg, i))) return false;
    }
    return true;
  }
  to.put(reinterpret_cast<PyObject*>(type));
  to.put(arg);
  return true;
}

void count_all(Binding& to, PyObject* tuple) {
  if (tuple == Py_None) return;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) to.inner[PyTuple_GET_ITEM(tuple, i)]++;
}

// Number the tensors of a node, and count the references that the cut holds.
bool bind_node(Binding& to, PyObject* of) {
  to.put(node.at(of, kOp));
  PyObject* args = node.at(of, kArgs);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
    if (!bind_argument(to, PyTuple_GET_ITEM(args, i))) return false;
  }
  PyObject* kwargs = node.at(of, kKwargs);
  if (kwargs != Py_None) {
    to.put(kKeywords);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwargs); i++) {
      PyObject* pair = PyTuple_GET_ITEM(kwargs, i);
      to.put(PyTuple_GET_ITEM(pair, 0));
      if (!bind_argument(to, PyTuple_GET_ITEM(pair, 1))) return false;
    }
  }
  count_all(to, node.at(of, kAfter));
  count_all(to, node.at(of, kOverwrites));
  if (node.at(of, kRoot) != Py_None) to.inner[node.at(of, kRoot)]++;
  PyObject* refs = node.at(of, kOuts);
  if (refs == Py_None) return to.number(of) && PyList_Append(to.results.get(), Py_None) == 0;
  Ref outs(PyList_New(0)), all(PySequence_Fast(refs, "results are in a list or tuple"));
  if (!outs || !all) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); i++) {
    PyObject* out = PyWeakref_GetObject(PySequence_Fast_GET_ITEM(all.get(), i));
    if (out == Py_None) continue;
    if (PyList_Append(outs.get(), out) < 0 || !to.number(out)) return false;
    if (output.at(out, kOutputRoot) != Py_None) to.inner[output.at(out, kOutputRoot)]++;
  }
  return PyList_Append(to.results.get(), outs.get()) == 0;
}

// Whether somebody outside of the cut holds a value: beyond what is in it, `slots` and a list hold it once each.
bool escapes(const Binding& to, PyObject* value) {
  auto inside = to.inner.find(value);
  return Py_REFCNT(value) - 2 > (inside == to.inner.end() ? 0 : inside->second);
}

bool let_escape(Binding& to, PyObject* value) {
  Ref slot(PyLong_FromSsize_t(to.slot_of[value]));
  return slot && PySet_Add(to.escaping.get(), slot.get()) == 0 && PyList_Append(to.outputs.get(), value) == 0;
}

bool find_escaping(Binding& to, PyObject* nodes) {
  std::vector<PyObject*> roots;
  auto note_root = [&](PyObject* value) {
    if (root_of(value) != value) roots.push_back(root_of(value));
  };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
    PyObject *of = PyList_GET_ITEM(nodes, i), *outs = PyList_GET_ITEM(to.results.get(), i);
    if (outs == Py_None) {
      if (!escapes(to, of)) continue;
      to.put(kEscapes);
      if (!to.put_number(to.slot_of[of]) || !let_escape(to, of)) return false;
      note_root(of);
      continue;
    }
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(outs); j++) {
      PyObject* out = PyList_GET_ITEM(outs, j);
      to.put(output.at(out, kPath));
      if (!to.put_number(to.slot_of[out])) return false;
      if (!escapes(to, out)) continue;
      to.put(kEscapes);
      if (!let_escape(to, out)) return false;
      note_root(out);
    }
  }
  for (PyObject* root : roots) {
    auto found = to.slot_of.find(root);
    if (found == to.slot_of.end() || concrete_of(root) != Py_None) continue;
    Ref slot(PyLong_FromSsize_t(found->second));
    int already = slot ? PySet_Contains(to.escaping.get(), slot.get()) : -1;
    if (already < 0) return false;
    if (already == 1) continue;
    to.put(kEscapes);
    if (!to.put_number(found->second) || !let_escape(to, root)) return false;
  }
  return true;
}

// bind(task, nodes): fill in everything of a task but its nodes, which are in this list and nowhere else.
PyObject* bind(PyObject*, PyObject* const* given, Py_ssize_t) {
  PyObject *of = given[0], *nodes = given[1];
  Binding to;
  to.inputs = Ref(PyList_New(0));
  to.input_slots = Ref(PyList_New(0));
  to.params = Ref(PyList_New(0));
  to.slots = Ref(PyDict_New());
  to.results = Ref(PyList_New(0));
  to.outputs = Ref(PyList_New(0));
  to.escaping = Ref(PySet_New(nullptr));
  if (!to.inputs || !to.input_slots || !to.params || !to.slots || !to.results || !to.outputs || !to.escaping) return nullptr;
  to.key.reserve(8 * PyList_GET_SIZE(nodes));
  to.slot_of.reserve(2 * PyList_GET_SIZE(nodes));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
    if (!bind_node(to, PyList_GET_ITEM(nodes, i))) return nullptr;
  }
  if (!find_escaping(to, nodes)) return nullptr;
  Ref key(PyTuple_New(static_cast<Py_ssize_t>(to.key.size())));
  Ref specs(PyTuple_New(static_cast<Py_ssize_t>(to.specs.size())));
  if (!key || !specs) return nullptr;
  for (size_t i = 0; i < to.specs.size(); i++) PyTuple_SET_ITEM(specs.get(), i, Py_NewRef(to.specs[i]));
  for (size_t i = 0; i < to.key.size(); i++) PyTuple_SET_ITEM(key.get(), i, Py_NewRef(to.key[i]));
  task.set(of, kTaskKey, std::move(key));
  task.set(of, kInputs, std::move(to.inputs));
  task.set(of, kInputSlots, std::move(to.input_slots));
  task.set(of, kParams, std::move(to.params));
  task.set(of, kTaskSlots, std::move(to.slots));
  task.set(of, kSpecs, std::move(specs));
  task.set(of, kResults, std::move(to.results));
  task.set(of, kOutputs, std::move(to.outputs));
  task.set(of, kEscaping, std::move(to.escaping));
  Py_RETURN_NONE;
}

// places_of(nodes): the site and the scope of each, one after the other.
PyObject* places_of(PyObject*, PyObject* nodes) {
  Py_ssize_t count = PyList_GET_SIZE(nodes);
  PyObject* places = PyTuple_New(2 * count);
  for (Py_ssize_t i = 0; places != nullptr && i < count; i++) {
    PyObject* of = PyList_GET_ITEM(nodes, i);
    PyTuple_SET_ITEM(places, 2 * i, Py_NewRef(node.at(of, kSite)));
    PyTuple_SET_ITEM(places, 2 * i + 1, Py_NewRef(node.at(of, kScope)));
  }
  return places;
}

// configure_binding(**names): the classes of the graph layer.
PyObject* configure_binding(PyObject*, PyObject*, PyObject* names) {
  PyObject *task_type = PyDict_GetItemString(names, "Task"), *draws = PyDict_GetItemString(names, "Draw");
  if (task_type == nullptr || draws == nullptr) {
    return PyErr_Format(PyExc_TypeError, "configure_binding() needs Task and Draw");
  }
  draw_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(draws));
  for (int i = 0; i < 5; i++) minus[i] = PyLong_FromLong(-1 - i);
  bool found = task.find(
      task_type, {"key", "inputs", "input_slots", "params", "slots", "results", "outputs", "escaping", "nodes", "specs"});
  if (!found) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

namespace {

void set_concrete(PyObject* value, Ref to) {
  if (is_node(value)) {
    node.set(value, kConcrete, std::move(to));
  } else {
    output.set(value, kOutputConcrete, std::move(to));
  }
}

}  // namespace

void deliver(PyObject* of, PyObject* results) {
  Ref outputs = Ref::to(task.at(of, kOutputs)), nodes = Ref::to(task.at(of, kNodes));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs.get()); i++) {
    set_concrete(PyList_GET_ITEM(outputs.get(), i), Ref::to(PyList_GET_ITEM(results, i)));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes.get()); i++) {
    Ref of_task = Ref::to(PyList_GET_ITEM(nodes.get(), i));
    for (int slot : kNeeds) node.set(of_task.get(), slot, Ref::to(Py_None));
  }
}

namespace {

// hand_over(task, flight, kept): its nodes are in flight, and its values hold the flight. What each node needed, and forgets, is
// put into the list `kept`: `args`, `kwargs`, `after` and `overwrites`, one after the other. No interrupt comes in between.
PyObject* hand_over(PyObject*, PyObject* const* given, Py_ssize_t) {
  Ref outputs = Ref::to(task.at(given[0], kOutputs)), nodes = Ref::to(task.at(given[0], kNodes));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes.get()); i++) {
    for (int slot : kNeeds) {
      if (PyList_Append(given[2], node.at(PyList_GET_ITEM(nodes.get(), i), slot)) < 0) return nullptr;
    }
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes.get()); i++) {
    PyObject* of = PyList_GET_ITEM(nodes.get(), i);
    for (int slot : kNeeds) node.set(of, slot, Ref::to(Py_None));
    node.set(of, kAfter, Ref(PyTuple_New(0)));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs.get()); i++) {
    set_concrete(PyList_GET_ITEM(outputs.get(), i), Ref::to(given[1]));
  }
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef bind_functions[] = {
    {"bind", fast(bind), METH_FASTCALL, nullptr},
    {"hand_over", fast(hand_over), METH_FASTCALL, nullptr},
    {"places_of", places_of, METH_O, nullptr},
    {"configure_binding", fast(configure_binding), METH_VARARGS | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
