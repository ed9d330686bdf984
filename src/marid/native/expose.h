// Functions in C++ as functions of the Python module: a signature says how arguments are read and what is returned.
//
// Numbers and texts are what they are in Python, a vector is a list or a tuple, and a pair is a tuple. What a pointer points
// to belongs to C++: Python has its address, an int, and None for null.
#pragma once
#include "python.h"

#include <cstdint>
#include <exception>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace marid {

// Thrown where Python has an error set.
struct PythonError {};

// An argument, as a function takes it.
template <typename T>
T read_as(PyObject* given) {
  if constexpr (std::is_same_v<T, PyObject*>) {
    return given;  // borrowed
  } else if constexpr (std::is_same_v<T, bool>) {
    int truth = PyObject_IsTrue(given);
    if (truth < 0) throw PythonError();
    return truth != 0;
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(read_as<int64_t>(given));
  } else if constexpr (std::is_integral_v<T>) {
    long long number = PyLong_AsLongLong(given);
    if (number == -1 && PyErr_Occurred()) throw PythonError();
    if (!std::in_range<T>(number)) {
      PyErr_Format(PyExc_OverflowError, "%lld does not fit into %zu bytes", number, sizeof(T));
      throw PythonError();
    }
    return static_cast<T>(number);
  } else if constexpr (std::is_floating_point_v<T>) {
    double number = PyFloat_AsDouble(given);
    if (number == -1 && PyErr_Occurred()) throw PythonError();
    return number;
  } else if constexpr (std::is_same_v<T, const char*>) {
    const char* text = PyBytes_Check(given) ? PyBytes_AS_STRING(given) : PyUnicode_AsUTF8(given);
    if (text == nullptr) throw PythonError();
    return text;
  } else if constexpr (std::is_pointer_v<T>) {
    if (given == Py_None) return nullptr;
    if (!PyLong_Check(given)) {
      PyErr_Format(PyExc_TypeError, "%R is no address", given);
      throw PythonError();
    }
    void* address = PyLong_AsVoidPtr(given);
    if (address == nullptr && PyErr_Occurred()) throw PythonError();
    return reinterpret_cast<T>(address);  // of a function too
  } else {
    Ref items(PySequence_Fast(given, "a list or a tuple is needed"));
    if (!items) throw PythonError();
    T all;
    all.reserve(PySequence_Fast_GET_SIZE(items.get()));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); i++) {
      all.push_back(read_as<typename T::value_type>(PySequence_Fast_GET_ITEM(items.get(), i)));
    }
    return all;
  }
}

template <typename T>
constexpr bool is_pair = false;
template <typename First, typename Second>
constexpr bool is_pair<std::pair<First, Second>> = true;

// What a function has returned; null after an error.
template <typename T>
PyObject* returned(const T& made) {
  if constexpr (std::is_same_v<T, PyObject*>) {
    return made;
  } else if constexpr (std::is_same_v<T, bool>) {
    return PyBool_FromLong(made);
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    return PyLong_FromLongLong(static_cast<long long>(made));
  } else if constexpr (std::is_floating_point_v<T>) {
    return PyFloat_FromDouble(made);
  } else if constexpr (std::is_pointer_v<T>) {
    return made == nullptr ? Py_NewRef(Py_None) : PyLong_FromVoidPtr(made);
  } else if constexpr (is_pair<T>) {
    Ref first(returned(made.first)), second(returned(made.second));
    return first && second ? PyTuple_Pack(2, first.get(), second.get()) : nullptr;
  } else {
    Ref all(PyList_New(static_cast<Py_ssize_t>(made.size())));
    for (size_t i = 0; all && i < made.size(); i++) {
      PyObject* item = returned(made[i]);
      if (item == nullptr) return nullptr;
      PyList_SET_ITEM(all.get(), static_cast<Py_ssize_t>(i), item);
    }
    return all.release();
  }
}

template <bool lets_go, auto function>
struct Exposed;

template <bool lets_go, typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Exposed<lets_go, function> {
  static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
    constexpr auto expected = static_cast<Py_ssize_t>(sizeof...(Arguments));
    if (count != expected) return PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", expected, count);
    try {
      return call_with(given, std::index_sequence_for<Arguments...>());
    } catch (const PythonError&) {
      return nullptr;
    } catch (const std::exception& error) {
      return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }
  }

 private:
  template <size_t... i>
  static PyObject* call_with([[maybe_unused]] PyObject* const* given, std::index_sequence<i...>) {
    std::tuple<std::decay_t<Arguments>...> arguments{read_as<std::decay_t<Arguments>>(given[i])...};
    auto called = [&] {
      [[maybe_unused]] std::conditional_t<lets_go, WithoutLock, std::tuple<>> lock;
      return std::apply(function, std::move(arguments));
    };
    if constexpr (std::is_void_v<Result>) {
      called();
      Py_RETURN_NONE;
    } else {
      return returned(called());
    }
  }
};

// An entry of a module's table: a function that is called with the interpreter's lock, so it must not wait for a thread that
// wants that.
template <auto function>
PyMethodDef held(const char* name) {
  return {name, fast(Exposed<false, function>::call), METH_FASTCALL, nullptr};
}

// One that is called without it, since it waits, runs kernels, or takes or frees much memory.
template <auto function>
PyMethodDef released(const char* name) {
  return {name, fast(Exposed<true, function>::call), METH_FASTCALL, nullptr};
}

}  // namespace marid
