#include "cpu/attention/attention_blocks.h"
#include "cpu/attention/attention_results.h"

namespace sgap::SGAP_ISA {
namespace {

// What is kept of the rows of a head from block to block.
template <typename Acc>
struct BlockStates {
  Acc *q, *sums;        // [rows, padded_depth], times the scale, and [rows, padded_value_depth]
  Acc *peaks, *totals;  // [rows]

  BlockStates(const AttentionArgs& args, int64_t slot) {
    const int64_t row = args.padded_depth + args.padded_value_depth + 2;
    q = static_cast<Acc*>(args.blocks.states) + slot * args.rows * row;
    sums = q + args.rows * args.padded_depth;
    peaks = sums + args.rows * args.padded_value_depth;
    totals = peaks + args.rows;
  }
};

// Rows [begin, end) before they have met a key.
template <typename T>
void BeginRows(const AttentionArgs& args, int64_t batch, int64_t head, int64_t begin, int64_t end,
               const BlockStates<Accumulator<T>>& states) {
  using Acc = Accumulator<T>;
  const int64_t stride = args.row_heads * args.depth, depth = args.padded_value_depth;
  const T* q = static_cast<const T*>(args.q) + batch * args.q_stride + head * args.depth;
  LoadRows<T>(q + begin * stride, stride, end - begin, args.depth, int(end - begin),
              args.padded_depth, Acc(args.scale), states.q + begin * args.padded_depth);
  __builtin_memset(states.sums + begin * depth, 0, size_t((end - begin) * depth) * sizeof(Acc));
  for (int64_t row = begin; row < end; ++row) {
    states.peaks[row] = -static_cast<Acc>(__builtin_inf());
    states.totals[row] = 0;
  }
}

// The softmax of row i of the pass, with the keys that it sees: updates its greatest score (peak)
// and its sum of exp(s - peak) (total), rescales its sums of values where the peak has grown, and
// puts exp(s - peak) in the place of the scores.
template <typename Acc>
void AddScores(const BlockPass<Acc>& pass, int i, Acc* scores, const BlockStates<Acc>& states,
               int64_t depth) {
  constexpr int kSize = kLanes<Acc>;
  using V = Vector<Acc, kSize>;
  constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
  Acc* const own = scores + i * BlockPass<Acc>::kMostKeys;
  const int vectors = pass.MaskLast(own, i);
  Acc *const peak = states.peaks + pass.rows[i], *const total = states.totals + pass.rows[i];
  V greatest = V{} + *peak;
  for (int c = 0; c < vectors; ++c) {
    const V s = Load<Acc, kSize>(own + c * kSize);
    greatest = s > greatest ? s : greatest;
  }
  const Acc found = GreatestLane<Acc, kSize>(greatest);
  if (found > *peak) {
    const Acc shrink = *peak == kLeast ? Acc(0) : ExpOfNegative<kSize>(V{} + (*peak - found))[0];
    Acc* const sums = states.sums + pass.rows[i] * depth;
    for (int64_t d = 0; d < depth; d += kSize) {
      Store<Acc, kSize>(sums + d, Load<Acc, kSize>(sums + d) * shrink);
    }
    *total *= shrink;
    *peak = found;
  }
  const V shift = V{} + (found == kLeast ? Acc(0) : found);  // then all terms are 0, but for NaN
  V sum = {};
  for (int c = 0; c < vectors; ++c) {
    const V x = ExpOfNegative<kSize>(Load<Acc, kSize>(own + c * kSize) - shift);
    Store<Acc, kSize>(own + c * kSize, x);
    sum += x;
  }
  *total += FoldLanes<1, Acc, kSize>(sum)[0];
  pass.ClearFrom(own, vectors);
}

// Keys [begin, end) are of one block, and `seeing` are the block rows of the task that see it.
template <typename Acc>
void MeetBlock(const AttentionArgs& args, const HeadKeys<Acc>& k, const HeadKeys<Acc>& v,
               SeeingRows seeing, int64_t begin, int64_t end, const BlockStates<Acc>& states) {
  using Pass = BlockPass<Acc>;
  alignas(64) typename Pass::Scores scores;
  const int64_t depth = args.padded_value_depth;
  KeyPanel<Acc> keys, values;
  Pass pass;
  for (int64_t at = begin; at < end && seeing.begin < seeing.end; at += pass.count) {
    const int count = int(Lesser(end - at, Pass::kMostKeys));
    keys.Transpose(k, at, count, args.padded_depth);
    values.Copy(v, at, count, depth);
    for (const int32_t* next = seeing.begin; next < seeing.end;) {
      next = pass.Take(args, next, seeing.end, kMostGroupedRows);
      pass.Meet(args, at, count);
      pass.Dots({states.q, args.padded_depth, pass.rows}, keys, scores);
      for (int i = 0; i < pass.height; ++i) AddScores(pass, i, scores, states, depth);
      pass.AddKeys(scores, values, depth, {states.sums, depth, pass.rows});
    }
  }
}

template <typename T>
void BlocksTask(const AttentionArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const KeyBlocks& blocks = args.blocks;
  const int64_t group_heads = args.heads / args.key_heads;
  GroupTask own = FindGroup(args, group_heads * args.row_tasks, task);
  if (CopyTask<T>(args, &own)) return;
  const int64_t slot = own.task / args.row_tasks, walk = own.first * group_heads + slot;
  const int64_t batch = walk / args.heads, head = walk % args.heads;
  const int64_t first = own.task % args.row_tasks * blocks.range, last = first + blocks.range;
  const int64_t begin = first * args.length, end = Lesser(last * args.length, args.rows);
  const BlockStates<Acc> states(args, slot);
  BeginRows<T>(args, batch, head, begin, end, states);
  const HeadKeys<Acc> k(args, args.k, batch, head / group_heads);
  const HeadKeys<Acc> v(args, args.v, batch, head / group_heads);
  const int64_t keys = Lesser(args.is_causal ? end : args.keys, KnownKeys(args, batch));
  for (int64_t block = 0; block * blocks.width < keys; ++block) {
    const int64_t key = block * blocks.width;
    MeetBlock<Acc>(args, k, v, SeeingRows(blocks, block, first, last), key,
                   Lesser(key + blocks.width, keys), states);
  }
  for (int64_t row = begin; row < end; ++row) {
    Finish<T>(args, batch, head, row, states.sums + row * args.padded_value_depth,
              states.peaks[row], states.totals[row]);
  }
}

}  // namespace

void AttentionBlocks(const AttentionArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { BlocksTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
