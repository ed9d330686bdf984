// Runs a program without Python between its operations.
//
// execute/table.py translates a program once into a table of dispatcher calls; a run fills in tensors and numbers and
// goes through the table with the interpreter's lock released. It stops before an operation that needs a generator
// positioned, after every stretch of time in which Ctrl-C should be heard, and where an operation raises: the caller
// then goes on in Python, which raises the same error in Python's terms. Each result is compared with what was recorded of
// it; behind one that differs the run stops too, for Python to lay it out as recorded (execute/geometry.py).
#include "expose.h"

#include "execute.h"
#include "free_lists.h"
#include "small/small.h"

#include <ATen/record_function.h>

#include <chrono>
#include <memory>
#include <stdexcept>

namespace at::detail {
// From ATen/ScalarOps.h, which would bring in every operator there is: four seconds of a first import.
Tensor scalar_tensor_static(const Scalar& s, std::optional<ScalarType> dtype, std::optional<Device> device);
}  // namespace at::detail

namespace {

using namespace marid;

c10::IValue parameter_of(const Parameter& param, const Argument& arg) {
  Number only{};
  const c10::SmallVectorImpl<Number>* numbers = &param.numbers;
  c10::SmallVector<Number, 8> filled;
  if (!param.list) {
    only = param.numbers[0];
    if (arg.type != Type::kInts && arg.type != Type::kFloats && arg.type != Type::kBools) {
      return number_of(only, arg.type);
    }
    filled.assign(arg.width > 0 ? arg.width : 1, only);
    numbers = &filled;
  }
  switch (arg.type) {
    case Type::kInts: {
      std::vector<int64_t> values;
      for (const Number& n : *numbers) values.push_back(n.i);
      return values;
    }
    case Type::kFloats: {
      std::vector<double> values;
      for (const Number& n : *numbers) values.push_back(n.real());
      return values;
    }
    case Type::kBools: {
      c10::List<bool> values;
      for (const Number& n : *numbers) values.push_back(n.i != 0);
      return values;
    }
    case Type::kNumbers: {
      c10::List<c10::Scalar> values;
      for (const Number& n : *numbers) values.push_back(n.scalar());
      return c10::impl::toList(values);
    }
    case Type::kTensors: return c10::List<at::Tensor>();
    case Type::kMaybeTensors: return c10::List<std::optional<at::Tensor>>();
    default: throw std::invalid_argument("a list of numbers for an argument that takes none");
  }
}

c10::IValue value_of(Run& run, const Argument& arg, const c10::OperatorHandle& op, size_t position,
                     const at::Generator& generator) {
  const Program& program = *run.program;
  switch (arg.kind) {
    case kSlot: return run.slots[arg.index];
    case kParam: return parameter_of(run.params[arg.index], arg);
    case kDraw: return generator;
    case kConstant: return program.constants[arg.index];
    case kList: {
      if (arg.type == Type::kMaybeTensors) {
        c10::List<std::optional<at::Tensor>> items;
        for (int64_t slot : program.lists[arg.index]) {
          items.push_back(slot < 0 ? std::nullopt : std::optional<at::Tensor>(run.slots[slot]));
        }
        return items;
      }
      c10::List<at::Tensor> items;
      for (int64_t slot : program.lists[arg.index]) items.push_back(run.slots[slot]);
      return items;
    }
    default: {
      const auto& value = op.schema().arguments()[position].default_value();
      return value.has_value() ? *value : c10::IValue();
    }
  }
}

// Whether a tensor is all of its memory, and nobody but this run can see it.
bool is_sole(const at::Tensor& tensor) {
  return tensor.defined() && tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.storage().nbytes() == tensor.numel() * tensor.element_size();
}

// An item of a list that an operator returned. How long that is may depend on numbers, which are new in each run.
at::Tensor item_of(const c10::IValue& list, int64_t index) {
  auto items = list.toListRef();
  if (index < 0 || static_cast<size_t>(index) >= items.size()) throw std::out_of_range("a result that is not there");
  return items[index].toTensor();
}

// Whether a result is a tensor of its own, and no argument.
bool is_new(const at::Tensor& result) {
  size_t owners = result.use_count();
  return owners == 1 || (owners == 2 && has_object(*result.unsafeGetTensorImpl()->pyobj_slot()));
}

// Whether everything that an instruction made, or may have resized, is as recorded; what is `given` is in a place that it
// was given.
bool agrees(const Run& run, const Instruction& instruction, bool given) {
  if (run.recorded.empty()) return true;
  for (const Result& result : instruction.results) {
    const Geometry* recorded = run.recorded[result.slot];
    if (recorded == nullptr || !result.is_settled) continue;
    const at::Tensor& made = run.slots[result.slot];
    const at::Tensor* viewed = given ? &made : result.viewed < 0 ? nullptr : &run.slots[result.viewed];
    if (!marid::agrees(made, *recorded, viewed) || !(viewed != nullptr || is_new(made))) return false;
  }
  for (int64_t slot : instruction.resized) {
    const Geometry* recorded = run.recorded[slot];
    if (recorded != nullptr && !marid::agrees(run.slots[slot], *recorded, &run.slots[slot])) return false;
  }
  return true;
}

bool has_own_object(const at::Tensor& tensor) {
  return tensor.defined() && has_object(*tensor.unsafeGetTensorImpl()->pyobj_slot());
}

// Let go of a tensor that no later instruction needs. What Python has an object of is not freed by that anyway.
void retire(Run& run, at::Tensor& tensor) {
  if (has_own_object(tensor)) run.retired.push_back(std::move(tensor));
  tensor.reset();
}

void execute(Run& run, const Instruction& instruction, int64_t donor, const at::Generator& generator) {
  torch::jit::Stack& stack = run.stack;
  stack.clear();
  const c10::OperatorHandle* op = &instruction.op;
  at::Tensor place;
  if (donor >= 0 && instruction.out && is_sole(run.slots[instruction.args[donor].index])) {
    op = &*instruction.out;
    place = run.slots[instruction.args[donor].index];
  }
  for (size_t i = 0; i < instruction.args.size(); i++) {
    stack.push_back(value_of(run, instruction.args[i], instruction.op, i, generator));
  }
  bool is_small = instruction.small != nullptr && !at::hasCallbacks() && (*instruction.small)(stack);
  bool given = place.defined() && !is_small;
  if (given) stack.push_back(std::move(place));
  if (!is_small) op->callBoxed(&stack);
  for (const Result& result : instruction.results) {
    const c10::IValue& top = stack[instruction.returns == 1 ? 0 : result.path[0]];
    int64_t depth = instruction.returns == 1 ? 0 : 1;
    run.slots[result.slot] = depth == result.depth ? top.toTensor() : item_of(top, result.path[depth]);
  }
  stack.clear();
  run.differs = !agrees(run, instruction, given);
  if (run.differs) return;  // with what it was called with
  for (int64_t slot : instruction.dying) retire(run, run.slots[slot]);
}

int64_t nanoseconds(std::chrono::steady_clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

// For a profiler: consecutive instructions with one label are within one range of that name.
class Stretch {
 public:
  explicit Stretch(const Run& run) : run_(run) {}
  void enter() {
    if (run_.labels.empty() || (label_ != nullptr && *label_ == run_.labels[run_.next])) return;
    label_ = &run_.labels[run_.next];
    range_.reset();
    range_.emplace(at::RecordScope::USER_SCOPE);
    if (range_->isActive()) range_->before(*label_);
  }

 private:
  const Run& run_;
  const std::string* label_ = nullptr;
  std::optional<at::RecordFunction> range_;
};

}  // namespace

c10::IValue marid::number_of(const Number& number, Type type) {
  switch (type) {
    case Type::kTensor: {
      at::Tensor tensor = at::detail::scalar_tensor_static(number.scalar(), number.scalar().type(), at::kCPU);
      tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
      return tensor;
    }
    case Type::kFloat: return number.real();
    case Type::kInt: return number.i;
    case Type::kBool: return number.i != 0;
    default: return c10::IValue(number.scalar());
  }
}

void marid::release_objects(Run& run) {
  run.retired.clear();
  for (at::Tensor& tensor : run.slots) {
    if (has_own_object(tensor)) tensor.reset();
  }
}

Status marid::go(Run& run, c10::GeneratorImpl* generator, double seconds) {
  at::Generator from;
  if (generator != nullptr) from = at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(generator));
  const auto& instructions = run.program->instructions;
  auto start = std::chrono::steady_clock::now();
  auto deadline = start + std::chrono::duration<double>(seconds);
  int64_t before = nanoseconds(start);
  Stretch stretch(run);
  UsesFreeLists uses;
  while (run.next < instructions.size()) {
    const Instruction& instruction = instructions[run.next];
    if (instruction.draws && !from.defined()) return kRunDraws;
    stretch.enter();
    try {
      execute(run, instruction, run.donors.empty() ? -1 : run.donors[run.next], from);
    } catch (...) {
      return kRunRaised;
    }
    if (run.sums != nullptr) {
      int64_t after = nanoseconds(std::chrono::steady_clock::now());
      run.sums[2 * run.next] += after - before;
      run.sums[2 * run.next + 1]++;
      if (run.spans != nullptr) {
        run.spans[2 * run.next] = before;
        run.spans[2 * run.next + 1] = after;
      }
      before = after;
    }
    from = at::Generator();
    run.next++;
    if (run.differs) return kRunRaised;
    if ((run.next & 15) == 0 && std::chrono::steady_clock::now() > deadline) return kRunAgain;
  }
  return kRunDone;
}

namespace {

void run_free(Run* given) {
  std::unique_ptr<Run> run(given);
  release_objects(*run);
  WithoutLock others;
  run.reset();  // what it frees takes its time
}
Status run_go(Run* run, c10::GeneratorImpl* generator, double seconds) { return go(*run, generator, seconds); }
bool run_differs(const Run* run) { return run->differs; }
size_t run_next(const Run* run) { return run->next; }
bool run_has(const Run* run, int64_t slot) { return run->slots[slot].defined(); }

}  // namespace

namespace marid {

PyMethodDef execute_functions[] = {
    held<run_free>("run_free"),
    released<run_go>("run_go"),
    held<run_differs>("run_differs"),
    held<run_next>("run_next"),
    held<run_has>("run_has"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
