// Attention over the stored entries of a mask, and its gradients, on CUDA cores; the mask has
// column vectors of kLength rows (1: CSR). In one head, for a row i and the keys j stored in it,
//
//   s[j] = scale q[i] . k[j] + bias[i, j],  lse = log(sum exp(s[j]) + exp(sink)),
//   out[i] = sum exp(s[j] - lse) v[j]
//
// and backward, from lse and delta[i] = dout[i] . out[i] - dlse[i],
//
//   p = exp(s - lse),  ds = p (dout[i] . v[j] - delta[i]),
//   dq[i] = scale sum ds k[j],  dk[j] = scale sum ds q[i],  dv[j] = sum p dout[i],  dbias = ds.
//
// kLength      V, rows of a vector
// kRows        rows of a vector that one group computes together: they share what it gathers
// kGroup       lanes that share the features: lane l holds features [l, l + 1) * kColumns of every
//              kGroup * kColumns; kSteps such packs of q and k, kValueSteps of v and out
// kShare       neighbouring groups that share the rows, each taking every kShare-th window of their
//              vectors; their partial results are merged in a fixed order: deterministic
// kVector      both depths are multiples of kColumns
//
// Grid: x over rows (keys, for dk and dv), y over heads, z over sequences. The softmax takes one
// pass (Milakov and Gimelshein, 2018): a row's sums are rescaled where its maximum grows. A masked
// entry contributes nothing, even where its operands are NaN. Accumulates in float32, float64 for
// float64.
#pragma once

#include "row_pieces.cuh"
#include "sparse_softmax.cuh"

namespace sgap {

__device__ inline float Log(float x) { return logf(x); }
__device__ inline double Log(double x) { return log(x); }

enum AttentionFlag {
  kCausal = 1,  // entries (i, j) with j > i are masked
  kHasBias = 2,
  kBiasOfHeads = 4,
  kHasSinks = 8,
  kHasLengths = 16,
  // Set for each operand that differs between sequences; the others are shared by the batch.
  kManyQ = 32,
  kManyK = 64,
  kManyV = 128,
  kManyBias = 256,
  kManySinks = 512,
  kManyLengths = 1024,
  kManyOut = 2048,
  kManyDelta = 4096,
  kManyLse = 8192,
};

// Sizes and flags of one call, and the addresses of one head of one sequence. Shapes: q and out [B,
// m, heads, ...], k and v [B, keys, key_heads, ...], bias [B, heads, vectors, kLength], lse [B, m,
// heads].
struct AttentionCall {
  Size m, keys, heads, key_heads, depth, value_depth, vectors;
  unsigned flags;

  __device__ bool Has(AttentionFlag flag) const { return flags & flag; }
  __device__ Size Of(AttentionFlag many, Size batch) const { return Has(many) ? batch : 0; }

  template <class T>
  __device__ T* Rows(T* all, AttentionFlag many, Size batch, Size rows, Size all_heads, Size head,
                     Size width) const {
    return all + (Of(many, batch) * rows * all_heads + head) * width;
  }
  template <class A>
  __device__ A* Bias(A* all, Size batch, Size head, Size length) const {
    const Size heads_of_bias = Has(kBiasOfHeads) ? heads : 1;
    const Size at = Of(kManyBias, batch) * heads_of_bias + (Has(kBiasOfHeads) ? head : 0);
    return all + at * vectors * length;
  }
  template <class A>
  __device__ A* OfRows(A* all, AttentionFlag many, Size batch, Size head) const {
    return all + Of(many, batch) * m * heads + head;
  }
  __device__ Size End(const Index* lengths, Size batch) const {
    return Has(kHasLengths) ? Size(lengths[Of(kManyLengths, batch)]) : keys;
  }
};

// What else scores and probabilities may have (attention_terms.cuh): nothing.
struct NoTerms {
  // Those of one head of one sequence.
  __device__ NoTerms Of(const AttentionCall&, Size, Size) const { return {}; }
  // Whether a row sees a key that is not after it.
  __device__ bool Sees(Size row, Index column) const { return Size(column) <= row; }
  // The score after the soft cap, and the derivative of that.
  template <class A>
  __device__ A Curb(A score, A& curb) const {
    return curb = 1, score;
  }
  // The score with what depends on its place.
  template <class A>
  __device__ A Add(A score, Size, Index) const {
    return score;
  }
  // What dropout multiplies the probability by.
  template <class A>
  __device__ A Factor(Size, Index) const {
    return 1;
  }
};

// A lane's part of the features of one row: kSteps packs.
template <class T, int kGroup, int kSteps, int kColumns, bool kVector>
struct Features {
  Pack<T, kColumns> at[kSteps];

