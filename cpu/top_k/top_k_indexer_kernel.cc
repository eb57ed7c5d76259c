// The selection from scores of a light indexer: the scores of a few rows are computed into the
// cache, and the rows are selected there.
#include "cpu/top_k/top_k_indexer.h"

namespace sgap::SGAP_ISA {
namespace {

// Writes some panels of keys; columns that do not exist have zeros.
template <typename T>
void PackPanels(const TopKIndexerArgs& args, int64_t batch, int64_t first) {
  using Acc = Accumulator<T>;
  const int64_t columns = args.top_k.columns, panels = args.PanelCount();
  const int64_t last = first + args.panels_of_task < panels ? first + args.panels_of_task : panels;
  const T* keys = static_cast<const T*>(args.keys) + batch * columns * args.depth;
  for (int64_t p = first; p < last; ++p) {
    Acc* out = reinterpret_cast<Acc*>(args.panels + (batch * panels + p) * args.panel_bytes);
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      const int64_t column = p * kPanelColumns + j;
      const T* key = keys + column * args.depth;
      for (int64_t d = 0; d < args.depth; ++d) {
        out[d * kPanelColumns + j] = column < columns ? LoadScalar(key + d) : Acc(0);
      }
    }
  }
}

// The rows of a task, by pairs of a row and a head.
template <typename Acc>
struct Pairs {
  static constexpr int N = kVectorBytes / sizeof(Acc);
  // Sums in registers: 24 of 32, or 12 of 16.
  static constexpr int kTogether = kVectorBytes == 64 ? 8 : 4, kVectors = 3;
  static_assert(kPairsTogether % kTogether == 0 && kPanelColumns % (kVectors * N) == 0);
  using V = Vector<Acc, N>;

  const Acc* q;        // [pairs / kTogether, depth, kTogether]
  const Acc* weights;  // [pairs]
  int64_t count, heads, depth;

  // scores [rows, stride] of the columns of kVectors vectors: panel [depth, kPanelColumns].
  void Score(const Acc* panel, Acc* scores, int64_t stride) const {
    int64_t head = 0;
    Acc* row = scores;
    for (int64_t first = 0; first < count; first += kTogether) {
      V sums[kTogether][kVectors] = {};
      const Acc* own = q + first * depth;
      for (int64_t d = 0; d < depth; ++d) {
        V keys[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          keys[v] = Load<Acc, N>(panel + d * kPanelColumns + v * N);
#pragma GCC unroll 8
        for (int i = 0; i < kTogether; ++i) {
          const V value = Kept(V{} + own[d * kTogether + i]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[i][v] += keys[v] * value;
        }
      }
      V total[kVectors] = {};
      if (head > 0) {
        for (int v = 0; v < kVectors; ++v) total[v] = Load<Acc, N>(row + v * N);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= count) break;
        const Acc weight = weights[first + i];
        const bool ends = ++head == heads;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          total[v] += (sums[i][v] < 0 ? V{} : sums[i][v]) * weight;  // NaN stays
          if (ends || i + 1 == kTogether) Store<Acc, N>(row + v * N, total[v]);
          if (ends) total[v] = V{};
        }
        head = ends ? 0 : head;
        row += ends ? stride : 0;
      }
    }
  }
};

template <typename T>
void SelectRows(const TopKIndexerArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  using OfPairs = Pairs<Acc>;
  constexpr int kTogether = OfPairs::kTogether;
  const IndexerRows at(args, task);
  const int64_t whole = (at.pairs + kPairsTogether - 1) / kPairsTogether * kPairsTogether;
  IndexerScratch<Acc> scratch(args.top_k, at, whole, args.depth * int64_t(sizeof(Acc)));
  Acc* q = reinterpret_cast<Acc*>(scratch.q);
  for (int64_t i = 0; i < whole; ++i) {
    const T* own = static_cast<const T*>(args.q) + (at.place + i) * args.depth;
    const T* weights = static_cast<const T*>(args.weights) + at.place;
    Acc* out = q + i / kTogether * kTogether * args.depth + i % kTogether;
    for (int64_t d = 0; d < args.depth; ++d) {
      out[d * kTogether] = i < at.pairs ? LoadScalar(own + d) : Acc(0);
    }
    scratch.weights[i] = i < at.pairs ? LoadScalar(weights + i) : Acc(0);
  }
  const OfPairs own{q, scratch.weights, at.pairs, args.heads, args.depth};
  const char* panel = args.panels + at.batch * args.PanelCount() * args.panel_bytes;
  for (int64_t j = 0; j < at.columns; j += kPanelColumns, panel += args.panel_bytes) {
    constexpr int kStep = OfPairs::kVectors * OfPairs::N;
    for (int64_t c = 0; c < kPanelColumns; c += kStep) {
      own.Score(reinterpret_cast<const Acc*>(panel) + c, scratch.scores + j + c, at.stride);
    }
  }
  SelectScored(args.top_k, at, scratch);
}

}  // namespace

void TopKIndexer(const TopKIndexerArgs& args, int64_t task) {
  DispatchDtype(args.top_k.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t packing = args.batch * args.panel_tasks;
    if (task >= packing) return SelectRows<T>(args, task - packing);
    PackPanels<T>(args, task / args.panel_tasks, task % args.panel_tasks * args.panels_of_task);
  });
}

}  // namespace sgap::SGAP_ISA
