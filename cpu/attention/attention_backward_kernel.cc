#include "cpu/attention/attention_backward.h"
#include "cpu/attention/attention_groups.h"

namespace sgap::SGAP_ISA {
namespace {

// Some rows of a block row: what each pass over their keys reads and adds to.
template <typename Acc>
struct BackwardRows {
  const Acc* q;     // [rows, padded_depth], times the scale
  const Acc* dout;  // [rows, padded_value_depth], dout_row apart
  const Acc* lse;   // [rows], +inf for a row that has none; of delta and this a vector is read
  const Acc* delta;
  Acc* dq;     // [rows, padded_depth], dq_row apart, without the scale
  Acc* dbias;  // of the first row at vector 0, or null
  int64_t dout_row, dq_row;
};

// Hands the gradients of the scores of kRows rows to the bias and to the terms, dbias being that of
// the rows and of the first vector, and takes them through the soft cap, whose derivatives `curbs`
// has.
template <typename Acc, int kRows>
void PassGradients(const AttentionBackwardArgs& args, const BlockTerms<Acc, kRows>& terms,
                   int64_t lanes, int count, int padded, Acc* dbias, double* term_sums,
                   const Acc* curbs, Acc* slopes) {
  using Tile = AttentionTile<Acc, kRows>;
  constexpr int kSize = Tile::kSize;
  using V = typename Tile::V;
  if (dbias) {
    for (int j = 0; j < count; ++j, dbias += args.length) {
      for (int r = 0; r < lanes; ++r) dbias[r] = slopes[Tile::At(j, r)];
    }
  }
  if (term_sums) terms.AddGradients(padded, slopes, term_sums);
  for (int i = 0; terms.Curbs() && i < padded * kRows; i += kSize) {
    const V slope = Load<Acc, kSize>(slopes + i);
    // A masked entry may have a score, and with it a derivative, of NaN.
    Store<Acc, kSize>(slopes + i, slope == 0 ? slope : slope * Load<Acc, kSize>(curbs + i));
  }
}

// Where the gradients of the terms of a task's rows are added up, or null.
inline double* TermSums(const AttentionBackwardArgs& args, const BackwardPlace& place,
                        const AttentionRows& at) {
  const int64_t own = (at.batch * args.heads + at.head) * args.pieces + place.piece;
  return args.term_sums ? args.term_sums + own * (args.terms.range + 1) : nullptr;
}

template <typename Acc, int kRows>
void BackwardVectors(const AttentionBackwardArgs& args, const BackwardPlace& place,
                     const AttentionRows& at, const BackwardRows<Acc>& rows, Run run, int64_t end,
                     const KeySums<Acc>& sums) {
  using Tile = AttentionTile<Acc, kRows>;
  using V = typename Tile::V;
  constexpr int kMostKeys = ScoreBlock<Acc, kRows>::kMostKeys;
  alignas(64) Acc left_q[kMostRowNumbers], left_dout[kMostRowNumbers];
  alignas(64) Acc slopes[kMostKeys * kRows], curbs[kMostKeys * kRows];
  Acc *k_targets[kMostKeys], *v_targets[kMostKeys];
  ScoreBlock<Acc, kRows> block(args, at);
  double* const term_sums = TermSums(args, place, at);
  Tile::Interleave(rows.q, args.padded_depth, args.padded_depth, left_q);
  Tile::Interleave(rows.dout, rows.dout_row, args.padded_value_depth, left_dout);
  const V lse = Tile::OfRows(rows.lse), delta = Tile::OfRows(rows.delta);
  while (run.begin < run.end) {
    const int64_t p = run.begin;
    const int32_t* columns = args.indices + p;
    const int keys = run.end - p < kMostKeys ? int(run.end - p) : kMostKeys;
    PointAt(sums.k, sums.k_row, columns, keys, k_targets);
    PointAt(sums.v, sums.v_row, columns, keys, v_targets);
    BeginKeys(args, sums, columns, keys);  // before the products, which hide the stores
    block.Compute(args, at, left_q, p, run.end, curbs);
    block.Products(left_dout, args.padded_value_depth, block.values, block.count, slopes);
    Differentiate(block.terms, block.padded, lse, delta, block.scores, slopes);
    PassGradients(args, block.terms, at.lanes, block.count, block.padded,
                  rows.dbias ? rows.dbias + p * args.length : nullptr, term_sums, curbs, slopes);
    Tile::AddKeys(slopes, block.keys, block.count, args.padded_depth, rows.dq, rows.dq_row);
    Tile::AddRows(block.scores, v_targets, block.count, args.padded_value_depth, rows.dout,
                  rows.dout_row);
    Tile::AddRows(slopes, k_targets, block.count, args.padded_depth, rows.q, args.padded_depth);
    run.begin += block.count;
    if (run.begin == run.end) run = NextRun(args, place.keys, run.end, end);
  }
}

// The same for groups of rows.
template <typename Acc>
void BackwardGroups(const AttentionBackwardArgs& args, const BackwardPlace& place,
                    const AttentionRows& at, const BackwardRows<Acc>& rows, Run run, int64_t end,
                    const KeySums<Acc>& sums) {
  using Groups = RowGroups<Acc>;
  constexpr int kRows = Groups::kRows, kMostKeys = Groups::kMostKeys;
  alignas(64) Acc left_q[kMostRowNumbers], left_dout[kMostRowNumbers];
  alignas(64) Acc slopes[Groups::kMost * kMostKeys * kRows],
      curbs[Groups::kMost * kMostKeys * kRows];
  Acc *k_targets[kMostKeys], *v_targets[kMostKeys];
  GroupedScores<Acc> block(int(at.lanes / kRows));
  double* const term_sums = TermSums(args, place, at);
  for (int64_t r = 0; r < at.lanes; r += kRows) {
    Groups::Tile::Interleave(rows.q + r * args.padded_depth, args.padded_depth, args.padded_depth,
                             left_q + r * args.padded_depth);
    Groups::Tile::Interleave(rows.dout + r * rows.dout_row, rows.dout_row, args.padded_value_depth,
                             left_dout + r * args.padded_value_depth);
  }
  while (run.begin < run.end) {
    const int64_t p = run.begin;
    const int32_t* columns = args.indices + p;
    const int keys = run.end - p < kMostKeys ? int(run.end - p) : kMostKeys;
    PointAt(sums.k, sums.k_row, columns, keys, k_targets);
    PointAt(sums.v, sums.v_row, columns, keys, v_targets);
    BeginKeys(args, sums, columns, keys);
    block.Products(args, at, left_q, p, run.end);
    Groups::Dots(left_dout, block.seen, args.padded_value_depth, block.values, block.padded, slopes,
                 [](int) {});
    block.ForGroups(args, at, p, curbs, [&](int g, const AttentionRows& own, const auto& terms) {
      const int first = Groups::At(g, 0);
      Differentiate(terms, block.padded, Load<Acc, kRows>(rows.lse + g * kRows),
                    Load<Acc, kRows>(rows.delta + g * kRows), block.scores + first, slopes + first);
      PassGradients(args, terms, own.lanes, block.count, block.padded,
                    rows.dbias ? rows.dbias + p * args.length + g * kRows : nullptr, term_sums,
                    curbs + first, slopes + first);
    });
    Groups::AddKeys(slopes, block.seen, block.keys, block.count, args.padded_depth, rows.dq,
                    rows.dq_row);
    Groups::AddRows(block.scores, block.seen, v_targets, block.count, args.padded_value_depth,
                    rows.dout, rows.dout_row);
    Groups::AddRows(slopes, block.seen, k_targets, block.count, args.padded_depth, rows.q,
                    args.padded_depth);
    run.begin += block.count;
    if (run.begin == run.end) run = NextRun(args, place.keys, run.end, end);
  }
}

template <typename T>
void RowsOfHead(const AttentionBackwardArgs& args, const BackwardPlace& place, int64_t head,
                const KeySums<Accumulator<T>>& sums) {
  using Acc = Accumulator<T>;
  const bool first = place.phase == 0, last = place.phase == args.pieces - 1;
  const int64_t batch = place.batch, own = head * args.value_depth;
  const int64_t q_row = args.row_heads * args.depth, out_row = args.row_heads * args.value_depth;
  const T* q_head = static_cast<const T*>(args.q) + batch * args.q_stride + head * args.depth;
  const T* dout_head = static_cast<const T*>(args.dout) + batch * args.dout_stride + own;
  const T* out_head = static_cast<const T*>(args.out) + batch * args.out_stride + own;
  T* dq_head = static_cast<T*>(args.dq) + batch * args.rows * q_row + head * args.depth;
  const PartialRows<T> partial(args, place, head);
  Acc* deltas = static_cast<Acc*>(args.deltas) + SlotOfHead(args, place, head) * args.rows;
  alignas(64) Acc q[kMostRowNumbers], dout[kMostRowNumbers], dq[kMostRowNumbers];
  Acc lse[kMostPassRows<Acc>] = {}, delta[kMostPassRows<Acc>] = {};  // whole vectors
  for (int64_t block = place.block_begin; block < place.block_end; ++block) {
    const int64_t end = args.offsets[block + 1];
    const Run run = NextRun(args, place.keys, args.offsets[block], end);
    if (run.begin == run.end && !first && !last) continue;
    ForRows<Acc>(args, batch, head, block, [&](auto count, const AttentionRows& at) {
      constexpr bool kGrouped = std::is_same_v<decltype(count), int>;
      const int padded_rows = count;
      const int64_t row = at.row * args.row_heads + head;
      LoadRows<T>(q_head + at.row * q_row, q_row, at.height, args.depth, padded_rows,
                  args.padded_depth, Acc(args.scale), q);
      // Of whole rows of accumulators dout is read, and dq added up, where they are.
      BackwardRows<Acc> rows{
          q, dout, lse, delta, dq, nullptr, args.padded_value_depth, args.padded_depth};
      bool in_place = false;
      if constexpr (std::is_same_v<T, Acc> && !kGrouped) {
        in_place = !args.sums && at.height == padded_rows;
        if (in_place) {
          rows.dout = dout_head + at.row * out_row;
          rows.dout_row = out_row;
          rows.dq = partial.first + at.row * partial.stride;
          rows.dq_row = partial.stride;
          for (int r = 0; r < (first ? padded_rows : 0); ++r)
            Clear(rows.dq + r * rows.dq_row, args.depth);
        }
      }
      if (!in_place) {
        LoadRows<T>(dout_head + at.row * out_row, out_row, at.height, args.value_depth, padded_rows,
                    args.padded_value_depth, Acc(1), dout);
        LoadRows<Acc>(partial.first + at.row * partial.stride, partial.stride,
                      first ? 0 : at.height, args.depth, padded_rows, args.padded_depth, Acc(1),
                      dq);
      }
      const Acc* stored_lse = static_cast<const Acc*>(args.lse) + batch * args.lse_stride + row;
      if (first) Deltas<T>(args, at, rows.dout, rows.dout_row, deltas + at.row);
      for (int r = 0; r < padded_rows; ++r) {
        const bool inside = r < at.height;
        lse[r] = inside ? stored_lse[r * args.row_heads] : Acc(__builtin_inf());
        if (lse[r] == -Acc(__builtin_inf())) lse[r] = Acc(__builtin_inf());
        delta[r] = inside ? deltas[at.row + r] : Acc(0);
      }
      rows.dbias = static_cast<Acc*>(args.dbias);
      if (rows.dbias)
        rows.dbias += (batch * args.row_heads + head) * args.vectors * args.length + at.lane;
      PrefetchPass(args, at, /*next=*/true, q_head, q_row, args.depth);
      PrefetchPass(args, at, /*next=*/true, dout_head, out_row, args.value_depth);
      if (first) PrefetchPass(args, at, /*next=*/true, out_head, out_row, args.value_depth);
      PrefetchPass(args, at, /*next=*/true, partial.first, partial.stride, args.depth);
      if constexpr (kGrouped) {
        BackwardGroups<Acc>(args, place, at, rows, run, end, sums);
      } else {
        BackwardVectors<Acc, decltype(count)::value>(args, place, at, rows, run, end, sums);
      }
      for (int64_t r = 0; r < at.height; ++r) {
        const Acc* sum = rows.dq + r * rows.dq_row;
        const int64_t i = at.row + r;
        if (last) {
          StoreRow<T>(sum, args.depth, Acc(args.scale), dq_head + i * q_row);
        } else if (!in_place) {
          StoreRow<Acc>(sum, args.depth, Acc(1), partial.first + i * partial.stride);
        }
      }
    });
  }
}

template <typename T>
void BackwardTask(const AttentionBackwardArgs& args, int64_t task) {
  GroupTask own = FindGroup(args, args.pieces * args.pieces, task);
  if (CopyTask<T>(args, &own)) return;
  const BackwardPlace place = FindPlace(args, own);
  const KeySums<Accumulator<T>> sums = BeginSums<T>(args, place);
  const int64_t heads = args.heads / args.key_heads, first = place.key_head * heads;
  for (int64_t head = first; head < first + heads; ++head) {
    RowsOfHead<T>(args, place, head, sums);
  }
  if (place.phase == args.pieces - 1) EndSums<T>(args, place, sums, 1);
}

}  // namespace

void AttentionBackward(const AttentionBackwardArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { BackwardTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