  // Zeros where the row does not exist.
  __device__ void Load(const T* row, bool exists, unsigned depth, unsigned lane) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const unsigned first = (s * kGroup + lane) * kColumns;
      at[s] =
          sgap::Load<kVector, kColumns>(row + first, exists && first < depth ? depth - first : 0);
    }
  }
  __device__ Accumulator<T> Number(int i) const { return Widen(at[i / kColumns].at[i % kColumns]); }
  __device__ Accumulator<T> Dot(const Features& other) const {
    Accumulator<T> sum = 0;
#pragma unroll
    for (int i = 0; i < kSteps * kColumns; ++i) sum += Number(i) * other.Number(i);
    return sum;
  }
  // sums += factor * row
  __device__ void AddTo(Accumulator<T> factor, Accumulator<T> (&sums)[kSteps * kColumns]) const {
#pragma unroll
    for (int i = 0; i < kSteps * kColumns; ++i) sums[i] += factor * Number(i);
  }
  static __device__ void Store(T* row, unsigned depth, unsigned lane, Accumulator<T> factor,
                               const Accumulator<T> (&sums)[kSteps * kColumns]) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const unsigned first = (s * kGroup + lane) * kColumns;
      Accumulator<T> own[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) own[j] = sums[s * kColumns + j] * factor;
      if (first < depth) sgap::Store<kVector>(row + first, depth - first, own);
    }
  }
};

// exp(x - peak); zero where the peak is -infinity (no entry so far).
template <class A>
__device__ inline A TermUnder(A peak, A x) {
  return Exp(peak == Least<A>() ? Least<A>() : x - peak);
}

// The running softmax of one row: all terms are relative to the peak.
template <class A, int kNumbers>
struct Online {
  A values[kNumbers + 2];  // sums of v, the total, the peak: one array, to be merged

  __device__ A& total() { return values[kNumbers]; }
  __device__ A& peak() { return values[kNumbers + 1]; }
  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i <= kNumbers; ++i) values[i] = 0;
    peak() = Least<A>();
  }
  __device__ void Raise(A greatest) {
    const A factor = TermUnder(greatest, peak());
#pragma unroll
    for (int i = 0; i <= kNumbers; ++i) values[i] *= factor;
    peak() = greatest;
  }
};

struct MergeOnline {
  template <class A, int kCount>
  __device__ void operator()(A (&own)[kCount], const A (&other)[kCount]) const {
    const A peak = Greater()(own[kCount - 1], other[kCount - 1]);
    const A mine = TermUnder(peak, own[kCount - 1]), theirs = TermUnder(peak, other[kCount - 1]);
#pragma unroll
    for (int i = 0; i < kCount - 1; ++i) own[i] = own[i] * mine + other[i] * theirs;
    own[kCount - 1] = peak;
  }
};

// The work of a group: rows `row` to row + kRows - 1, which are rows `part` to part + kRows - 1 of
// the vectors `first` to last - 1. Of these the group takes every kShare-th window of kAtOnce
// vectors.
template <int kLength, int kRows, int kGroup, int kShare, int kBlock>
struct GroupVectors {
  enum { kAtOnce = kRows >= 4 ? 1 : 4 / kRows, kParts = kLength / kRows };

  Size row;
  unsigned part, first, last, share, steps;
  Index place = -1;  // of the group's results among the partial ones, if it has a piece of its rows

