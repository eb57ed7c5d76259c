// Loops over the vectors of one block row (or a piece of it), for row_reduce and sparse_softmax.
#pragma once

#include "cpu/row_reduce/row_reduce.h"
#include "cpu/simd/lane_sums.h"
#include "cpu/simd/pairs.h"

namespace sgap::SGAP_ISA {

// How registers pass over consecutive vectors of V values, of which value j is of
// row j of the block. A walk is one of three; of entries, V = 1, all lanes are of one row.
template <typename T>
struct OneRow {
  int64_t numbers;  // to pass over

  static constexpr int64_t Step() { return kLanes<T>; }  // values from one register to the next
  static constexpr int Count() { return kLanes<T>; }     // lanes in use, but for the last register
  static constexpr int Rows() { return 1; }              // that a register has at once
  static constexpr int Row(int) { return 0; }            // of a lane

  // Calls body(walk, its first value, its first row) for the vectors begin to end - 1.
  template <typename Body>
  static void Over(int64_t, int64_t begin, int64_t end, Body&& body) {
    body(OneRow{end - begin}, begin, int64_t{0});
  }
};

// Where V divides the number of lanes, a register takes consecutive values too: lane i is of row
// i % V.
template <typename T>
struct Interleaved {
  int64_t numbers;
  int rows;  // V

  static constexpr int64_t Step() { return kLanes<T>; }
  static constexpr int Count() { return kLanes<T>; }
  int Rows() const { return rows; }
  int Row(int lane) const { return lane & (rows - 1); }

  template <typename Body>
  static void Over(int64_t length, int64_t begin, int64_t end, Body&& body) {
    body(Interleaved{(end - begin) * length, static_cast<int>(length)}, begin * length, int64_t{0});
  }
};

// For any other V it takes as many values of one vector as it has lanes, or as are left: lane i is
// of the i-th of these rows.
template <typename T>
struct Strided {
  int64_t numbers, length;
  int count;

  int64_t Step() const { return length; }
  int Count() const { return count; }
  int Rows() const { return count; }
  int Row(int lane) const { return lane < count ? lane : 0; }

  template <typename Body>
  static void Over(int64_t length, int64_t begin, int64_t end, Body&& body) {
    for (int64_t row = 0; row < length; row += kLanes<T>) {
      const int64_t left = length - row;
      const int count = left < kLanes<T> ? static_cast<int>(left) : kLanes<T>;
      body(Strided{(end - begin) * length, length, count}, begin * length + row, row);
    }
  }
};

// Calls body(TypeTag<T>(), TypeTag<Walk>()) for the type of `dtype` and the walk for a length.
template <typename Body>
inline void DispatchWalk(Dtype dtype, int64_t length, Body&& body) {
  DispatchOwnDtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (length == 1) {
      body(type, TypeTag<OneRow<T>>());
    } else if (length <= kLanes<T> && (length & (length - 1)) == 0) {
      body(type, TypeTag<Interleaved<T>>());
    } else {
      body(type, TypeTag<Strided<T>>());
    }
  });
}

// Calls body(first, count) for each register of a walk.
template <typename Walk, typename Body>
inline void ForRegisters(const Walk& walk, Body&& body) {
  int64_t i = 0;
  for (; walk.numbers - i >= walk.Step(); i += walk.Step()) body(i, walk.Count());
  if (i < walk.numbers) body(i, static_cast<int>(walk.numbers - i));
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

// Lane i gets lane i ^ kDistance.
template <int kDistance, typename V, int... i>
inline V SwapLanes(V x, std::integer_sequence<int, i...>) {
  return Shuffle<(i ^ kDistance)...>(x, x);
}

// In each lane the combination of those that are of its row, in a fixed order.
template <typename T, typename V, typename Combine>
inline V FoldRows(V x, const OneRow<T>&, Combine combine) {
  return Horizontal(x, combine) - V{};  // a subtraction keeps the sign of zero, and is none
}
template <typename T, typename V, typename Combine>
inline V FoldRows(V x, const Strided<T>&, Combine) {
  return x;
}
template <typename T, int kDistance = kLanes<T> / 2, typename V, typename Combine>
inline V FoldRows(V x, const Interleaved<T>& walk, Combine combine) {
  if constexpr (kDistance >= 1) {
    if (kDistance >= walk.rows) {
      x = combine(x, SwapLanes<kDistance>(x, std::make_integer_sequence<int, kLanes<T>>()));
      return FoldRows<T, kDistance / 2>(x, walk, combine);
    }
  }
  return x;
}

// Row by row the combination of term(first, count) over a walk, in the lanes of that row; lanes
// past `count` of a term are not taken. Four running vectors where there are many.
template <template <typename> typename Walk, typename T, typename Combine, typename Term>
inline Vector<Accumulator<T>, kLanes<T>> Reduce(const Walk<T>& walk, Accumulator<T> identity,
                                                Combine combine, Term&& term) {
  using V = Vector<Accumulator<T>, kLanes<T>>;
  const int64_t step = walk.Step();
  const V none = V{} + identity;
  V total = none;
  int64_t i = 0;
  if (walk.numbers >= 8 * step) {
    V running[4] = {none, none, none, none};
    for (; walk.numbers - i >= 4 * step; i += 4 * step) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        running[j] = combine(running[j], term(i + j * step, walk.Count()));
      }
    }
    total = combine(combine(running[0], running[1]), combine(running[2], running[3]));
  }
  for (; walk.numbers - i >= step; i += step) total = combine(total, term(i, walk.Count()));
  if (i < walk.numbers) {
    const int count = static_cast<int>(walk.numbers - i);
    total = combine(total, FirstLanes(term(i, count), count, none));
  }
  return FoldRows(total, walk, combine);
}

// In each lane the value of its row, from one value per row.
template <template <typename> typename Walk, typename T>
inline Vector<Accumulator<T>, kLanes<T>> SpreadRows(const Walk<T>& walk, const double* rows) {
  Vector<Accumulator<T>, kLanes<T>> x;
  for (int i = 0; i < kLanes<T>; ++i) x[i] = static_cast<Accumulator<T>>(rows[walk.Row(i)]);
  return x;
}

// Zeros for the rows past the end of the matrix, in vectors begin to end - 1 of one block row.
template <typename T>
inline void ClearBeyond(const RowPhases& phases, int64_t block_row, int64_t begin, int64_t end,
                        T* values) {
  const int64_t rows = phases.rows - block_row * phases.length;
  for (int64_t p = begin; rows < phases.length && p < end; ++p) {
    for (int64_t j = rows; j < phases.length; ++j) values[p * phases.length + j] = T{};
  }
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

// Two values for each row of the block row: V of the first, then V of the second.
inline double* Partial(const RowPhases& phases, int64_t batch, int64_t piece) {
  return phases.partials + (batch * phases.pieces + piece) * 2 * phases.length;
}

inline double* Total(const RowPhases& phases, int64_t batch, int64_t split) {
  return phases.totals + (batch * phases.split_rows + split) * 2 * phases.length;
}

}  // namespace sgap::SGAP_ISA
