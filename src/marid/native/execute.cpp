// Runs a program without Python between its operations.
//
// execute/table.py translates a program once into a table of dispatcher calls; a run fills in tensors and numbers and
// goes through the table with the interpreter's lock released. It stops before an operation that needs a generator
// positioned, after every stretch of time in which Ctrl-C should be heard, and where an operation raises: the caller
// then goes on in Python, which raises the same error in Python's terms.
#include <ATen/core/dispatch/Dispatcher.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

struct _object;
using PyObject = _object;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
namespace at::detail {
// From ATen/ScalarOps.h, which would bring in every operator there is: four seconds of a first import.
Tensor scalar_tensor_static(const Scalar& s, std::optional<ScalarType> dtype, std::optional<Device> device);
}  // namespace at::detail

namespace {

// What an argument becomes, by its type in the operator's schema.
enum class Type { kTensor, kInt, kFloat, kBool, kNumber, kInts, kFloats, kBools, kNumbers, kTensors, kMaybeTensors, kOther };

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

enum Kind { kSlot, kParam, kDraw, kConstant, kList, kDefault };

struct Argument {
  Kind kind;
  int64_t index;
  Type type;
  int64_t width;  // of a list that a single number fills, or 0
};

struct Result {
  int64_t slot;
  int64_t depth;
  int64_t path[2];
};

struct Instruction {
  c10::OperatorHandle op;
  std::optional<c10::OperatorHandle> out;  // the same operator with the place of its result as last argument
  std::vector<Argument> args;
  std::vector<Result> results;
  std::vector<int64_t> dying;
  size_t returns;
  bool draws = false;
};

struct Program {
  int64_t slots;
  std::vector<Instruction> instructions;
  std::vector<c10::IValue> constants;
  std::vector<std::vector<int64_t>> lists;  // slots, or -1 for None
};

// A number or a list of numbers: 'i', 'd', 'b' or 'c' each.
struct Number {
  char tag;
  int64_t i;
  double d, imaginary;
  double real() const { return tag == 'd' ? d : static_cast<double>(i); }
  c10::Scalar scalar() const {
    switch (tag) {
      case 'd': return d;
      case 'b': return i != 0;
      case 'c': return c10::complex<double>(d, imaginary);
      default: return i;
    }
  }
};
struct Parameter {
  bool list = false;
  std::vector<Number> numbers;
};

struct Run {
  const Program* program;
  std::vector<at::Tensor> slots;
  std::vector<Parameter> params;
  std::vector<int64_t> donors;  // for each instruction the argument whose memory its result takes over, or -1
  size_t next = 0;
};

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
  const std::vector<Number>* numbers = &param.numbers;
  std::vector<Number> filled;
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

void execute(Run& run, const Instruction& instruction, int64_t donor, const at::Generator& generator) {
  torch::jit::Stack stack;
  stack.reserve(instruction.args.size() + 1);
  const c10::OperatorHandle* op = &instruction.op;
  at::Tensor place;
  if (donor >= 0 && instruction.out && is_sole(run.slots[instruction.args[donor].index])) {
    op = &*instruction.out;
    place = run.slots[instruction.args[donor].index];
  }
  for (size_t i = 0; i < instruction.args.size(); i++) {
    stack.push_back(value_of(run, instruction.args[i], instruction.op, i, generator));
  }
  if (place.defined()) stack.push_back(std::move(place));
  op->callBoxed(&stack);
  for (const Result& result : instruction.results) {
    const c10::IValue& top = stack[instruction.returns == 1 ? 0 : result.path[0]];
    int64_t depth = instruction.returns == 1 ? 0 : 1;
    run.slots[result.slot] =
        depth == result.depth ? top.toTensor() : at::Tensor(top.toListRef()[result.path[depth]].toTensor());
  }
  stack.clear();
  for (int64_t slot : instruction.dying) run.slots[slot].reset();
}

}  // namespace

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
  Instruction instruction{*op, std::nullopt, {}, {}, {}, op->schema().returns().size()};
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
  instruction.draws = instruction.draws || kind == kDraw;
  instruction.args.push_back({static_cast<Kind>(kind), index, type, formal.N().value_or(0)});
  return type == Type::kOther && (kind == kParam || kind == kList) ? 0 : 1;
}
void marid_program_result(void* given, int64_t slot, int64_t depth, int64_t first, int64_t second) {
  static_cast<Program*>(given)->instructions.back().results.push_back({slot, depth, {first, second}});
}
void marid_program_dying(void* given, int64_t slot) {
  static_cast<Program*>(given)->instructions.back().dying.push_back(slot);
}
int64_t marid_program_list(void* given, int64_t count, const int64_t* slots) {
  auto* program = static_cast<Program*>(given);
  program->lists.emplace_back(slots, slots + count);
  return static_cast<int64_t>(program->lists.size()) - 1;
}
// Constants: none, bool, int (also what stands for layouts and memory formats), text, device, dtype (of a tensor), and
// as many ints as `number` says, at `text`.
int64_t marid_program_constant(void* given, char kind, int64_t number, const char* text) {
  auto& constants = static_cast<Program*>(given)->constants;
  switch (kind) {
    case 'b': constants.emplace_back(number != 0); break;
    case 'i': constants.emplace_back(number); break;
    case 's': constants.emplace_back(std::string(text)); break;
    case 'l': {
      std::vector<int64_t> ints(number);
      if (number > 0) std::memcpy(ints.data(), text, number * sizeof(int64_t));
      constants.emplace_back(std::move(ints));
      break;
    }
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

// A run. `inputs` are TensorImpl*, by `input_slots`. Numbers come as one stream of `tags`: i, b, d or c for a number, and
// l with the number of elements in `ints` before those of a list; i and b take one of `ints`, d one and c two of
// `doubles`.
void* marid_run_new(void* given, int64_t inputs, void* const* tensors, const int64_t* input_slots, int64_t tag_count,
                    const char* tags, const int64_t* ints, const double* doubles, const int64_t* donors) {
  auto* run = new Run;
  run->program = static_cast<Program*>(given);
  run->slots.resize(run->program->slots);
  for (int64_t i = 0; i < inputs; i++) {
    if (tensors[i] == nullptr) continue;  // comes later, by marid_run_link
    run->slots[input_slots[i]] = at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
        static_cast<c10::TensorImpl*>(tensors[i])));
  }
  int64_t left = 0;  // elements still to come of a list
  for (int64_t at = 0; at < tag_count; at++) {
    if (tags[at] == 'l') {
      left = *ints++;
      run->params.push_back({true, {}});
      run->params.back().numbers.reserve(left);
      continue;
    }
    Number number{tags[at], 0, 0, 0};
    if (number.tag == 'd') {
      number.d = *doubles++;
    } else if (number.tag == 'c') {
      number.d = *doubles++;
      number.imaginary = *doubles++;
    } else {
      number.i = *ints++;
    }
    if (left > 0) {
      left--;
    } else {
      run->params.emplace_back();
    }
    run->params.back().numbers.push_back(number);
  }
  if (donors != nullptr) run->donors.assign(donors, donors + run->program->instructions.size());
  return run;
}
void marid_run_free(void* run) { delete static_cast<Run*>(run); }

