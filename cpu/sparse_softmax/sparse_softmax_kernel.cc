#include <limits>

#include "cpu/row_reduce/row_reduce_loops.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/simd.h"
#include "cpu/sparse_softmax/sparse_softmax.h"

namespace sgap::SGAP_ISA {
namespace {

// Of a scale below kLeastScale values are subtracted in units of 1 / kSmallPart.
constexpr double kLeastScale = 0x1p-100, kSmallPart = 0x1p-64;

// A row's terms are exp(size * (sign * v - peak)), where size * sign is the scale and peak the
// greatest sign * v: no multiply and subtract that could contract. The sign is 1 or -1, but for
// scales below kLeastScale: there a difference that overflows may still give a term that is not 0,
// so values are scaled down and `size` up. `Walk` says which row each lane of a register is of;
// rows never mix.
template <typename T, typename Walk>
struct SoftmaxRows {
  using Acc = Accumulator<T>;
  static constexpr int kSize = kLanes<T>;
  static constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
  static constexpr int64_t kHeldTerms = 1 << 14;  // on the stack: more than rows of one task have
  using V = Vector<Acc, kSize>;
  // Whether registers follow each other.
  static constexpr bool kHolds = sizeof(Acc) == 4 && !std::is_same_v<Walk, Strided<T>>;

  Walk walk;
  Acc size, sign;

  struct Greater {
    template <typename A>
    A operator()(A a, A b) const {
      return b > a ? b : a;
    }
  };

  // NaN is skipped: the sum will have it.
  static V Number(V v) { return v == v ? v : V{} + kLeast; }

  // Bits of 16-bit floats as integers of the same order; the same again takes them back. NaN is
  // more than infinity or, of negative sign, less than all else.
  using Bits = Vector<int16_t, kSize>;
  static Bits InOrder(Bits x) { return x ^ ((x >> 15) & 0x7fff); }
  static Bits LoadInOrder(const T* values) {
    Bits x;
    __builtin_memcpy(&x, values, sizeof(x));
    return InOrder(x);
  }

  // Peaks lane by lane of 16-bit values as they are, of some whole registers. One that is NaN is
  // as good: the terms will be NaN too.
  static V PeakOfBits(const T* values, int64_t registers) {
    Bits most = LoadInOrder(values);
#pragma GCC unroll 8
    for (int64_t i = 1; i < registers; ++i) {
      const Bits x = LoadInOrder(values + i * kSize);
      most = x > most ? x : most;
    }
    const Bits bits = InOrder(most);
    T peak[kSize];
    __builtin_memcpy(peak, &bits, sizeof(bits));
    return Load<T, kSize>(peak);
  }
  bool HasBits() const { return sizeof(T) == 2 && kHolds && sign == 1; }

  V Peak(const T* values) const {
    if constexpr (sizeof(T) == 2) {
      const int64_t whole = walk.numbers / kSize, rest = walk.numbers % kSize;
      if (HasBits() && whole > 0) {
        V peak = PeakOfBits(values, whole);
        if (rest > 0) {
          const V last = Number(LoadCount(values + whole * kSize, int(rest)));
          peak = Greater()(peak, FirstLanes(last, int(rest), V{} + kLeast));
        }
        return FoldRows(peak, walk, Greater());
      }
    }
    return Reduce(walk, kLeast, Greater(), [&](int64_t i, int count) {
      return Number(LoadCount(values + i, count) * sign);
    });
  }

  // Whether any row has a peak of -inf. That is rare: only then do Terms look.
  static bool Masked(V peak) {
    constexpr uint32_t kEvery = (uint64_t{1} << kSize) - 1;
    return LanesFrom<Acc, kSize>(peak, std::numeric_limits<Acc>::lowest()) != kEvery;
  }

  // x = exp(x) of kCount registers. The power of two takes fewer instructions; that its exponent is
  // rounded once more, up to 2^-17 of a term, is little beside the rounding of 16-bit results.
  template <int kCount>
  static void Exponentials(V* x) {
    if constexpr (sizeof(T) == 2) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) x[i] *= 0x1.715476p+0f;  // log2(e)
      Exp2OfNegatives<kSize, kCount>(x);
    } else {
      ExpOfNegatives<kSize, kCount>(x);
    }
  }

