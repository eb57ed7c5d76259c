// The selection from scores of a light indexer: the scores of a few rows are computed into the
// cache, and the rows are selected there.
#include "cpu/top_k/top_k_indexer.h"

namespace sgap::SGAP_ISA {
namespace {

// Writes a panel of keys; columns that do not exist have zeros.
template <typename T>
void PackPanel(const TopKIndexerArgs& args, int64_t batch, int64_t panel, Accumulator<T>* out) {
  using Acc = Accumulator<T>;
  const int64_t columns = args.top_k.columns, first = panel * kPanelColumns;
  const T* key = static_cast<const T*>(args.keys) + (batch * columns + first) * args.depth;
  for (int64_t j = 0; j < kPanelColumns; ++j, key += args.depth) {
    const bool exists = first + j < columns;
    for (int64_t d = 0; d < args.depth; ++d) {
      out[d * kPanelColumns + j] = exists ? LoadScalar(key + d) : Acc(0);
    }
  }
}

// Calls body(panel) for those of a task of the first phase.
template <typename Body>
void ForPanels(const TopKIndexerArgs& args, int64_t task, Body&& body) {
  const int64_t first = task % args.panel_tasks * args.panels_of_task, panels = args.PanelCount();
  const int64_t last = first + args.panels_of_task < panels ? first + args.panels_of_task : panels;
  for (int64_t panel = first; panel < last; ++panel) body(panel);
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
          const V value =
              Kept(own[d * kTogether + i] - V{});  // 0 + x takes an addition, for x of -0
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

// q and weights of some rows as Pairs has them, zeros after the last one.
template <typename T>
void LoadPairs(const TopKIndexerArgs& args, const IndexerRows& at, int64_t whole, Accumulator<T>* q,
               Accumulator<T>* weights) {
  using Acc = Accumulator<T>;
  constexpr int kTogether = Pairs<Acc>::kTogether;
  const T* from = static_cast<const T*>(args.q) + at.place * args.depth;
  const T* from_weights = static_cast<const T*>(args.weights) + at.place;
  for (int64_t i = 0; i < whole; ++i, from += args.depth) {
    Acc* out = q + i / kTogether * kTogether * args.depth + i % kTogether;
    for (int64_t d = 0; d < args.depth; ++d) {
      out[d * kTogether] = i < at.pairs ? LoadScalar(from + d) : Acc(0);
    }
    weights[i] = i < at.pairs ? LoadScalar(from_weights + i) : Acc(0);
  }
}

// The scores of a panel's columns, to scores [rows, stride] of these.
template <typename Acc>
void ScorePanel(const Pairs<Acc>& pairs, const Acc* panel, Acc* scores, int64_t stride) {
  constexpr int kStep = Pairs<Acc>::kVectors * Pairs<Acc>::N;
  for (int64_t c = 0; c < kPanelColumns; c += kStep) pairs.Score(panel + c, scores + c, stride);
}

int64_t WholePairs(const IndexerRows& at) {
  return (at.pairs + kPairsTogether - 1) / kPairsTogether * kPairsTogether;
}

template <typename T>
void SelectRows(const TopKIndexerArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const IndexerRows at(args, task);
  const int64_t whole = WholePairs(at);
  IndexerScratch<Acc> scratch(args.top_k, at, whole, args.depth * int64_t(sizeof(Acc)));
  Acc* q = reinterpret_cast<Acc*>(scratch.q);
  LoadPairs<T>(args, at, whole, q, scratch.weights);
  const Pairs<Acc> pairs{q, scratch.weights, at.pairs, args.heads, args.depth};
  const char* panel = args.panels + at.batch * args.PanelCount() * args.panel_bytes;
  for (int64_t j = 0; j < at.columns; j += kPanelColumns, panel += args.panel_bytes) {
    ScorePanel(pairs, reinterpret_cast<const Acc*>(panel), scratch.scores + j, at.stride);
  }
  SelectScored(args.top_k, at, scratch.scores, scratch.selection);
}

// Of all rows, which are few, the scores of a task's columns.
template <typename T>
void ScoreColumns(const TopKIndexerArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const IndexerRows at(args, task / args.panel_tasks, 0, args.top_k.rows);
  const int64_t whole = WholePairs(at);
  Acc* panel = reinterpret_cast<Acc*>(AlignedLine(args.top_k.scratch));
  Acc* q = panel + kPanelColumns * args.depth;
  Acc* weights = q + whole * args.depth;
  LoadPairs<T>(args, at, whole, q, weights);
  const Pairs<Acc> pairs{q, weights, at.pairs, args.heads, args.depth};
  Acc* scores = static_cast<Acc*>(args.scores) + at.batch * args.top_k.rows * at.stride;
  ForPanels(args, task, [&](int64_t p) {
    if (p * kPanelColumns >= at.columns) return;
    PackPanel<T>(args, at.batch, p, panel);
    ScorePanel(pairs, panel, scores + p * kPanelColumns, at.stride);
  });
}

template <typename T>
void SelectFew(const TopKIndexerArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const IndexerRows at(args, task);
  const Acc* scores = static_cast<const Acc*>(args.scores);
  RowScratch<Acc> scratch(AlignedLine(args.top_k.scratch), args.top_k.columns);
  SelectScored(args.top_k, at, scores + (at.batch * args.top_k.rows + at.begin) * at.stride,
               scratch);
}

}  // namespace

void TopKIndexer(const TopKIndexerArgs& args, int64_t task) {
  DispatchDtype(args.top_k.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Acc = Accumulator<T>;
    const int64_t first_phase = args.batch * args.panel_tasks;
    if (task >= first_phase) {
      return args.scores ? SelectFew<T>(args, task - first_phase)
                         : SelectRows<T>(args, task - first_phase);
    }
    if (args.scores) return ScoreColumns<T>(args, task);
    const int64_t batch = task / args.panel_tasks;
    char* panels = args.panels + batch * args.PanelCount() * args.panel_bytes;
    ForPanels(args, task, [&](int64_t p) {
      PackPanel<T>(args, batch, p, reinterpret_cast<Acc*>(panels + p * args.panel_bytes));
    });
  });
}

}  // namespace sgap::SGAP_ISA
