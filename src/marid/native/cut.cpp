// Choosing what must run and naming it, in the time of a few operations: what graph/tape.py (`Tape.cut`) and
// graph/program.py (`bind`) do in Python, and say why. Tests hold both to the same results.
#include "python.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using marid::Ref;
using marid::Slots;

Slots node, output, task, tape;
enum NodeSlot { kSeq, kOp, kArgs, kKwargs, kRoot, kAfter, kOverwrites, kOuts, kConcrete, kSpec, kSite, kScope };
enum OutputSlot { kOutputNode, kPath, kOutputRoot, kOutputConcrete, kOutputSpec };
enum TaskSlot { kTaskKey, kInputs, kInputSlots, kParams, kTaskSlots, kResults, kOutputs, kEscaping, kNodes, kSpecs };
enum TapeSlot { kEntries, kRecorded, kKept };

PyTypeObject* draw_type;
PyObject *failed, *raise_failure;  // the plain dictionary of nodes that failed; raises the error of one of these
PyObject* minus[5];  // marks in a key, by `Mark`

bool is_node(PyObject* object) { return Py_TYPE(object) == node.type; }
bool is_value(PyObject* object) { return is_node(object) || Py_TYPE(object) == output.type; }
PyObject* concrete_of(PyObject* value) {
  return is_node(value) ? node.at(value, kConcrete) : output.at(value, kOutputConcrete);
}
PyObject* node_of(PyObject* value) { return is_node(value) ? value : output.at(value, kOutputNode); }
PyObject* root_of(PyObject* value) {
  PyObject* root = is_node(value) ? node.at(value, kRoot) : output.at(value, kOutputRoot);
  return root == Py_None ? value : root;
}
long long seq_of(PyObject* of) { return PyLong_AsLongLong(node.at(of, kSeq)); }

// Each value among the arguments of a node, in order. Arguments nest one deep at most.
template <typename Visit>
void each_input(PyObject* of, Visit visit) {
  auto each = [&](PyObject* arg) {
    if (is_value(arg)) {
      visit(arg);
    } else if (PyTuple_CheckExact(arg)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arg); i++) {
        if (is_value(PyTuple_GET_ITEM(arg, i))) visit(PyTuple_GET_ITEM(arg, i));
      }
    }
  };
  PyObject* args = node.at(of, kArgs);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) each(PyTuple_GET_ITEM(args, i));
  PyObject* kwargs = node.at(of, kKwargs);
  if (kwargs == Py_None) return;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwargs); i++) each(PyTuple_GET_ITEM(PyTuple_GET_ITEM(kwargs, i), 1));
}

// --- cutting ---------------------------------------------------------------------------------------------------------

struct Cut {
  std::unordered_set<PyObject*> chosen;
  std::vector<Ref> order;  // the chosen ones, which it keeps
  std::vector<PyObject*> writes;
};

// Raise the error of a node that failed, if it did.
bool has_failed(PyObject* of) {
  if (!marid::any_failed()) return false;
  return !Ref(PyObject_CallOneArg(raise_failure, of));
}

// Add nodes and what they need; false with an error.
bool close(std::vector<Ref> stack, Cut& cut) {
  while (!stack.empty()) {
    Ref held = std::move(stack.back());
    stack.pop_back();
    PyObject* of = held.get();
    if (node.at(of, kArgs) == Py_None) {
      if (has_failed(of)) return false;
      continue;
    }
    if (!cut.chosen.insert(of).second) continue;
    cut.order.push_back(std::move(held));
    each_input(of, [&](PyObject* value) {
      if (concrete_of(value) == Py_None) stack.push_back(Ref::to(node_of(value)));
    });
    PyObject* after = node.at(of, kAfter);
    if (after != Py_None) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(after); i++) stack.push_back(Ref::to(PyTuple_GET_ITEM(after, i)));
    }
    if (node.at(of, kOverwrites) != Py_None) cut.writes.push_back(of);
  }
  return true;
}

// The pending nodes of a tape that are not chosen. Forgets entries of nodes that have run or are gone.
bool others_of(PyObject* on, const Cut& cut, std::vector<Ref>& others) {
  PyObject* entries = tape.at(on, kEntries);
  Py_ssize_t count = PyList_GET_SIZE(entries);
  long long recorded = PyLong_AsLongLong(tape.at(on, kRecorded)) + count - PyLong_AsLongLong(tape.at(on, kKept));
  Ref kept(PyList_New(0));
  if (!kept) return false;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* entry = PyList_GET_ITEM(entries, i);
    PyObject* of = PyWeakref_GetObject(entry);
    if (of == Py_None || node.at(of, kArgs) == Py_None) continue;
    if (PyList_Append(kept.get(), entry) < 0) return false;
    if (cut.chosen.count(of) == 0) others.push_back(Ref::to(of));
  }
  Ref left(PyLong_FromSsize_t(PyList_GET_SIZE(kept.get()))), total(PyLong_FromLongLong(recorded));
  if (!left || !total) return false;
  tape.set(on, kEntries, std::move(kept));
  tape.set(on, kKept, std::move(left));
  tape.set(on, kRecorded, std::move(total));
  return true;
}

