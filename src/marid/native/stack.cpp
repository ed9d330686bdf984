// What the stack of Python's frames says of an operation: the user's line, and the modules and the optimizer that are
// running. semantics/scopes.py says what is made of it, and does the same in Python.
//
// One walk over the interpreter's own frames, without making objects of them, which compares code objects.
#include "record.h"

#include <c10/util/SmallVector.h>

#include <unordered_map>

#if __has_include(<internal/pycore_frame.h>)
#include <torch/csrc/dynamo/cpython_includes.h>
#define MARID_HAS_FRAMES 1
#endif

namespace {

using marid::Ref;

// --- what `configure_stack` is told ----------------------------------------------------------------------------------

PyObject *sites, *internal, *site_table, *site_at, *called_in, *usual_outside, *child_scope, *meet;
PyObject* walk;
PyCodeObject *module_code, *optimizer_code;
Py_ssize_t optimizer_self;
marid::Slots scope_slots;
enum ScopeSlot { kBackward };

// What `set_outside` has said in this thread. Scopes live for good.
constinit thread_local PyObject* outside = nullptr;

#ifdef MARID_HAS_FRAMES

using Frame = _PyInterpreterFrame;

Frame* innermost() {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_Get()->current_frame;
#else
  return PyThreadState_Get()->cframe->current_frame;
#endif
}

// The code object of a frame that runs Python; null for others. Borrowed.
PyCodeObject* code_of(Frame* frame) {
  if (_PyFrame_IsIncomplete(frame)) return nullptr;
  auto* code = reinterpret_cast<PyObject*>(F_CODE(frame));
  return code != nullptr && PyCode_Check(code) ? reinterpret_cast<PyCodeObject*>(code) : nullptr;
}

// A local variable, which inner functions may share; null where it has no value. Borrowed.
PyObject* local(Frame* frame, Py_ssize_t index) {
#if PY_VERSION_HEX >= 0x030E0000
  PyObject* value = static_cast<PyObject*>(THP_PyStackRef_AsPyObjectBorrow(&frame->localsplus[index]));
#else
  PyObject* value = frame->localsplus[index];
#endif
  return value != nullptr && PyCell_Check(value) ? PyCell_GET(value) : value;
}

// --- the user's line -------------------------------------------------------------------------------------------------

// What `sites` holds for a code object, which is kept for good.
auto& tables = *new std::unordered_map<PyCodeObject*, Ref>;

// Borrowed; null after an error.
PyObject* table_of(PyCodeObject* code) {
  auto found = tables.find(code);
  if (found != tables.end()) return found->second.get();
  Ref table(PyObject_CallOneArg(site_table, reinterpret_cast<PyObject*>(code)));
  // Another thread may have come here meanwhile, with the same table.
  return table ? tables.emplace(code, std::move(table)).first->second.get() : nullptr;
}

// What is known of an instruction: the site there, and whether that is in an installed package (whose tables are of a
// subclass of dict). Null where it is internal. Borrowed: sites live for good, and so do code objects that have a table.
struct Place {
  PyCodeObject* code;
  int instruction;
  bool in_package;
  PyObject* site;
};
constexpr size_t kPlaces = 1 << 12;
Place places[kPlaces];  // by the lower bits of both

// False after an error.
bool find_place(Frame* frame, PyCodeObject* code, Place* found) {
  int at = static_cast<int>(_PyInterpreterFrame_LASTI(frame)) * static_cast<int>(sizeof(_Py_CODEUNIT));
  Place& kept = places[(reinterpret_cast<size_t>(code) >> 4 ^ static_cast<size_t>(at) * 31) % kPlaces];
  if (kept.code == code && kept.instruction == at) {
    *found = kept;
    return true;
  }
  PyObject* table = table_of(code);
  if (table == nullptr) return false;
  *found = {code, at, false, nullptr};
  if (table != internal) {
    Ref instruction(PyLong_FromLong(at));
    if (!instruction) return false;
    found->in_package = !PyDict_CheckExact(table);
    found->site = PyDict_GetItemWithError(table, instruction.get());
    if (found->site == nullptr) {
      if (PyErr_Occurred()) return false;
      // The table has it from here on.
      found->site = Ref(PyObject_CallFunctionObjArgs(site_at, reinterpret_cast<PyObject*>(code), instruction.get(), nullptr)).get();
      if (found->site == nullptr) return false;
    }
  }
  kept = *found;
  return true;
}

// Code that is not the user's, by the lower bits of its address: frames of packages are often many, and lie between the
// line of a package and the user's. Code objects that have a table are kept for good.
constexpr size_t kPassed = 1 << 10;
PyCodeObject* passed[kPassed];
PyCodeObject*& passed_at(PyCodeObject* code) {
  auto address = reinterpret_cast<size_t>(code);
  return passed[(address >> 4 ^ address >> 14) % kPassed];
}

struct TwoHash {
  size_t operator()(const std::pair<PyObject*, PyObject*>& two) const {
    return (reinterpret_cast<size_t>(two.first) >> 4) * 31 + (reinterpret_cast<size_t>(two.second) >> 4);
  }
};
auto& calls = *new std::unordered_map<std::pair<PyObject*, PyObject*>, Ref, TwoHash>;  // sites live for good

// The user's site that has called a line of a package; borrowed. Null after an error.
PyObject* site_calling(PyObject* site, PyObject* package) {
  auto found = calls.find({site, package});
  if (found != calls.end()) return found->second.get();
  Ref made(PyObject_CallFunctionObjArgs(called_in, site, package, nullptr));
  return made ? calls.emplace(std::pair{site, package}, std::move(made)).first->second.get() : nullptr;
}

// --- the scope -------------------------------------------------------------------------------------------------------

// A module that is called in a scope, by the parent whose call is running. Scopes live for good.
struct Key {
  PyObject *scope, *parent, *module;
  bool operator==(const Key&) const = default;
};
struct Hash {
  size_t operator()(const Key& key) const {
    auto number = [](PyObject* object) { return reinterpret_cast<size_t>(object) >> 4; };
    return (number(key.scope) * 31 + number(key.parent)) * 31 + number(key.module);
  }
};
// The scope inside of it, as long as these are the same objects: an address may be another's later.
struct Inside {
  Ref parent, module;  // weak references
  PyTypeObject* type;
  Ref scope;
};
auto& insides = *new std::unordered_map<Key, Inside, Hash>;  // stays when the interpreter is gone
// The scopes that were found last, by modules from the outermost inward: nearly always operations come from the same call, or
// from one in the same modules outside. Holds as long as `insides` has what it was made of.
struct Called {
  PyObject* module;
  PyTypeObject* type;
  PyObject* scope;  // inside of it
};
struct Chain {
  PyObject* outermost = nullptr;
  c10::SmallVector<Called, 16> calls;
};
auto& last_chain = *new Chain;
void forget_chain() { last_chain.calls.clear(); }
PyObject* forget_gone(PyObject*, PyObject*) {
  forget_chain();
  Py_RETURN_NONE;
}
PyMethodDef forget_gone_method = {"forget_gone", forget_gone, METH_O, nullptr};
// The scope of an optimizer's step, which `meet` has said; as long as it is the same object.
struct Step {
  Ref optimizer;  // a weak reference
  Ref scope;
};
auto& optimizers = *new std::unordered_map<PyObject*, Step>;
constexpr size_t kMany = 1 << 14;  // entries, before those of objects that are gone are forgotten with the others

bool is_of(const Ref& weak, PyObject* object) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(weak.get(), &found) < 0) PyErr_Clear();
  return Ref(found).get() == object;
