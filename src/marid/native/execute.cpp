// Runs a program without Python between its operations.
//
// execute/table.py translates a program once into a table of dispatcher calls; a run fills in tensors and numbers and
// goes through the table with the interpreter's lock released. It stops before an operation that needs a generator
// positioned, after every stretch of time in which Ctrl-C should be heard, and where an operation raises: the caller
// then goes on in Python, which raises the same error in Python's terms. Each result is compared with what was recorded of
// it; behind one that differs the run stops too, for Python to lay it out as recorded (execute/geometry.py).
#include "python.h"

#include "execute.h"

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

Type classify(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return Type::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return Type::kInt;
    case c10::TypeKind::FloatType: return Type::kFloat;
    case c10::TypeKind::BoolType: return Type::kBool;
    case c10::TypeKind::NumberType: return Type::kNumber;
    case c10::TypeKind::ListType: {
      c10::TypePtr element = type->expectRef<c10::ListType>().getElementType();
      if (element->kind() == c10::TypeKind::OptionalType) {
        return classify(element) == Type::kTensor ? Type::kMaybeTensors : Type::kOther;
      }
      switch (classify(element)) {
        case Type::kTensor: return Type::kTensors;
        case Type::kInt: return Type::kInts;
        case Type::kFloat: return Type::kFloats;
        case Type::kBool: return Type::kBools;
        case Type::kNumber: return Type::kNumbers;
        default: return Type::kOther;
      }
    }
    default: return Type::kOther;
  }
}

