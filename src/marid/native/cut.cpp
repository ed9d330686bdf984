// Choosing what must run, in the time of a few operations: `Tape.cut` in graph/tape.py, which says why.
#include "nodes.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using namespace marid;

Slots tape;
enum TapeSlot { kEntries, kRecorded, kKept };

PyObject *failed, *raise_failure;  // the plain dictionary of nodes that failed; raises the error of one of these

long long seq_of(PyObject* of) { return PyLong_AsLongLong(node.at(of, kSeq)); }

// --- cutting ---------------------------------------------------------------------------------------------------------

struct Cut {
  std::unordered_set<PyObject*> chosen;
  std::vector<Ref> order;  // the chosen ones, which it keeps
  std::vector<PyObject*> writes;
};

// Raise the error of a node that failed, if it did.
bool has_failed(PyObject* of) {
  if (!any_failed()) return false;
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

// configure_cuts(**names): the classes of the graph layer.
PyObject* configure_cuts(PyObject*, PyObject*, PyObject* names) {
  PyObject *node_type, *output_type, *tape_type, *failures;
  std::pair<const char*, PyObject**> wanted[] = {{"Node", &node_type}, {"Output", &output_type}, {"Tape", &tape_type},
                                                 {"failures", &failures}, {"raise_failure", &raise_failure}};
  for (auto [name, place] : wanted) {
    *place = PyDict_GetItemString(names, name);
    if (*place == nullptr) return PyErr_Format(PyExc_TypeError, "configure_cuts() needs %s", name);
    Py_INCREF(*place);
  }
  failed = PyObject_GetAttrString(failures, "data");
  if (failed == nullptr || !PyDict_CheckExact(failed)) {
    return PyErr_Format(PyExc_TypeError, "configure_cuts() needs a WeakKeyDictionary for failures");
  }
  bool found = node.find(
                   node_type, {"seq", "op", "args", "kwargs", "spec", "root", "site", "scope", "after", "overwrites", "outs",
                               "concrete"}) &&
      output.find(output_type, {"node", "path", "spec", "root", "concrete"}) &&
      tape.find(tape_type, {"entries", "_recorded", "_kept"});
  if (!found) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

Slots node, output;

bool any_failed() { return PyDict_GET_SIZE(failed) > 0; }

PyMethodDef cut_functions[] = {
    {"pending", pending, METH_O, nullptr},
    {"cut", fast(cut), METH_FASTCALL, nullptr},
    {"configure_cuts", fast(configure_cuts), METH_VARARGS | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
