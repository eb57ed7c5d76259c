#include "exp.h"
#include "row_reduce_loops.h"
#include "simd.h"
#include "sparse_softmax.h"

namespace sgap::SGAP_ISA {
namespace {

// A row's terms are exp(size * (sign * v - peak)), peak being the greatest sign * v: no overflow
// whatever the scale, and no multiply and subtract that could contract.
template <typename T>
struct SoftmaxRow {
  using Acc = Accumulator<T>;
  static constexpr int kSize = kLanes<T>;
  using V = Vector<Acc, kSize>;

  Acc size, sign;

  explicit SoftmaxRow(double scale)
      : size(Acc(scale < 0 ? -scale : scale)), sign(scale < 0 ? -1 : 1) {}

  // NaN is skipped: the sum will have it.
  Acc Peak(const T* values, int64_t length) const {
    constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
    const auto greater = [](auto a, auto b) { return b > a ? b : a; };
    return Reduce<T>(length, kLeast, greater, [&](int64_t i, int count) {
      const V v = LoadCount(values + i, count) * sign;
      return v == v ? v : V{} + kLeast;
    });
  }

  V Terms(const T* values, int count, Acc peak) const {
    const V v = LoadCount(values, count) * sign;
    // Under a peak of -inf all terms are zero, but for NaN.
    const V terms = ExpOfNegative<kSize>((v - peak) * size);
    return peak == -static_cast<Acc>(__builtin_inf()) ? (v == v ? V{} : v) : terms;
  }

  Acc Sum(const T* values, int64_t length, Acc peak) const {
    return Reduce<T>(length, 0, Add(),
                     [&](int64_t i, int count) { return Terms(values + i, count, peak); });
  }

  void Write(const T* values, int64_t length, Acc peak, Acc sum, T* out) const {
    const Acc factor = sum == 0 ? sum : 1 / sum;
    ForVectors<T>(length, [&](int64_t i, int count) {
      StoreCount(out + i, Terms(values + i, count, peak) * factor, count);
    });
  }

  void Whole(const T* values, int64_t length, T* out) const {
    const Acc peak = Peak(values, length);
    if constexpr (sizeof(T) < 4) return Write(values, length, peak, Sum(values, length, peak), out);
    if constexpr (sizeof(T) >= 4) {  // out holds the terms for a while
      const Acc sum = Reduce<T>(length, 0, Add(), [&](int64_t i, int count) {
        const V terms = Terms(values + i, count, peak);
        StoreCount(out + i, terms, count);
        return terms;
      });
      const Acc factor = sum == 0 ? sum : 1 / sum;
      ForVectors<T>(length, [&](int64_t i, int count) {
        StoreCount(out + i, LoadCount(out + i, count) * factor, count);
      });
    }
  }
};

template <typename T>
void SoftmaxTask(const SparseSoftmaxArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const RowPhases& phases = args.phases;
  const RowPhaseTask at = FindPhase(phases, task);
  const T* values = static_cast<const T*>(args.values) + at.batch * args.nnz;
  T* out = static_cast<T*>(args.out) + at.batch * args.nnz;
  const SoftmaxRow<T> row(args.scale);
  if (at.phase == 0) {
    const RowTask& rows = phases.tasks[at.index];
    if (rows.piece >= 0) {
      double* partial = Partial(phases, at.batch, rows.piece);
      const T* piece = values + rows.entry_begin;
      const int64_t length = rows.entry_end - rows.entry_begin;
      const Acc peak = row.Peak(piece, length);
      partial[0] = peak;
      partial[1] = row.Sum(piece, length, peak);
      return;
    }
    for (int64_t r = rows.row_begin; r < rows.row_end; ++r) {
      const int64_t begin = phases.offsets[r], end = phases.offsets[r + 1];
      if (begin < end) row.Whole(values + begin, end - begin, out + begin);
    }
  } else if (at.phase == 1) {
    const SplitRow& split = phases.splits[at.index];
    double peak = -__builtin_inf(), sum = 0;
    for (int64_t i = 0; i < split.pieces; ++i) {
      const double piece_peak = Partial(phases, at.batch, split.first_piece + i)[0];
      peak = piece_peak > peak ? piece_peak : peak;
    }
    for (int64_t i = 0; i < split.pieces; ++i) {
      const double* partial = Partial(phases, at.batch, split.first_piece + i);
      const double distance = partial[0] == peak ? 0 : partial[0] - peak;
      sum += partial[1] * __builtin_exp(distance * row.size);
    }
    Total(phases, at.batch, at.index)[0] = peak;
    Total(phases, at.batch, at.index)[1] = sum;
  } else {
    const RowTask& piece = phases.piece_tasks[at.index];
    const double* total = Total(phases, at.batch, piece.split);
    row.Write(values + piece.entry_begin, piece.entry_end - piece.entry_begin, Acc(total[0]),
              Acc(total[1]), out + piece.entry_begin);
  }
}

template <typename T>
void JacobianTask(const SparseSoftmaxJacobianArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const RowPhases& phases = args.phases;
  const RowPhaseTask at = FindPhase(phases, task);
  const T* p = static_cast<const T*>(args.probabilities) + at.batch * args.probabilities_stride;
  const T* t = static_cast<const T*>(args.tangent) + at.batch * args.tangent_stride;
  T* out = static_cast<T*>(args.out) + at.batch * args.nnz;
  const Acc scale = Acc(args.scale);
  const auto dot = [&](int64_t begin, int64_t end) {
    return Reduce<T>(end - begin, 0, Add(), [&](int64_t i, int count) {
      return LoadCount(p + begin + i, count) * LoadCount(t + begin + i, count);
    });
  };
  const auto write = [&](int64_t begin, int64_t end, Acc sum) {
    ForVectors<T>(end - begin, [&](int64_t i, int count) {
      const auto difference = LoadCount(t + begin + i, count) - sum;
      StoreCount(out + begin + i, LoadCount(p + begin + i, count) * difference * scale, count);
    });
  };
  if (at.phase == 0) {
    const RowTask& rows = phases.tasks[at.index];
    if (rows.piece >= 0) {
      *Partial(phases, at.batch, rows.piece) = dot(rows.entry_begin, rows.entry_end);
      return;
    }
    for (int64_t r = rows.row_begin; r < rows.row_end; ++r) {
      const int64_t begin = phases.offsets[r], end = phases.offsets[r + 1];
      if (begin < end) write(begin, end, dot(begin, end));
    }
  } else if (at.phase == 1) {
    const SplitRow& split = phases.splits[at.index];
    double sum = 0;
    for (int64_t i = 0; i < split.pieces; ++i) {
      sum += *Partial(phases, at.batch, split.first_piece + i);
    }
    *Total(phases, at.batch, at.index) = sum;
  } else {
    const RowTask& piece = phases.piece_tasks[at.index];
    write(piece.entry_begin, piece.entry_end, Acc(*Total(phases, at.batch, piece.split)));
  }
}

}  // namespace

void SparseSoftmax(const SparseSoftmaxArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { SoftmaxTask<typename decltype(tag)::type>(args, task); });
}

void SparseSoftmaxJacobian(const SparseSoftmaxJacobianArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { JacobianTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
