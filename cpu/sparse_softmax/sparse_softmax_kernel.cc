#include <limits>

#include "cpu/row_reduce/row_reduce_loops.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/simd.h"
#include "cpu/sparse_softmax/sparse_softmax.h"

namespace sgap::SGAP_ISA {
namespace {

// A row's terms are exp(size * (sign * v - peak)), peak being the greatest sign * v: no overflow
// whatever the scale, and no multiply and subtract that could contract. `Walk` says which row each
// lane of a register is of; rows never mix.
template <typename T, typename Walk>
struct SoftmaxRows {
  using Acc = Accumulator<T>;
  static constexpr int kSize = kLanes<T>;
  static constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
  static constexpr int64_t kHeldTerms = 4096;  // on the stack, in the first-level cache
  using V = Vector<Acc, kSize>;

  Walk walk;
  Acc size, sign;

  // NaN is skipped: the sum will have it.
  V Peak(const T* values) const {
    const auto greater = [](auto a, auto b) { return b > a ? b : a; };
    return Reduce(walk, kLeast, greater, [&](int64_t i, int count) {
      const V v = LoadCount(values + i, count) * sign;
      return v == v ? v : V{} + kLeast;
    });
  }

  // Whether any row has a peak of -inf. That is rare: only then do Terms look.
  static bool Masked(V peak) {
    constexpr uint32_t kEvery = (uint64_t{1} << kSize) - 1;
    return LanesFrom<Acc, kSize>(peak, std::numeric_limits<Acc>::lowest()) != kEvery;
  }

  V Terms(const T* values, int count, V peak, bool masked) const {
    const V v = LoadCount(values, count) * sign;
    const V terms = ExpOfNegative<kSize>((v - peak) * size);
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

  void Whole(const T* values, T* out) const {
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
  const auto size = Accumulator<T>(args.scale < 0 ? -args.scale : args.scale);
  const auto sign = Accumulator<T>(args.scale < 0 ? -1 : 1);
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
