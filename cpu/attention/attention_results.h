// What the forward kernels share: the softmax of a block of scores, and how a row ends: out and lse
// from its sums or from those of its pieces.
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

// Bits r * kPart.
template <int kRows, int kPart>
constexpr uint32_t kFirstLanes = kFirstLanes<kRows - 1, kPart> << kPart | 1;
template <int kPart>
constexpr uint32_t kFirstLanes<0, kPart> = 0;

// The softmax of kRows rows in one pass: takes the scores of a block of keys into the statistics of
// the rows, whose sums then are relative to the new peak, and makes exp(s - peak) of them.
template <typename Acc, int kRows>
void AddBlock(const BlockTerms<Acc, kRows>& terms, int padded, Acc* scores,
              Vector<Acc, kLanes<Acc>>* peak, Vector<Acc, kLanes<Acc>>* total, Acc* sums,
              int64_t depth) {
  using Tile = AttentionTile<Acc, kRows>;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kPart = Tile::kPart;
  constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
  // Several at a time: one maximum after the other would take as long as the exponentials.
  constexpr int kChains = kGroupsRows && kRows == kSize ? 4 : 1;
  V found[kChains];
  for (int u = 0; u < kChains; ++u) found[u] = *peak;
  for (int i = 0; i < padded * kRows; i += kChains * kSize) {
#pragma GCC unroll 4
    for (int u = 0; u < kChains; ++u) {
      const V s = Load<Acc, kSize>(scores + i + u * kSize);
      found[u] = s > found[u] ? s : found[u];
    }
  }
  V greatest = found[0];
  for (int u = 1; u < kChains; ++u) greatest = found[u] > greatest ? found[u] : greatest;
  greatest = Tile::GreatestOfRow(greatest);
  // Under a peak of -inf all terms are zero, but for NaN.
  const V shift = greatest == kLeast ? V{} : greatest;
  const V shrink = *peak == kLeast ? V{} : ExpOfNegative<kSize>(*peak - shift);
  V sum = *total * shrink;
  // Of the lanes that shrink the first of each row. Rows one after the other would each be a branch
  // that is often mispredicted.
  uint32_t rest = ~LanesFrom<Acc, kSize>(shrink, 1) & kFirstLanes<kRows, kPart>;
  for (; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    Acc* own = sums + lane / kPart * depth;
    const Acc factor = shrink[lane];
    for (int64_t d = 0; d < depth; d += kSize) {
      Store<Acc, kSize>(own + d, Load<Acc, kSize>(own + d) * factor);
    }
  }
  *peak = greatest;
  constexpr int kTogether = kChains == 1 ? 1 : 2;
  for (int i = 0; i < padded * kRows; i += kTogether * kSize) {
    V x[kTogether];
    for (int u = 0; u < kTogether; ++u) x[u] = Load<Acc, kSize>(scores + i + u * kSize) - shift;
    ExpOfNegatives<kSize, kTogether>(x);
    for (int u = 0; u < kTogether; ++u) {
      Store<Acc, kSize>(scores + i + u * kSize, x[u]);
      sum += x[u];
    }
  }
  *total = sum;
  for (int i = 0; terms.Drops() && i < padded * kRows; i += kSize) {
    Store<Acc, kSize>(scores + i, Load<Acc, kSize>(scores + i) * terms.Kept(i));
  }
}

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
