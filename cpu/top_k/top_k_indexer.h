// What the kernels of an indexer's scores share: the rows of a task, and the selection of these.
#pragma once

#include "cpu/top_k/top_k.h"
#include "cpu/top_k/top_k_rows.h"

namespace sgap::SGAP_ISA {

// Some rows of an element of the batch.
struct IndexerRows {
  int64_t batch, begin, rows;
  int64_t pairs, place;  // of a row and a head, and the first of them in q and weights
  int64_t columns;       // the most that one of the rows has
  int64_t stride;        // between the rows of scores

  // Those of a task of the second phase.
  IndexerRows(const TopKIndexerArgs& args, int64_t task)
      : IndexerRows(args, task / args.top_k.row_tasks,
                    task % args.top_k.row_tasks * args.top_k.task_rows, args.top_k.task_rows) {}

  // Those from `first` on, `most` at most.
  IndexerRows(const TopKIndexerArgs& args, int64_t batch, int64_t first, int64_t most)
      : batch(batch), begin(first) {
    const TopKArgs& top_k = args.top_k;
    const int64_t left = top_k.rows - begin;
    rows = left < most ? left : most;
    pairs = rows * args.heads, place = (batch * top_k.rows + begin) * args.heads;
    stride = args.PanelCount() * args.panel_columns;
    columns = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t limit = Limit(top_k, r);
      columns = limit > columns ? limit : columns;
    }
  }

  int64_t Limit(const TopKArgs& top_k, int64_t row) const {
    return TopKLimit(top_k.limits[batch * top_k.limits_stride + begin + row], top_k.columns);
  }
};

inline char* AlignedLine(char* memory) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
}

// The memory of a task: scores [rows, stride], q of `pairs` pairs of `bytes` each, their weights,
// and what the selection needs; each on a line of its own.
template <typename Acc>
struct IndexerScratch {
  Acc* scores;
  char* q;
  Acc* weights;
  RowScratch<Acc> selection;

  IndexerScratch(const TopKArgs& top_k, const IndexerRows& at, int64_t pairs, int64_t bytes)
      : scores(reinterpret_cast<Acc*>(AlignedLine(top_k.scratch))),
        q(AlignedLine(reinterpret_cast<char*>(scores + at.rows * at.stride))),
        weights(reinterpret_cast<Acc*>(q + pairs * bytes)),
        selection(AlignedLine(reinterpret_cast<char*>(weights + pairs)), top_k.columns) {}
};

// Selects from scores [rows, stride].
template <typename Acc>
void SelectScored(const TopKArgs& top_k, const IndexerRows& at, const Acc* scores,
                  RowScratch<Acc>& scratch) {
  const int32_t* offsets = top_k.offsets + at.batch * (top_k.rows + 1) + at.begin;
  int32_t* counts = top_k.counts + at.batch * top_k.rows + at.begin;
  int32_t* indices = top_k.indices + at.batch * top_k.rows * top_k.k;
  for (int64_t r = 0; r < at.rows; ++r) {
    counts[r] = SelectRow<Acc>(scores + r * at.stride, at.Limit(top_k, r), top_k.k, 0, scratch,
                               offsets[at.rows] - offsets[r], indices + offsets[r], nullptr);
  }
}

}  // namespace sgap::SGAP_ISA
