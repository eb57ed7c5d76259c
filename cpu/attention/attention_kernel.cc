#include "cpu/attention/attention_groups.h"
#include "cpu/attention/attention_results.h"

namespace sgap::SGAP_ISA {
namespace {

// The vectors [begin, end) of some rows, in one pass over blocks of keys, added to `state`.
template <typename Acc, int kRows>
void ForwardRows(const AttentionProblem& args, const AttentionRows& at, const Acc* rows,
                 int64_t begin, int64_t end, const RowState<Acc>& state) {
  using Tile = AttentionTile<Acc, kRows>;
  using V = typename Tile::V;
  constexpr int kPart = Tile::kPart;
  alignas(64) Acc left[kMostRowNumbers];
  ScoreBlock<Acc, kRows> block(args, at);
  const int64_t depth = state.depth;
  Tile::Interleave(rows, args.padded_depth, args.padded_depth, left);
  V peak = Tile::OfRows(state.peaks), total = {};
  for (int r = 0; r < kRows; ++r) total[r * kPart] = state.totals[r];
  for (int64_t p = begin; p < end; p += block.count) {
    block.Compute(args, at, left, p, end);
    AddBlock(block.terms, block.padded, block.scores, &peak, &total, state.sums, depth);
    Tile::AddKeys(block.scores, block.values, block.count, depth, state.sums, depth);
  }
  for (int r = 0; r < kRows; ++r) {
    state.peaks[r] = peak[r * kPart];
    Acc sum = 0;
    for (int i = 0; i < kPart; ++i) sum += total[r * kPart + i];
    state.totals[r] = sum;
  }
}

// The same for groups of rows.
template <typename Acc>
void ForwardGroups(const AttentionProblem& args, const AttentionRows& at, const Acc* rows,
                   int64_t begin, int64_t end, const RowState<Acc>& state) {
  using Groups = RowGroups<Acc>;
  using V = typename Groups::V;
  constexpr int kRows = Groups::kRows;
  alignas(64) Acc left[kMostRowNumbers];
  GroupedScores<Acc> block(int(at.lanes / kRows));
  const int64_t depth = state.depth;
  for (int64_t r = 0; r < at.lanes; r += kRows) {
    const int64_t first = r * args.padded_depth;
    Groups::Tile::Interleave(rows + first, args.padded_depth, args.padded_depth, left + first);
  }
  for (int64_t p = begin; p < end; p += block.count) {
    block.Products(args, at, left, p, end);
    block.ForGroups(args, at, p, nullptr, [&](int g, const AttentionRows&, const auto& terms) {
      Acc *peaks = state.peaks + g * kRows, *totals = state.totals + g * kRows;
      V peak = Load<Acc, kRows>(peaks), total = Load<Acc, kRows>(totals);
      AddBlock(terms, block.padded, block.scores + Groups::At(g, 0), &peak, &total,
               state.sums + g * kRows * depth, depth);
      Store<Acc, kRows>(peaks, peak);
      Store<Acc, kRows>(totals, total);
    });
    Groups::AddKeys(block.scores, block.seen, block.values, block.count, depth, state.sums, depth);
  }
}

// The state of rows without keys; or the one that an earlier piece of the keys left in out and lse,
// with sums over exp(s - lse), which is 1.
template <typename T>
void Begin(const AttentionArgs& args, const AttentionRows& at, bool fresh, int height,
           const RowState<Accumulator<T>>& state) {
  using Acc = Accumulator<T>;
  constexpr Acc kLeast = -static_cast<Acc>(__builtin_inf());
  const int64_t place = (at.batch * args.rows + at.row) * args.row_heads + at.head;
  LoadRows<T>(static_cast<const T*>(args.out) + place * args.value_depth,
              args.row_heads * args.value_depth, fresh ? 0 : at.height, args.value_depth, height,
              args.padded_value_depth, Acc(1), state.sums);
  for (int r = 0; r < height; ++r) {
    const bool known = !fresh && r < at.height;
    state.peaks[r] = known ? static_cast<const Acc*>(args.lse)[place + r * args.row_heads] : kLeast;
    state.totals[r] = state.peaks[r] == kLeast ? Acc(0) : Acc(1);
  }
}

template <typename T>
void AttentionTask(const AttentionArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const int64_t group_heads = args.heads / args.key_heads;
  GroupTask own = FindGroup(args, group_heads * args.row_tasks, task);
  if (CopyTask<T>(args, &own)) return;
  const int64_t walk = own.first * group_heads + own.task / args.row_tasks;
  const int64_t batch = walk / args.heads, head = walk % args.heads;
  const RowTask& rows = args.tasks[own.task % args.row_tasks];
  const T* q = static_cast<const T*>(args.q) + batch * args.q_stride + head * args.depth;
  const int64_t stride = args.row_heads * args.depth, depth = args.padded_value_depth;
  const T* out = static_cast<const T*>(args.out) +
                 (batch * args.rows * args.row_heads + head) * args.value_depth;
  alignas(64) Acc loaded[kMostRowNumbers];
  alignas(64) Acc sums[kMostRowNumbers];
  alignas(64) Acc peaks[kMostPassRows<Acc>] = {}, totals[kMostPassRows<Acc>];  // whole vectors
  const RowState<Acc> state{sums, peaks, totals, depth};
  const auto run_block = [&](int64_t block, const KeyPiece& keys, bool fresh) {
    const int64_t end = rows.piece < 0 ? args.offsets[block + 1] : rows.entry_end;
    const Run first =
        NextRun(args, keys, rows.piece < 0 ? args.offsets[block] : rows.entry_begin, end);
    if (first.begin == first.end && !fresh) return;
    ForRows<Acc>(args, batch, head, block, [&](auto count, const AttentionRows& at) {
      LoadRows<T>(q + at.row * stride, stride, at.height, args.depth, count, args.padded_depth,
                  Acc(args.scale), loaded);
      PrefetchPass(args, at, /*next=*/true, q, stride, args.depth);
      PrefetchPass(args, at, /*next=*/!fresh, out, args.row_heads * args.value_depth,
                   args.value_depth);
      Begin<T>(args, at, fresh, count, state);
      for (Run run = first; run.begin < run.end; run = NextRun(args, keys, run.end, end)) {
        if constexpr (std::is_same_v<decltype(count), int>) {
          ForwardGroups(args, at, loaded, run.begin, run.end, state);
        } else {
          ForwardRows<Acc, decltype(count)::value>(args, at, loaded, run.begin, run.end, state);
        }
        if (keys.whole) break;
      }
      if (rows.piece < 0) {
        for (int r = 0; r < at.height; ++r) {
          Finish<T>(args, batch, head, at.row + r, sums + r * depth, peaks[r], totals[r]);
        }
        return;
      }
      StorePiece<Acc>(args, walk, rows.piece, at, state);
    });
  };
  // out and lse hold what a sink has no part in yet, as exactly as accumulators do.
  const bool pieces = std::is_same_v<T, Acc> && rows.piece < 0 && !args.sinks;
  const int64_t key_pieces = pieces ? args.key_pieces : 1;
  for (int64_t piece = 0; piece < key_pieces; ++piece) {
    const KeyPiece keys = KeyPieceOf(args.keys, piece, key_pieces);
    for (int64_t block = rows.row_begin; block < rows.row_end; ++block) {
      run_block(block, keys, piece == 0);
    }
  }
  if (rows.piece >= 0 && IsLastPiece(args, walk, rows)) Combine<T>(args, walk, rows);
}

}  // namespace

void Attention(const AttentionArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { AttentionTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
