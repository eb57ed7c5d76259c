// Attention over stored entries, in column vectors of V rows (V = 1: CSR). In one head, for a row i
// and the keys j that it stores:
//   s[j] = scale * q[i] . k[j] + bias[i, j],   lse = log(sum exp(s[j]) + exp(sink))
//   out[i] = sum exp(s[j] - lse) * v[j]
// and the gradients, from out and lse, with delta[i] = dout[i] . out[i] - dlse[i]:
//   p = exp(s - lse),  ds = p * (dout[i] . v[j] - delta[i])
//   dq[i] = scale * sum ds k[j],  dk[j] = scale * sum ds q[i],  dv[j] = sum p dout[i],  dbias = ds
// ScoreTerms say what else scores and probabilities may have.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/common/partition.h"

namespace sgap {

// The greatest depth of a head: rows of one pass lie on the kernel's stack.
constexpr int64_t kMostDepth = 4096;
constexpr int64_t kMostOctetDepth = 512;  // of the kernels on matrix tiles
// Of the kernels in blocks, which take rows of 32 and more together.
constexpr int64_t kMostBlockDepth = 256;
constexpr int64_t kMostBlockRows = 32;

// Keys or values, [batch or 1, keys, key_heads, depth]: read where they are, or from copies.
struct KeyRows {
  const void* source;
  int64_t depth, padded;  // padded to whole vectors of any instruction set, or to whole tiles
  int64_t batch_stride;   // elements, 0 where shared
  void* copies;           // [slots, keys, padded] of accumulators (tiles: of bfloat16), or null
  int64_t slots;          // head h of all batches' is in slot h % slots
};

// What else a call may have. With d = j - i - offset, an entry's score is
//   s = cap tanh(scale q . k / cap) + bias - slope |d| + table[clip(d + range / 2, 0, range - 1)]
// and -inf where the segments of i and j differ; out is made of probabilities times 0 or
// keep_scale, which a number drawn for (seeds of the head, i, j) decides.
struct ScoreTerms {
  bool any;
  double softcap;      // 0: none
  const void* slopes;  // [batch or 1, heads] of accumulators, or null
  const void* table;   // [batch or 1, heads, range] of accumulators, or null
  int64_t range;
  const int32_t* query_segments;  // [batch or 1, rows], or null
  const int32_t* key_segments;    // [batch or 1, keys]
  const int32_t* offset;          // [batch or 1], or null; where the rows lie among the keys
  const uint32_t* seeds;          // [batch or 1, heads, 2], or null: no dropout
  int64_t slopes_stride, table_stride, query_segments_stride, key_segments_stride;
  int64_t offset_stride, seeds_stride;
  uint32_t kept;  // numbers below are kept
  double keep_scale;
};

// Where indices are of blocks of keys: key j is in block j / width.
struct KeyBlocks {
  int64_t width;           // 0: indices are of keys
  int64_t count;           // blocks
  const int32_t* offsets;  // [count + 1], of the rows of each block
  const int32_t* rows;     // the block rows that see it, ascending
  int64_t range;           // block rows of a task of the forward pass
  void* states;            // of the rows of each head of a group, from block to block
};

// What both directions share.
struct AttentionProblem {
  Dtype dtype;
  const int32_t* offsets;  // [ceil(rows / V) + 1]
  const int32_t* indices;  // [vectors]
  const void* q;           // [batch or 1, rows, heads, depth]
  const void* bias;        // [batch or 1, heads or 1, vectors, V] of accumulators, or null
  const int32_t* lengths;  // [batch or 1], or null
  int64_t batch, rows, keys, heads, key_heads, depth, value_depth, vectors, length;
  int64_t row_heads, row_key_heads;  // side by side in memory: a call may have some of them
  int64_t padded_depth, padded_value_depth;
  int64_t q_stride, lengths_stride;  // elements from one batch to the next, 0 where shared
  int64_t bias_stride, bias_head_stride;
  double scale;
  bool is_causal;
  ScoreTerms terms;
  KeyBlocks blocks;
  KeyRows k, v;
  int64_t copy_rows, copy_chunks;  // of the keys, in tasks of copying

  // The heads of keys, batch * key_heads of them, are taken in groups of so many: there are copies
  // and sums for one group at a time.
  int64_t group;
};

struct AttentionArgs : AttentionProblem, RowTasks {
  const void* sinks;  // [batch or 1, heads] of accumulators, or null
  int64_t sinks_stride;
  void* out;  // [batch, rows, heads, value_depth]
  void* lse;  // [batch, rows, heads] of accumulators
  // A task takes all its rows against one piece of the keys, then against the next: a piece stays
  // in the cache. Between pieces out and lse hold what a row has seen. More than 1 only where these
  // are of accumulators and there are no sinks.
  int64_t key_pieces;

  // task = in each group: of copying k, then v, then (its key head * heads of that + head) *
  // row_tasks + row task
  // partials: [batch * heads, pieces, V, padded_value_depth + 2]: sums, peak, total of each row
};

struct AttentionBackwardArgs : AttentionProblem {
  const void* dout;  // [batch or 1, rows, heads, value_depth]
  const void* out;   // likewise
  const void* dlse;  // [batch or 1, rows, heads] of accumulators
  const void* lse;   // likewise
  int64_t dout_stride, out_stride, dlse_stride, lse_stride;
  void* dq;           // [batch, rows, heads, depth]
  void* dk;           // [batch, keys, key_heads, depth]
  void* dv;           // [batch, keys, key_heads, value_depth]
  void* dbias;        // [batch, heads, vectors, V] of accumulators, or null
  double* term_sums;  // [batch * heads, pieces, range + 1]: of the slope and the table; or null

  // Rows and keys in pieces. In phase p, row piece i meets key piece (i + p) % pieces: no two tasks
  // of a phase add to the same row of dq, dk or dv, and the phases add in their order.
  int64_t pieces;
  const int64_t* piece_begin;  // [pieces + 1] block rows
  void* sums;     // [group, keys, padded_depth + padded_value_depth], or null: dk and dv themselves
  void* dq_sums;  // [group * heads of a key head, rows, padded_depth], or null: dq itself
  void* deltas;   // [group * heads of a key head, rows], written in the first phase
  uint8_t* added;  // [group, keys]: whether that has been written

  // task = in each group: of copying k, then v, then (phase * its key heads + key head) * pieces +
  // row piece
};

// A task among those of its group, which has key heads [first, first + count).
struct GroupTask {
  int64_t first, count, task;
};

namespace SGAP_ISA {

// Tasks of copying x for so many key heads.
inline int64_t CopyTasks(const AttentionProblem& args, const KeyRows& x, int64_t count) {
  return (count < x.slots ? count : x.slots) * args.copy_chunks;
}

// Where each key head has `of_head` tasks after those of copying.
inline GroupTask FindGroup(const AttentionProblem& args, int64_t of_head, int64_t task) {
  const int64_t copying = CopyTasks(args, args.k, args.group) + CopyTasks(args, args.v, args.group);
  const int64_t tasks = copying + args.group * of_head, all = args.batch * args.key_heads;
  const int64_t first = task / tasks * args.group;
  return {first, args.group < all - first ? args.group : all - first, task % tasks};
}

}  // namespace SGAP_ISA

}  // namespace sgap
