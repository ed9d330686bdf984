// How many numbers an operation has taken is measured, not foretold: it runs at once, so its generator can be looked at
// afterwards. What recorded operations take is known beforehand, for those of a list: frontend/random.py.
#include "random.h"

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/DistributionsHelper.h>

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

namespace marid {

namespace {

// Of frontend/random.py.
Slots positions, draw;  // of a device's generator; of graph/node.py
enum PositionSlot { kSeed, kOffset, kSpare, kEnd, kEndSpare };  // a draw has all of them
PyObject *generators, *made_generator, *cpu_state, *measure;

constexpr int64_t kTwist = at::MERSENNE_STATE_N;  // words after which a generator makes its state anew
constexpr int64_t kPairWords = 4;  // of a pair of normal numbers, of which one is kept: PAIR_WORDS in graph/mersenne_twister.py
constexpr int64_t kLatest = 2048;  // words among which it is looked for
constexpr int64_t kFarthest = int64_t{1} << 31;
constexpr uint64_t kMostSkipped = 1 << 20, kMostFromSeed = 1 << 12;

// The state of a generator of the CPU.
struct State {
  at::mt19937_data_pod twister;
  std::optional<float> single;
  std::optional<double> normal;

  static State of(at::CPUGeneratorImpl* generator) {
    return {generator->engine().data(), generator->next_float_normal_sample(), generator->next_double_normal_sample()};
  }

  void give(at::CPUGeneratorImpl* generator) const {
    at::mt19937 engine;
    engine.set_data(twister);
    generator->set_engine(engine);
    generator->set_next_float_normal_sample(single);
    generator->set_next_double_normal_sample(normal);
  }
};

// A generator of this thread, and where it stands.
struct Source {
  at::Generator generator;
  Position position{};
  State state;

