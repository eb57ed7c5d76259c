#include "cpu/attention/attention_rows.h"

namespace sgap::SGAP_ISA {
namespace {

// What is known of a row after some of its keys: its greatest score, and sums of exp(s - peak)
// without and with the values.
template <typename Acc>
struct RowState {
  Acc* sums;  // [rows, depth]
  Acc* peaks;
  Acc* totals;
  int64_t depth;
};

template <typename Acc>
Acc ExpOfDifference(Acc x, Acc peak) {
  return x == peak ? Acc(1) : Acc(__builtin_exp(double(x) - double(peak)));
}

// The vectors [begin, end) of some rows, in one pass over blocks of keys.
template <typename Acc, int kRows>
void ForwardRows(const AttentionProblem& args, const AttentionRows& at, const Acc* rows,
                 int64_t begin, int64_t end, const RowState<Acc>& state) {
  using Tile = AttentionTile<Acc, kRows>;
  using V = typename Tile::V;
  using Block = ScoreBlock<Acc, kRows>;
  constexpr int kSize = Tile::kSize, kPart = Tile::kPart;
  alignas(64) Acc left[kMostRowNumbers];
  Block block;
  const int64_t depth = state.depth;
  for (int64_t i = 0; i < kRows * depth; ++i) state.sums[i] = 0;
  Tile::Interleave(rows, args.padded_depth, args.padded_depth, left);
  V peak = V{} + Block::kLeast, total = {};
  for (int64_t p = begin; p < end; p += block.count) {
    block.Compute(args, at, left, p, end);
    V greatest = peak;
    for (int i = 0; i < block.padded * kRows; i += kSize) {
      const V s = Load<Acc, kSize>(block.scores + i);
      greatest = s > greatest ? s : greatest;
    }
    greatest = Tile::GreatestOfRow(greatest);
    // Under a peak of -inf all terms are zero, but for NaN.
    const V shift = greatest == Block::kLeast ? V{} : greatest;
    const V shrink = peak == Block::kLeast ? V{} : ExpOfNegative<kSize>(peak - shift);
    total *= shrink;
    for (int r = 0; r < kRows; ++r) {
      if (shrink[r * kPart] == 1) continue;
      Acc* sums = state.sums + r * depth;
      const Acc factor = shrink[r * kPart];
      for (int64_t d = 0; d < depth; d += kSize) {
        Store<Acc, kSize>(sums + d, Load<Acc, kSize>(sums + d) * factor);
      }
    }
    peak = greatest;
    for (int i = 0; i < block.padded * kRows; i += kSize) {
      const V terms = ExpOfNegative<kSize>(Load<Acc, kSize>(block.scores + i) - shift);
      Store<Acc, kSize>(block.scores + i, terms);
      total += terms;
    }
    Tile::AddKeys(block.scores, block.values, block.count, depth, state.sums, depth);
  }
  for (int r = 0; r < kRows; ++r) {
    state.peaks[r] = peak[r * kPart];
    Acc sum = 0;
    for (int i = 0; i < kPart; ++i) sum += total[r * kPart + i];
    state.totals[r] = sum;
  }
}

// out and lse of one row.
template <typename T>
void Finish(const AttentionArgs& args, int64_t batch, int64_t head, int64_t row,
            const Accumulator<T>* sums, Accumulator<T> peak, Accumulator<T> total) {
  using Acc = Accumulator<T>;
  constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
  Acc share = 1;
  if (args.sinks) {
    const Acc sink = static_cast<const Acc*>(args.sinks)[batch * args.sinks_stride + head];
    const Acc greatest = sink > peak ? sink : peak;
    share = peak == kLeast && total == 0 ? Acc(0) : ExpOfDifference(peak, greatest);
    total = total * share + (sink == kLeast ? Acc(0) : ExpOfDifference(sink, greatest));
    peak = greatest;
  }
  const int64_t place = (batch * args.rows + row) * args.heads + head;
  T* out = static_cast<T*>(args.out) + place * args.value_depth;
  StoreRow<T>(sums, args.value_depth, total == 0 ? Acc(0) : share / total, out);
  Acc* lse = static_cast<Acc*>(args.lse) + place;
  *lse = total == 0 ? kLeast : peak + Acc(__builtin_log(double(total)));
}

// Adds up what the pieces of a split block row left, in their order.
template <typename T>
void Combine(const AttentionArgs& args, int64_t walk, const RowTask& task) {
  using Acc = Accumulator<T>;
  constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
  const SplitRow& split = args.splits[task.split];
  const int64_t depth = args.padded_value_depth, size = args.length * (depth + 2);
  Acc* pieces = static_cast<Acc*>(args.partials) + (walk * args.pieces + split.first_piece) * size;
  for (int64_t v = 0; v < args.length; ++v) {
    const int64_t row = split.row * args.length + v;
    if (row >= args.rows) return;
    Acc* first = pieces + v * depth;
    Acc* peaks = pieces + args.length * depth + v;
    Acc* totals = peaks + args.length;
    Acc greatest = kLeast;
    for (int64_t i = 0; i < split.pieces; ++i) {
      greatest = peaks[i * size] > greatest ? peaks[i * size] : greatest;
    }
    Acc total = 0;
    for (int64_t i = 0; i < split.pieces; ++i) {
      const Acc own = peaks[i * size];
      const Acc share = own == kLeast ? Acc(own == greatest) : ExpOfDifference(own, greatest);
      total += totals[i * size] * share;
      const Acc* sums = first + i * size;
      for (int64_t d = 0; d < depth; ++d) first[d] = (i == 0 ? Acc(0) : first[d]) + sums[d] * share;
    }
    Finish<T>(args, walk / args.heads, walk % args.heads, row, first, greatest, total);
  }
}

template <typename T>
void AttentionTask(const AttentionArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const int64_t group_heads = args.heads / args.key_heads;
  GroupTask own = FindGroup(args, group_heads * args.row_tasks, task);
  if (CopyTask<T>(args, &own)) return;
  const int64_t walk = own.first * group_heads + own.task / args.row_tasks;
  const int64_t batch = walk / args.heads, head = walk % args.heads;
  const RowTask& rows = args.tasks[own.task % args.row_tasks];
  const T* q = static_cast<const T*>(args.q) + batch * args.q_stride + head * args.depth;
  const int64_t stride = args.heads * args.depth, depth = args.padded_value_depth;
  const T* out =
      static_cast<const T*>(args.out) + (batch * args.rows * args.heads + head) * args.value_depth;
  alignas(64) Acc loaded[kMostRowNumbers];
  alignas(64) Acc sums[kMostRowNumbers];
  Acc peaks[kLanes<Acc>], totals[kLanes<Acc>];
  for (int64_t block = rows.row_begin; block < rows.row_end; ++block) {
    const int64_t begin = rows.piece < 0 ? args.offsets[block] : rows.entry_begin;
    const int64_t end = rows.piece < 0 ? args.offsets[block + 1] : rows.entry_end;
    ForRows<Acc>(args, batch, head, block, [&](auto count, const AttentionRows& at) {
      constexpr int kRows = decltype(count)::value;
      LoadRows<T>(q + at.row * stride, stride, at.height, args.depth, kRows, args.padded_depth,
                  Acc(args.scale), loaded);
      PrefetchPass(args, at, /*next=*/true, q, stride, args.depth);
      PrefetchPass(args, at, /*next=*/false, out, args.heads * args.value_depth, args.value_depth);
      RowState<Acc> state{sums, peaks, totals, depth};
      ForwardRows<Acc, kRows>(args, at, loaded, begin, end, state);
      if (rows.piece < 0) {
        for (int r = 0; r < at.height; ++r) {
          Finish<T>(args, batch, head, at.row + r, sums + r * depth, peaks[r], totals[r]);
        }
        return;
      }
      Acc* partial = static_cast<Acc*>(args.partials) +
                     (walk * args.pieces + rows.piece) * args.length * (depth + 2);
      for (int64_t r = 0; r < at.lanes; ++r) {
        __builtin_memcpy(partial + (at.lane + r) * depth, sums + r * depth, depth * sizeof(Acc));
        partial[args.length * depth + at.lane + r] = peaks[r];
        partial[args.length * (depth + 1) + at.lane + r] = totals[r];
      }
    });
  }
  if (rows.piece >= 0 && IsLastPiece(args, walk, rows)) Combine<T>(args, walk, rows);
}

}  // namespace

void Attention(const AttentionArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { AttentionTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
