// Puts tables of dispatcher calls together for execute/table.py: an operation, its arguments and its results after each other.
#include "expose.h"

#include "execute.h"
#include "small/small.h"

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

Program* program_new(int64_t slots) {
  auto* program = new Program;
  program->slots = slots;
  return program;
}
void program_free(Program* program) { delete program; }

// Append an operation; false when there is no such operator.
bool program_operation(Program* program, const char* name, const char* overload) {
  auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op) return false;
  program->instructions.push_back(
      {*op, find_small_kernel(c10::toString(op->operator_name())), std::nullopt, {}, {}, {}, {}, op->schema().returns().size()});
  return true;
}
// Let the newest operation take over the memory of an argument, by the overload that is given the place.
void program_out(Program* program, const char* name, const char* overload) {
  program->instructions.back().out = c10::Dispatcher::singleton().findSchema({name, overload});
}
// The next argument of the newest operation; false when it cannot be passed.
bool program_argument(Program* program, Kind kind, int64_t index) {
  Instruction& instruction = program->instructions.back();
  const c10::Argument& formal = instruction.op.schema().arguments()[instruction.args.size()];
  Type type = classify(formal.type());
  if (kind == kConstant && type == Type::kTensor) {
    c10::IValue& constant = program->constants[index];
    if (constant.isBool()) constant = number_of({'b', constant.toBool(), 0, 0}, type);
  }
  instruction.draws = instruction.draws || kind == kDraw;
  instruction.args.push_back({kind, index, type, formal.N().value_or(0)});
  return type != Type::kOther || (kind != kParam && kind != kList);
}
void program_result(Program* program, int64_t slot, int64_t depth, int64_t first, int64_t second, int64_t viewed,
                    bool is_settled) {
  program->instructions.back().results.push_back({slot, depth, {first, second}, viewed, is_settled});
}
void program_resized(Program* program, int64_t slot) { program->instructions.back().resized.push_back(slot); }
void program_dying(Program* program, int64_t slot) { program->instructions.back().dying.push_back(slot); }
// A list of slots, -1 for None; what arguments name it by.
size_t program_list(Program* program, std::vector<int64_t> slots) {
  program->lists.push_back(std::move(slots));
  return program->lists.size() - 1;
}
// Constants: none, bool, int (also what stands for layouts and memory formats), text, device, and dtype (of a tensor).
size_t program_constant(Program* program, const char* kind, int64_t number, const char* text) {
  auto& constants = program->constants;
  switch (*kind) {
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
  return constants.size() - 1;
}

}  // namespace

namespace marid {

PyMethodDef program_functions[] = {
    held<program_new>("program_new"),
    released<program_free>("program_free"),
    held<program_operation>("program_operation"),
    held<program_out>("program_out"),
    held<program_argument>("program_argument"),
    held<program_result>("program_result"),
    held<program_resized>("program_resized"),
    held<program_dying>("program_dying"),
    held<program_list>("program_list"),
    held<program_constant>("program_constant"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