#else
  return PyWeakref_GetObject(weak.get()) == object;
#endif
}

// Borrowed; null after an error.
PyObject* inside(PyObject* scope, PyObject* parent, PyObject* module) {
  Key key{scope, parent, module};
  auto found = insides.find(key);
  if (found != insides.end()) {
    const Inside& known = found->second;
    bool same = is_of(known.module, module) && known.type == Py_TYPE(module);
    if (same && (parent == nullptr || is_of(known.parent, parent))) return known.scope.get();
    insides.erase(found);
    forget_chain();
  }
  PyObject* above = parent == nullptr ? Py_None : parent;
  Ref child(PyObject_CallFunctionObjArgs(child_scope, scope, above, module, nullptr));
  Ref weak_parent(parent == nullptr ? nullptr : PyWeakref_NewRef(parent, nullptr));
  static PyObject* when_gone = PyCFunction_New(&forget_gone_method, nullptr);
  Ref weak_module(PyWeakref_NewRef(module, when_gone));
  if (!child || !weak_module || (parent != nullptr && !weak_parent)) return nullptr;
  if (insides.size() >= kMany) {
    insides.clear();
    forget_chain();
  }
  PyObject* made = child.get();
  insides.insert_or_assign(
      key, Inside{std::move(weak_parent), std::move(weak_module), Py_TYPE(module), std::move(child)});
  return made;
}

