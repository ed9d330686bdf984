#include "handle.h"

#include "arithmetic.h"
#include "backward.h"
#include "immediate.h"
#include "indexing.h"
#include "intermediates.h"
#include "methods.h"
#include "operands.h"
#include "record.h"

#include <ATen/core/List.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>
#include <vector>

PyObject* THPVariable_Wrap(const at::TensorBase& tensor, PyTypeObject* type);

namespace marid {

PyTypeObject* handle_type;

namespace {

constexpr c10::DispatchKeySet kBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

template <typename Version>
c10::intrusive_ptr<c10::TensorImpl> copied(const Handle* handle, Version&& version, bool allow_change) {
  c10::intrusive_ptr<c10::TensorImpl> impl;
  if (Saves::now()) impl = handle->copy_for_autograd();
  if (!impl) {
    at::Tensor same(Pointer::unsafe_reclaim_from_nonowning(const_cast<Handle*>(handle)));
    impl = marid::detach(same).getIntrusivePtr();
  }
  if (Handle* copy = handle_of(impl.get())) copy->normalised_in = handle->normalised_in;
  impl->set_version_counter(std::forward<Version>(version));
  impl->set_allow_tensor_metadata_change(allow_change);
  return impl;
}

bool is_in_mode() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 &&
      !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
}

}  // namespace

Handle::Handle(const c10::TensorImpl* pattern, bool alone)
    : c10::TensorImpl(pattern->key_set(), pattern->dtype(), pattern->device()) {
  copy_tensor_metadata(pattern, this, own_version(), /*allow_tensor_metadata_change=*/true);
  if (alone) {
    set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, pattern->device())));
  }
}

Handle::Handle(const c10::TensorImpl* pattern, const c10::TensorImpl* tensor)
    : c10::TensorImpl(pattern->key_set(), tensor->dtype(), pattern->device()) {
  copy_generic_tensor_metadata(tensor, this);
  key_set_ = pattern->key_set() | (tensor->key_set() & kBits);  // in inference mode it has lost some
  device_opt_ = pattern->device();
  TensorImpl::storage_ = pattern->storage();
  is_wrapped_number_ = false;
  if (c10::InferenceMode::is_enabled()) set_version_counter(own_version());
}

// In inference mode a tensor has no counter from the beginning. Handles are no inference tensors: what they stand for is kept.
c10::VariableVersion Handle::own_version() const {
  return c10::InferenceMode::is_enabled() ? c10::VariableVersion(0) : version_counter();
}

Handle::~Handle() { Handle::release_resources(); }

void Handle::release_resources() {
  c10::TensorImpl::release_resources();
  computed_.reset();
  give_up({&value_, &storage_});
}

c10::intrusive_ptr<c10::TensorImpl> Handle::shallow_copy_and_detach(
    const c10::VariableVersion& version, bool allow_change) const {
  if (is_in_mode()) return c10::TensorImpl::shallow_copy_and_detach(version, allow_change);
  return copied(this, version, allow_change);
}

c10::intrusive_ptr<c10::TensorImpl> Handle::shallow_copy_and_detach(
    c10::VariableVersion&& version, bool allow_change) const {
  if (is_in_mode()) return c10::TensorImpl::shallow_copy_and_detach(std::move(version), allow_change);
  return copied(this, std::move(version), allow_change);
}

void Handle::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) {
  c10::TensorImpl::shallow_copy_from(impl);
  Handle* other = handle_of(impl.get());
  if (other == nullptr) return;
  InterpreterLock lock;
  stand_for_the_same(other);
}

const char* Handle::tensorimpl_type_name() const { return "marid::Handle"; }

PyObject* Handle::value() {
  if (!value_ && computed_) value_ = Ref(Py_XNewRef(computed_->value()));
  return value_.get();
}

PyObject* Handle::memory() const { return !storage_ && computed_ ? computed_->storage().get() : storage_.get(); }

void Handle::lie_in(PyObject* storage) {
  storage_ = Ref(Py_XNewRef(storage));
  if (computed_) computed_->storage() = Ref(Py_XNewRef(storage));
}

void Handle::stand_for(PyObject* other) {
  is_zero = false;
  storage_ = Ref(Py_XNewRef(memory()));
  computed_.reset();
  value_ = Ref(Py_XNewRef(other));
}