c10::IValue number_of(const Number& number, Type type) {
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

// Keeps what kernels warn of, for Python to warn of when their results are safe.
struct Warnings final : c10::WarningHandler {
  std::vector<std::string> kept;
  c10::WarningHandler* outer = c10::WarningUtils::get_warning_handler();
  void process(const c10::Warning& warning) override { kept.push_back(warning.msg()); }
};

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
  bool given = place.defined();
  if (given) stack.push_back(std::move(place));
  op->callBoxed(&stack);
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

void marid::release_objects(Run& run) {
  run.retired.clear();
  for (at::Tensor& tensor : run.slots) {
    if (has_own_object(tensor)) tensor.reset();
  }
}

Status marid::go(Run& run, at::Generator from, double seconds) {
  const auto& instructions = run.program->instructions;
  auto start = std::chrono::steady_clock::now();
  auto deadline = start + std::chrono::duration<double>(seconds);
  int64_t before = nanoseconds(start);
  Stretch stretch(run);
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

extern "C" {

void* marid_program_new(int64_t slots) {
  auto* program = new Program;
  program->slots = slots;
  return program;
}
void marid_program_free(void* program) { delete static_cast<Program*>(program); }

// Append an operation; how many arguments it takes, or -1 when there is no such operator.
int64_t marid_program_operation(void* given, const char* name, const char* overload) {
  auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op) return -1;
  Instruction instruction{*op, std::nullopt, {}, {}, {}, {}, op->schema().returns().size()};
  static_cast<Program*>(given)->instructions.push_back(std::move(instruction));
  return static_cast<int64_t>(op->schema().arguments().size());
}
// Let the newest operation take over the memory of an argument, by the overload that is given the place.
int marid_program_out(void* given, const char* name, const char* overload) {
  auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (op) static_cast<Program*>(given)->instructions.back().out = *op;
  return op ? 1 : 0;
}
// The next argument of the newest operation; 0 when it cannot be passed.
int marid_program_argument(void* given, int kind, int64_t index) {
  Instruction& instruction = static_cast<Program*>(given)->instructions.back();
  const c10::Argument& formal = instruction.op.schema().arguments()[instruction.args.size()];
  Type type = classify(formal.type());
  if (kind == kConstant && type == Type::kTensor) {
    c10::IValue& constant = static_cast<Program*>(given)->constants[index];
    if (constant.isBool()) constant = number_of({'b', constant.toBool(), 0, 0}, type);
  }
  instruction.draws = instruction.draws || kind == kDraw;
  instruction.args.push_back({static_cast<Kind>(kind), index, type, formal.N().value_or(0)});
  return type == Type::kOther && (kind == kParam || kind == kList) ? 0 : 1;
}
void marid_program_result(void* given, int64_t slot, int64_t depth, int64_t first, int64_t second, int64_t viewed,
                          int settled) {
  static_cast<Program*>(given)->instructions.back().results.push_back(
      {slot, depth, {first, second}, viewed, settled != 0});
}
void marid_program_resized(void* given, int64_t slot) {
  static_cast<Program*>(given)->instructions.back().resized.push_back(slot);
}
void marid_program_dying(void* given, int64_t slot) {
  static_cast<Program*>(given)->instructions.back().dying.push_back(slot);
}
int64_t marid_program_list(void* given, int64_t count, const int64_t* slots) {
  auto* program = static_cast<Program*>(given);
  program->lists.emplace_back(slots, slots + count);
  return static_cast<int64_t>(program->lists.size()) - 1;
}
// Constants: none, bool, int (also what stands for layouts and memory formats), text, device, and dtype (of a tensor).
int64_t marid_program_constant(void* given, char kind, int64_t number, const char* text) {
  auto& constants = static_cast<Program*>(given)->constants;
  switch (kind) {
    case 'b': constants.emplace_back(number != 0); break;
    case 'i': constants.emplace_back(number); break;
    case 's': constants.emplace_back(std::string(text)); break;
    case 'v': constants.emplace_back(c10::Device(std::string(text))); break;
    case 't': {
      auto* impl = reinterpret_cast<c10::TensorImpl*>(number);
      constants.emplace_back(static_cast<int64_t>(impl->dtype().toScalarType()));
      break;
    }
    default: constants.emplace_back();
  }
  return static_cast<int64_t>(constants.size()) - 1;
}

void marid_run_free(void* given) {
  std::unique_ptr<Run> run(static_cast<Run*>(given));
  InterpreterLock lock;
  release_objects(*run);
  PyThreadState* state = PyEval_SaveThread();
  run.reset();  // what it frees takes its time
  PyEval_RestoreThread(state);
}

// Go on (see `go`), with a generator or null; a `Status`.
int marid_run_go(void* run, void* generator, double seconds) {
  at::Generator from;
  if (generator != nullptr) {
    from = at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(static_cast<c10::GeneratorImpl*>(generator)));
  }
  return go(*static_cast<Run*>(run), std::move(from), seconds);
}
// Take an input from a slot of another run.
void marid_run_link(void* run, int64_t slot, void* from, int64_t from_slot) {
  static_cast<Run*>(run)->slots[slot] = static_cast<Run*>(from)->slots[from_slot];
}
int marid_run_differs(void* run) { return static_cast<Run*>(run)->differs ? 1 : 0; }
int64_t marid_run_next(void* run) { return static_cast<int64_t>(static_cast<Run*>(run)->next); }
int marid_run_has(void* run, int64_t slot) { return static_cast<Run*>(run)->slots[slot].defined() ? 1 : 0; }

// Keep what kernels warn of on this thread, until the end; one inside of another.
void* marid_warnings_begin() {
  auto* warnings = new Warnings;
  c10::WarningUtils::set_warning_handler(warnings);
  return warnings;
}
// The text of a warning, or null after the last.
const char* marid_warnings_text(void* given, int64_t index) {
  auto* warnings = static_cast<Warnings*>(given);
  return index < static_cast<int64_t>(warnings->kept.size()) ? warnings->kept[index].c_str() : nullptr;
}
// No longer keep what is warned of; on the thread that began.
void marid_warnings_suspend(void* given) {
  c10::WarningUtils::set_warning_handler(static_cast<Warnings*>(given)->outer);
}
void marid_warnings_free(void* given) { delete static_cast<Warnings*>(given); }

}  // extern "C"
