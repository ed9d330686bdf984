// Nodes and their outputs (graph/node.py), as all files have them: Python objects with __slots__, read and written where the
// slots lie.
#pragma once
#include "python.h"

namespace marid {

extern Slots node, output;  // found when cut.cpp is configured
enum NodeSlot { kSeq, kOp, kArgs, kKwargs, kSpec, kRoot, kSite, kScope, kAfter, kOverwrites, kOuts, kConcrete };
constexpr int kNeeds[] = {kArgs, kKwargs, kAfter, kOverwrites};  // what a node forgets when it has run
enum OutputSlot { kOutputNode, kPath, kOutputSpec, kOutputRoot, kOutputConcrete };

inline bool is_node(PyObject* object) { return Py_TYPE(object) == node.type; }
inline bool is_value(PyObject* object) { return is_node(object) || Py_TYPE(object) == output.type; }

// Of a value; borrowed.
inline PyObject* spec_of(PyObject* value) { return is_node(value) ? node.at(value, kSpec) : output.at(value, kOutputSpec); }
inline PyObject* node_of(PyObject* value) { return is_node(value) ? value : output.at(value, kOutputNode); }
inline PyObject* concrete_of(PyObject* value) {
  return is_node(value) ? node.at(value, kConcrete) : output.at(value, kOutputConcrete);
}
inline PyObject* root_of(PyObject* value) {
  PyObject* root = is_node(value) ? node.at(value, kRoot) : output.at(value, kOutputRoot);
  return root == Py_None ? value : root;
}

// Whether a node was handed over, and has not landed.
inline bool is_in_flight(PyObject* of) {
  PyObject* after = node.at(of, kAfter);
  return after != Py_None && PyTuple_GET_SIZE(after) == 0;
}

// Each value among the arguments of a node that is pending, in order. Arguments nest one deep at most.
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

}  // namespace marid