  // All vectors of a block row.
  __device__ GroupVectors(const Index* row_offsets, Size m) {
    const Size block_row = Work();
    row = block_row * kLength + part;
    const bool valid = row < m;
    first = valid ? row_offsets[block_row] : 0;
    last = valid ? row_offsets[block_row + 1] : 0;
    Count();
  }
  // A piece of a block row, of a work list (row_pieces.cuh).
  __device__ GroupVectors(const Index* list, Size pieces, Size vectors, Size m) {
    const Size element = Work();
    const RowPiece piece = PieceAt(list, element, element < pieces, vectors);
    row = Size(unsigned(piece.row)) * kLength + part;
    const bool valid = row < m;
    first = valid ? piece.first : 0;
    last = valid ? piece.last : 0;
    place = piece.place;
    Count();
  }
  // The position of the a-th vector of a step.
  __device__ unsigned At(unsigned step, int a) const {
    return first + (step * kShare + share) * kAtOnce + a;
  }

 private:
  __device__ Size Work() {
    const Size group = (Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup / kShare;
    part = unsigned(group % kParts) * kRows;
    share = threadIdx.x / kGroup % kShare;
    return group / kParts;
  }
  __device__ void Count() {
    const unsigned window = kAtOnce * kShare;
    steps = (last - first + window - 1) / window;
  }
};

// Turns the dot products of a window's vectors into scores: scale, bias and terms; -infinity where
// an entry is masked or its row does not exist. `curbs` are the derivatives of the soft cap.
template <int kLength, int kRows, int kAtOnce, class A, class Terms>
__device__ inline void Score(const AttentionCall& call, const Terms& terms, Size row, unsigned part,
                             Size end, A scale, const A* bias, unsigned p,
                             const Index (&columns)[kAtOnce], A (&s)[kAtOnce * kRows],
                             A (&curbs)[kAtOnce * kRows]) {
#pragma unroll
  for (int a = 0; a < kAtOnce; ++a) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Index column = columns[a];
      A& score = s[a * kRows + r];
      const bool kept = column >= 0 && row + r < call.m && Size(column) < end &&
                        (!call.Has(kCausal) || terms.Sees(row + r, column));
      score = terms.Curb(score * scale, curbs[a * kRows + r]);
      if (kept && call.Has(kHasBias)) score += bias[Size(p + a) * kLength + part + r];
      score = kept ? terms.Add(score, row + r, column) : Least<A>();
    }
  }
}

// The running softmax of the rows of a group, over its vectors; for each row that exists the groups
// that share it call write(batch, r, state) with the same state.
template <class T, int kGroup, int kSteps, int kValueSteps, int kColumns, int kBlock, bool kVector,
          int kLength, int kRows, int kShare, class Terms, class Write>
__device__ __forceinline__ void AttendRows(
    const AttentionCall& call, const Terms& terms,
    const GroupVectors<kLength, kRows, kGroup, kShare, kBlock>& own, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const Accumulator<T>* __restrict__ bias,
    const Index* __restrict__ lengths, const Index* __restrict__ column_indices, long long batches,
    Accumulator<T> scale, const Write& write) {
  using A = Accumulator<T>;
  using Keys = Features<T, kGroup, kSteps, kColumns, kVector>;
  using Values = Features<T, kGroup, kValueSteps, kColumns, kVector>;
  using State = Online<A, kValueSteps * kColumns>;
  const Group<kGroup> group;
  constexpr int kAtOnce = GroupVectors<kLength, kRows, kGroup, kShare, kBlock>::kAtOnce;
  const Size head = blockIdx.y, key_head = head / (call.heads / call.key_heads);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const T* queries = call.Rows(q, kManyQ, batch, call.m, call.heads, head, call.depth);
    const T* of_keys = call.Rows(k, kManyK, batch, call.keys, call.key_heads, key_head, call.depth);
    const T* of_values =
        call.Rows(v, kManyV, batch, call.keys, call.key_heads, key_head, call.value_depth);
    const A* own_bias = call.Bias(bias, batch, head, kLength);
    const Size end = call.End(lengths, batch);
    const auto of_head = terms.Of(call, batch, head);
    Keys query[kRows];
    State states[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool exists = own.row + r < call.m;
      query[r].Load(queries + (own.row + r) * call.heads * call.depth, exists, call.depth,
                    group.lane);
      states[r].Clear();
    }
#pragma unroll 1
    for (unsigned step = 0; step < own.steps; ++step) {
      Index columns[kAtOnce];
      A s[kAtOnce * kRows], curbs[kAtOnce * kRows];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const unsigned p = own.At(step, a);
        columns[a] = p < own.last ? column_indices[p] : -1;
        Keys key;
        key.Load(of_keys + Size(unsigned(columns[a])) * call.key_heads * call.depth,
                 columns[a] >= 0, call.depth, group.lane);
#pragma unroll
        for (int r = 0; r < kRows; ++r) s[a * kRows + r] = query[r].Dot(key);
      }
      group.Reduce(s);
      Score<kLength, kRows>(call, of_head, own.row, own.part, end, scale, own_bias, own.At(step, 0),
                            columns, s, curbs);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        A greatest = states[r].peak();
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a) greatest = Greater()(greatest, s[a * kRows + r]);
        states[r].Raise(greatest);
      }
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        Values value;
        value.Load(of_values + Size(unsigned(columns[a])) * call.key_heads * call.value_depth,
                   columns[a] >= 0, call.value_depth, group.lane);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          // A masked entry is skipped: zero times a NaN in v would be NaN. All lanes of the group
          // agree.
          if (s[a * kRows + r] == Least<A>()) continue;
          const A term = TermUnder(states[r].peak(), s[a * kRows + r]);
          states[r].total() += term;
          const A weight = term * of_head.template Factor<A>(own.row + r, columns[a]);
