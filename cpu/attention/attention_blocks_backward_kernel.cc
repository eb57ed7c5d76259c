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
  using Pass = BlockPass<Acc>;
  constexpr int kSize = kLanes<Acc>;
  using V = Vector<Acc, kSize>;
  alignas(64) Acc q[kMostRowNumbers], dout[kMostRowNumbers];  // rows of the pass
  alignas(64) typename Pass::Scores scores, slopes;
  const BlockTerms<Acc, 1> terms(args, 0, 0, 0, 0);  // none
  const int64_t depth = args.padded_depth, value_depth = args.padded_value_depth;
  const int most = MostRowsTogether(args);
  KeyPanel<Acc> keys, key_rows, values;
  Pass pass;
  for (int64_t at = begin; at < end && seeing.begin < seeing.end; at += pass.count) {
    const int count = int(Lesser(end - at, Pass::kMostKeys));
    keys.Transpose(k, at, count, depth);
    values.Transpose(v, at, count, value_depth);
    key_rows.Copy(k, at, count, depth);
    const SomeRows<Acc> dk{sums.k + at * sums.k_row, sums.k_row};
    const SomeRows<Acc> dv{sums.v + at * sums.v_row, sums.v_row};
    for (const int32_t* next = seeing.begin; next < seeing.end;) {
      next = pass.Take(args, next, seeing.end, most);
      pass.Meet(args, at, count);
      pass.Gather(states.q, depth, q);
      pass.Gather(states.dout, value_depth, dout);
      pass.Dots({q, depth}, keys, scores);
      pass.Dots({dout, value_depth}, values, slopes);
      for (int i = 0; i < pass.height; ++i) {
        Acc *const own = scores + i * Pass::kMostKeys, *const slope = slopes + i * Pass::kMostKeys;
        const int vectors = pass.MaskLast(own, i);
        Differentiate(terms, vectors * kSize, V{} + states.lse[pass.rows[i]],
                      V{} + states.deltas[pass.rows[i]], own, slope);
        pass.ClearFrom(own, vectors);
        pass.ClearFrom(slope, vectors);
      }
      pass.AddKeys(slopes, key_rows, depth, {states.dq, depth, pass.rows});
      pass.AddRows(scores, dout, value_depth, dv);
      pass.AddRows(slopes, q, depth, dk);
    }
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
