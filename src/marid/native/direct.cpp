// Which operators get kernels of their signature (direct.h).
#include "direct.h"

#include "kernels.h"

#include <array>
#include <string>
#include <string_view>
#include <unordered_map>

namespace marid {

namespace {

using at::Generator, at::Scalar, at::ScalarType, at::Tensor, c10::SymInt, c10::SymIntArrayRef, std::optional, std::tuple;
using c10::Device, c10::Layout;
using at::ArrayRef, at::TensorList, at::IntArrayRef, at::OptionalIntArrayRef, at::OptionalSymIntArrayRef;

// Some 98 % of the calls of ordinary programs. Where a result lies is said of those made like another tensor, which run at once
// where that is left to the tensor; those that draw run at once where they draw from the device's generator.
template <typename... Each>
struct Types {};
using Signatures = Types<
    Tensor(const Tensor&),
    Tensor(const Tensor&, bool),
    Tensor(const Tensor&, int64_t),
    Tensor(const Tensor&, int64_t, bool),
    Tensor(const Tensor&, int64_t, SymInt),
    Tensor(const Tensor&, int64_t, int64_t),
    Tensor(const Tensor&, int64_t, int64_t, int64_t),
    Tensor(const Tensor&, int64_t, IntArrayRef),
    Tensor(const Tensor&, int64_t, const Tensor&),
    Tensor(const Tensor&, int64_t, const Tensor&, const Scalar&),
    Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, const Scalar&),
    Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&, std::string_view, bool),
    Tensor(const Tensor&, int64_t, const Tensor&, bool),
    Tensor(const Tensor&, int64_t, const Tensor&, const Tensor&),
    Tensor(const Tensor&, int64_t, optional<SymInt>, optional<SymInt>, SymInt),
    Tensor(const Tensor&, optional<int64_t>, bool),
    Tensor(const Tensor&, optional<int64_t>),
    Tensor(const Tensor&, SymInt),
    Tensor(const Tensor&, optional<SymInt>),
    Tensor(const Tensor&, optional<double>, optional<double>, optional<double>),
    Tensor(const Tensor&, IntArrayRef),
    Tensor(const Tensor&, IntArrayRef, bool),
    Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef),
    Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool),
    Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, bool, bool, optional<int64_t>),
    Tensor(const Tensor&, SymIntArrayRef),
    Tensor(const Tensor&, SymIntArrayRef, bool),
    Tensor(const Tensor&, SymIntArrayRef, const Scalar&),
    Tensor(const Tensor&, SymIntArrayRef, optional<double>),
    Tensor(const Tensor&, SymIntArrayRef, optional<double>, optional<double>),
    Tensor(const Tensor&, SymIntArrayRef, bool, optional<double>),
    Tensor(const Tensor&, SymIntArrayRef, bool, optional<double>, optional<double>),
    Tensor(const Tensor&, SymIntArrayRef, SymIntArrayRef, optional<double>, optional<double>),
    Tensor(const Tensor&, SymIntArrayRef, SymIntArrayRef, bool, optional<double>, optional<double>),
    Tensor(const Tensor&, SymIntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef),
    Tensor(const Tensor&, SymIntArrayRef, int64_t, SymInt),
    Tensor(const Tensor&, SymIntArrayRef, int64_t, SymInt, SymInt, SymInt),
    Tensor(const Tensor&, OptionalIntArrayRef, bool, optional<ScalarType>),
    Tensor(const Tensor&, optional<ScalarType>),
    Tensor(const Tensor&, optional<at::MemoryFormat>),
    Tensor(const Tensor&, int64_t, optional<ScalarType>),
    Tensor(const Tensor&, int64_t, bool, optional<ScalarType>),
    Tensor(const Tensor&, SymIntArrayRef, IntArrayRef),
    Tensor(const Tensor&, SymInt, bool, optional<Generator>),
    Tensor(const Tensor&, optional<Generator>),
    Tensor(const Tensor&, OptionalIntArrayRef, const optional<Scalar>&, bool),
    Tensor(const Tensor&, optional<ScalarType>, optional<Layout>, optional<Device>, optional<bool>, optional<at::MemoryFormat>),
    Tensor(const Tensor&, SymIntArrayRef, optional<ScalarType>, optional<Layout>, optional<Device>, optional<bool>),
    Tensor(const Tensor&, SymIntArrayRef, const Scalar&, optional<ScalarType>, optional<Layout>, optional<Device>,
           optional<bool>),
    Tensor(const Tensor&, const Scalar&, optional<ScalarType>, optional<Layout>, optional<Device>, optional<bool>,
           optional<at::MemoryFormat>),
    Tensor(const Tensor&, std::string_view),
    Tensor(const Tensor&, const Scalar&),
    Tensor(const Tensor&, const Scalar&, const Scalar&),
    Tensor(const Tensor&, const Scalar&, const Scalar&, const Scalar&),
    Tensor(const Tensor&, const Scalar&, const Scalar&, const Scalar&, bool, const Tensor&),
    Tensor(const Tensor&, const Scalar&, int64_t, const Scalar&),
    Tensor(const Scalar&, const Tensor&),
    Tensor(const Tensor&, const Scalar&, OptionalIntArrayRef, bool, optional<ScalarType>),
    Tensor(const Tensor&, const optional<Scalar>&, const optional<Scalar>&),
    Tensor(const Tensor&, const Tensor&),
    Tensor(const Tensor&, const Tensor&, int64_t),
    Tensor(const Tensor&, const Tensor&, bool, bool),
    Tensor(const Tensor&, const Tensor&, bool, bool, optional<std::string_view>, const optional<Tensor>&),
    Tensor(const Tensor&, const Tensor&, int64_t, int64_t, bool),
    Tensor(const Tensor&, const Tensor&, const optional<Tensor>&, int64_t),
    Tensor(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, int64_t),
    Tensor(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, const optional<Tensor>&, int64_t),
    Tensor(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, bool, bool, optional<int64_t>),
    Tensor(const Tensor&, const optional<Tensor>&, SymInt),
    Tensor(const Tensor&, const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, const Tensor&, const Tensor&, int64_t, bool),
    Tensor(const Tensor&, const Tensor&, int64_t, ScalarType),
    Tensor(const Tensor&, const Tensor&, std::string_view),
    Tensor(const Tensor&, const Tensor&, const Scalar&),
    Tensor(const Tensor&, const Tensor&, const Scalar&, bool),
    Tensor(const Tensor&, const Tensor&, int64_t, double),
    Tensor(const Tensor&, const Tensor&, const optional<Tensor>&, const optional<Tensor>&, int64_t),
    Tensor(const Tensor&, const Tensor&, const optional<Tensor>&, SymIntArrayRef, SymIntArrayRef, SymIntArrayRef, bool,
           SymIntArrayRef, SymInt),
    Tensor(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, int64_t, SymInt, const Tensor&),
    Tensor(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool, const Tensor&),
    Tensor(const Tensor&, const Tensor&, SymInt, bool, bool),
    Tensor(const Tensor&, const Tensor&, SymInt, SymInt, bool),
    Tensor(const Tensor&, const Tensor&, const Tensor&),
    Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t),
    Tensor(const Tensor&, const Tensor&, const Tensor&, const Scalar&),
    Tensor(const Tensor&, const Tensor&, const Tensor&, const Scalar&, const Scalar&),
    Tensor&(Tensor&),
    Tensor&(Tensor&, const Scalar&),
    Tensor&(Tensor&, int64_t, const Tensor&, const Scalar&),
    Tensor&(Tensor&, const optional<Scalar>&, const optional<Scalar>&),
    Tensor&(Tensor&, optional<double>, optional<double>, optional<double>),
    Tensor&(Tensor&, SymInt),
    Tensor&(Tensor&, int64_t, const Tensor&, const Tensor&, std::string_view, bool),
    Tensor&(Tensor&, const Scalar&, const Scalar&),
    Tensor&(Tensor&, const Tensor&),
    Tensor&(Tensor&, const Tensor&, bool),
    Tensor&(Tensor&, const Tensor&, const Scalar&),
    Tensor&(Tensor&, const Tensor&, const Tensor&, const Scalar&),
    Tensor&(Tensor&, int64_t, const Tensor&, const Tensor&),
    Tensor&(Tensor&, int64_t, const Tensor&, const Tensor&, const Scalar&),
    Tensor&(Tensor&, double, optional<Generator>),
    Tensor&(Tensor&, double, double, optional<Generator>),
    void(TensorList),
    void(TensorList, const Scalar&),
    void(TensorList, const Tensor&),
    void(TensorList, ArrayRef<Scalar>),
    void(TensorList, TensorList),
    void(TensorList, TensorList, bool),
    void(TensorList, TensorList, const Scalar&),
    void(TensorList, TensorList, TensorList, const Scalar&),
    void(TensorList, TensorList, TensorList, ArrayRef<Scalar>),
    std::vector<Tensor>(TensorList),
    std::vector<Tensor>(TensorList, const Scalar&),
    std::vector<Tensor>(TensorList, const Scalar&, optional<ScalarType>),
    std::vector<Tensor>(TensorList, ArrayRef<Scalar>),
    std::vector<Tensor>(TensorList, TensorList),
    std::vector<Tensor>(TensorList, TensorList, const Scalar&),
    Tensor(TensorList, int64_t),
    Tensor(const Tensor&, const c10::List<optional<Tensor>>&),
    Tensor(const Tensor&, const c10::List<optional<Tensor>>&, const Tensor&, bool),
    Tensor&(Tensor&, const c10::List<optional<Tensor>>&, const Tensor&, bool),
    std::vector<Tensor>(const Tensor&, int64_t),
    std::vector<Tensor>(const Tensor&, SymInt, int64_t),
    std::vector<Tensor>(const Tensor&, SymIntArrayRef, int64_t),
    tuple<Tensor, Tensor>(const Tensor&, int64_t, bool),
    tuple<Tensor, Tensor>(const Tensor&),
    tuple<Tensor, Tensor>(const Tensor&, bool),
    tuple<Tensor, Tensor>(const Tensor&, int64_t),
    tuple<Tensor, Tensor>(const Tensor&, optional<int64_t>, bool),
    tuple<Tensor, Tensor>(const Tensor&, IntArrayRef),
    tuple<Tensor, Tensor>(const Tensor&, OptionalIntArrayRef, const optional<Scalar>&, bool),
    tuple<Tensor, Tensor>(const Tensor&, SymInt, int64_t, bool),
    tuple<Tensor, Tensor>(const Tensor&, std::string_view),
    tuple<Tensor, Tensor>(const Tensor&, std::string_view, bool),
    tuple<Tensor, Tensor>(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, int64_t, bool),
    tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, bool, std::array<bool, 2>),
    tuple<Tensor, Tensor, Tensor>(const Tensor&, bool, bool, bool),
    tuple<Tensor, Tensor, Tensor>(const Tensor&, const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&,
                                  const optional<Tensor>&, bool, double, double),
    tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&,
        const optional<Tensor>&, const optional<Tensor>&, bool, double, std::array<bool, 3>),
    tuple<Tensor, Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, bool, int64_t, bool, const optional<Tensor>&, bool, int64_t),
    tuple<Tensor, Tensor>(const Tensor&, SymInt, int64_t, bool, bool),
    tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const optional<Tensor>&, int64_t, SymInt),
    tuple<Tensor, Tensor>(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool),
    tuple<Tensor, Tensor, Tensor>(const Tensor&, SymIntArrayRef, const optional<Tensor>&, const optional<Tensor>&, double),
    tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const optional<Tensor>&, const optional<Tensor>&, SymInt, SymInt, SymInt, int64_t, double),
    tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, SymIntArrayRef, const Tensor&, const Tensor&,
                                  const optional<Tensor>&, const optional<Tensor>&, std::array<bool, 3>),
    tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, OptionalSymIntArrayRef, SymIntArrayRef,
                                  SymIntArrayRef, SymIntArrayRef, bool, SymIntArrayRef, SymInt, std::array<bool, 3>)>;

