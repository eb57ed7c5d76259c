// The gradients of k and v in attention on tensor cores: the walk by keys of
// attention_octet_backward.cuh.
//
// kTiles   a warp owns 8 * kTiles neighbouring keys, and gathers the rows of q and dout of each
//          block row in which any of them is stored: neighbours are mostly stored in the same ones
// kShare   warps that share these keys, each taking a range of their block rows; merged in a fixed
//          order
//
// Where a row of q or dout has NaN or infinity, all features of dk and dv are NaN for the keys
// stored in that row; other keys are not affected.
#pragma once

#include "attention_octet_backward.cuh"
#include "row_search.cuh"

namespace sgap {

// A value of each lane that it needs between loops alone: in shared memory, if kThreads, those of a
// block, are not 0, so that it takes no register inside of them. One for each type X.
template <class X, int kThreads>
struct Aside {
  X held;

  __device__ static X& Shared() {
    __shared__ X values[kThreads];
    return values[threadIdx.x];
  }
  __device__ void Put(const X& x) {
    if constexpr (kThreads > 0) {
      Shared() = x;
    } else {
      held = x;
    }
  }
  __device__ X Get() const {
    if constexpr (kThreads > 0) {
      asm volatile("" ::: "memory");
      return Shared();
    } else {
      return held;
    }
  }
};

// The vectors of 8 * kTiles neighbouring keys, walked together in windows of 32 block rows: kNear
// from the next one on in which any of the keys is stored, and others from the first one on that is
// stored behind these. So a window has the first rows, which may see all keys, and those around
// the keys. Lanes of g have key g of each tile.
template <int kTiles, int kThreads>
struct KeyLists {
  enum : unsigned { kNear = 8 };
  unsigned next[kTiles], last[kTiles];  // the vectors of the lane's keys, before Start()
  Aside<Pack<unsigned, 2 * kTiles>, kThreads> remain;  // those that remain: the next, the last
  unsigned stop;                                       // end of the warp's range of block rows
  unsigned base, far;          // the window's block rows less their bits, RowOf()
  unsigned any;                // bits of those that are stored
  unsigned of_tile[kTiles];    // bits of those that store a key of a tile
  unsigned stored[kTiles][2];  // for keys 2t and 2t + 1 of a tile: bits of those that store them