void Handle::stand_for_the_same(Handle* other) {
  is_zero = other->is_zero;
  value_ = Ref(Py_XNewRef(other->value_.get()));
  storage_ = Ref(Py_XNewRef(other->storage_.get()));
  computed_ = other->computed_;
}

const std::shared_ptr<Computed>& Handle::computed() {
  if (!computed_ && value_ && is_value(value_.get())) {
    at::Tensor tensor = concrete_tensor(value_.get());
    if (tensor.defined()) computed_ = Computed::of_value(std::move(tensor), value_.get(), storage_.get());
  }
  return computed_;
}

c10::intrusive_ptr<Handle> Handle::copy_for_autograd() const {
  if (!computed_ || value_ || storage_ || !computed_->ran_at_once()) return {};
  auto copy = c10::make_intrusive<Handle>(this, computed_->tensor.unsafeGetTensorImpl());
  copy->is_zero = is_zero;
  copy->computed_ = computed_;
  return copy;
}

bool Handle::is_shared() const {
  PyObject* in = memory();
  Py_ssize_t own = (storage_ ? 1 : 0) + (in != nullptr && computed_ && computed_->storage().get() == in ? 1 : 0);
  return (in != nullptr && Py_REFCNT(in) > own) || (computed_ && computed_->is_shared());
}

bool holds_handle(const c10::IValue& value) {
  if (value.isTensor()) return handle_of(value.toTensor()) != nullptr;
  if (!value.isTensorList() && !value.isOptionalTensorList()) return false;
  auto items = value.toListRef();
  return std::any_of(items.begin(), items.end(), holds_handle);
}

namespace {

// A pattern of a device and a type, neither conjugated nor negated; null after an error.
const c10::TensorImpl* pattern_of(c10::DeviceIndex device, at::ScalarType type) {
  static auto& patterns = *new std::vector<const c10::TensorImpl*>();  // of specs that are kept
  size_t index = static_cast<size_t>(device) * c10::NumScalarTypes + static_cast<size_t>(type);
  if (index >= patterns.size()) patterns.resize(index + 1);
  if (patterns[index] == nullptr) {
    Ref spec = spec_like(at::detail::empty_cpu({0}, type), device);
    Ref pattern(spec ? PyObject_GetAttrString(spec.get(), "pattern") : nullptr);
    if (!pattern) return nullptr;
    patterns[index] = THPVariable_Unpack(pattern.release()).unsafeGetTensorImpl();
  }
  return patterns[index];
}

at::Tensor with_object(at::Tensor made) {
  Ref object(THPVariable_Wrap(made, handle_type));
  return object ? made : at::Tensor();
}

}  // namespace

at::Tensor new_handle(const c10::TensorImpl* pattern, PyObject* value, bool alone) {
  auto impl = c10::make_intrusive<Handle>(pattern, alone);
  impl->stand_for(value);
  return with_object(at::Tensor(std::move(impl)));
}

at::Tensor new_handle(std::shared_ptr<Computed> value) {
  const c10::TensorImpl* pattern = pattern_of(value->device(), value->tensor.scalar_type());
  if (pattern == nullptr) return at::Tensor();
  auto impl = c10::make_intrusive<Handle>(pattern, value->tensor.unsafeGetTensorImpl());
  impl->stand_for(std::move(value));
  at::Tensor made(std::move(impl));
  return is_intermediate() || is_for_autograd_alone() ? made : with_object(std::move(made));
}

// --- attributes ------------------------------------------------------------------------------------------------------

