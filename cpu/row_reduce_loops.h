// Loops over the entries of one row (or a piece of it), for row_reduce and sparse_softmax.
#pragma once

#include "row_reduce.h"
#include "simd.h"

namespace sgap::SGAP_ISA {

// Calls body(first, count) for [0, length) cut into vectors of kLanes<T>.
template <typename T, typename Body>
inline void ForVectors(int64_t length, Body&& body) {
  constexpr int kSize = kLanes<T>;
  int64_t i = 0;
  for (; length - i >= kSize; i += kSize) body(i, kSize);
  if (i < length) body(i, static_cast<int>(length - i));
}

template <typename T>
inline Vector<Accumulator<T>, kLanes<T>> LoadCount(const T* source, int count) {
  constexpr int kSize = kLanes<T>;
  return count == kSize ? Load<T, kSize>(source) : LoadPartial<T, kSize>(source, count);
}

template <typename T>
inline void StoreCount(T* target, Vector<Accumulator<T>, kLanes<T>> x, int count) {
  constexpr int kSize = kLanes<T>;
  if (count == kSize) {
    Store<T, kSize>(target, x);
  } else {
    StorePartial<T, kSize>(target, x, count);
  }
}

// `x` in the first `count` lanes, `otherwise` in the rest.
template <typename V>
inline V FirstLanes(V x, int count, V otherwise) {
  using Element = decltype(x[0] + x[0]);
  constexpr int n = sizeof(V) / sizeof(x[0]);
  return count == n ? x : LaneNumbers<Element, n>() < Element(count) ? x : otherwise;
}

struct Add {
  template <typename V>
  V operator()(V a, V b) const {
    return a + b;
  }
};

// NaN if either is.
struct Greatest {
  template <typename V>
  V operator()(V a, V b) const {
    const V greater = a > b ? a : b;  // b where either is NaN
    return a == a ? greater : a;
  }
};

// The lanes combined by halves: a fixed order.
template <typename V, typename Combine>
inline auto Horizontal(V x, Combine combine) {
  using Element = decltype(x[0] + x[0]);
  constexpr int n = sizeof(V) / sizeof(Element);
  if constexpr (n == 1) {
    return x[0];
  } else if constexpr (n == 2) {
    Element low = x[0], high = x[1];
    return combine(low, high);
  } else {
    Vector<Element, n / 2> halves[2];
    __builtin_memcpy(halves, &x, sizeof(x));
    return Horizontal(combine(halves[0], halves[1]), combine);
  }
}

// The combination of term(first, count) over [0, length), lanes past `count` of a term being the
// identity; four running vectors where the row is long.
template <typename T, typename Combine, typename Term>
inline Accumulator<T> Reduce(int64_t length, Accumulator<T> identity, Combine combine,
                             Term&& term) {
  constexpr int kSize = kLanes<T>;
  using V = Vector<Accumulator<T>, kSize>;
  const V none = V{} + identity;
  V total = none;
  int64_t i = 0;
  if (length >= 8 * kSize) {
    V running[4] = {none, none, none, none};
    for (; length - i >= 4 * kSize; i += 4 * kSize) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) running[j] = combine(running[j], term(i + j * kSize, kSize));
    }
    total = combine(combine(running[0], running[1]), combine(running[2], running[3]));
  }
  for (; length - i >= kSize; i += kSize) total = combine(total, term(i, kSize));
  if (i < length) {
    const int count = static_cast<int>(length - i);
    total = combine(total, FirstLanes(term(i, count), count, none));
  }
  return Horizontal(total, combine);
}

// Which part of which phase a task is.
struct RowPhaseTask {
  int phase;
  int64_t batch, index;
};

inline RowPhaseTask FindPhase(const RowPhases& phases, int64_t task) {
  const int64_t counts[3] = {phases.row_tasks, phases.split_rows, phases.pieces};
  int phase = 0;
  for (; phase < 2 && task >= phases.batch * counts[phase]; ++phase) {
    task -= phases.batch * counts[phase];
  }
  return {phase, task / counts[phase], task % counts[phase]};
}

inline double* Partial(const RowPhases& phases, int64_t batch, int64_t piece) {
  return phases.partials + (batch * phases.pieces + piece) * 2;
}

inline double* Total(const RowPhases& phases, int64_t batch, int64_t split) {
  return phases.totals + (batch * phases.split_rows + split) * 2;
}

}  // namespace sgap::SGAP_ISA