  // Starts at key `first`, up to `end`.
  __device__ void Begin(const Index* column_offsets, Size first, Size end) {
    stop = ~0u;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const Size key = first + 8 * i + threadIdx.x % 32 / 4;
      next[i] = key < end ? column_offsets[key] : 0;
      last[i] = key < end ? column_offsets[key + 1] : 0;
    }
  }
  // Keeps the block rows of a piece: from that of vector `from` of the key with most vectors, of
  // all `keys` keys, up to that of its vector `to`. Pieces that follow each other have all block
  // rows. All lanes of the warp must call.
  __device__ void Cut(const Index* column_offsets, const Index* row_indices, Size first, Size keys,
                      unsigned from, unsigned to) {
    unsigned length = 0, start = 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const Size key = first + 8 * i + threadIdx.x % 32 / 4;
      if (key >= keys) continue;
      const unsigned begin = column_offsets[key], own = column_offsets[key + 1] - begin;
      if (own > length) start = begin;
      length = own > length ? own : length;
    }
    const unsigned most = __reduce_max_sync(~0u, length);
    start = __shfl_sync(~0u, start, __ffs(__ballot_sync(~0u, length == most)) - 1);
    const Index far = 0x7fffffff;
    const Index low = from == 0 ? 0 : from < most ? row_indices[start + from] : far;
    const Index high = to < most ? row_indices[start + to] : far;
    // The two bounds of each key side by side, so that they are searched for in the same rounds.
    unsigned begin[2 * kTiles], end[2 * kTiles];
    Index row[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      begin[i] = next[i / 2];
      end[i] = last[i / 2];
      row[i] = i % 2 == 0 ? low : high;
    }
    FirstByFour(row_indices, begin, end, row);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      next[i] = begin[2 * i];
      last[i] = begin[2 * i + 1];
    }
  }
  // Keeps range `share` of kShare nearly equal ranges of block rows.
  template <int kShare>
  __device__ void Share(const Index* row_indices, unsigned share) {
    unsigned low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (kShare == 1 || next[i] >= last[i]) continue;
      const unsigned from = row_indices[next[i]], to = row_indices[last[i] - 1] + 1;
      low = from < low ? from : low;
      high = to > high ? to : high;
    }
    if constexpr (kShare > 1) {
      low = __reduce_min_sync(~0u, low);
      high = __reduce_max_sync(~0u, high);
      const unsigned each = high > low ? (high - low + kShare - 1) / kShare : 0;
      stop = low + (share + 1) * each;
      unsigned end[kTiles];
      Index row[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        end[i] = last[i];
        row[i] = Index(low + share * each);
      }
      FirstByFour(row_indices, next, end, row);
    }
  }
  // The block row of a bit of the window.
  __device__ unsigned RowOf(unsigned bit) const { return (bit < kNear ? base : far) + bit; }
  __device__ void Start() {
    Pack<unsigned, 2 * kTiles> own;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) own.at[i] = i < kTiles ? next[i] : last[i - kTiles];
    remain.Put(own);
  }
  // Moves to the next window; returns false where there is none. All lanes of the warp must call.
  // If a block row stores a key twice, as a traced structure may, the second one is left to the
  // next window.
  __device__ bool Find(const Index* row_indices) {
    constexpr int kAtOnce = 4;  // of the next sixteen vectors of a key each of four lanes has four
    const unsigned t = threadIdx.x % 4;
    __syncwarp();  // ptxas does not see that the warp is together, and would take more registers
    auto left = remain.Get();
    unsigned found[kTiles][kAtOnce], least = ~0u;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (unsigned j = 0; j < kAtOnce; ++j) {
        const unsigned p = left.at[i] + 4 * j + t;
        found[i][j] = p < left.at[kTiles + i] ? row_indices[p] : ~0u;
      }
      least = t == 0 && found[i][0] < least ? found[i][0] : least;
    }
    base = __reduce_min_sync(~0u, least);
    if (base >= stop) return false;
    // The window ends with the last block row that all keys with more vectors have looked at.
    unsigned second = stop, end = stop;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (unsigned j = 0; j < kAtOnce; ++j) {
        const unsigned row = found[i][j];
        second = row - base >= kNear && row < second ? row : second;
      }
      const unsigned looked = found[i][kAtOnce - 1];
      const bool more = t == 3 && left.at[i] + 4 * kAtOnce < left.at[kTiles + i];
      end = more && looked >= base && looked < end ? looked + 1 : end;
    }
    end = __reduce_min_sync(~0u, end);
    second = __reduce_min_sync(~0u, second < end ? second : end);
    // One range, where there is no other, or a list that may hold anything does not ascend.
    far = second < base || second - base < kNear ? base : second - kNear;
    unsigned limit = end - base < end - far ? end - base : end - far, own[kTiles];
    limit = limit < 32 ? limit : 32;
    while (true) {
      unsigned many = 0, kept = 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        own[i] = 0;
#pragma unroll
        for (unsigned j = 0; j < kAtOnce; ++j) {
          const unsigned row = found[i][j];
          const unsigned bit = row - (row - base < kNear ? base : far);
          own[i] |= bit < limit ? 1u << bit : 0;
          many += bit < limit;
        }
        own[i] |= __shfl_xor_sync(~0u, own[i], 1);
        own[i] |= __shfl_xor_sync(~0u, own[i], 2);
        kept += __popc(own[i]);
      }
      // A block row that stores a key twice: one block row of a window is always right.
      if (limit == 1 || 4 * __reduce_add_sync(~0u, many) == __reduce_add_sync(~0u, kept)) break;
      limit = 1;
    }
    any = 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) stored[i][e] = __shfl_sync(~0u, own[i], t * 8 + e * 4);
      of_tile[i] = __reduce_or_sync(~0u, own[i]);
      any |= of_tile[i];
      left.at[i] += __popc(own[i]);
    }
    remain.Put(left);
    return true;
  }
};

// Whether no value is NaN or infinite.
template <class T, int kSteps>
__device__ inline bool AllFinite(const Pack<unsigned, 4> (&words)[kSteps]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const auto eight = __builtin_bit_cast(Pack<T, 8>, words[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) finite &= 0 * Widen(eight.at[j]) == 0;
  }
  return finite;
}