// The scope inside of all of these, which are in order from the innermost outward. Borrowed; null after an error.
PyObject* innermost_scope(PyObject* outermost, c10::ArrayRef<PyObject*> modules) {
  auto& calls = last_chain.calls;
  if (std::exchange(last_chain.outermost, outermost) != outermost) calls.clear();
  auto module = [&](size_t depth) { return modules[modules.size() - 1 - depth]; };
  size_t known = 0;
  while (known < calls.size() && known < modules.size() && calls[known].module == module(known) &&
         calls[known].type == Py_TYPE(module(known))) {
    known++;
  }
  PyObject* found = known == 0 ? outermost : calls[known - 1].scope;
  for (size_t depth = known; depth < modules.size(); depth++) {
    found = inside(found, depth == 0 ? nullptr : module(depth - 1), module(depth));
    if (found == nullptr) return nullptr;
    if (calls.size() < depth) return innermost_scope(outermost, modules);  // forgotten meanwhile
    calls.resize(depth);
    calls.push_back({module(depth), Py_TYPE(module(depth)), found});
  }
  return found;
}

// Borrowed; null after an error.
PyObject* met(PyObject* optimizer) {
  auto found = optimizers.find(optimizer);
  if (found != optimizers.end() && is_of(found->second.optimizer, optimizer)) return found->second.scope.get();
  Ref weak(PyWeakref_NewRef(optimizer, nullptr));
  Ref scope(weak ? PyObject_CallOneArg(meet, optimizer) : nullptr);
  if (!scope) return nullptr;
  if (optimizers.size() >= kMany) optimizers.clear();
  PyObject* kept = scope.get();
  optimizers.insert_or_assign(optimizer, Step{std::move(weak), std::move(scope)});
  return kept;
}

#endif

}  // namespace

bool marid::where(PyObject** site, PyObject** scope) {
#ifdef MARID_HAS_FRAMES
  c10::SmallVector<PyObject*, 16> modules;  // from the innermost outward; their frames hold them
  PyObject* optimizer = nullptr;
  PyObject *own = nullptr, *package = nullptr;  // the user's line, and the innermost of an installed package inside of it
  for (Frame* frame = innermost(); frame != nullptr; frame = frame->previous) {
    auto* any = reinterpret_cast<PyCodeObject*>(F_CODE(frame));
    // Once the site is known only these matter, and the rest of the stack is passed over quickly.
    if (site == nullptr || own != nullptr || (package != nullptr && passed_at(any) == any)) {
      if (any != module_code && any != optimizer_code) continue;
    }
    PyCodeObject* code = code_of(frame);
    if (code == nullptr) continue;
    if (site != nullptr && own == nullptr) {
      Place found;
      if (!find_place(frame, code, &found)) return false;
      if (found.site == nullptr || found.in_package) {
        passed_at(code) = code;
        if (package == nullptr) package = found.site;
      } else {
        own = package != nullptr ? site_calling(found.site, package) : found.site;
        if (own == nullptr) return false;
      }
      if (own != nullptr && scope == nullptr) break;
    }
    if (scope == nullptr || optimizer != nullptr) continue;
    if (code == module_code) {
      PyObject* module = local(frame, 0);
      if (module != nullptr) modules.push_back(module);
    } else if (code == optimizer_code) {
      optimizer = local(frame, optimizer_self);
      if (optimizer != nullptr && own != nullptr) break;  // what called it has no part in this
    }
  }
  if (site != nullptr) *site = own != nullptr ? own : package != nullptr ? package : Py_None;
  if (scope == nullptr) return true;
  PyObject* step = optimizer != nullptr ? met(optimizer) : nullptr;
  if (optimizer != nullptr && step == nullptr) return false;
  if (modules.empty() && step != nullptr) {
    *scope = step;
    return true;
  }
  *scope = innermost_scope(outside == nullptr ? usual_outside : outside, modules);
  return *scope != nullptr;
#else
  Ref both(PyObject_CallNoArgs(walk));
  if (!both) return false;
  if (site != nullptr) *site = PyTuple_GET_ITEM(both.get(), 0);
  if (scope != nullptr) *scope = PyTuple_GET_ITEM(both.get(), 1);
  return true;
#endif
}

