#include "cpu/attention/attention_backward.h"
#include "cpu/attention/attention_blocks.h"

namespace sgap::SGAP_ISA {
namespace {

// What is kept of the rows of a head: operands, and dq, which is added up.
template <typename Acc>
struct BackwardStates {
  Acc *q, *dq;        // [rows, padded_depth], q times the scale, dq without it
  Acc* dout;          // [rows, padded_value_depth]
  Acc *lse, *deltas;  // [rows]

  BackwardStates(const AttentionBackwardArgs& args, int64_t slot) {
    const int64_t row = 2 * args.padded_depth + args.padded_value_depth + 2;
    q = static_cast<Acc*>(args.blocks.states) + slot * args.rows * row;
    dq = q + args.rows * args.padded_depth;
    dout = dq + args.rows * args.padded_depth;
    lse = dout + args.rows * args.padded_value_depth;
    deltas = lse + args.rows;
  }
};

template <typename T>
void BeginRows(const AttentionBackwardArgs& args, int64_t batch, int64_t head, int64_t begin,
               int64_t end, const BackwardStates<Accumulator<T>>& states) {
  using Acc = Accumulator<T>;
  const int64_t q_row = args.row_heads * args.depth, out_row = args.row_heads * args.value_depth;
  const int64_t count = end - begin, value_depth = args.padded_value_depth;
  const T* q = static_cast<const T*>(args.q) + batch * args.q_stride + head * args.depth;
  const T* dout =
      static_cast<const T*>(args.dout) + batch * args.dout_stride + head * args.value_depth;
  Acc* const own_dout = states.dout + begin * value_depth;
  LoadRows<T>(q + begin * q_row, q_row, count, args.depth, int(count), args.padded_depth,
              Acc(args.scale), states.q + begin * args.padded_depth);
  LoadRows<T>(dout + begin * out_row, out_row, count, args.value_depth, int(count), value_depth,
              Acc(1), own_dout);
  __builtin_memset(states.dq + begin * args.padded_depth, 0,
                   size_t(count * args.padded_depth) * sizeof(Acc));
  Deltas<T>(args, {batch, head, begin, count, 0, count}, own_dout, value_depth,
            states.deltas + begin);
  const Acc* lse = static_cast<const Acc*>(args.lse) + batch * args.lse_stride + head;
  for (int64_t row = begin; row < end; ++row) {
    const Acc own = lse[row * args.row_heads];
    states.lse[row] = own == -Acc(__builtin_inf()) ? Acc(__builtin_inf()) : own;
  }
}

// Keys [begin, end) are of one block, and `seeing` are the block rows of the task that see it.
template <typename Acc>
void MeetBlock(const AttentionBackwardArgs& args, const HeadKeys<Acc>& k, const HeadKeys<Acc>& v,
               SeeingRows seeing, int64_t begin, int64_t end, const BackwardStates<Acc>& states,
               const KeySums<Acc>& sums) {
  using Groups = RowGroups<Acc>;
  constexpr int kRows = Groups::kRows, kMostKeys = Groups::kMostKeys;
  alignas(64) Acc q[kMostRowNumbers], dout[kMostRowNumbers], dq[kMostRowNumbers];
  alignas(64) Acc left_q[kMostRowNumbers], left_dout[kMostRowNumbers];
  alignas(64) Acc slopes[Groups::kMost * kMostKeys * kRows];
  alignas(64) Acc lse[kMostGroupedRows], deltas[kMostGroupedRows];
  Acc *k_targets[kMostKeys], *v_targets[kMostKeys];
  const BlockTerms<Acc, kRows> terms(args, 0, 0, 0, 0);  // none
  const int64_t depth = args.padded_depth, value_depth = args.padded_value_depth;
  const int most = MostRowsTogether(args);
  BlockPass<Acc> pass;
  while (seeing.begin < seeing.end) {
    seeing.begin = pass.Take(args, seeing.begin, seeing.end, most);
    pass.Gather(states.q, depth, q);
    pass.Gather(states.dq, depth, dq);
    pass.Gather(states.dout, value_depth, dout);
    pass.GatherOne(states.lse, Acc(__builtin_inf()), lse);
    pass.GatherOne(states.deltas, Acc(0), deltas);
    pass.Interleave(q, depth, left_q);
    pass.Interleave(dout, value_depth, left_dout);
    for (int64_t at = begin; at < end; at += pass.count) {
      pass.Meet(args, k, v, at, int(end - at < kMostKeys ? end - at : kMostKeys));
      for (int j = 0; j < pass.count; ++j) {
        k_targets[j] = sums.k + (at + j) * sums.k_row;
        v_targets[j] = sums.v + (at + j) * sums.v_row;
      }
      Groups::Dots(left_q, pass.seen, depth, pass.keys, pass.padded, pass.scores, [](int) {});
      Groups::Dots(left_dout, pass.seen, value_depth, pass.values, pass.padded, slopes, [](int) {});
      for (int g = 0; g < pass.seen.groups; ++g) {
        pass.Mask(g);
        Differentiate(terms, pass.padded, Load<Acc, kRows>(lse + g * kRows),
                      Load<Acc, kRows>(deltas + g * kRows), pass.scores + Groups::At(g, 0),
                      slopes + Groups::At(g, 0));
      }
      Groups::AddKeys(slopes, pass.seen, pass.keys, pass.count, depth, dq, depth);
      Groups::AddRows(pass.scores, pass.seen, v_targets, pass.count, value_depth, dout,
                      value_depth);
      Groups::AddRows(slopes, pass.seen, k_targets, pass.count, depth, q, depth);
    }
    pass.Scatter(dq, depth, states.dq);
  }
}

template <typename T>
void BackwardBlocksTask(const AttentionBackwardArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const KeyBlocks& blocks = args.blocks;
  GroupTask own = FindGroup(args, args.pieces * args.pieces, task);
  if (CopyTask<T>(args, &own)) return;
  BackwardPlace place = FindPlace(args, own);
  const KeyPiece of_blocks =
      KeyPieceOf(blocks.count, (place.piece + place.phase) % args.pieces, args.pieces);
  place.keys.begin = int32_t(of_blocks.begin * blocks.width);
  place.keys.end = int32_t(Lesser(of_blocks.end * blocks.width, args.keys));
  const KeySums<Acc> sums = BeginSums<T>(args, place);
  const int64_t heads = args.heads / args.key_heads, stride = args.row_heads * args.depth;
  const int64_t begin = place.block_begin * args.length;
  const int64_t end = Lesser(place.block_end * args.length, args.rows);
  if (place.phase == 0) {
    for (int64_t j = place.keys.begin; j < place.keys.end; ++j) {
      const auto key = int32_t(j);
      BeginKeys(args, sums, &key, 1);
    }
  }
  const int64_t known = Lesser(args.is_causal ? end : args.keys, KnownKeys(args, place.batch));
  const int64_t keys = Lesser(known, place.keys.end);
  const HeadKeys<Acc> k(args, args.k, place.batch, place.key_head);
  const HeadKeys<Acc> v(args, args.v, place.batch, place.key_head);
  for (int64_t head = place.key_head * heads; head < (place.key_head + 1) * heads; ++head) {
    const int64_t slot = args.pieces == 1 ? place.slot : SlotOfHead(args, place, head);
    const BackwardStates<Acc> states(args, slot);
    if (place.phase == 0) BeginRows<T>(args, place.batch, head, begin, end, states);
    for (int64_t block = of_blocks.begin; block * blocks.width < keys; ++block) {
      const int64_t key = block * blocks.width;
      MeetBlock<Acc>(args, k, v, SeeingRows(blocks, block, place.block_begin, place.block_end), key,
                     Lesser(key + blocks.width, keys), states, sums);
    }
    if (place.phase < args.pieces - 1) continue;
    T* dq = static_cast<T*>(args.dq) + place.batch * args.rows * stride + head * args.depth;
    for (int64_t row = begin; row < end; ++row) {
      StoreRow<T>(states.dq + row * args.padded_depth, args.depth, Acc(args.scale),
                  dq + row * stride);
    }
  }
  if (place.phase == args.pieces - 1) EndSums<T>(args, place, sums, 1);
}

}  // namespace

void AttentionBackwardBlocks(const AttentionBackwardArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { BackwardBlocksTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
