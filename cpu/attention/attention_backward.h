// What the backward kernels of attention share: pieces of rows and keys, sums of dq, dk and dv.
#pragma once

#include "cpu/attention/attention_rows.h"

namespace sgap::SGAP_ISA {

// What a task does: its row piece against its key piece, in all heads that share a head of keys.
struct BackwardPlace {
  int64_t phase, piece, slot;  // slot: of the key head, among those of its group
  int64_t batch, key_head;
  int64_t block_begin, block_end;
  KeyPiece keys;
};

inline BackwardPlace FindPlace(const AttentionBackwardArgs& args, const GroupTask& own) {
  const int64_t slot = own.task / args.pieces % own.count, piece = own.task % args.pieces;
  const int64_t phase = own.task / args.pieces / own.count, head = own.first + slot;
  const int64_t key_piece = (piece + phase) % args.pieces;
  return {phase,
          piece,
          slot,
          head / args.key_heads,
          head % args.key_heads,
          args.piece_begin[piece],
          args.piece_begin[piece + 1],
          KeyPieceOf(args.keys, key_piece, args.pieces)};
}

// Where a task adds to dk and dv: rows of accumulators, zeroed when a key is first met, as it is
// about to be in the cache then.
template <typename Acc>
struct KeySums {
  Acc* k;
  Acc* v;
  int64_t k_row, v_row;
  uint8_t* added;  // of each key
};

template <typename Acc>
void Clear(Acc* row, int64_t depth) {
  constexpr int kSize = kLanes<Acc>;
  for (int64_t d = 0; d < depth; d += kSize) Store<Acc, kSize>(row + d, Vector<Acc, kSize>{});
}

// Begins the sums of the keys that are met for the first time.
template <typename Acc>
void BeginKeys(const AttentionBackwardArgs& args, const KeySums<Acc>& sums, const int32_t* columns,
               int count) {
  for (int j = 0; j < count; ++j) {
    const auto key = size_t(columns[j]);
    if (sums.added[key]) continue;
    sums.added[key] = 1;
    Clear(sums.k + key * size_t(sums.k_row), args.padded_depth);
    Clear(sums.v + key * size_t(sums.v_row), args.padded_value_depth);
  }
}

// The sums of a task. In the first phase nothing has been added to its keys.
template <typename T>
KeySums<Accumulator<T>> BeginSums(const AttentionBackwardArgs& args, const BackwardPlace& place) {
  using Acc = Accumulator<T>;
  uint8_t* added = args.added + place.slot * args.keys;
  if (place.phase == 0) {
    __builtin_memset(added + place.keys.begin, 0, size_t(place.keys.end - place.keys.begin));
  }
  if (args.sums) {
    const int64_t row = args.padded_depth + args.padded_value_depth;
    Acc* k = static_cast<Acc*>(args.sums) + place.slot * args.keys * row;
    return {k, k + args.padded_depth, row, row, added};
  }
  const int64_t first = place.batch * args.keys * args.row_key_heads + place.key_head;
  return {static_cast<Acc*>(args.dk) + first * args.depth,
          static_cast<Acc*>(args.dv) + first * args.value_depth, args.row_key_heads * args.depth,
          args.row_key_heads * args.value_depth, added};
}

// The place of a head among those that a group has.
inline int64_t SlotOfHead(const AttentionBackwardArgs& args, const BackwardPlace& place,
                          int64_t head) {
  const int64_t heads = args.heads / args.key_heads;
  return place.slot * heads + head % heads;
}

// delta of the rows of a pass, whose dout is given, `stride` apart.
template <typename T>
void Deltas(const AttentionBackwardArgs& args, const AttentionRows& at, const Accumulator<T>* dout,
            int64_t stride, Accumulator<T>* delta) {
  using Acc = Accumulator<T>;
  constexpr int kSize = kLanes<T>;
  const int64_t first = at.row * args.row_heads + at.head;
  const T* out =
      static_cast<const T*>(args.out) + at.batch * args.out_stride + first * args.value_depth;
  const Acc* dlse = static_cast<const Acc*>(args.dlse) + at.batch * args.dlse_stride + first;
  for (int64_t r = 0; r < at.height; ++r, dout += stride) {
    const T* own = out + r * args.row_heads * args.value_depth;
    Vector<Acc, kSize> sums = {};
    int64_t d = 0;
    for (; d + kSize <= args.value_depth; d += kSize) {
      sums += Load<T, kSize>(own + d) * Load<Acc, kSize>(dout + d);
    }
    Acc sum = FoldLanes<1, Acc, kSize>(sums)[0];
    for (; d < args.value_depth; ++d) sum += LoadScalar<T>(own + d) * dout[d];
    delta[r] = sum - dlse[r * args.row_heads];
  }
}

// What the scores of kRows rows and their slopes, dout . v, become: probabilities, times the
// factors of dropout, and gradients of the scores.
template <typename Acc, int kRows>
void Differentiate(const BlockTerms<Acc, kRows>& terms, int padded, Vector<Acc, kLanes<Acc>> lse,
                   Vector<Acc, kLanes<Acc>> delta, Acc* scores, Acc* slopes) {
  constexpr int kSize = kLanes<Acc>;
  using V = Vector<Acc, kSize>;
  for (int i = 0; i < padded * kRows; i += kSize) {
    const V x = ExpOfNegative<kSize>(Load<Acc, kSize>(scores + i) - lse);
    V along = Load<Acc, kSize>(slopes + i), kept = x;
    if (terms.Drops()) {
      const V factor = terms.Kept(i);
      along *= factor, kept *= factor;
    }
    const V slope = x * (along - delta);
    Store<Acc, kSize>(scores + i, kept);
    Store<Acc, kSize>(slopes + i, x == 0 ? V{} : slope);  // whatever a masked value holds
  }
}

// Where dq of a head is added up over the phases, without the scale.
template <typename T>
struct PartialRows {
  Accumulator<T>* first;
  int64_t stride;