// Go on. Returns 0 when all is done; 1 to be called again (after `seconds`); 2 where the next operation wants a
// generator, to be given with the next call; 3 where the next operation raised.
int marid_run_go(void* given, void* generator, double seconds) {
  auto* run = static_cast<Run*>(given);
  const auto& instructions = run->program->instructions;
  at::Generator from;
  if (generator != nullptr) {
    from = at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(static_cast<c10::GeneratorImpl*>(generator)));
  }
  auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (run->next < instructions.size()) {
    const Instruction& instruction = instructions[run->next];
    if (instruction.draws && !from.defined()) return 2;
    try {
      execute(*run, instruction, run->donors.empty() ? -1 : run->donors[run->next], from);
    } catch (...) {
      return 3;
    }
    from = at::Generator();
    run->next++;
    if ((run->next & 15) == 0 && std::chrono::steady_clock::now() > deadline) return 1;
  }
  return 0;
}
// Take an input from a slot of another run.
void marid_run_link(void* run, int64_t slot, void* from, int64_t from_slot) {
  static_cast<Run*>(run)->slots[slot] = static_cast<Run*>(from)->slots[from_slot];
}
int64_t marid_run_next(void* run) { return static_cast<int64_t>(static_cast<Run*>(run)->next); }
int marid_run_has(void* run, int64_t slot) { return static_cast<Run*>(run)->slots[slot].defined() ? 1 : 0; }
// The tensor in a slot, for Python; with the interpreter's lock.
PyObject* marid_run_tensor(void* run, int64_t slot) { return THPVariable_Wrap(static_cast<Run*>(run)->slots[slot]); }

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
