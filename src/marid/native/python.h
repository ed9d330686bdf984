// Python objects in C++: references that are given back, and attributes of classes with __slots__.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <array>
#include <initializer_list>
#include <utility>

namespace marid {

// A reference that is given back.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref to(PyObject* borrowed) { return Ref(Py_NewRef(borrowed)); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// The interpreter's lock, for as long as this lives.
class InterpreterLock {
 public:
  InterpreterLock() : state_(PyGILState_Ensure()) {}
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;
  ~InterpreterLock() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// The opposite: other threads may have the interpreter's lock, for as long as this lives.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {}
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;
  ~WithoutLock() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Give references back, with the interpreter's lock or without it; where the process ends nothing is left to give to.
inline void give_up(std::initializer_list<Ref*> held) {
  bool empty = true;
  for (Ref* one : held) empty = empty && !*one;
  if (empty) return;
  if (Py_IsInitialized() == 0) {
    for (Ref* one : held) one->release();
    return;
  }
  InterpreterLock lock;
  for (Ref* one : held) *one = Ref();
}

// Give the values of a task their tensors; its nodes have run. (bind.cpp, as graph/program.py's `deliver`.)
void deliver(PyObject* task, PyObject* results);

// Whether there are nodes that failed. (cut.cpp)
bool any_failed();

// A function of another signature than `PyMethodDef` has.
template <typename Function>
PyCFunction fast(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// A class with __slots__, and where its objects keep them: by position among the names that were given.
class Slots {
 public:
  PyTypeObject* type = nullptr;

  // An error when the class has no slot of a name.
  bool find(PyObject* of, std::initializer_list<const char*> names) {
    type = reinterpret_cast<PyTypeObject*>(Py_NewRef(of));
    size_t next = 0;
    for (const char* name : names) {
      Ref member(PyObject_GetAttrString(of, name));
      if (!member) return false;
      if (Py_TYPE(member.get()) != &PyMemberDescr_Type) {
        PyErr_Format(PyExc_TypeError, "%s is no slot of %R", name, of);
        return false;
      }
      offsets_.at(next++) = reinterpret_cast<PyMemberDescrObject*>(member.get())->d_member->offset;
    }
    return true;
  }

  PyObject* at(PyObject* object, int index) const { return place(object, index); }  // borrowed

  void set(PyObject* object, int index, Ref value) const {
    Ref old(std::exchange(place(object, index), value.release()));
  }

 private:
  PyObject*& place(PyObject* object, int index) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offsets_[index]);
  }

  std::array<Py_ssize_t, 16> offsets_{};
};

}  // namespace marid