// A list of nodes, which it takes, in program order.
PyObject* in_order(std::vector<Ref>& nodes) {
  auto earlier = [](const Ref& a, const Ref& b) { return seq_of(a.get()) < seq_of(b.get()); };
  if (!std::is_sorted(nodes.begin(), nodes.end(), earlier)) std::sort(nodes.begin(), nodes.end(), earlier);
  Ref list(PyList_New(static_cast<Py_ssize_t>(nodes.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < nodes.size(); i++) PyList_SET_ITEM(list.get(), i, nodes[i].release());
  return list.release();
}

// cut(tape, asked): the nodes that must run so that every asked one has run, in program order.
PyObject* cut(PyObject*, PyObject* const* given, Py_ssize_t) {
  Cut found;
  std::vector<Ref> asked;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given[1]); i++) asked.push_back(Ref::to(PyList_GET_ITEM(given[1], i)));
  if (!close(std::move(asked), found)) return nullptr;
  std::vector<Ref> others;  // keeps them while the hazards are looked for
  if (!found.writes.empty() && !others_of(given[0], found, others)) return nullptr;
  while (!found.writes.empty() && !others.empty()) {
    std::unordered_map<PyObject*, long long> overwritten;
    for (PyObject* write : found.writes) {
      PyObject* roots = node.at(write, kOverwrites);
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(roots); i++) {
        long long& last = overwritten[PyTuple_GET_ITEM(roots, i)];
        last = std::max(last, seq_of(write));
      }
    }
    found.writes.clear();
    std::vector<Ref> overtaken;
    for (const Ref& other : others) {
      if (found.chosen.count(other.get()) != 0) continue;
      long long seq = seq_of(other.get());
      bool is_overtaken = false;
      each_input(other.get(), [&](PyObject* value) {
        auto last = overwritten.find(root_of(value));
        is_overtaken = is_overtaken || (last != overwritten.end() && seq < last->second);
      });
      if (is_overtaken) overtaken.push_back(Ref::to(other.get()));
    }
    if (!close(std::move(overtaken), found)) return nullptr;
  }
  return in_order(found.order);
}

// pending(tape): its living nodes that have not run, in program order.
PyObject* pending(PyObject*, PyObject* on) {
  std::vector<Ref> alive;
  return others_of(on, Cut(), alive) ? in_order(alive) : nullptr;
}

// --- binding -----------------------------------------------------------------------------------------------------------

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

// configure_cuts(**names): the classes of the graph layer.
PyObject* configure_cuts(PyObject*, PyObject*, PyObject* names) {
  PyObject *node_type, *output_type, *task_type, *tape_type, *draws, *failures;
  std::pair<const char*, PyObject**> wanted[] = {{"Node", &node_type}, {"Output", &output_type}, {"Task", &task_type},
                                                 {"Tape", &tape_type}, {"Draw", &draws}, {"failures", &failures},
                                                 {"raise_failure", &raise_failure}};
  for (auto [name, place] : wanted) {
    *place = PyDict_GetItemString(names, name);
    if (*place == nullptr) return PyErr_Format(PyExc_TypeError, "configure_cuts() needs %s", name);
    Py_INCREF(*place);
  }
  draw_type = reinterpret_cast<PyTypeObject*>(draws);
  failed = PyObject_GetAttrString(failures, "data");
  if (failed == nullptr || !PyDict_CheckExact(failed)) {
    return PyErr_Format(PyExc_TypeError, "configure_cuts() needs a WeakKeyDictionary for failures");
  }
  for (int i = 0; i < 5; i++) minus[i] = PyLong_FromLong(-1 - i);
  bool found = node.find(
                   node_type, {"seq", "op", "args", "kwargs", "root", "after", "overwrites", "outs", "concrete", "spec", "site",
                              "scope"}) &&
      output.find(output_type, {"node", "path", "root", "concrete", "spec"}) &&
      task.find(
          task_type, {"key", "inputs", "input_slots", "params", "slots", "results", "outputs", "escaping", "nodes", "specs"}) &&
      tape.find(tape_type, {"entries", "_recorded", "_kept"});
  if (!found) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

bool any_failed() { return PyDict_GET_SIZE(failed) > 0; }

void deliver(PyObject* of, PyObject* results) {
  Ref outputs = Ref::to(task.at(of, kOutputs)), nodes = Ref::to(task.at(of, kNodes));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs.get()); i++) {
    PyObject* value = PyList_GET_ITEM(outputs.get(), i);
    Ref tensor = Ref::to(PyList_GET_ITEM(results, i));
    if (is_node(value)) {
      node.set(value, kConcrete, std::move(tensor));
    } else {
      output.set(value, kOutputConcrete, std::move(tensor));
    }
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes.get()); i++) {
    Ref of_task = Ref::to(PyList_GET_ITEM(nodes.get(), i));
    for (int slot : {kArgs, kKwargs, kAfter, kOverwrites}) node.set(of_task.get(), slot, Ref::to(Py_None));
  }
}

// What the module has of this file.
PyMethodDef cut_functions[] = {
    {"pending", pending, METH_O, nullptr},
    {"cut", fast(cut), METH_FASTCALL, nullptr},
    {"bind", fast(bind), METH_FASTCALL, nullptr},
    {"places_of", places_of, METH_O, nullptr},
    {"configure_cuts", fast(configure_cuts), METH_VARARGS | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