namespace {

// An attribute of tensors of the class that are no handles yet (a parameter whose shape is not known) is missing.
Handle* handle_of_object(PyObject* object) {
  Handle* handle = handle_of(THPVariable_Unpack(object));
  if (handle == nullptr) PyErr_SetString(PyExc_AttributeError, "this tensor stands for no value of the device");
  return handle;
}

PyObject* get_value(PyObject* object, void*) {
  Handle* handle = handle_of_object(object);
  if (handle == nullptr) return nullptr;
  PyObject* found = handle->value();
  return found == nullptr && PyErr_Occurred() ? nullptr : Py_NewRef(found == nullptr ? Py_None : found);
}

PyObject* get_storage(PyObject* object, void*) {
  Handle* handle = handle_of_object(object);
  if (handle == nullptr) return nullptr;
  return Py_NewRef(handle->memory() == nullptr ? Py_None : handle->memory());
}

int set_value(PyObject* object, PyObject* to, void*) {
  Handle* handle = handle_of_object(object);
  if (handle != nullptr) handle->stand_for(to == Py_None ? nullptr : to);
  return handle == nullptr ? -1 : 0;
}

int set_storage(PyObject* object, PyObject* to, void*) {
  Handle* handle = handle_of_object(object);
  if (handle != nullptr) handle->lie_in(to == Py_None ? nullptr : to);
  return handle == nullptr ? -1 : 0;
}

// The attribute `data` as PyTorch has it.
PyObject* general_data() {
  static PyObject* const name = PyUnicode_InternFromString("data");
  return _PyType_Lookup(handle_type->tp_base, name);
}

PyObject* get_data(PyObject* object, void*) {
  Handle* handle = handle_of_object(object);
  if (handle == nullptr) return nullptr;
  handle->is_zero = false;  // who has the data may write to it, unseen by autograd
  if (Py_TYPE(object) != handle_type) {  // a class of the user's may have a say
    PyObject* general = general_data();
    return Py_TYPE(general)->tp_descr_get(general, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
  }
  return guarded([&] { return THPVariable_Wrap(THPVariable_Unpack(object).variable_data()); });
}

int set_data(PyObject* object, PyObject* to, void*) {
  if (handle_of_object(object) == nullptr) return -1;
  if (to == nullptr || !THPVariable_Check(to)) {  // as PyTorch says
    PyObject* general = general_data();
    return Py_TYPE(general)->tp_descr_set(general, object, to);
  }
  Ref done(guarded([&] {
    const at::Tensor& self = THPVariable_Unpack(object);
    const at::Tensor& other = THPVariable_Unpack(to);
    TORCH_CHECK(
        handle_of(other) != nullptr,
        "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have incompatible tensor type: a ",
        self.device().type(), " tensor cannot take the data of a ", other.device().type(), " tensor; move it first with .to('",
        self.device(), "')");
    bool was_conj = self.is_conj(), was_neg = self.is_neg();
    try {
      self._set_conj(other.is_conj());  // PyTorch compares what kind of tensors they are
      self._set_neg(other.is_neg());
      self.set_data(marid::detach(other));
    } catch (...) {
      self._set_conj(was_conj);
      self._set_neg(was_neg);
      throw;
    }
    return Py_NewRef(Py_None);
  }));
  return done ? 0 : -1;
}

constexpr const char* kDataDoc =
    "The same value without its history and with a version of its own; assigning makes this tensor a handle of the other's memory.";

PyGetSetDef attributes[] = {
    {"data", get_data, set_data, kDataDoc, nullptr},
    {"_value", get_value, set_value, nullptr, nullptr},
    {"_storage", get_storage, set_storage, nullptr, nullptr},
};

}  // namespace

bool prepare_handles(PyObject* type) {
  handle_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  for (PyGetSetDef& attribute : attributes) {
    Ref descriptor(PyDescr_NewGetSet(handle_type, &attribute));
    if (!descriptor || PyObject_SetAttrString(type, attribute.name, descriptor.get()) < 0) return false;
  }
  prepare_indexing();
  return prepare_arithmetic() && prepare_view_methods() && prepare_methods();
}

namespace {

// parameters_on_device(params): how many of a list of tensors are on the device, the index of the first one's, and whether all
// of those are of float32 or float64.
PyObject* parameters_on_device(PyObject*, PyObject* given) {
  Ref params(PySequence_Fast(given, "parameters are a list of tensors"));
  if (!params) return nullptr;
  int count = 0, device = -1;
  bool is_plain = true;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params.get()); i++) {
    PyObject* one = PySequence_Fast_GET_ITEM(params.get(), i);
    Handle* handle = PyObject_TypeCheck(one, handle_type) ? handle_of(THPVariable_Unpack(one)) : nullptr;
    if (handle == nullptr) continue;
    if (count++ == 0) device = handle->device().index();
    at::ScalarType type = c10::typeMetaToScalarType(handle->dtype());
    is_plain = is_plain && (type == at::kFloat || type == at::kDouble);
  }
  return Py_BuildValue("iiO", count, device, is_plain ? Py_True : Py_False);
}

}  // namespace

PyMethodDef handle_functions[] = {
    {"parameters_on_device", parameters_on_device, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
