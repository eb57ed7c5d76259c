// Attention of bfloat16 column vectors on matrix tiles: the scores of some hundred keys with the
// rows of a block row, then their probabilities, rounded to bfloat16, times the values. Statistics
// and sums are float32, and totals are of probabilities that are not rounded.
#include "cpu/attention/attention_octets.h"
#include "cpu/attention/attention_results.h"

namespace sgap::SGAP_ISA {
namespace {

template <int kRows>
class ForwardOctets {
  using Of = OctetScores<kRows>;
  using V = typename Of::V;
  static constexpr int kMostKeys = kRows > 8 ? 256 : 512;  // of a block
  static constexpr int kStep = kTileDepth * kRows;         // scores of a step

 public:
  explicit ForwardOctets(const AttentionArgs& args)
      : args_(args), tiles_(AttentionOctets<kRows>::Shapes()), octets_(tiles_) {}

  void Run(const AttentionRows& at, int64_t begin, int64_t end) {
    const int64_t key_head = at.head / (args_.heads / args_.key_heads);
    const OctetKeys k(args_, args_.k, at.batch, key_head), v(args_, args_.v, at.batch, key_head);
    const int64_t stride = args_.row_heads * args_.depth, depth = args_.padded_value_depth;
    const BFloat16* q = static_cast<const BFloat16*>(args_.q) + at.batch * args_.q_stride;
    rows_.Pack(q + at.row * stride + at.head * args_.depth, stride, at.height, args_.depth);
    PrefetchPass(args_, at, /*next=*/true, q + at.head * args_.depth, stride, args_.depth);
    if (begin == end) std::memset(sums_, 0, size_t(kRows * depth) * sizeof(float));
    V peak = V{} + Of::kLeast, total = {};  // the peak in units of `factor`
    float factor = 1;
    for (int64_t p = begin; p < end; p += kMostKeys) {
      const int count = int(end - p < kMostKeys ? end - p : kMostKeys);
      octets_.Dots(rows_, k, args_.indices + p, count, scores_);
      factor = Of::Finish(args_, at, p, count, scores_);
      const float power = factor * float(kLog2E);
      const V before = peak;
      peak = Of::GreatestOfRow(Of::Greatest(scores_, count, peak));
      // Under a peak of -inf all terms are zero, but for NaN.
      const V shift = peak == Of::kLeast ? V{} : peak;
      if (p != begin) {
        const V shrink =
            before == Of::kLeast ? V{} : Exp2OfNegative<kTileColumns>((before - shift) * power);
        total *= shrink;
        Shrink(shrink, depth);
      }
      octets_.Sums(weights_, v, args_.indices + p, count, p == begin, sums_, depth,
                   [&](int64_t step, auto&& beside) {
                     const float* scores = scores_ + step * kStep;
                     weights_.Set(step, [&](int i, V* low, V* high) {
                       const float* at = scores + 2 * i * kTileColumns;
                       const V s = (Load<float, kTileColumns>(at) - shift) * power;
                       const V t = (Load<float, kTileColumns>(at + kTileColumns) - shift) * power;
                       *low = Exp2OfNegative<kTileColumns>(s);
                       *high = Exp2OfNegative<kTileColumns>(t);
                       total += *low + *high;
                       beside(i);
                     });
                   });
    }
    Store<float, kTileColumns>(peaks_, peak * factor);
    Store<float, kTileColumns>(totals_, Of::SumOfRow(total));
  }

  RowState<float> State() { return {sums_, peaks_, totals_, args_.padded_value_depth}; }

 private:
  void Shrink(V shrink, int64_t depth) {
    for (int r = 0; r < kRows; ++r) {
      if (shrink[r] == 1) continue;
      float* sums = sums_ + r * depth;
      for (int64_t d = 0; d < depth; d += kTileColumns) {
        Store<float, kTileColumns>(sums + d, Load<float, kTileColumns>(sums + d) * shrink[r]);
      }
    }
  }

  const AttentionArgs& args_;
  Tiles tiles_;
  AttentionOctets<kRows> octets_;
  alignas(64) float scores_[kMostKeys * kRows];
  OctetWeights<kRows, kMostKeys> weights_;
  OctetPairs<kRows> rows_;
  alignas(64) float sums_[kRows * kMostOctetDepth];
  alignas(64) float peaks_[kTileColumns], totals_[kTileColumns];
};

template <int kRows>
void ForwardTask(const AttentionArgs& args, int64_t walk, const RowTask& rows) {
  const int64_t batch = walk / args.heads, head = walk % args.heads;
  ForwardOctets<kRows> octets(args);
  const RowState<float> state = octets.State();
  for (int64_t block = rows.row_begin; block < rows.row_end; ++block) {
    const int64_t begin = rows.piece < 0 ? args.offsets[block] : rows.entry_begin;
    const int64_t end = rows.piece < 0 ? args.offsets[block + 1] : rows.entry_end;
    ForOctetRows<kRows>(args, batch, head, block, [&](const AttentionRows& at) {
      octets.Run(at, begin, end);
      if (rows.piece >= 0) return StorePiece<float>(args, walk, rows.piece, at, state);
      for (int r = 0; r < at.height; ++r) {
        Finish<BFloat16>(args, batch, head, at.row + r, state.sums + r * state.depth,
                         state.peaks[r], state.totals[r]);
      }
    });
  }
  if (rows.piece >= 0 && IsLastPiece(args, walk, rows)) Combine<BFloat16>(args, walk, rows);
}

}  // namespace

void AttentionOctet(const AttentionArgs& args, int64_t task) {
  const int64_t group_heads = args.heads / args.key_heads;
  GroupTask own = FindGroup(args, group_heads * args.row_tasks, task);
  if (CopyTask<BFloat16, BFloat16>(args, &own)) return;
  const int64_t walk = own.first * group_heads + own.task / args.row_tasks;
  const RowTask& rows = args.tasks[own.task % args.row_tasks];
  if (args.length == 4) return ForwardTask<4>(args, walk, rows);
  if (args.length == 8) return ForwardTask<8>(args, walk, rows);
  ForwardTask<16>(args, walk, rows);
}

}  // namespace sgap::SGAP_ISA