  // Go there from here, past what was drawn elsewhere in between, by recorded operations say, or from the beginning of a stream;
  // false where that is not just some words.
  bool go_to(const Position& wanted) {
    bool is_ahead = generator.defined() && wanted.seed == position.seed && wanted.offset >= position.offset;
    uint64_t skipped = wanted.offset - (is_ahead ? position.offset : 0);
    if (wanted.spare >= 0 || skipped > (is_ahead ? kMostSkipped : kMostFromSeed)) return false;
    if (!generator.defined()) generator = at::detail::createCPUGenerator();
    auto* impl = static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
    if (!is_ahead) impl->set_current_seed(wanted.seed);
    impl->set_next_double_normal_sample(std::nullopt);
    for (; skipped > 0; skipped--) impl->random();
    position = wanted;
    state = State::of(impl);
    return true;
  }
};

Source& here() {
  static thread_local Source source;
  return source;
}

at::CPUGeneratorImpl* impl_of(const at::Generator& generator) {
  return static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

bool is_same_block(const at::mt19937_data_pod& one, const at::mt19937_data_pod& other) {
  return std::memcmp(one.state_.data(), other.state_.data(), sizeof one.state_) == 0;
}

using Words = uint32_t __attribute__((vector_size(32)));
constexpr int64_t kTogether = 8;  // words

#if defined(__x86_64__) && !defined(__clang__)
#define FOR_EACH_VECTOR_UNIT __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_VECTOR_UNIT
#endif

template <typename T>
__attribute__((always_inline)) inline T twisted(const uint32_t* words, const uint32_t* other) {
  T word, next, far;
  std::memcpy(&word, words, sizeof(word));
  std::memcpy(&next, words + 1, sizeof(next));
  std::memcpy(&far, other, sizeof(far));
  T mixed = (word & uint32_t{at::UMASK}) | (next & uint32_t{at::LMASK});
  return far ^ (mixed >> 1) ^ (-(next & 1u) & uint32_t{at::MATRIX_A});
}

// The words from `begin` to before `end` of a block become those of the next one, for which others lie so far from them.
FOR_EACH_VECTOR_UNIT void twist(uint32_t* words, int64_t begin, int64_t end, int64_t distance) {
  int64_t i = begin;
  for (; i + kTogether <= end; i += kTogether) {
    auto made = twisted<Words>(words + i, words + i + distance);
    std::memcpy(words + i, &made, sizeof(made));
  }
  for (; i < end; i++) words[i] = twisted<uint32_t>(words + i, words + i + distance);
}

// The next block of a generator (Matsumoto and Nishimura, "Mersenne Twister", 1998): what `at::mt19937` makes a word at a time,
// in an eighth of the time.
void go_to_next_block(at::mt19937_data_pod& block) {
  constexpr int64_t kShift = at::MERSENNE_STATE_M, kFront = kTwist - kShift;
  uint32_t* words = block.state_.data();
  twist(words, 0, kFront, kShift);
  twist(words, kFront, kTwist - 1, -kFront);
  std::array<uint32_t, 2> last{words[kTwist - 1], words[0]};
  words[kTwist - 1] = twisted<uint32_t>(last.data(), words + kShift - 1);
}

// How many words lie between two states; nothing if too many.
std::optional<int64_t> words_between(const at::mt19937_data_pod& from, const at::mt19937_data_pod& to) {
  int64_t words = from.left_ - to.left_;
  if (words >= 0 && is_same_block(from, to)) return words;
  at::mt19937_data_pod block = from;
  for (; words < 0 || !is_same_block(block, to); words += kTwist) {
    if (words > kFarthest) return std::nullopt;
    go_to_next_block(block);
  }
  return words;
}

// Words that were drawn, as a generator of which PyTorch's distributions make numbers.
struct Drawn {
  const uint32_t* next;
  std::optional<double> spare;

  uint32_t random() { return *next++; }
  uint64_t random64() {
    uint64_t high = random();
    return high << 32 | random();
  }
  std::optional<double> next_double_normal_sample() const { return spare; }
  void set_next_double_normal_sample(std::optional<double> made) { spare = made; }
};

// Behind how many of the words between two states the last pair of normal numbers begins, of which the second state holds a
// spare. Nothing where that is not among the latest.
std::optional<int64_t> beginning_of_pair(const State& from, const State& to, int64_t words) {
  if (!to.normal) return std::nullopt;
  int64_t first = std::max<int64_t>(0, words - kLatest);
  at::mt19937 engine;
  engine.set_data(from.twister);
  for (int64_t i = 0; i < first; i++) engine();
  std::vector<uint32_t> latest(static_cast<size_t>(words - first));
  for (uint32_t& word : latest) word = engine();
  for (int64_t at = words - kPairWords; at >= first; at--) {
    Drawn drawn{latest.data() + (at - first), std::nullopt};
    at::normal_distribution<double> normal(0, 1);
    normal(&drawn);
    if (drawn.spare == to.normal) return at;
  }
  return std::nullopt;
}

// Where a generator stands, or where a draw begins; false after an error.
bool read_position(const Slots& slots, PyObject* of, Position* position) {
  position->seed = PyLong_AsUnsignedLongLong(slots.at(of, kSeed));
  position->offset = PyLong_AsUnsignedLongLong(slots.at(of, kOffset));
  position->spare = PyLong_AsLongLong(slots.at(of, kSpare));
  return !PyErr_Occurred();
}

bool write_position(PyObject* generator, const Position& position) {
  Ref offset(PyLong_FromUnsignedLongLong(position.offset)), spare(PyLong_FromLongLong(position.spare));
  if (!offset || !spare) return false;
  positions.set(generator, kOffset, std::move(offset));
  positions.set(generator, kSpare, std::move(spare));
  return true;
}

// A generator that stands there, for Python. Null after an error.
Ref generator_at(const Position& position) {
  Ref generator(PyObject_CallFunction(made_generator, "iK", 0, static_cast<unsigned long long>(position.seed)));
  return generator && write_position(generator.get(), position) ? std::move(generator) : Ref();
}

// Go on by the words between two states; false after an error.
bool advance(const State& from, const State& to, Position* position) {
  std::optional<int64_t> words = words_between(from.twister, to.twister);
  bool is_same_spare = from.single == to.single && from.normal == to.normal;
  std::optional<int64_t> pair = words && !is_same_spare && !to.single ? beginning_of_pair(from, to, *words) : std::nullopt;
  bool is_known = words && (is_same_spare || (!to.single && (!to.normal || pair)));
  if (!is_known) {  // Python searches
    Ref states[2];
    for (auto [state, place] : {std::pair{&from, &states[0]}, {&to, &states[1]}}) {
      at::Generator generator = at::detail::createCPUGenerator();
      state->give(impl_of(generator));
      *place = Ref(THPVariable_Wrap(generator.get_state()));
      if (!*place) return false;
    }
    Ref generator = generator_at(*position);
    if (!generator) return false;
    Ref taken(PyObject_CallFunctionObjArgs(measure, generator.get(), states[0].get(), states[1].get(), nullptr));
    return taken && read_position(positions, generator.get(), position);
  }
  if (!is_same_spare) position->spare = pair ? static_cast<int64_t>(position->offset) + *pair : -1;
  position->offset += *words;
  return true;
}

}  // namespace

Draws::Draws(bool draws, c10::DeviceIndex device, const at::Generator& given)
    : given_(draws && given.defined() ? position_of(given) : nullptr),
      of_(draws && given_ == nullptr ? PyList_GetItem(generators, device) : nullptr) {}

const at::Generator& Draws::source() { return here().generator; }

bool Draws::begin() {
  if (given_ == nullptr && of_ == nullptr) return true;
  Source& source = here();
  Position wanted;
  for (;;) {  // while Python runs, another thread may draw
    if (given_ != nullptr) {
      wanted = *given_;
    } else if (!read_position(positions, of_, &wanted)) {
      return false;
    }
    if ((source.generator.defined() && wanted == source.position) || source.go_to(wanted)) break;
    Ref state(PyObject_CallFunction(cpu_state, "KKL", wanted.seed, wanted.offset, wanted.spare));
    if (!state) return false;
    if (!source.generator.defined()) source.generator = at::detail::createCPUGenerator();
    source.generator.set_state(THPVariable_Unpack(state.get()));
    source.state = State::of(impl_of(source.generator));
    source.position = wanted;
  }
  is_begun_ = true;
  return true;
}

bool Draws::end() {
  if (!std::exchange(is_begun_, false)) return true;
  Source& source = here();
  State reached = State::of(impl_of(source.generator));
  bool moved = advance(source.state, reached, &source.position);
  source.state = reached;
  if (!moved) return false;
  if (given_ == nullptr) return write_position(of_, source.position);
  *given_ = source.position;
  return true;
}

void Draws::undo() {
  if (std::exchange(is_begun_, false)) here().state.give(impl_of(here().generator));
}

Draws::~Draws() {
  if (!end()) PyErr_WriteUnraisable(generators);  // beside what the operation has thrown
}

namespace {

// take(generator, draw): move a generator on to the end of a draw, if it still stands where that begins; whether it did.
PyObject* take(PyObject*, PyObject* const* given, Py_ssize_t) {
  Position stands, begins;
  if (!read_position(positions, given[0], &stands) || !read_position(draw, given[1], &begins)) return nullptr;
  if (!(stands == begins)) Py_RETURN_FALSE;
  positions.set(given[0], kOffset, Ref::to(draw.at(given[1], kEnd)));
  positions.set(given[0], kSpare, Ref::to(draw.at(given[1], kEndSpare)));
  Py_RETURN_TRUE;
}

// draw_from(generators, Generator, Draw, cpu_state, measure): the devices' generators, and of random.py what is needed for them.
PyObject* draw_from(PyObject*, PyObject* const* given, Py_ssize_t) {
  if (!positions.find(given[1], {"seed", "offset", "spare"})) return nullptr;
  if (!draw.find(given[2], {"seed", "offset", "spare", "end", "end_spare"})) return nullptr;
  generators = Py_NewRef(given[0]);
  made_generator = Py_NewRef(given[1]);
  cpu_state = Py_NewRef(given[3]);
  measure = Py_NewRef(given[4]);
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef random_functions[] = {
    {"draw_from", fast(draw_from), METH_FASTCALL, nullptr},
    {"take", fast(take), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace marid