// A character for each type of arguments and results.
template <typename Type>
constexpr char kCode = 0;
template <> constexpr char kCode<const Tensor&> = 't';
template <> constexpr char kCode<Tensor> = 't';
template <> constexpr char kCode<Tensor&> = 'T';
template <> constexpr char kCode<const optional<Tensor>&> = 'u';
template <> constexpr char kCode<std::vector<Tensor>> = 'v';
template <> constexpr char kCode<TensorList> = 'z';
template <> constexpr char kCode<ArrayRef<Scalar>> = 'q';
template <> constexpr char kCode<const c10::List<optional<Tensor>>&> = 'p';
template <> constexpr char kCode<bool> = 'b';
template <> constexpr char kCode<double> = 'f';
template <> constexpr char kCode<optional<double>> = 'D';
template <> constexpr char kCode<int64_t> = 'i';
template <> constexpr char kCode<optional<int64_t>> = 'j';
template <> constexpr char kCode<SymInt> = 's';
template <> constexpr char kCode<optional<SymInt>> = 'r';
template <> constexpr char kCode<const Scalar&> = 'n';
template <> constexpr char kCode<const optional<Scalar>&> = 'o';
template <> constexpr char kCode<IntArrayRef> = 'l';
template <> constexpr char kCode<OptionalIntArrayRef> = 'm';
template <> constexpr char kCode<SymIntArrayRef> = 'k';
template <> constexpr char kCode<OptionalSymIntArrayRef> = 'h';
template <> constexpr char kCode<std::array<bool, 3>> = 'w';
template <> constexpr char kCode<std::array<bool, 2>> = 'w';
template <> constexpr char kCode<ScalarType> = 'd';
template <> constexpr char kCode<optional<ScalarType>> = 'e';
template <> constexpr char kCode<optional<at::MemoryFormat>> = 'y';
template <> constexpr char kCode<optional<Layout>> = 'a';
template <> constexpr char kCode<optional<Device>> = 'c';
template <> constexpr char kCode<optional<bool>> = 'g';
template <> constexpr char kCode<std::string_view> = 'x';
template <> constexpr char kCode<optional<std::string_view>> = 'X';
template <> constexpr char kCode<optional<Generator>> = 'G';

