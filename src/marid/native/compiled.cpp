// Runs parts of programs that were compiled to shared objects by AOTInductor (execute/compiled/).
//
// A part is called through the operator marid::compiled, so that a compiled program is a program like any other: the
// table, planned memory and errors know nothing of it. Each call names an *instance*: a part together with the exact
// geometry of its inputs and results for one set of sizes. A call that does not fit is declined before anything is
// written; the program then goes on without the part.
#include "expose.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/library.h>

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace at::detail {
// From ATen/ScalarOps.h, which would bring in every operator there is.
Tensor scalar_tensor_static(const Scalar& s, std::optional<ScalarType> dtype, std::optional<Device> device);
}  // namespace at::detail

namespace {

// The functions of aoti_runtime/interface.h that a part exports; that header may only be included by the part itself.
struct Functions {
  AOTITorchError (*create)(void** container, size_t models, const char* device, const char* folder);
  AOTITorchError (*destroy)(void* container);
  AOTITorchError (*count)(void* container, size_t* outputs);
  AOTITorchError (*run)(void* container, AtenTensorHandle* inputs, size_t input_count, AtenTensorHandle* outputs,
                        size_t output_count, void* stream, void* proxy);
  AOTITorchError (*last_error)(const char** text);
};

struct Part {
  void* file = nullptr;
  void* container = nullptr;
  int threads = 0;
  size_t outputs = 0;
  Functions call{};
  // A shared object stays loaded: its threads' variables may be used until their threads end.
  ~Part() {
    if (container != nullptr) call.destroy(container);
  }
};

struct Geometry {
  at::ScalarType dtype;
  bool written = false;
  int64_t base = -1;   // the input that this one is a view of, which is then not given to the part
  int64_t offset = 0;  // and where in it, in elements
  std::vector<int64_t> sizes, strides;
  bool fits(const at::Tensor& tensor) const {
    return tensor.defined() && tensor.scalar_type() == dtype && tensor.device().is_cpu() &&
           tensor.layout() == at::kStrided && tensor.sizes() == at::IntArrayRef(sizes) &&
           tensor.strides() == at::IntArrayRef(strides) && !tensor.is_conj() && !tensor.is_neg();
  }
};

struct Instance {
  std::shared_ptr<Part> part;
  std::vector<Geometry> inputs, outputs;
  std::vector<at::ScalarType> numbers;
  at::Tensor carrier;  // its sizes are the values of the symbols; its memory is never looked at
  bool writes = false;
  std::atomic<bool> failed{false};
};

std::mutex lock;
std::unordered_map<int64_t, std::shared_ptr<Instance>> instances;
int64_t newest = 0;

std::shared_ptr<Instance> find(int64_t id) {
  std::lock_guard<std::mutex> held(lock);
  auto found = instances.find(id);
  return found == instances.end() ? nullptr : found->second;
}

// Whether inputs share memory that is written in another way than the part was compiled for.
bool overlapping(const Instance& instance, const std::vector<at::Tensor>& inputs) {
  if (!instance.writes) return false;
  for (size_t i = 0; i < inputs.size(); i++) {
    const auto* own = inputs[i].storage().unsafeGetStorageImpl();
    if (int64_t base = instance.inputs[i].base; base >= 0) {
      if (inputs[base].storage().unsafeGetStorageImpl() != own ||
          inputs[i].storage_offset() - inputs[base].storage_offset() != instance.inputs[i].offset) {
        return true;
      }
    }
    if (!instance.inputs[i].written) continue;
    for (size_t j = 0; j < inputs.size(); j++) {
      bool known = j == i || instance.inputs[j].base == static_cast<int64_t>(i);
      if (!known && inputs[j].storage().unsafeGetStorageImpl() == own) return true;
    }
  }
  return false;
}

AtenTensorHandle handle_of(const at::Tensor& tensor) {  // as torch::aot_inductor::new_tensor_handle does
  return reinterpret_cast<AtenTensorHandle>(new at::Tensor(tensor));
}
at::Tensor taken(AtenTensorHandle handle) {
  std::unique_ptr<at::Tensor> owned(reinterpret_cast<at::Tensor*>(handle));
  return owned ? *owned : at::Tensor();
}

std::vector<at::Tensor> run(Instance& instance, const std::vector<at::Tensor>& inputs,
                            const std::vector<c10::Scalar>& numbers) {
  const Part& part = *instance.part;
  if (instance.failed) throw std::runtime_error("this part has failed before");
  if (inputs.size() != instance.inputs.size() || numbers.size() != instance.numbers.size()) {
    throw std::runtime_error("declined: another number of arguments");
  }
  if (at::get_num_threads() != part.threads) throw std::runtime_error("declined: another number of threads");
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!instance.inputs[i].fits(inputs[i])) throw std::runtime_error("declined: another geometry");
  }
  if (overlapping(instance, inputs)) throw std::runtime_error("declined: inputs share memory that is written");

  std::vector<AtenTensorHandle> given;
  std::vector<at::Tensor> lifted;
  for (size_t i = 0; i < numbers.size(); i++) {
    lifted.push_back(at::detail::scalar_tensor_static(numbers[i], instance.numbers[i], at::kCPU));
  }
  given.reserve(inputs.size() + numbers.size() + 1);
  if (instance.carrier.defined()) given.push_back(handle_of(instance.carrier));
  for (size_t i = 0; i < inputs.size(); i++) {
    if (instance.inputs[i].base < 0) given.push_back(handle_of(inputs[i]));
  }
  for (const at::Tensor& tensor : lifted) given.push_back(handle_of(tensor));
  std::vector<AtenTensorHandle> made(part.outputs, nullptr);
  AOTITorchError error =
      part.call.run(part.container, given.data(), given.size(), made.data(), made.size(), nullptr, nullptr);
  std::vector<at::Tensor> results;
  for (AtenTensorHandle handle : made) results.push_back(taken(handle));
  bool right = error == AOTI_TORCH_SUCCESS && results.size() == instance.outputs.size();
  for (size_t i = 0; right && i < results.size(); i++) right = instance.outputs[i].fits(results[i]);
  if (!right) {
    instance.failed = true;
    const char* text = nullptr;
    if (error != AOTI_TORCH_SUCCESS && part.call.last_error != nullptr) part.call.last_error(&text);
    throw std::runtime_error(text != nullptr && *text ? text : "a compiled part failed");
  }
  return results;
}