// The rows of k and v that a warp owns, kWords packs of each tile in a lane: in registers or, with
// kThreads threads of a block, in shared memory, where each lane reads what it wrote itself.
template <int kTiles, int kWords, int kThreads>
struct OwnRows {
  Pack<unsigned, 4> held[kTiles][kWords];

  __device__ static Pack<unsigned, 4>& Shared(int tile, int word) {
    __shared__ Pack<unsigned, 4> words[kTiles][kWords][kThreads];
    return words[tile][word][threadIdx.x];
  }
  // The packs from `first` on.
  template <int kCount>
  __device__ void Put(int tile, int first, const Pack<unsigned, 4> (&words)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if constexpr (kThreads > 0) {
        Shared(tile, first + j) = words[j];
      } else {
        held[tile][first + j] = words[j];
      }
    }
  }
  template <int kCount>
  __device__ void Get(int tile, int first, Pack<unsigned, 4> (&words)[kCount]) const {
    if (kThreads > 0) asm volatile("" ::: "memory");  // read here, not before the loop
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if constexpr (kThreads > 0) {
        words[j] = Shared(tile, first + j);
      } else {
        words[j] = held[tile][first + j];
      }
    }
  }
};

// The keys and values that a warp owns, and the running sums of their gradients. kThreads: as of
// OwnRows.
template <class T, int kLength, int kTiles, int kSteps, int kValueSteps, int kThreads, bool kVector>
struct OctetKeys {
  OwnRows<kTiles, kSteps + kValueSteps, kThreads> rows_of_keys;
  float of_key[kTiles][2 * kSteps][4], of_value[kTiles][2 * kValueSteps][4];
  KeyLists<kTiles, kThreads> lists;
  Index first;  // key 2t of the first tile

  // Loads the keys and values from position `at` on, one of each tile in each lane, below `end`.
  __device__ void Load(const T* k, const T* v, const AttentionCall& call, Size at, Size end,
                       unsigned t) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i, at += 8) {
      const Size row = at * call.key_heads;
      Pack<unsigned, 4> key[kSteps], value[kValueSteps];
      LoadOwn<kVector>(k + row * call.depth, at < end, call.depth, t, key);
      LoadOwn<kVector>(v + row * call.value_depth, at < end, call.value_depth, t, value);
      rows_of_keys.Put(i, 0, key);
      rows_of_keys.Put(i, kSteps, value);
    }
  }
  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 8 * kSteps; ++j) of_key[i][j / 4][j % 4] = 0;
