// The inner loops of RWKV-7's operators. built.py compiles this file for this machine's vector unit.
#include "rwkv7_kernels.h"

#include "vectors.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace marid::rwkv7 {
namespace {

constexpr int64_t kGrain = 1 << 15;  // elements for which a second thread pays

template <typename T, typename F>
void parallel_rows(int64_t rows, int64_t elements_of_row, const F& f) {
  int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(elements_of_row, 1));
  at::parallel_for(0, rows, grain, f);
}

// --- element by element ----------------------------------------------------------------------------------------------

// Calls f(a, b, c, out) for each row; operands that there are none of are null.
template <typename T, typename F>
void over_rows(const Rows& of, const F& f) {
  using S = Sum<T>;
  int64_t width = of.width;
  parallel_rows<T>(of.rows, width, [&](int64_t begin, int64_t end) {
    Room<T> room(4 * width);
    auto row = [&](const void* data, bool one, int64_t i, int64_t at) -> const S* {
      if (data == nullptr) return nullptr;
      return widened(static_cast<const T*>(data) + (one ? 0 : i * width), room.at(at * width), width);
    };
    for (int64_t i = begin; i < end; i++) {
      Written<T> out(static_cast<T*>(of.out) + i * width, room.at(3 * width));
      f(row(of.a, of.one_a, i, 0), row(of.b, of.one_b, i, 1), row(of.c, of.one_c, i, 2), out.begin());
      out.end(width);
    }
  });
}

template <typename T>
struct Lerp {
  static void run(const Rows& of) {
    using S = Sum<T>;
    bool reversed = of.first != 0;
    over_rows<T>(of, [&](const S* a, const S* b, const S* f, S* out) {
      if (reversed) std::swap(a, b);
      for (int64_t j = 0; j < of.width; j++) out[j] = a[j] + (b[j] - a[j]) * f[j];
    });
  }
};

template <typename T>
struct Blend {
  static void run(const Rows& of) {
    using S = Sum<T>;
    over_rows<T>(of, [&](const S* a, const S* b, const S* f, S* out) {
      for (int64_t j = 0; j < of.width; j++) out[j] = a[j] * f[j] + b[j] * (1 - f[j]);
    });
  }
};

template <typename T>
struct ControlK {
  static void run(const Rows& of) {
    using S = Sum<T>;
    over_rows<T>(of, [&](const S* k, const S* a, const S* k_a, S* out) {
      for (int64_t j = 0; j < of.width; j++) out[j] = k[j] * (1 + (a[j] - 1) * k_a[j]);
    });
  }
};

template <typename T>
struct L2Norm {
  static void run(const Rows& of) {
    using S = Sum<T>;
    using Vec = at::vec::Vectorized<S>;
    over_rows<T>(of, [&](const S* a, const S*, const S*, S* out) {
      S sum = of.width == 0 ? 0 : at::vec::map_reduce_all<S>(
          [](Vec x) { return x * x; }, [](Vec x, Vec y) { return x + y; }, a, of.width);
      S norm = std::max<S>(std::sqrt(sum), static_cast<S>(of.number));
      if (std::isnan(sum)) norm = sum;
      for (int64_t j = 0; j < of.width; j++) out[j] = a[j] / norm;
    });
  }
};

template <typename T>
struct SquaredRelu {
  static void run(const Rows& of) {
    using S = Sum<T>;
    over_rows<T>(of, [&](const S* a, const S*, const S*, S* out) {
      for (int64_t j = 0; j < of.width; j++) {
        S positive = a[j] < 0 ? S(0) : a[j];
        out[j] = positive * positive;
      }
    });
  }
};

template <typename T>
struct AddActivate {
  static void run(const Rows& of) {
    using S = Sum<T>;
    over_rows<T>(of, [&](const S* a, const S* b, const S*, S* out) {
      if (of.second == kNone) {
        std::memcpy(out, a, of.width * sizeof(S));
        activate(of.first, out, of.width);
        for (int64_t j = 0; j < of.width; j++) out[j] += b[j];
      } else {
        static thread_local std::vector<S> other;
        other.assign(b, b + of.width);
        activate(of.second, other.data(), of.width);
        std::memcpy(out, a, of.width * sizeof(S));
        activate(of.first, out, of.width);
        for (int64_t j = 0; j < of.width; j++) out[j] += other[j];
      }
      activate(of.third, out, of.width);
    });
  }
};

// --- along tokens ----------------------------------------------------------------------------------------------------