void compiled(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  int64_t id = torch::jit::pop(*stack).toInt();
  c10::List<c10::IValue> listed = torch::jit::pop(*stack).toList();
  c10::List<at::Tensor> tensors = torch::jit::pop(*stack).toTensorList();
  std::vector<c10::Scalar> numbers;
  for (const c10::IValue& number : listed) numbers.push_back(number.toScalar());
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < tensors.size(); i++) inputs.push_back(tensors.get(i));
  auto instance = find(id);
  if (!instance) throw std::runtime_error("declined: there is no such compiled part");
  torch::jit::push(*stack, c10::List<at::Tensor>(run(*instance, inputs, numbers)));
}

// Parts call functions of this library (gemm/products.cpp), which Python loads where others do not see it.
bool make_visible() {
  static const bool done = [] {
    Dl_info info;
    return dladdr(reinterpret_cast<void*>(&make_visible), &info) != 0 &&
           dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL) != nullptr;
  }();
  return done;
}

TORCH_LIBRARY_FRAGMENT(marid, library) {
  library.def("compiled(Tensor[] inputs, Scalar[] numbers, int instance) -> Tensor[]");
  library.impl("compiled", c10::DispatchKey::CompositeExplicitAutograd,
               torch::CppFunction::makeFromBoxedFunction<&compiled>());
}

// Load a part. Throws where that is not possible.
std::shared_ptr<Part>* compiled_load(const char* path, int threads) {
  if (!make_visible()) throw std::runtime_error("the library cannot be found again");
  auto part = std::make_shared<Part>();
  part->threads = threads;
  part->file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (part->file == nullptr) {
    const char* text = dlerror();
    throw std::runtime_error(text != nullptr ? text : "dlopen failed");
  }
  auto symbol = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(part->file, name));
    return function != nullptr;
  };
  symbol("AOTInductorGetLastError", part->call.last_error);
  if (!symbol("AOTInductorModelContainerCreateWithDevice", part->call.create) ||
      !symbol("AOTInductorModelContainerDelete", part->call.destroy) ||
      !symbol("AOTInductorModelContainerGetNumOutputs", part->call.count) ||
      !symbol("AOTInductorModelContainerRun", part->call.run)) {
    throw std::runtime_error("not a compiled part");
  }
  if (part->call.create(&part->container, 1, "cpu", "") != AOTI_TORCH_SUCCESS ||
      part->call.count(part->container, &part->outputs) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("a compiled part could not be set up");
  }
  return new std::shared_ptr<Part>(std::move(part));
}
void compiled_unload(std::shared_ptr<Part>* part) { delete part; }

// A part with one set of sizes. `shapes` has for each input, then for each output: dtype, whether it is written,
// base, offset in it, the number of dimensions, sizes, strides. Returns what calls name it by.
int64_t compiled_instance(const std::shared_ptr<Part>* part, size_t inputs, const std::vector<int64_t>& shapes,
                          std::vector<at::ScalarType> numbers, const std::vector<int64_t>& symbols) {
  auto instance = std::make_shared<Instance>();
  instance->part = *part;
  for (auto shape = shapes.begin(); shape != shapes.end();) {
    Geometry geometry;
    geometry.dtype = static_cast<at::ScalarType>(*shape++);
    geometry.written = *shape++ != 0;
    geometry.base = *shape++;
    geometry.offset = *shape++;
    int64_t dims = *shape++;
    geometry.sizes.assign(shape, shape + dims);
    geometry.strides.assign(shape + dims, shape + 2 * dims);
    shape += 2 * dims;
    instance->writes = instance->writes || geometry.written;
    (instance->inputs.size() < inputs ? instance->inputs : instance->outputs).push_back(std::move(geometry));
  }
  instance->numbers = std::move(numbers);
  if (!symbols.empty()) {
    std::vector<int64_t> strides(symbols.size(), 0);
    instance->carrier = at::detail::empty_strided_cpu(symbols, strides, at::kFloat);
  }
  std::lock_guard<std::mutex> held(lock);
  instances[++newest] = std::move(instance);
  return newest;
}
void compiled_drop(int64_t id) {
  std::shared_ptr<Instance> last;  // ends after the lock is given back
  std::lock_guard<std::mutex> held(lock);
  auto found = instances.find(id);
  if (found == instances.end()) return;
  last = std::move(found->second);
  instances.erase(found);
}
// Whether a call failed after it may have written to its inputs.
bool compiled_failed_writing(int64_t id) {
  auto instance = find(id);
  return instance && instance->failed && instance->writes;
}

}  // namespace

namespace marid {

PyMethodDef compiled_functions[] = {
    released<compiled_load>("compiled_load"),
    released<compiled_unload>("compiled_unload"),
    held<compiled_instance>("compiled_instance"),
    released<compiled_drop>("compiled_drop"),
    held<compiled_failed_writing>("compiled_failed_writing"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
