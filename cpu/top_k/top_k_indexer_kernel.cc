// The selection from scores of a light indexer: the scores of a few rows are computed into the
// cache, and the rows are selected there.
#include "cpu/top_k/top_k.h"
#include "cpu/top_k/top_k_rows.h"

namespace sgap::SGAP_ISA {
namespace {

template <typename Acc>
inline Acc* Aligned(char* memory) {
  return reinterpret_cast<Acc*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
}

// Writes some panels of keys; columns that do not exist have zeros.
template <typename T>
void PackPanels(const TopKIndexerArgs& args, int64_t batch, int64_t first) {
  using Acc = Accumulator<T>;
  const int64_t columns = args.top_k.columns, panels = Panels(columns);
  const int64_t last = first + args.panels_of_task < panels ? first + args.panels_of_task : panels;
  const T* keys = static_cast<const T*>(args.keys) + batch * columns * args.depth;
  Acc* out = static_cast<Acc*>(args.panels) + (batch * panels + first) * args.depth * kPanelColumns;
  for (int64_t p = first; p < last; ++p, out += args.depth * kPanelColumns) {
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
  const TopKArgs& top_k = args.top_k;
  const int64_t batch = task / top_k.row_tasks, begin = task % top_k.row_tasks * top_k.task_rows;
  const int64_t left = top_k.rows - begin, rows = left < top_k.task_rows ? left : top_k.task_rows;
  const int64_t pairs = rows * args.heads, place = (batch * top_k.rows + begin) * args.heads;
  const int64_t whole = (pairs + kPairsTogether - 1) / kPairsTogether * kPairsTogether;
  const int64_t stride = Panels(top_k.columns) * kPanelColumns;

  Acc* scores = Aligned<Acc>(top_k.scratch);
  Acc* q = Aligned<Acc>(reinterpret_cast<char*>(scores + rows * stride));
  Acc* weights = q + whole * args.depth;
  const RowScratch<Acc> scratch(reinterpret_cast<char*>(Aligned<Acc>((char*)(weights + whole))),
                                top_k.columns);
  for (int64_t i = 0; i < whole; ++i) {
    const T* own = static_cast<const T*>(args.q) + (place + i) * args.depth;
    Acc* out = q + i / kTogether * kTogether * args.depth + i % kTogether;
    for (int64_t d = 0; d < args.depth; ++d) {
      out[d * kTogether] = i < pairs ? LoadScalar(own + d) : Acc(0);
    }
    weights[i] = i < pairs ? LoadScalar(static_cast<const T*>(args.weights) + place + i) : Acc(0);
  }

  const int32_t* limits = top_k.limits + batch * top_k.limits_stride + begin;
  int64_t most = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t limit = TopKLimit(limits[r], top_k.columns);
    most = limit > most ? limit : most;
  }
  const OfPairs own{q, weights, pairs, args.heads, args.depth};
  const Acc* panel = static_cast<const Acc*>(args.panels) +
                     batch * Panels(top_k.columns) * args.depth * kPanelColumns;
  for (int64_t j = 0; j < most; j += kPanelColumns, panel += args.depth * kPanelColumns) {
    constexpr int kStep = OfPairs::kVectors * OfPairs::N;
    for (int64_t c = 0; c < kPanelColumns; c += kStep) own.Score(panel + c, scores + j + c, stride);
  }
  const int32_t* offsets = top_k.offsets + batch * (top_k.rows + 1) + begin;
  int32_t* indices = top_k.indices + batch * top_k.rows * top_k.k;
  for (int64_t r = 0; r < rows; ++r) {
    top_k.counts[batch * top_k.rows + begin + r] =
        SelectRow<Acc>(scores + r * stride, TopKLimit(limits[r], top_k.columns), top_k.k, 0,
                       scratch, indices + offsets[r], nullptr);
  }
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