#pragma unroll
          for (int i = 0; i < kValueSteps * kColumns; ++i) {
            states[r].values[i] += weight * value.Number(i);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      MergeShares<kGroup, kShare, kBlock>(states[r].values, MergeOnline());
      if (own.row + r >= call.m || own.share != 0) continue;
      write(batch, r, states[r]);
    }
  }
}

// Ends the softmax of a row: its sink, its output and its lse.
template <class Values, class T, class A, int kNumbers>
__device__ inline void WriteRow(const AttentionCall& call, const A* sinks, T* out, A* lse,
                                Size batch, Size row, Size head, unsigned lane,
                                Online<A, kNumbers>& state) {
  if (call.Has(kHasSinks)) {
    const A sink = sinks[call.Of(kManySinks, batch) * call.heads + head];
    state.Raise(Greater()(state.peak(), sink));
    state.total() += TermUnder(state.peak(), sink);
  }
  const A total = state.total();
  A values[kNumbers];
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) values[i] = state.values[i];
  const Size at = (batch * call.m + row) * call.heads + head;
  Values::Store(out + at * call.value_depth, call.value_depth, lane, total == 0 ? A(0) : 1 / total,
                values);
  if (lane == 0) lse[at] = total == 0 ? Least<A>() : state.peak() + Log(total);
}

template <class T, int kLength, int kRows, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, 1)
    AttentionKernel(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                    const Accumulator<T>* __restrict__ bias,
                    const Accumulator<T>* __restrict__ sinks, const Index* __restrict__ lengths,
                    const Index* __restrict__ row_offsets, const Index* __restrict__ column_indices,
                    T* __restrict__ out, Accumulator<T>* __restrict__ lse, long long m,
                    long long keys, long long heads, long long key_heads, long long depth,
                    long long value_depth, long long vectors, long long batches,
                    long long scale_bits, long long flags, long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, vectors, column_indices);
  using A = Accumulator<T>;
  using Values = Features<T, kGroup, kValueSteps, kColumns, kVector>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const GroupVectors<kLength, kRows, kGroup, kShare, kBlock> own(row_offsets, call.m);
  const unsigned lane = threadIdx.x % kGroup;
  AttendRows<T, kGroup, kSteps, kValueSteps, kColumns, kBlock, kVector>(
      call, NoTerms(), own, q, k, v, bias, lengths, column_indices, batches,
      A(__longlong_as_double(scale_bits)), [&](Size batch, int r, auto& state) {
        WriteRow<Values>(call, sinks, out, lse, batch, own.row + r, blockIdx.y, lane, state);
      });
}

}  // namespace sgap
