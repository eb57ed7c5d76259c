// Attention over stored entries, in column vectors of V rows (V = 1: CSR). In one head, for a row i
// and the keys j that it stores:
//   s[j] = scale * q[i] . k[j] + bias[i, j],   lse = log(sum exp(s[j]) + exp(sink))
//   out[i] = sum exp(s[j] - lse) * v[j]
// and the gradients, from out and lse, with delta[i] = dout[i] . out[i] - dlse[i]:
//   p = exp(s - lse),  ds = p * (dout[i] . v[j] - delta[i])
//   dq[i] = scale * sum ds k[j],  dk[j] = scale * sum ds q[i],  dv[j] = sum p dout[i],  dbias = ds
#pragma once

#include <cstdint>

#include "dtype.h"
#include "partition.h"

namespace sgap {

// Rows and numbers of one pass: what a kernel keeps of them lies on its stack.
constexpr int64_t kMostDepth = 4096;

// Rows of keys or values for all heads, in accumulators: strides in elements.
struct HeadRows {
  const void* data;
  int64_t row, head, batch;
};

// [batch, rows, heads, depth] -> accumulators [batch, heads, rows, padded], zero past `depth`.
struct HeadPacking {
  const void* source;
  void* packed;
  int64_t rows, heads, depth, padded;
  int64_t chunk_rows, chunks;  // task = batch * chunks + chunk of rows, of all heads
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
  int64_t padded_depth, padded_value_depth;  // to whole vectors of any instruction set
  int64_t q_stride, lengths_stride;          // elements from one batch to the next, 0 where shared
  int64_t bias_stride, bias_head_stride;
  double scale;
  bool is_causal;
  HeadRows k, v;
  HeadPacking pack_k, pack_v;
  int64_t pack_k_tasks, pack_v_tasks;
};

struct AttentionArgs : AttentionProblem, RowTasks {
  const void* sinks;  // [batch or 1, heads] of accumulators, or null
  int64_t sinks_stride;
  void* out;  // [batch, rows, heads, value_depth]
  void* lse;  // [batch, rows, heads] of accumulators

  // task = pack tasks of k, of v, then (batch * heads + head) * row_tasks + row task
  // partials: [batch * heads, pieces, V, padded_value_depth + 2]: sums, peak, total of each row
};

struct AttentionBackwardArgs : AttentionProblem {
  const void* dout;  // [batch or 1, rows, heads, value_depth]
  const void* out;   // likewise
  const void* dlse;  // [batch or 1, rows, heads] of accumulators
  const void* lse;   // likewise
  int64_t dout_stride, out_stride, dlse_stride, lse_stride;
  void* dq;     // [batch, rows, heads, depth]
  void* dk;     // [batch, keys, key_heads, depth]
  void* dv;     // [batch, keys, key_heads, value_depth]
  void* dbias;  // [batch, heads, vectors, V] of accumulators, or null

  // The block rows in pieces; each adds to sums of its own, or where there is one to dk and dv.
  int64_t pieces;
  const int64_t* piece_begin;  // [pieces + 1] block rows
  void* sums;      // [batch, key_heads, pieces, keys, padded_depth + padded_value_depth], or null
  uint8_t* added;  // [batch, key_heads, pieces, keys]: whether that has been written
  int64_t chunk_keys, chunks;

  // task = pack tasks of k, of v, then (batch * key_heads + key head) * pieces + piece, then
  // (batch * key_heads + key head) * chunks + chunk of keys, whose sums are added up
};

namespace SGAP_ISA {
void Attention(const AttentionArgs& args, int64_t task);
void AttentionBackward(const AttentionBackwardArgs& args, int64_t task);
}  // namespace SGAP_ISA

}  // namespace sgap