char code_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType: return 't';
    case c10::TypeKind::BoolType: return 'b';
    case c10::TypeKind::FloatType: return 'f';
    case c10::TypeKind::IntType: return 'i';
    case c10::TypeKind::SymIntType: return 's';
    case c10::TypeKind::NumberType: return 'n';
    case c10::TypeKind::ScalarTypeType: return 'd';
    case c10::TypeKind::StringType: return 'x';
    case c10::TypeKind::ListType:
      switch (type.containedType(0)->kind()) {
        case c10::TypeKind::IntType: return 'l';
        case c10::TypeKind::SymIntType: return 'k';
        case c10::TypeKind::TensorType: return 'z';
        case c10::TypeKind::NumberType: return 'q';
        case c10::TypeKind::BoolType: return 'w';
        case c10::TypeKind::OptionalType: return code_of(*type.containedType(0)) == 'u' ? 'p' : 0;
        default: return 0;
      }
    case c10::TypeKind::OptionalType: {
      const c10::Type& inner = *type.containedType(0);
      if (inner.kind() == c10::TypeKind::MemoryFormatType) return 'y';
      if (inner.kind() == c10::TypeKind::LayoutType) return 'a';
      if (inner.kind() == c10::TypeKind::DeviceObjType) return 'c';
      if (inner.kind() == c10::TypeKind::GeneratorType) return 'G';
      switch (code_of(inner)) {
        case 't': return 'u';
        case 'b': return 'g';
        case 'i': return 'j';
        case 's': return 'r';
        case 'n': return 'o';
        case 'l': return 'm';
        case 'k': return 'h';
        case 'd': return 'e';
        case 'f': return 'D';
        case 'x': return 'X';
        default: return 0;
      }
    }
    default: return 0;
  }
}

