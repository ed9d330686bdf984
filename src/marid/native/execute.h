// Programs as tables of dispatcher calls (programs.cpp), and their runs (execute.cpp).
#pragma once
#include "geometry.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace marid {

// What an argument becomes, by its type in the operator's schema.
enum class Type { kTensor, kInt, kFloat, kBool, kNumber, kInts, kFloats, kBools, kNumbers, kTensors, kMaybeTensors, kOther };

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
  int64_t viewed;   // the slot of what it is a view of, or -1 where it has memory of its own
  bool is_settled;  // whether it keeps its geometry: false where a later instruction may resize it
};

struct AnySmallKernel;  // small/small.h

struct Instruction {
  c10::OperatorHandle op;
  const AnySmallKernel* small;  // null where there is none
  std::optional<c10::OperatorHandle> out;  // the same operator with the place of its result as last argument
  std::vector<Argument> args;
  std::vector<Result> results;
  std::vector<int64_t> resized;  // arguments whose geometry it may change
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
// As an argument of this type.
c10::IValue number_of(const Number& number, Type type);

struct Parameter {
  bool list = false;
  c10::SmallVector<Number, 1> numbers;
};

struct Run {
  const Program* program;
  std::vector<at::Tensor> slots;
  std::vector<const Geometry*> recorded;  // by slot, null where nothing is known; whoever began the run keeps them
  std::vector<Parameter> params;
  std::vector<int64_t> donors;  // for each instruction the argument whose memory its result takes over, or -1
  size_t next = 0;
  int64_t* sums = nullptr;  // for each instruction nanoseconds and runs, which this one adds to, if asked for
  int64_t* spans = nullptr;  // for each instruction when it began and ended, in nanoseconds of a steady clock, if asked for
  std::vector<std::string> labels;  // what profilers are to show each instruction under, where one is at work
  bool differs = false;  // the instruction before `next` gave something else than was recorded
  torch::jit::Stack stack;  // of the operation at hand
  // Tensors that it does not need any more and that Python has objects of. PyTorch takes the interpreter's lock where the last
  // other owner of such a tensor lets go of it, and this thread, which has none, would wait for whoever records meanwhile.
  std::vector<at::Tensor> retired;
};

// Keeps what kernels warn of on this thread, for Python to warn of when their results are safe; one inside of another.
class Warnings final : public c10::WarningHandler {
 public:
  Warnings() { c10::WarningUtils::set_warning_handler(this); }
  void process(const c10::Warning& warning) override { kept.push_back(warning.msg()); }
  void end() { c10::WarningUtils::set_warning_handler(outer_); }  // on the thread that began

  std::vector<std::string> kept;

 private:
  c10::WarningHandler* outer_ = c10::WarningUtils::get_warning_handler();
};

// Let go of the tensors that Python has objects of; with the interpreter's lock.
void release_objects(Run& run);

// How far a run has come.
enum Status { kRunDone, kRunAgain, kRunDraws, kRunRaised };

// Go on: to the end; for about so many seconds; up to an operation that wants a generator, which is for the first one of
// the next call (else null); or up to one that raised, or that gave something else than was recorded (then the run `differs`).
// Without the interpreter's lock.
Status go(Run& run, c10::GeneratorImpl* generator, double seconds);

}  // namespace marid