  V Terms(const T* values, int count, V peak, bool masked) const {
    const V v = LoadCount(values, count) * sign;
    V terms = (v - peak) * size;
    Exponentials<1>(&terms);
    if (!__builtin_expect(masked, false)) return terms;
    // Under a peak of -inf all terms are zero, but for NaN.
    return peak == kLeast ? (v == v ? V{} : v) : terms;
  }

  V Sum(const T* values, V peak, bool masked) const {
    return Reduce(walk, Acc(0), Add(),
                  [&](int64_t i, int count) { return Terms(values + i, count, peak, masked); });
  }

  V Factor(V sum) const {
    if (walk.Rows() > 1) return sum == 0 ? sum : Acc(1) / sum;
    const Acc one = sum[0];
    return (one == 0 ? one : 1 / one) - V{};
  }

  void Write(const T* values, V peak, bool masked, V sum, T* out) const {
    const V factor = Factor(sum);
    ForRegisters(walk, [&](int64_t i, int count) {
      StoreCount(out + i, Terms(values + i, count, peak, masked) * factor, count);
    });
  }

  // Whether results are stored 32 at a time: of bfloat16 one instruction rounds those.
  static constexpr bool kInTwos = kHolds && sizeof(T) == 2 && kSize == 16;

  // A row of so few registers stays in them from its first load to its last store: its values are
  // widened once, and there is no loop over them, whose end the processor would not foresee. The
  // sums have the order of Reduce.
  static constexpr int kMostHeld = kVectorBytes == 64 ? 8 : 4;

  // Calls the code for as many registers as the row has. Returns whether it is done.
  template <int kCount = 1>
  bool WholeHeld(const T* values, T* out) const {
    if constexpr (kCount < kMostHeld) {
      if (walk.numbers > kCount * kSize) return WholeHeld<kCount + 1>(values, out);
    }
    return Held<kCount>(values, out);
  }

  template <int kCount>
  [[gnu::flatten]] bool Held(const T* values, T* out) const {
    constexpr int kLast = kCount - 1, kFirst = kCount < 4 ? kCount : 4;
    const int last = int(walk.numbers - kLast * kSize);  // in the last register
    constexpr bool kBits = sizeof(T) == 2 && kLast > 0;
    V x[kCount], peak = V{} + kLeast, sum{};
    if constexpr (kBits) peak = PeakOfBits(values, kLast);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      x[i] = LoadCount(values + i * kSize, i < kLast ? kSize : last);
      if constexpr (sizeof(T) > 2) x[i] *= sign;
      if (kBits && i < kLast) continue;
      const V number = Number(x[i]);
      peak = Greater()(peak, i < kLast ? number : FirstLanes(number, last, V{} + kLeast));
    }
    peak = FoldRows(peak, walk, Greater());
    if (__builtin_expect(Masked(peak), false)) return false;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) x[i] = (x[i] - peak) * size;
    Exponentials<kFirst>(x);
    if constexpr (kCount > kFirst) Exponentials<kCount - kFirst>(x + kFirst);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum += i < kLast ? x[i] : FirstLanes(x[i], last, V{});
    const V factor = Factor(FoldRows(sum, walk, Add()));
    constexpr int kPaired = kInTwos ? kLast / 2 * 2 : 0;
#pragma GCC unroll 8
    for (int i = 0; i < kPaired; i += 2) {
      if constexpr (kInTwos) StoreTwo<T>(out + i * kSize, x[i] * factor, x[i + 1] * factor);
    }