// The types of what an operator returns, and of its arguments; empty where one is not among those above.
std::string code_of(const c10::FunctionSchema& schema) {
  std::string code;
  for (const c10::Argument& one : schema.returns()) {
    bool is_list = one.type()->kind() == c10::TypeKind::ListType;
    bool written = one.alias_info() != nullptr && one.alias_info()->isWrite();
    code += is_list ? 'v' : written ? 'T' : code_of(*one.real_type());
  }
  code += '(';
  for (const c10::Argument& one : schema.arguments()) {
    bool written = one.alias_info() != nullptr && one.alias_info()->isWrite();
    char type = code_of(*one.real_type());
    bool is_list = type == 'z' && schema.returns().empty();
    if (type == 0 || (written && ((type != 't' && !is_list) || &one != &schema.arguments()[0]))) return {};
    code += written && !is_list ? 'T' : type;
  }
  return code;
}

template <typename Signature>
struct Coded;
template <typename Returned, typename... Arguments>
struct Coded<Returned(Arguments...)> {
  static std::string code() { return {kCode<Returned>, '(', kCode<Arguments>...}; }
};
template <typename... Arguments>
struct Coded<void(Arguments...)> {
  static std::string code() { return {'(', kCode<Arguments>...}; }
};
template <typename... Each, typename... Arguments>
struct Coded<tuple<Each...>(Arguments...)> {
  static std::string code() { return {kCode<Each>..., '(', kCode<Arguments>...}; }
};