namespace {

// configure_stack(**names): see semantics/scopes.py.
PyObject* configure_stack(PyObject*, PyObject*, PyObject* names) {
  PyObject *module, *optimizer, *self;
  std::pair<const char*, PyObject**> wanted[] = {
      {"sites", &sites}, {"internal", &internal}, {"site_table", &site_table}, {"site_at", &site_at},
      {"called_in", &called_in},
      {"outside", &usual_outside}, {"child_scope", &child_scope}, {"meet", &meet},
      {"walk", &walk}, {"module_code", &module}, {"optimizer_code", &optimizer}, {"optimizer_self", &self}};
  for (auto [name, place] : wanted) {
    *place = PyDict_GetItemString(names, name);
    if (*place == nullptr) return PyErr_Format(PyExc_TypeError, "configure_stack() needs %s", name);
    Py_INCREF(*place);
  }
  module_code = reinterpret_cast<PyCodeObject*>(module);
  optimizer_code = reinterpret_cast<PyCodeObject*>(optimizer);
  optimizer_self = PyLong_AsSsize_t(self);
  if (!scope_slots.find(reinterpret_cast<PyObject*>(Py_TYPE(usual_outside)), {"backward"})) return nullptr;
  Py_RETURN_NONE;
}

// set_outside(scope): the scope outside of all modules, in this thread.
PyObject* set_outside(PyObject*, PyObject* scope) {
  outside = scope;
  Py_RETURN_NONE;
}

// here(): the user's line that is running now; scopes.current_site, quicker.
PyObject* here(PyObject*, PyObject*) {
  PyObject* site;
  return marid::where(&site, nullptr) ? Py_NewRef(site) : nullptr;
}

// scope(): the modules, or the optimizer, that are running now; scopes.current_scope, quicker.
PyObject* scope(PyObject*, PyObject*) {
  PyObject* found;
  return marid::where(nullptr, &found) ? Py_NewRef(found) : nullptr;
}

// forget_optimizers(): tell `meet` of each again.
PyObject* forget_optimizers(PyObject*, PyObject*) {
#ifdef MARID_HAS_FRAMES
  optimizers.clear();
#endif
  Py_RETURN_NONE;
}

}  // namespace

namespace marid {

const void* running_frame() {
#ifdef MARID_HAS_FRAMES
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  return thread->current_frame;
#else
  return thread->cframe->current_frame;
#endif
#else
  return nullptr;
#endif
}

PyObject* running_code() {
#ifdef MARID_HAS_FRAMES
  for (Frame* frame = innermost(); frame != nullptr; frame = frame->previous) {
    if (PyCodeObject* code = code_of(frame)) return reinterpret_cast<PyObject*>(code);
  }
  return nullptr;
#else
  PyFrameObject* frame = PyEval_GetFrame();
  return frame == nullptr ? nullptr : Ref(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame))).get();
#endif
}

PyObject* backward_of(PyObject* scope) { return scope_slots.at(scope, kBackward); }

PyMethodDef stack_functions[] = {
    {"configure_stack", fast(configure_stack), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"set_outside", set_outside, METH_O, nullptr},
    {"here", here, METH_NOARGS, nullptr},
    {"scope", scope, METH_NOARGS, nullptr},
    {"forget_optimizers", forget_optimizers, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