#pragma GCC unroll 8
    for (int i = kPaired; i < kCount; ++i)
      StoreCount(out + i * kSize, x[i] * factor, i < kLast ? kSize : last);
    return true;
  }

  void Whole(const T* values, T* out) const {
    if constexpr (kHolds) {
      const bool held = sizeof(T) > 2 || HasBits();
      if (held && walk.numbers < kMostHeld * kSize && WholeHeld(values, out)) return;
    }
    const V peak = Peak(values);
    const bool masked = Masked(peak);
    if constexpr (sizeof(T) >= 4) {
      Scale(values, peak, masked, out, out);  // which holds the terms for a while
    } else if (walk.numbers <= kHeldTerms) {
      alignas(64) Acc terms[kHeldTerms + kSize];
      Scale(values, peak, masked, terms, out);
    } else {
      Write(values, peak, masked, Sum(values, peak, masked), out);
    }
  }

  // Through `held`, the terms as accumulators; past the last one there is room or it is out.
  void Scale(const T* values, V peak, bool masked, Acc* held, T* out) const {
    const bool whole = sizeof(T) < sizeof(Acc);
    const V sum = Reduce(walk, Acc(0), Add(), [&](int64_t i, int count) {
      const V terms = Terms(values + i, count, peak, masked);
      StoreCount(held + i, terms, whole ? kSize : count);
      return terms;
    });
    const V factor = Factor(sum);
    if constexpr (kInTwos) {
      const int64_t paired = walk.numbers / (2 * kSize) * (2 * kSize);
      for (int64_t i = 0; i < paired; i += 2 * kSize) {
        const V first = Load<Acc, kSize>(held + i), second = Load<Acc, kSize>(held + i + kSize);
        StoreTwo<T>(out + i, first * factor, second * factor);
      }
      Walk rest = walk;
      rest.numbers -= paired, held += paired, out += paired;
      return ForRegisters(rest, [&](int64_t i, int count) {
        StoreCount(out + i, LoadCount(held + i, kSize) * factor, count);
      });
    }
    ForRegisters(walk, [&](int64_t i, int count) {
      StoreCount(out + i, LoadCount(held + i, whole ? kSize : count) * factor, count);
    });
  }
};

template <typename T, typename Walk>
void SoftmaxTask(const SparseSoftmaxArgs& args, int64_t task) {
  const RowPhases& phases = args.phases;
  const RowPhaseTask at = FindPhase(phases, task);
  const T* values = static_cast<const T*>(args.values) + at.batch * args.numbers;
  T* out = static_cast<T*>(args.out) + at.batch * args.numbers;
  const double magnitude = args.scale < 0 ? -args.scale : args.scale;
  const double part = magnitude < kLeastScale ? kSmallPart : 1;
  const auto size = Accumulator<T>(magnitude / part);
  const auto sign = Accumulator<T>(args.scale < 0 ? -part : part);
  // Calls body(rows, their first value, the first of them) for vectors of a block row.
  const auto over = [&](int64_t begin, int64_t end, auto&& body) {
    Walk::Over(phases.length, begin, end, [&](const Walk& walk, int64_t first, int64_t row) {
      body(SoftmaxRows<T, Walk>{walk, size, sign}, first, row);
    });
  };
  if (at.phase == 0) {
    const RowTask& task = phases.tasks[at.index];
    if (task.piece >= 0) {
      double* peaks = Partial(phases, at.batch, task.piece);
      double* sums = peaks + phases.length;
      return over(task.entry_begin, task.entry_end, [&](auto rows, int64_t first, int64_t row) {
        const auto peak = rows.Peak(values + first);
        const auto sum = rows.Sum(values + first, peak, rows.Masked(peak));
        for (int i = 0; i < rows.walk.Rows(); ++i) peaks[row + i] = peak[i], sums[row + i] = sum[i];
      });
    }
    for (int64_t r = task.row_begin; r < task.row_end; ++r) {
      const int64_t begin = phases.offsets[r], end = phases.offsets[r + 1];
      if (begin == end) continue;
      over(begin, end,
           [&](auto rows, int64_t first, int64_t) { rows.Whole(values + first, out + first); });
    }
    ClearBeyond(phases, task.row_end - 1, phases.offsets[task.row_end - 1],
                phases.offsets[task.row_end], out);
  } else if (at.phase == 1) {
    const SplitRow& split = phases.splits[at.index];
    double* total = Total(phases, at.batch, at.index);
    for (int64_t j = 0; j < phases.length; ++j) {
      double peak = -__builtin_inf(), sum = 0;
      for (int64_t i = 0; i < split.pieces; ++i) {
        const double piece_peak = Partial(phases, at.batch, split.first_piece + i)[j];
        peak = piece_peak > peak ? piece_peak : peak;
      }
      for (int64_t i = 0; i < split.pieces; ++i) {
        const double* partial = Partial(phases, at.batch, split.first_piece + i) + j;
        const double distance = partial[0] == peak ? 0 : partial[0] - peak;
        sum += partial[phases.length] * __builtin_exp(distance * size);
      }
      total[j] = peak;
      total[phases.length + j] = sum;
    }
  } else {
    const RowTask& piece = phases.piece_tasks[at.index];
    const double* peaks = Total(phases, at.batch, piece.split);
    const double* sums = peaks + phases.length;
    over(piece.entry_begin, piece.entry_end, [&](auto rows, int64_t first, int64_t row) {
      const auto peak = SpreadRows(rows.walk, peaks + row);
      const auto sum = SpreadRows(rows.walk, sums + row);
      rows.Write(values + first, peak, rows.Masked(peak), sum, out + first);
    });
    ClearBeyond(phases, piece.row_begin, piece.entry_begin, piece.entry_end, out);
  }
}

