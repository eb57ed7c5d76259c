#include "attention_rows.h"

namespace sgap::SGAP_ISA {
namespace {

// Where a task adds to dk and dv: rows of accumulators, zeroed when a key is first met, as it is
// about to be in the cache then.
template <typename Acc>
struct KeySums {
  Acc* k;
  Acc* v;
  int64_t k_row, v_row;
  uint8_t* added;  // of each key, or null where all are zeroed beforehand
};

template <typename Acc>
void Clear(Acc* row, int64_t depth) {
  constexpr int kSize = kLanes<Acc>;
  for (int64_t d = 0; d < depth; d += kSize) Store<Acc, kSize>(row + d, Vector<Acc, kSize>{});
}

// Some rows of a block row: what each pass over their keys reads and adds to.
template <typename Acc>
struct BackwardRows {
  const Acc* q;     // [rows, padded_depth], times the scale
  const Acc* dout;  // [rows, padded_value_depth]
  const Acc* lse;   // [rows], +inf for a row that has none; of delta and this a vector is read
  const Acc* delta;
  Acc* dq;     // [rows, padded_depth], without the scale
  Acc* dbias;  // of the first row at vector 0, or null
};

template <typename Acc, int kRows>
void BackwardVectors(const AttentionProblem& args, const AttentionRows& at,
                     const BackwardRows<Acc>& rows, int64_t begin, int64_t end,
                     const KeySums<Acc>& sums) {
  using Tile = AttentionTile<Acc, kRows>;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kMostKeys = ScoreBlock<Acc, kRows>::kMostKeys;
  alignas(64) Acc left_q[kMostRowNumbers], left_dout[kMostRowNumbers];
  alignas(64) Acc slopes[kMostKeys * kRows];
  Acc *k_targets[kMostKeys], *v_targets[kMostKeys];
  ScoreBlock<Acc, kRows> block;
  Tile::Interleave(rows.q, args.padded_depth, left_q);
  Tile::Interleave(rows.dout, args.padded_value_depth, left_dout);
  const V lse = Tile::OfRows(rows.lse), delta = Tile::OfRows(rows.delta);
  for (int64_t p = begin; p < end; p += block.count) {
    const int32_t* columns = args.indices + p;
    const int keys = end - p < kMostKeys ? int(end - p) : kMostKeys;
    PointAt(sums.k, sums.k_row, columns, keys, k_targets);
    PointAt(sums.v, sums.v_row, columns, keys, v_targets);
    for (int j = 0; sums.added && j < keys; ++j) {  // first: it is stored during the products
      if (sums.added[size_t(columns[j])]) continue;
      sums.added[size_t(columns[j])] = 1;
      Clear(k_targets[j], args.padded_depth);
      Clear(v_targets[j], args.padded_value_depth);
    }
    block.Compute(args, at, left_q, p, end);
    block.Products(left_dout, args.padded_value_depth, block.values, slopes, [&](int j) {
      block.AskFor(v_targets, j, keys, args.padded_value_depth);
      block.AskFor(k_targets, j, keys, args.padded_depth);
    });
    for (int i = 0; i < block.padded * kRows; i += kSize) {
      const V terms = ExpOfNegative<kSize>(Load<Acc, kSize>(block.scores + i) - lse);
      const V slope = terms * (Load<Acc, kSize>(slopes + i) - delta);
      Store<Acc, kSize>(block.scores + i, terms);
      Store<Acc, kSize>(slopes + i, terms == 0 ? V{} : slope);  // whatever a masked value holds
    }
    if (rows.dbias) {
      for (int j = 0; j < block.count; ++j) {
        Acc* target = rows.dbias + (p + j) * args.length;
        for (int r = 0; r < at.lanes; ++r) target[r] = slopes[Tile::At(j, r)];
      }
    }
    Tile::AddKeys(slopes, block.keys, block.count, args.padded_depth, rows.dq);
    Tile::AddRows(block.scores, v_targets, block.count, args.padded_value_depth, rows.dout);
    Tile::AddRows(slopes, k_targets, block.count, args.padded_depth, rows.q);
  }
}

// The sums of a task, as it begins.
template <typename T>
KeySums<Accumulator<T>> BeginSums(const AttentionBackwardArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const int64_t piece = task % args.pieces, head = task / args.pieces % args.key_heads;
  const int64_t batch = task / args.pieces / args.key_heads;
  if (args.sums) {
    const int64_t row = args.padded_depth + args.padded_value_depth;
    const int64_t first = ((batch * args.key_heads + head) * args.pieces + piece) * args.keys;
    Acc* k = static_cast<Acc*>(args.sums) + first * row;
    __builtin_memset(args.added + first, 0, size_t(args.keys));
    return {k, k + args.padded_depth, row, row, args.added + first};
  }
  const int64_t first = batch * args.keys * args.key_heads + head;
  const KeySums<Acc> sums{static_cast<Acc*>(args.dk) + first * args.depth,
                          static_cast<Acc*>(args.dv) + first * args.value_depth,
                          args.key_heads * args.depth, args.key_heads * args.value_depth, nullptr};
  for (int64_t j = 0; j < args.keys; ++j) {
    Clear(sums.k + j * sums.k_row, args.depth);
    Clear(sums.v + j * sums.v_row, args.value_depth);
  }
  return sums;
}

// delta of the rows of a pass: dout is theirs.
template <typename T>
void Deltas(const AttentionBackwardArgs& args, const AttentionRows& at, const Accumulator<T>* dout,
            int rows, Accumulator<T>* delta) {
  using Acc = Accumulator<T>;
  constexpr int kSize = kLanes<T>;
  const int64_t first = at.row * args.heads + at.head;
  const T* out =
      static_cast<const T*>(args.out) + at.batch * args.out_stride + first * args.value_depth;
  const Acc* dlse = static_cast<const Acc*>(args.dlse) + at.batch * args.dlse_stride + first;
  for (int r = 0; r < rows; ++r, dout += args.padded_value_depth) {
    delta[r] = 0;
    if (r >= at.height) continue;
    const T* own = out + r * args.heads * args.value_depth;
    Vector<Acc, kSize> sums = {};
    int64_t d = 0;
    for (; d + kSize <= args.value_depth; d += kSize) {
      sums += Load<T, kSize>(own + d) * Load<Acc, kSize>(dout + d);
    }
    Acc sum = FoldLanes<1, Acc, kSize>(sums)[0];
    for (; d < args.value_depth; ++d) sum += LoadScalar<T>(own + d) * dout[d];
    delta[r] = sum - dlse[r * args.heads];
  }
}

// A piece of the rows in all heads that share one head of keys.
template <typename T>
void RowsTask(const AttentionBackwardArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const KeySums<Acc> sums = BeginSums<T>(args, task);
  const int64_t piece = task % args.pieces, key_head = task / args.pieces % args.key_heads;
  const int64_t batch = task / args.pieces / args.key_heads, group = args.heads / args.key_heads;
  const int64_t q_row = args.heads * args.depth, out_row = args.heads * args.value_depth;
  alignas(64) Acc q[kMostRowNumbers], dout[kMostRowNumbers], dq[kMostRowNumbers];
  Acc lse[kLanes<Acc>] = {}, delta[kLanes<Acc>] = {};  // whole vectors
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    const T* q_head = static_cast<const T*>(args.q) + batch * args.q_stride + head * args.depth;
    const int64_t own = head * args.value_depth;
    const T* dout_head = static_cast<const T*>(args.dout) + batch * args.dout_stride + own;
    const T* out_head = static_cast<const T*>(args.out) + batch * args.out_stride + own;
    T* dq_head = static_cast<T*>(args.dq) + batch * args.rows * q_row + head * args.depth;
    for (int64_t block = args.piece_begin[piece]; block < args.piece_begin[piece + 1]; ++block) {
      ForRows<Acc>(args, batch, head, block, [&](auto count, const AttentionRows& at) {
        constexpr int kRows = decltype(count)::value;
        const int64_t first = at.row * args.heads + head;
        LoadRows<T>(q_head + at.row * q_row, q_row, at.height, args.depth, kRows, args.padded_depth,
                    Acc(args.scale), q);
        LoadRows<T>(dout_head + at.row * out_row, out_row, at.height, args.value_depth, kRows,
                    args.padded_value_depth, Acc(1), dout);
        const Acc* stored_lse = static_cast<const Acc*>(args.lse) + batch * args.lse_stride + first;
        for (int r = 0; r < kRows; ++r) {
          const bool inside = r < at.height;
          lse[r] = inside ? stored_lse[r * args.heads] : Acc(__builtin_inf());
          if (lse[r] == -Acc(__builtin_inf())) lse[r] = Acc(__builtin_inf());
        }
        Deltas<T>(args, at, dout, kRows, delta);
        __builtin_memset(dq, 0, size_t(kRows * args.padded_depth) * sizeof(Acc));
        Acc* dbias = static_cast<Acc*>(args.dbias);
        if (dbias) dbias += (batch * args.heads + head) * args.vectors * args.length + at.lane;
        AskForPass(args, at, /*next=*/true, q_head, args.depth);
        AskForPass(args, at, /*next=*/true, dout_head, args.value_depth);
        AskForPass(args, at, /*next=*/true, out_head, args.value_depth);
        AskForPass(args, at, /*next=*/false, dq_head, args.depth);
        const BackwardRows<Acc> rows{q, dout, lse, delta, dq, dbias};
        BackwardVectors<Acc, kRows>(args, at, rows, args.offsets[block], args.offsets[block + 1],
                                    sums);
        for (int r = 0; r < at.height; ++r) {
          StoreRow<T>(dq + r * args.padded_depth, args.depth, Acc(args.scale),
                      dq_head + (at.row + r) * q_row);
        }
      });
    }
  }
}

// Rows of dk and dv that are asked for before they are stored.
constexpr int64_t kRowsAhead = 4;

// dk and dv of some keys: the pieces' sums, in their order.
template <typename T>
void KeysTask(const AttentionBackwardArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const int64_t chunk = task % args.chunks, walk = task / args.chunks;
  const int64_t batch = walk / args.key_heads, head = walk % args.key_heads;
  const int64_t begin = chunk * args.chunk_keys;
  const int64_t end = begin + args.chunk_keys < args.keys ? begin + args.chunk_keys : args.keys;
  const int64_t row = args.padded_depth + args.padded_value_depth, size = args.keys * row;
  constexpr int kSize = kLanes<Acc>;
  const Acc* sums = static_cast<const Acc*>(args.sums) + walk * args.pieces * size;
  const uint8_t* added = args.added + walk * args.pieces * args.keys;
  const int64_t k_row = args.key_heads * args.depth, v_row = args.key_heads * args.value_depth;
  T* dk = static_cast<T*>(args.dk) + batch * args.keys * k_row + head * args.depth;
  T* dv = static_cast<T*>(args.dv) + batch * args.keys * v_row + head * args.value_depth;
  alignas(64) Acc total[2 * kMostDepth];  // not in place, which would dirty the sums once more
  for (int64_t j = begin; j < end; ++j) {
    AskForRow(dk + (j + kRowsAhead) * k_row, args.depth);
    AskForRow(dv + (j + kRowsAhead) * v_row, args.value_depth);
    bool any = false;
    for (int64_t i = 0; i < args.pieces; ++i) {
      if (!added[i * args.keys + j]) continue;
      const Acc* own = sums + i * size + j * row;
      for (int64_t d = 0; d < row; d += kSize) {
        const Vector<Acc, kSize> x = Load<Acc, kSize>(own + d);
        Store<Acc, kSize>(total + d, any ? Load<Acc, kSize>(total + d) + x : x);
      }
      any = true;
    }
    if (!any) Clear(total, row);
    StoreRow<T>(total, args.depth, Acc(1), dk + j * k_row);
    StoreRow<T>(total + args.padded_depth, args.value_depth, Acc(1), dv + j * v_row);
  }
}

template <typename T>
void BackwardTask(const AttentionBackwardArgs& args, int64_t task) {
  if (PackTask<T>(args, &task)) return;
  const int64_t row_tasks = args.batch * args.key_heads * args.pieces;
  task < row_tasks ? RowsTask<T>(args, task) : KeysTask<T>(args, task - row_tasks);
}

}  // namespace

void AttentionBackward(const AttentionBackwardArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { BackwardTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
