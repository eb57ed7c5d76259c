#include "row_reduce.h"
#include "row_reduce_loops.h"
#include "row_search.h"
#include "simd.h"

namespace sgap::SGAP_ISA {
namespace {

template <typename T>
void StoreScalar(T* target, Accumulator<T> x) {
  const Vector<Accumulator<T>, 4> lanes = {x};
  StorePartial<T, 4>(target, lanes, 1);
}

template <typename T, typename Combine>
void RowReduceTask(const RowReduceArgs& args, Accumulator<T> identity, int64_t task) {
  using Acc = Accumulator<T>;
  const RowPhases& phases = args.phases;
  const RowPhaseTask at = FindPhase(phases, task);
  const T* values = static_cast<const T*>(args.values) + at.batch * args.nnz;
  T* out = static_cast<T*>(args.rows) + at.batch * args.m;
  const auto reduce = [&](int64_t begin, int64_t end) {
    return Reduce<T>(end - begin, identity, Combine(),
                     [&](int64_t i, int count) { return LoadCount(values + begin + i, count); });
  };
  if (at.phase == 0) {
    const RowTask& rows = phases.tasks[at.index];
    if (rows.piece >= 0) {
      *Partial(phases, at.batch, rows.piece) = reduce(rows.entry_begin, rows.entry_end);
      return;
    }
    for (int64_t r = rows.row_begin; r < rows.row_end; ++r) {
      StoreScalar(out + r, reduce(phases.offsets[r], phases.offsets[r + 1]));
    }
  } else if (at.phase == 1) {
    const SplitRow& split = phases.splits[at.index];
    Acc total = identity;
    for (int64_t i = 0; i < split.pieces; ++i) {
      total = Combine()(total, Acc(*Partial(phases, at.batch, split.first_piece + i)));
    }
    StoreScalar(out + split.row, total);
  }
}

template <typename T>
void RowBroadcastTask(const RowBroadcastArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, chunk = task % args.chunks;
  const T* rows = static_cast<const T*>(args.rows) + batch * args.m;
  T* values = static_cast<T*>(args.values) + batch * args.nnz;
  const int64_t begin = chunk * args.chunk_nonzeros;
  const int64_t stop =
      args.nnz - begin < args.chunk_nonzeros ? args.nnz : begin + args.chunk_nonzeros;
  const int64_t stored = args.offsets[args.m];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  for (int64_t p = end; p < stop; ++p) values[p] = T{};
  if (begin == end) return;
  for (int64_t p = begin, r = RowOfEntry(args.offsets, args.m, begin); p < end; ++r) {
    const int64_t row_end = args.offsets[r + 1] < end ? args.offsets[r + 1] : end;
    const T value = rows[r];
    for (; p < row_end; ++p) values[p] = value;
  }
}

}  // namespace

void RowReduce(const RowReduceArgs& args, int64_t task) {
  DispatchDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (args.operation == RowOperation::kSum) {
      RowReduceTask<T, Add>(args, 0, task);
    } else {
      RowReduceTask<T, Greatest>(args, -static_cast<Accumulator<T>>(__builtin_inf()), task);
    }
  });
}

void RowBroadcast(const RowBroadcastArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { RowBroadcastTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
