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

// Keys [begin, end) are of one block, and `seeing` are the block rows of the task that see it.
template <typename Acc>
void MeetBlock(const AttentionArgs& args, const HeadKeys<Acc>& k, const HeadKeys<Acc>& v,
               SeeingRows seeing, int64_t begin, int64_t end, const BlockStates<Acc>& states) {
  using Groups = RowGroups<Acc>;
  using V = typename Groups::V;
  constexpr int kRows = Groups::kRows;
  alignas(64) Acc rows[kMostRowNumbers], left[kMostRowNumbers];
  alignas(64) Acc peaks[kMostGroupedRows], totals[kMostGroupedRows];
  const BlockTerms<Acc, kRows> terms(args, 0, 0, 0, 0);  // none
  const int64_t depth = args.padded_value_depth;
  const int most = MostRowsTogether(args);
  BlockPass<Acc> pass;
  while (seeing.begin < seeing.end) {
    seeing.begin = pass.Take(args, seeing.begin, seeing.end, most);
    pass.Gather(states.q, args.padded_depth, rows);
    pass.Interleave(rows, args.padded_depth, left);
    pass.Gather(states.sums, depth, rows);
    pass.GatherOne(states.peaks, -static_cast<Acc>(__builtin_inf()), peaks);
    pass.GatherOne(states.totals, Acc(0), totals);
    for (int64_t at = begin; at < end; at += pass.count) {
      pass.Meet(args, k, v, at, int(end - at < pass.kMostKeys ? end - at : pass.kMostKeys));
      Groups::Dots(left, pass.seen, args.padded_depth, pass.keys, pass.padded, pass.scores,
                   [](int) {});
      for (int g = 0; g < pass.seen.groups; ++g) {
        pass.Mask(g);
        V peak = Load<Acc, kRows>(peaks + g * kRows), total = Load<Acc, kRows>(totals + g * kRows);
        AddBlock(terms, pass.padded, pass.scores + Groups::At(g, 0), &peak, &total,
                 rows + g * kRows * depth, depth);
        Store<Acc, kRows>(peaks + g * kRows, peak);
        Store<Acc, kRows>(totals + g * kRows, total);
      }
      Groups::AddKeys(pass.scores, pass.seen, pass.values, pass.count, depth, rows, depth);
    }
    pass.Scatter(rows, depth, states.sums);
    pass.ScatterOne(peaks, states.peaks);
    pass.ScatterOne(totals, states.totals);
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