template <typename T>
struct Shift {
  static void run(const TokenShift& of) {
    using S = Sum<T>;
    int64_t width = of.width, tokens = of.tokens, plane = of.batch * tokens * width;
    const T *x = static_cast<const T*>(of.x), *shift = static_cast<const T*>(of.shift);
    parallel_rows<T>(of.batch * tokens, width * (of.count + 1), [&](int64_t begin, int64_t end) {
      Room<T> room(4 * width);
      for (int64_t i = begin; i < end; i++) {
        const T* before = i % tokens == 0 ? shift + i / tokens * width : x + (i - 1) * width;
        const S* now = widened(x + i * width, room.at(0), width);
        const S* old = widened(before, room.at(width), width);
        for (int64_t m = 0; m < of.count; m++) {
          const S* mix = widened(static_cast<const T*>(of.mix) + m * width, room.at(2 * width), width);
          Written<T> written(static_cast<T*>(of.mixed) + m * plane + i * width, room.at(3 * width));
          S* out = written.begin();
          for (int64_t j = 0; j < width; j++) out[j] = now[j] + (old[j] - now[j]) * mix[j];
          written.end(width);
        }
      }
    });
    for (int64_t b = 0; b < of.batch; b++) {
      int64_t length = of.lengths == nullptr ? tokens : std::clamp<int64_t>(of.lengths[b], 0, tokens);
      const T* last = length == 0 ? shift + b * width : x + (b * tokens + length - 1) * width;
      std::memcpy(static_cast<T*>(of.last) + b * width, last, width * sizeof(T));
    }
  }
};

template <typename T>
struct Packing {
  static void run(const Pack& of) {
    int64_t size = of.size;
    const T* from[] = {static_cast<const T*>(of.k), static_cast<const T*>(of.v), static_cast<const T*>(of.a),
                       static_cast<const T*>(of.kk)};
    parallel_rows<T>(of.rows * of.heads, 4 * size, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        T* to = static_cast<T*>(of.packed) + i * 4 * size;
        for (int64_t part = 0; part < 4; part++) std::memcpy(to + part * size, from[part] + i * size, size * sizeof(T));
      }
    });
  }
};

template <typename T>
struct First {
  static void run(const TimeFirst& of) {
    using S = Sum<T>;
    int64_t size = of.size;
    parallel_rows<T>(of.rows * of.heads, size, [&](int64_t begin, int64_t end) {
      Room<T> room(6 * size);
      for (int64_t i = begin; i < end; i++) {
        const T* packed = static_cast<const T*>(of.packed) + i * 4 * size;
        const S* r = widened(static_cast<const T*>(of.r) + i * size, room.at(0), size);
        const S* k = widened(packed, room.at(size), size);
        const S* v = widened(packed + size, room.at(2 * size), size);
        const S* y = widened(static_cast<const T*>(of.y) + i * size, room.at(3 * size), size);
        const S* bonus =
            widened(static_cast<const T*>(of.bonus) + i % of.heads * size, room.at(4 * size), size);
        S sum = 0;
        for (int64_t j = 0; j < size; j++) sum += r[j] * k[j] * bonus[j];
        Written<T> written(static_cast<T*>(of.out) + i * size, room.at(5 * size));
        S* out = written.begin();
        for (int64_t j = 0; j < size; j++) out[j] = y[j] + sum * v[j];
        written.end(size);
      }
    });
  }
};

// One pass over the state makes a token's result, and what the next token removes: s[j] is the row of the state for
// key j. `removed` is the row that kk finds in the state.
template <typename S, int64_t kSize>
inline void step(S* __restrict s, int64_t size, const S* __restrict w, const S* __restrict k, const S* __restrict v,
                 const S* __restrict ka, const S* __restrict r, const S* __restrict next_kk, S* __restrict removed,
                 S* __restrict y) {
  using Vec = at::vec::Vectorized<S>;
  constexpr int64_t kLanes = Vec::size();
  constexpr int64_t kVectors = kSize / kLanes;
  static_assert(kSize % kLanes == 0);
  // Half of the row at a time, for the registers: a half's values, what is removed, the result, what the next removes.
  constexpr int64_t kPart = kVectors < 4 ? kVectors : 4;
  for (int64_t base = 0; base < kVectors; base += kPart) {
    Vec values[kPart], out[kPart], old[kPart], next[kPart];
    for (int64_t p = 0; p < kPart; p++) {
      values[p] = Vec::loadu(v + (base + p) * kLanes);
      old[p] = Vec::loadu(removed + (base + p) * kLanes);
      out[p] = next[p] = Vec(0);
    }
    for (int64_t j = 0; j < kSize; j++) {
      Vec decay(w[j]), key(k[j]), back(ka[j]), read(r[j]), find(next_kk[j]);
      for (int64_t p = 0; p < kPart; p++) {
        S* place = s + j * kSize + (base + p) * kLanes;
        Vec now = at::vec::fmadd(Vec::loadu(place), decay, values[p] * key);
        now = at::vec::fnmadd(old[p], back, now);
        now.store(place);
        out[p] = at::vec::fmadd(now, read, out[p]);
        next[p] = at::vec::fmadd(now, find, next[p]);
      }
    }
    for (int64_t p = 0; p < kPart; p++) {
      out[p].store(y + (base + p) * kLanes);
      next[p].store(removed + (base + p) * kLanes);
    }
  }
}

