#include "known_calls.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

// From PyTorch's Python half, whose headers take long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace marid {

namespace {

constexpr size_t kMost = 8192;  // rows for one operator
int64_t generation = 0;
std::vector<double> bounds;

enum Tag : uint64_t { kNone = 1, kUndefined, kTensor, kNumber, kInt, kBool, kBucket, kExact, kComplex, kText, kList, kUsual };

// A number of the range that a number lies in, as `bucket` says it.
uint64_t range_of(double number) {
  if (std::isnan(number)) return 0;
  if (0 <= number && number <= 1) return 1;
  auto beyond = std::lower_bound(bounds.begin(), bounds.end(), std::abs(number)) - bounds.begin();
  return 2 + 2 * static_cast<uint64_t>(beyond) + (number < 0 ? 1 : 0);
}

void add_double(double number, bool exact, Words& words) {
  uint64_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  words.push_back(exact ? kExact : kBucket);
  words.push_back(exact ? bits : range_of(number));
}

bool add_tensor(const at::Tensor& tensor, bool exact, Call& call, Words& words) {
  if (!tensor.defined()) {
    words.push_back(kUndefined);
    return true;
  }
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->is_wrapped_number()) {
    if (!impl->is_cpu() || impl->key_set().has(c10::DispatchKey::Python)) return false;
    words.push_back(kNumber);
    switch (tensor.scalar_type()) {
      case at::kDouble: add_double(*static_cast<const double*>(impl->data()), exact, words); return true;
      case at::kLong:
        words.push_back(kInt);
        words.push_back(static_cast<uint64_t>(*static_cast<const int64_t*>(impl->data())));
        return true;
      case at::kBool: words.push_back(kBool | (*static_cast<const bool*>(impl->data()) ? 256 : 0)); return true;
      case at::kComplexDouble: words.push_back(kComplex); return true;
      default: return false;
    }
  }
  Handle* handle = handle_of(impl);
  PyObject* value = handle == nullptr ? nullptr : handle->value();
  if (value == nullptr || !is_value(value)) return false;
  words.push_back(kTensor);
  words.push_back(reinterpret_cast<uint64_t>(spec_of(value)));
  call.handles.push_back(handle);
  call.values.push_back(value);  // which the handle keeps
  return true;
}

bool add_argument(const c10::IValue& arg, bool exact, Call& call, Words& words) {
  if (arg.isTensor()) return add_tensor(arg.toTensor(), exact, call, words);
  if (arg.isInt()) {
    words.push_back(kInt);
    words.push_back(static_cast<uint64_t>(arg.toInt()));
  } else if (arg.isNone()) {
    words.push_back(kNone);
  } else if (arg.isBool()) {
    words.push_back(kBool | (arg.toBool() ? 256 : 0));
  } else if (arg.isDouble()) {
    add_double(arg.toDouble(), exact, words);
  } else if (arg.isComplexDouble()) {
    words.push_back(kComplex);
  } else if (arg.isString()) {
    const std::string& text = arg.toStringRef();
    words.push_back(kText | text.size() << 8);
    for (size_t i = 0; i < text.size(); i += 8) {
      uint64_t part = 0;
      std::memcpy(&part, text.data() + i, std::min<size_t>(8, text.size() - i));
      words.push_back(part);
    }
  } else if (arg.isList()) {
    auto items = arg.toListRef();
    words.push_back(kList | items.size() << 8);
    for (const c10::IValue& item : items) {
      if (!add_argument(item, call.exact_lists, call, words)) return false;
    }
  } else {
    return false;
  }
  return true;
}

uint64_t hash_of(const Words& words) {
  uint64_t hash = 0x9E3779B97F4A7C15ull;
  for (uint64_t word : words) {
    hash = (hash ^ word) * 0xff51afd7ed558ccdull;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

bool read_words(const Operator& op, const c10::IValue* given, Call& call, Words& words) {
  for (size_t i = 0; i < op.formals.size(); i++) {
    const Formal& formal = op.formals[i];
    const c10::IValue& arg = given[i];
    if (formal.kind == Formal::kNotRecorded && !arg.isNone()) {
      if (!is_default(arg, formal) && !is_usual(given, i, op)) return false;
      words.push_back(kUsual);
    } else if ((formal.kind == Formal::kDtype || formal.kind == Formal::kMemoryFormat) && !arg.isNone() && !arg.isInt()) {
      return false;
    } else if (!add_argument(arg, call.exact, call, words)) {
      return false;
    }
  }
  return true;
}

PyObject* KnownCalls::find(const Words& words) {
  if (generation_ != generation) return nullptr;
  auto [first, last] = entries_.equal_range(hash_of(words));
  for (auto at = first; at != last; ++at) {
    const std::vector<uint64_t>& own = at->second.words;
    if (own.size() == words.size() && std::memcmp(own.data(), words.data(), words.size() * sizeof(uint64_t)) == 0) {
      return at->second.known.get();
    }
  }
  return nullptr;
}

void KnownCalls::keep(const Words& words, Ref known, Ref keeps) {
  // Freed at the end: Python may run then, and other threads meanwhile, which must find all in order.
  std::unordered_multimap<uint64_t, Entry> outdated;
  if (generation_ != generation || entries_.size() >= kMost) {
    outdated.swap(entries_);
    generation_ = generation;
  }
  Entry entry{{words.begin(), words.end()}, std::move(known), std::move(keeps)};
  entries_.emplace(hash_of(words), std::move(entry));
}

void forget_known_calls() { generation++; }

bool set_bounds(PyObject* numbers) {
  bounds.clear();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(numbers); i++) bounds.push_back(PyFloat_AsDouble(PyList_GET_ITEM(numbers, i)));
  return PyErr_Occurred() == nullptr;
}

}  // namespace marid