#pragma unroll
      for (int j = 0; j < 8 * kValueSteps; ++j) of_value[i][j / 4][j % 4] = 0;
    }
  }
  // Adds the contribution of two rows of a head in each lane: `rows`, at bit `bit` of the window;
  // `step` has those of all lanes. Where these rows store no key of a tile, its terms are zero.
  // bias() is the bias of the head.
  template <class Bias>
  __device__ void Add(const AttentionCall& call, KeyFragments<T, kSteps, kVector>& query,
                      KeyFragments<T, kValueSteps, kVector>& cotangent, const Index (&rows)[2],
                      unsigned bit, unsigned step, float (&lse)[2], const float (&delta)[2],
                      float scale, const Bias& bias, const Index* permutation) {
    float s[kTiles][4] = {}, ds[kTiles][4] = {}, finite = 0;
    unsigned of_s[kTiles][2] = {}, of_ds[kTiles][2] = {};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (kTiles > 1 && !(lists.of_tile[i] & step)) continue;
      Pack<unsigned, 4> key[kSteps], value[kValueSteps];
      rows_of_keys.Get(i, 0, key);
      query.Multiply(key, s[i]);
      rows_of_keys.Get(i, kSteps, value);
      cotangent.Multiply(value, ds[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        finite += 0 * s[i][j];
        finite += 0 * ds[i][j];
      }
    }
    if (__any_sync(~0u, finite != 0)) ClearRows(query, cotangent, lse);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (kTiles > 1 && !(lists.of_tile[i] & step)) continue;
      bool kept[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Index from = call.Has(kCausal) ? first + 8 * i + j % 2 : 0;
        kept[j] = rows[j / 2] >= from && (lists.stored[i][j % 2] >> bit & 1);
        s[i][j] *= scale;
      }
      if (call.Has(kHasBias)) AddBias(i, bit, rows, kept, bias(), permutation, s[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!kept[j]) s[i][j] = Least<float>();
        FastDifferentiate(lse[j / 2], delta[j / 2], s[i][j], ds[i][j]);
      }
      TurnTile<T>(s[i], of_s[i]);
      TurnTile<T>(ds[i], of_ds[i]);
    }
    AddTransposed(query, of_ds, of_key);
    AddTransposed(cotangent, of_s, of_value);
  }
  __device__ void AddBias(int tile, unsigned bit, const Index (&rows)[2], const bool (&kept)[4],
                          const float* bias, const Index* permutation, float (&s)[4]) const {
    asm volatile("" : "+r"(bit));  // positions are not computed where there is no bias
    unsigned ends[2];              // of the vectors of the window that store keys 2t and 2t + 1
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      ends[e] = __shfl_sync(~0u, lists.remain.Get().at[tile], threadIdx.x % 4 * 8 + e * 4);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!kept[j]) continue;
      const unsigned at = ends[j % 2] - __popc(lists.stored[tile][j % 2] >> bit);
      s[j] += bias[Size(unsigned(permutation[at])) * kLength + rows[j / 2] % kLength];
    }
  }
  // Replaces a row with NaN or infinity by zeros, which reach no key, and its lse by NaN, which
  // reaches the keys stored in the row.
  __device__ static void ClearRows(KeyFragments<T, kSteps, kVector>& query,
                                   KeyFragments<T, kValueSteps, kVector>& cotangent,
                                   float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned wrong = !AllFinite<T>(query.words[r]) || !AllFinite<T>(cotangent.words[r]);
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        wrong |= __shfl_xor_sync(~0u, wrong, distance);
      }
      if (!wrong) continue;
      lse[r] = __uint_as_float(0x7fc00000);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) query.words[r][s] = {};
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) cotangent.words[r][s] = {};
    }
  }
};

// dk and dv of the keys from `first` on, of which a set of kShare warps has 8 * kTiles. cut(lists)
// may leave block rows out. For each tile all threads call write(batch, key of the lane, whether to
// store, sums of dk before scaling, sums of dv).
template <class T, int kLength, int kTiles, int kSteps, int kValueSteps, int kShare, int kThreads,
          bool kVector, class Cut, class Write>