template <typename S>
inline void step_of_any(S* __restrict s, int64_t size, const S* __restrict w, const S* __restrict k,
                        const S* __restrict v, const S* __restrict ka, const S* __restrict r,
                        const S* __restrict next_kk, S* __restrict removed, S* __restrict y) {
  std::vector<S> next(size);
  for (int64_t i = 0; i < size; i++) y[i] = 0;
  for (int64_t j = 0; j < size; j++) {
    S* row = s + j * size;
    for (int64_t i = 0; i < size; i++) {
      row[i] = row[i] * w[j] + v[i] * k[j] - removed[i] * ka[j];
      y[i] += row[i] * r[j];
      next[i] += row[i] * next_kk[j];
    }
  }
  std::copy(next.begin(), next.end(), removed);
}

template <typename T>
struct Mix {
  static constexpr int64_t kWork = 4;  // what is done with an element of the state, beside what is done elsewhere
  static void run(const TimeMix& of) {
    using S = Sum<T>;
    using Vec = at::vec::Vectorized<S>;
    int64_t size = of.size, heads = of.heads, tokens = of.tokens;
    auto any = &step_of_any<S>;
    auto one = size == 64 ? &step<S, 64> : size == 128 ? &step<S, 128> : size == 32 ? &step<S, 32> : any;
    parallel_rows<T>(of.batch * heads, kWork * std::max<int64_t>(tokens, 1) * size * size, [&](int64_t begin, int64_t end) {
      std::vector<S> room(11 * size);
      S *decay = room.data(), *removed = decay + size, *ka = removed + size, *rooms = ka + size;
      for (int64_t task = begin; task < end; task++) {
        int64_t b = task / heads, h = task % heads;
        int64_t length = of.lengths == nullptr ? tokens : std::clamp<int64_t>(of.lengths[b], 0, tokens);
        S* s = static_cast<S*>(of.next) + task * size * size;
        std::memcpy(s, static_cast<const S*>(of.state) + task * size * size, size * size * sizeof(S));
        auto part = [&](int64_t t, int64_t which) {
          return static_cast<const T*>(of.packed) + (((b * tokens + t) * heads + h) * 4 + which) * size;
        };
        auto place = [&](int64_t t) { return ((b * tokens + t) * heads + h) * size; };
        std::fill(removed, removed + size, S(0));
        if (length > 0) {
          const S* kk = widened(part(0, 3), rooms, size);
          for (int64_t j = 0; j < size; j++) {
            for (int64_t i = 0; i < size; i++) removed[i] += s[j * size + i] * kk[j];
          }
        }
        for (int64_t t = 0; t < length; t++) {
          const S* w = widened(static_cast<const T*>(of.w) + place(t), rooms, size);
          at::vec::map<S>([](Vec x) { return (Vec(S(-0.60653065971263342)) * sigmoid(x)).exp(); }, decay, w, size);
          const S* k = widened(part(t, 0), rooms + size, size);
          const S* v = widened(part(t, 1), rooms + 2 * size, size);
          const S* a = widened(part(t, 2), rooms + 3 * size, size);
          const S* kk = widened(part(t, 3), rooms + 4 * size, size);
          const S* r = widened(static_cast<const T*>(of.r) + place(t), rooms + 5 * size, size);
          for (int64_t j = 0; j < size; j++) ka[j] = kk[j] * a[j];
          const S* next = t + 1 < length ? widened(part(t + 1, 3), rooms + 6 * size, size) : kk;
          Written<T> y(static_cast<T*>(of.y) + place(t), rooms + 7 * size);
          one(s, size, decay, k, v, ka, r, next, removed, y.begin());
          y.end(size);
        }
        for (int64_t t = length; t < tokens; t++) {
          T* y = static_cast<T*>(of.y) + place(t);
          std::fill(y, y + size, T(0));
        }
      }
    });
  }
};

template <template <typename> class K, typename Of>
void dispatched(Element element, const Of& of) {
  switch (element) {
    case Element::kDouble: return K<double>::run(of);
    case Element::kFloat: return K<float>::run(of);
    case Element::kHalf: return K<c10::Half>::run(of);
    case Element::kBFloat16: return K<c10::BFloat16>::run(of);
  }
}

}  // namespace

extern const Kernels kernels = {
    dispatched<Shift, TokenShift>, dispatched<Packing, Pack>, dispatched<Mix, TimeMix>,
    dispatched<First, TimeFirst>,  dispatched<Lerp, Rows>,    dispatched<Blend, Rows>,
    dispatched<L2Norm, Rows>,      dispatched<SquaredRelu, Rows>, dispatched<AddActivate, Rows>,
    dispatched<ControlK, Rows>,
};

}  // namespace marid::rwkv7