template <typename T, typename Walk>
void JacobianTask(const SparseSoftmaxJacobianArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  using V = Vector<Acc, kLanes<T>>;
  const RowPhases& phases = args.phases;
  const RowPhaseTask at = FindPhase(phases, task);
  const T* p = static_cast<const T*>(args.probabilities) + at.batch * args.probabilities_stride;
  const T* t = static_cast<const T*>(args.tangent) + at.batch * args.tangent_stride;
  T* out = static_cast<T*>(args.out) + at.batch * args.numbers;
  const Acc scale = Acc(args.scale);
  const auto dot = [&](const Walk& walk, int64_t first) {
    return Reduce(walk, Acc(0), Add(), [&](int64_t i, int count) {
      return LoadCount(p + first + i, count) * LoadCount(t + first + i, count);
    });
  };
  const auto write = [&](const Walk& walk, int64_t first, V sum) {
    ForRegisters(walk, [&](int64_t i, int count) {
      const V difference = LoadCount(t + first + i, count) - sum;
      StoreCount(out + first + i, LoadCount(p + first + i, count) * difference * scale, count);
    });
  };
  const auto over = [&](int64_t begin, int64_t end, auto&& body) {
    Walk::Over(phases.length, begin, end, body);
  };
  if (at.phase == 0) {
    const RowTask& task = phases.tasks[at.index];
    if (task.piece >= 0) {
      double* partial = Partial(phases, at.batch, task.piece);
      return over(task.entry_begin, task.entry_end,
                  [&](const Walk& walk, int64_t first, int64_t row) {
                    const V sum = dot(walk, first);
                    for (int i = 0; i < walk.Rows(); ++i) partial[row + i] = sum[i];
                  });
    }
    for (int64_t r = task.row_begin; r < task.row_end; ++r) {
      const int64_t begin = phases.offsets[r], end = phases.offsets[r + 1];
      if (begin == end) continue;
      over(begin, end,
           [&](const Walk& walk, int64_t first, int64_t) { write(walk, first, dot(walk, first)); });
    }
    ClearBeyond(phases, task.row_end - 1, phases.offsets[task.row_end - 1],
                phases.offsets[task.row_end], out);
  } else if (at.phase == 1) {
    const SplitRow& split = phases.splits[at.index];
    for (int64_t j = 0; j < phases.length; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < split.pieces; ++i) {
        sum += Partial(phases, at.batch, split.first_piece + i)[j];
      }
      Total(phases, at.batch, at.index)[j] = sum;
    }
  } else {
    const RowTask& piece = phases.piece_tasks[at.index];
    const double* sums = Total(phases, at.batch, piece.split);
    over(piece.entry_begin, piece.entry_end, [&](const Walk& walk, int64_t first, int64_t row) {
      write(walk, first, SpreadRows(walk, sums + row));
    });
    ClearBeyond(phases, piece.row_begin, piece.entry_begin, piece.entry_end, out);
  }
}

}  // namespace

void SparseSoftmax(const SparseSoftmaxArgs& args, int64_t task) {
  DispatchWalk(args.dtype, args.phases.length, [&](auto type, auto walk) {
    SoftmaxTask<typename decltype(type)::type, typename decltype(walk)::type>(args, task);
  });
}

void SparseSoftmaxJacobian(const SparseSoftmaxJacobianArgs& args, int64_t task) {
  DispatchWalk(args.dtype, args.phases.length, [&](auto type, auto walk) {
    JacobianTask<typename decltype(type)::type, typename decltype(walk)::type>(args, task);
  });
}

}  // namespace sgap::SGAP_ISA