// Whether PyTorch declares an operator that writes with constant tensors (`use_const_ref_for_mutable_tensors` in
// native_functions.yaml): of those with the types above, the ones that resize.
bool has_constant_tensors(const c10::OperatorName& name) { return name.name.find("resize") != std::string::npos; }

template <typename Boxed, typename Signature>
c10::KernelFunction kernel_of(const c10::OperatorHandle& op, const std::shared_ptr<Operator>& of, bool is_above) {
  using Own = Direct<Boxed, Signature>;
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Own>(std::make_unique<Own>(op, of, is_above));
}

c10::KernelFunction kernel_of_same_value(const c10::OperatorHandle& op, const std::shared_ptr<Operator>& of, bool) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, SameValue>(std::make_unique<SameValue>(op, of));
}

using Make = c10::KernelFunction (*)(const c10::OperatorHandle&, const std::shared_ptr<Operator>&, bool);

template <typename... Each>
std::unordered_map<std::string, Make> by_code(Types<Each...>) {
  return {{Coded<Each>::code(), kernel_of<Kernel, Each>}...};
}

// What makes the kernel of an operator; null where no signature is its.
Make maker_of(const c10::OperatorHandle& op) {
  static const auto& by_name = *new std::unordered_map<c10::OperatorName, Make>{
      {{"aten::add", "Tensor"}, kernel_of<Sum, Tensor(const Tensor&, const Tensor&, const Scalar&)>},
      {{"aten::sub", "Tensor"}, kernel_of<Difference, Tensor(const Tensor&, const Tensor&, const Scalar&)>},
      {{"aten::mul", "Tensor"}, kernel_of<Product, Tensor(const Tensor&, const Tensor&)>},
      {{"aten::mul", "Scalar"}, kernel_of<Scaled, Tensor(const Tensor&, const Scalar&)>},
      {{"aten::div", "Tensor"}, kernel_of<Quotient, Tensor(const Tensor&, const Tensor&)>},
      {{"aten::dot", ""}, kernel_of<DotProduct, Tensor(const Tensor&, const Tensor&)>},
      {{"aten::vdot", ""}, kernel_of<DotProduct, Tensor(const Tensor&, const Tensor&)>},
      {{"aten::linear", ""}, kernel_of<Linear, Tensor(const Tensor&, const Tensor&, const optional<Tensor>&)>},
      {{"aten::matmul", ""}, kernel_of<Matmul, Tensor(const Tensor&, const Tensor&)>},
      {{"aten::cat", ""}, kernel_of<Kernel, Tensor(const at::ITensorListRef&, int64_t)>},
      {{"aten::histc", ""}, kernel_of<Histogram, Tensor(const Tensor&, int64_t, const Scalar&, const Scalar&)>},
      {{"aten::_to_copy", ""}, kernel_of<Moved, Tensor(const Tensor&, optional<ScalarType>, optional<Layout>, optional<Device>,
                                                       optional<bool>, bool, optional<at::MemoryFormat>)>},
      {{"aten::detach", ""}, kernel_of_same_value},
      {{"aten::lift_fresh", ""}, kernel_of_same_value},
  };
  static const auto by_signature = by_code(Signatures());
  if (auto own = by_name.find(op.operator_name()); own != by_name.end()) return own->second;
  std::string code = code_of(op.schema());
  bool draws_otherwise = op.hasTag(at::Tag::nondeterministic_seeded) && code.find(kCode<optional<Generator>>) == code.npos;
  if (has_constant_tensors(op.operator_name()) || draws_otherwise) return nullptr;
  auto found = by_signature.find(code);
  return found == by_signature.end() ? nullptr : found->second;
}

}  // namespace

std::optional<c10::KernelFunction> direct_kernel(
    const c10::OperatorHandle& op, const std::shared_ptr<Operator>& of, bool is_above) {
  Make make = maker_of(op);
  if (make == nullptr) return std::nullopt;
  try {
    return make(op, of, is_above);
  } catch (const c10::Error&) {  // another version of PyTorch may declare one otherwise
    return std::nullopt;
  }
}

}  // namespace marid
