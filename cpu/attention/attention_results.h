// How forward attention ends: out and lse of rows, from their sums or from those of their pieces.
#pragma once

#include "cpu/attention/attention_rows.h"

namespace sgap::SGAP_ISA {

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

// The logarithm of a total. Where T has 16 bits that of float32 is near enough: the other one took
// 4% of the time of a pass over 410 keys.
template <typename T>
Accumulator<T> LogOfTotal(Accumulator<T> total) {
  if constexpr (sizeof(T) == 2) return __builtin_logf(total);
  return Accumulator<T>(__builtin_log(double(total)));
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
  const int64_t place = (batch * args.rows + row) * args.row_heads + head;
  T* out = static_cast<T*>(args.out) + place * args.value_depth;
  StoreRow<T>(sums, args.value_depth, total == 0 ? Acc(0) : share / total, out);
  Acc* lse = static_cast<Acc*>(args.lse) + place;
  *lse = total == 0 ? kLeast : peak + LogOfTotal<T>(total);
}

// What a piece of a split block row leaves of the rows of a pass.
template <typename Acc>
void StorePiece(const AttentionArgs& args, int64_t walk, int64_t piece, const AttentionRows& at,
                const RowState<Acc>& state) {
  const int64_t depth = state.depth;
  Acc* partial =
      static_cast<Acc*>(args.partials) + (walk * args.pieces + piece) * args.length * (depth + 2);
  for (int64_t r = 0; r < at.lanes; ++r) {
    __builtin_memcpy(partial + (at.lane + r) * depth, state.sums + r * depth, depth * sizeof(Acc));
    partial[args.length * depth + at.lane + r] = state.peaks[r];
    partial[args.length * (depth + 1) + at.lane + r] = state.totals[r];
  }
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

}  // namespace sgap::SGAP_ISA