  PartialRows(const AttentionBackwardArgs& args, const BackwardPlace& place, int64_t head) {
    using Acc = Accumulator<T>;
    if (args.dq_sums) {
      const int64_t slot = SlotOfHead(args, place, head);
      first = static_cast<Acc*>(args.dq_sums) + slot * args.rows * args.padded_depth;
      stride = args.padded_depth;
    } else {
      stride = args.row_heads * args.depth;
      first = static_cast<Acc*>(args.dq) + place.batch * args.rows * stride + head * args.depth;
    }
  }
};

// How many rows of dk and dv ahead of its stores EndSums prefetches.
constexpr int64_t kRowsAhead = 4;

// dk, times `scale`, and dv of the task's keys, after the last phase.
template <typename T>
void EndSums(const AttentionBackwardArgs& args, const BackwardPlace& place,
             const KeySums<Accumulator<T>>& sums, Accumulator<T> scale) {
  using Acc = Accumulator<T>;
  const int64_t k_row = args.row_key_heads * args.depth;
  const int64_t v_row = args.row_key_heads * args.value_depth;
  const int64_t first = place.batch * args.keys;
  T* dk = static_cast<T*>(args.dk) + first * k_row + place.key_head * args.depth;
  T* dv = static_cast<T*>(args.dv) + first * v_row + place.key_head * args.value_depth;
  for (int64_t j = place.keys.begin; j < place.keys.end; ++j) {
    Acc *k = sums.k + j * sums.k_row, *v = sums.v + j * sums.v_row;
    if (!sums.added[j]) {
      Clear(k, args.padded_depth);
      Clear(v, args.padded_value_depth);
    }
    if (!args.sums) continue;
    PrefetchRow(dk + (j + kRowsAhead) * k_row, args.depth);
    PrefetchRow(dv + (j + kRowsAhead) * v_row, args.value_depth);
    StoreRow<T>(k, args.depth, scale, dk + j * k_row);
    StoreRow<T>(v, args.value_depth, Acc(1), dv + j * v_row);
  }
}

}  // namespace sgap::SGAP_ISA