__device__ __forceinline__ void DifferentiateKeys(
    const AttentionCall& call, Size first, const T* __restrict__ dout,
    const float* __restrict__ delta, const T* __restrict__ q, const T* __restrict__ k,
    const T* __restrict__ v, const float* __restrict__ bias, const Index* __restrict__ lengths,
    const float* __restrict__ lse, const Index* __restrict__ column_offsets,
    const Index* __restrict__ row_indices, const Index* __restrict__ permutation, long long batches,
    float scale, const Cut& cut, const Write& write) {
  constexpr int kRows = kLength < 16 ? kLength : 16;  // rows of a block row in a step of 16
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned share = threadIdx.x / 32 % kShare;
  const Size key_head = blockIdx.y, depth = call.depth, value_depth = call.value_depth;
  const unsigned heads_of_key = unsigned(call.heads / call.key_heads), rows_end = Indices(call.m);
  const unsigned blocks = (rows_end + kLength - 1) / kLength;
  const Size first_head = key_head * heads_of_key;
  const unsigned row_bytes = unsigned(call.heads * depth * sizeof(T));
  const unsigned value_bytes = unsigned(call.heads * value_depth * sizeof(T));
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    Size end = call.End(lengths, batch) < call.keys ? call.End(lengths, batch) : call.keys;
    if (call.m == 0) end = 0;
    const T* queries = call.Rows(q, kManyQ, batch, call.m, call.heads, first_head, depth);
    const T* cotangents =
        call.Rows(dout, kManyOut, batch, call.m, call.heads, first_head, value_depth);
    const float* all_lse = call.OfRows(lse, kManyLse, batch, first_head);
    const float* all_delta = call.OfRows(delta, kManyDelta, batch, first_head);
    OctetKeys<T, kLength, kTiles, kSteps, kValueSteps, kThreads, kVector> own;
    own.first = Index(first + 2 * t);
    own.Load(call.Rows(k, kManyK, batch, call.keys, call.key_heads, key_head, depth),
             call.Rows(v, kManyV, batch, call.keys, call.key_heads, key_head, value_depth), call,
             first + g, end, t);
    own.lists.Begin(column_offsets, first, end);
    cut(own.lists);
    own.lists.template Share<kShare>(row_indices, share);
    own.lists.Start();
    own.Clear();
#pragma unroll 1
    while (own.lists.Find(row_indices)) {
#pragma unroll 1
      for (unsigned left = own.lists.any; left != 0;) {
        // With V = 8 a step takes two block rows: lanes of g < 4 have the first.
        unsigned bit = __ffs(left) - 1, step = left;
        left &= left - 1;
        if (kLength == 8) {
          const bool both = left != 0;
          if (g >= 4) bit = both ? __ffs(left) - 1 : 32;
          left &= left - 1;
        }
        step ^= left;
#pragma unroll 1
        for (unsigned part = 0; part < kLength; part += 16) {
          Index rows[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const unsigned place = (g / 2 * 4 + g % 2 + 2 * r) % kRows;
            const unsigned block = own.lists.RowOf(bit), row = block * kLength + part + place;
            rows[r] = bit < 32 && block < blocks && row < rows_end ? Index(row) : -1;
          }
#pragma unroll 1
          for (unsigned head = 0; head < heads_of_key; ++head) {
            // A row that does not exist is replaced by the first row; its results are dropped.
            KeyFragments<T, kSteps, kVector> query;
            query.LoadAny(queries + head * unsigned(depth), row_bytes, rows, depth, t);
            KeyFragments<T, kValueSteps, kVector> cotangent;
            cotangent.LoadAny(cotangents + head * unsigned(value_depth), value_bytes, rows,
                              value_depth, t);
            float of_lse[2], of_delta[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const Index row = rows[r] < 0 ? 0 : rows[r];
              of_lse[r] = TermsUnder(RowAt(all_lse + head, row, unsigned(call.heads) * 4)[0]);
              of_delta[r] = RowAt(all_delta + head, row, unsigned(call.heads) * 4)[0];
            }
            own.Add(
                call, query, cotangent, rows, bit, step, of_lse, of_delta, scale,
                [&] { return call.Bias(bias, batch, first_head + head, kLength); }, permutation);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const unsigned of_lane = 2 * t + 8 * i + g % 2;
      write(batch, of_lane, first + of_lane < call.keys && share == 0, own.of_key[i],
            own.of_value[i]);
    }
  }
}

template <class T, int kLength, int kTiles, int kSteps, int kValueSteps, int kShare, int kBlock,
          bool kVector, bool kFull>
__global__ void __launch_bounds__(kBlock, 1) AttentionOctetKeysBackwardKernel(
    const T* __restrict__ dout, const float* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const float* __restrict__ bias,
    const Index* __restrict__ lengths, const float* __restrict__ lse,
    const Index* __restrict__ column_offsets, const Index* __restrict__ row_indices,
    const Index* __restrict__ permutation, T* __restrict__ dk, T* __restrict__ dv, long long m,
    long long keys, long long heads, long long key_heads, long long depth, long long value_depth,
    long long vectors, long long batches, long long scale_bits, long long flags,
    long long sharing) {
  MoveToStructure(sharing, keys, column_offsets, vectors, row_indices, permutation);
  if (kFull) {
    depth = 32 * kSteps;
    value_depth = 32 * kValueSteps;
  }
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const Size set = (Size(blockIdx.x) * kBlock + threadIdx.x) / (32 * kShare);
  const float scale = float(__longlong_as_double(scale_bits));
  const Size first = set * 8 * kTiles;
  DifferentiateKeys<T, kLength, kTiles, kSteps, kValueSteps, kShare, 0, kVector>(
      call, first, dout, delta, q, k, v, bias, lengths, lse, column_offsets, row_indices,
      permutation, batches, scale, [](auto&) {},
      [&](Size batch, unsigned key, bool stored, const auto& of_key, const auto& of_value) {
        const Size at = (batch * call.keys + first + key) * call.key_heads + blockIdx.y;
        StoreTransposed<kVector, kShare, kBlock>(dk + at * depth, stored, depth, scale, of_key);
        StoreTransposed<kVector, kShare, kBlock>(dv + at * value_depth, stored, value_depth, 1,
                                                 of_value);
      });
}

// Whether twelve warps of the kernel below, three for each scheduler, run on a multiprocessor at
// once, in blocks of up to four: for others, and for earlier architectures, ptxas would spill.
template <int kLength, int kSteps, int kShare, int kBlock, bool kFull>
__device__ constexpr bool TwelveWarps() {
#if __CUDA_ARCH__ >= 900
  return kLength <= 16 && kSteps <= 4 && kShare == 1 && kBlock <= 128 && kFull;
#else
  return false;
#endif
}

// The same on a work list (row_pieces.cuh) whose rows are sets of 8 * kTiles keys, with as many
// entries as the key that has most vectors. Partial sums, those of dk scaled: [batch, places,
// 8 * kTiles, key_heads, depth] and [..., value_depth].
template <class T, int kLength, int kTiles, int kSteps, int kValueSteps, int kShare, int kBlock,
          bool kVector, bool kFull>
__global__ void __launch_bounds__(
    kBlock, TwelveWarps<kLength, kSteps + kValueSteps, kShare, kBlock, kVector && kFull>()
                ? 12 * 32 / kBlock
                : 1)
    AttentionOctetKeysBackwardPiecesKernel(
        const T* __restrict__ dout, const float* __restrict__ delta, const T* __restrict__ q,
        const T* __restrict__ k, const T* __restrict__ v, const float* __restrict__ bias,
        const Index* __restrict__ lengths, const float* __restrict__ lse,
        const Index* __restrict__ list, const Index* __restrict__ column_offsets,
        const Index* __restrict__ row_indices, const Index* __restrict__ permutation,
        T* __restrict__ dk, T* __restrict__ dv, float* __restrict__ partial_dk,
        float* __restrict__ partial_dv, long long m, long long keys, long long heads,
        long long key_heads, long long depth, long long value_depth, long long vectors,
        long long batches, long long scale_bits, long long flags, long long pieces,
        long long elements, long long places, long long sharing) {
  MoveToStructure(sharing, keys, column_offsets, vectors, row_indices, permutation);
  MoveToStructure(sharing, 4 * elements - 1, list);
  if (kFull) {
    depth = 32 * kSteps;
    value_depth = 32 * kValueSteps;
  }
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const Size set = (Size(blockIdx.x) * kBlock + threadIdx.x) / (32 * kShare);
  const float scale = float(__longlong_as_double(scale_bits));
  const RowPiece own = PieceAt(list, set, set < pieces, vectors);
  const Size first = Size(unsigned(own.row)) * 8 * kTiles;
  if (kShare == 1 && first >= call.keys) return;  // no work, in no lane; no barrier follows
  constexpr int kThreads =
      TwelveWarps<kLength, kSteps + kValueSteps, kShare, kBlock, kVector && kFull>() ? kBlock : 0;
  DifferentiateKeys<T, kLength, kTiles, kSteps, kValueSteps, kShare, kThreads, kVector>(
      call, first, dout, delta, q, k, v, bias, lengths, lse, column_offsets, row_indices,
      permutation, batches, scale,
      [&](auto& lists) {
        if (AllOfRow(own.place, places)) return;
        lists.Cut(column_offsets, row_indices, first, call.keys, own.first, own.last);
      },
      [&](Size batch, unsigned key, bool stored, const auto& of_key, const auto& of_value) {
        const bool all = AllOfRow(own.place, places);
        const Size at = (batch * call.keys + first + key) * call.key_heads + blockIdx.y;
        const Size place = (batch * places + unsigned(own.place)) * (8 * kTiles) + key;
        const Size partial = place * call.key_heads + blockIdx.y;
        StorePiece<kVector, kShare, kBlock>(all ? dk + at * depth : nullptr,
                                            partial_dk + partial * depth, stored, depth, scale,
                                            of_key);
        StorePiece<kVector, kShare, kBlock>(all ? dv + at * value_depth : nullptr,
                                            partial_dv + partial * value_depth, stored, value_depth,
                                            1, of_value);
      });
}

}  // namespace sgap
