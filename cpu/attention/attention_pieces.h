// The pieces of rows and keys in which the backward kernel of attention works.
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/simd/lane_sums.h"

namespace sgap::SGAP_ISA {

// What a task does: its row piece against its key piece, in all heads that share a head of keys.
struct BackwardPlace {
  int64_t phase, slot;  // slot: of the key head, among those of its group
  int64_t batch, key_head;
  int64_t block_begin, block_end;
  int32_t key_begin, key_end;
  bool whole;  // there is one key piece: whatever the structure, all keys are in it
};

inline BackwardPlace FindPlace(const AttentionBackwardArgs& args, const GroupTask& own) {
  const int64_t slot = own.task / args.pieces % own.count, piece = own.task % args.pieces;
  const int64_t phase = own.task / args.pieces / own.count, head = own.first + slot;
  const int64_t key_piece = (piece + phase) % args.pieces;
  return {phase,
          slot,
          head / args.key_heads,
          head % args.key_heads,
          args.piece_begin[piece],
          args.piece_begin[piece + 1],
          int32_t(args.keys * key_piece / args.pieces),
          int32_t(args.keys * (key_piece + 1) / args.pieces),
          args.pieces == 1};
}

// The next vectors of [begin, end) that follow each other and whose keys are in the task's piece.
// Nothing is assumed about their order: nobody has checked a traced structure.
struct Run {
  int64_t begin, end;
};

inline Run NextRun(const AttentionBackwardArgs& args, const BackwardPlace& place, int64_t begin,
                   int64_t end) {
  if (place.whole) return {begin, end};
  constexpr int kStep = kVectorBytes / 4;
  using Numbers = Vector<uint32_t, kStep>;
  const auto width = uint32_t(place.key_end - place.key_begin);
  const auto inside = [&](int64_t p) {
    return uint32_t(args.indices[p]) - uint32_t(place.key_begin) < width;
  };
  const auto count = [&](int64_t p) {
    Numbers columns;
    __builtin_memcpy(&columns, args.indices + p, sizeof(columns));
    const Numbers found = columns - uint32_t(place.key_begin) < width ? Numbers{} + 1 : Numbers{};
    return FoldLanes<1, uint32_t, kStep>(found)[0];
  };
  while (begin + kStep <= end && count(begin) == 0) begin += kStep;
  while (begin < end && !inside(begin)) ++begin;
  int64_t stop = begin;
  while (stop + kStep <= end && count(stop) == kStep) stop += kStep;
  while (stop < end && inside(stop)) ++stop;
  return {begin, stop};
}

}  // namespace sgap::SGAP_ISA
