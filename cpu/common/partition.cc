#include "cpu/common/partition.h"

#include <algorithm>

namespace sgap {
namespace {

// First row r in (row, m] at which offsets[r] + r >= work. Gallops from `guess`, near which it is
// where rows are alike: then it is found in one or two lines of the cache.
int64_t RowAtWork(const int32_t* offsets, int64_t row, int64_t m, int64_t work, int64_t guess) {
  const auto before = [=](int64_t r) { return offsets[r] + r < work; };
  int64_t low = row, high = std::min(guess, m), step = 1;
  if (high < m && before(high)) {
    low = high;
    while (low + step < m && before(low + step)) {
      low += step;
      step *= 2;
    }
    high = std::min(low + step, m);
  } else {
    while (high - step > row && !before(high - step)) {
      high -= step;
      step *= 2;
    }
    low = std::max(high - step, row);
  }
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (before(middle) ? low : high) = middle;
  }
  return high;
}

void SplitRowIntoPieces(int64_t row, int64_t begin, int64_t end, int64_t piece, RowPartition* out) {
  const int64_t pieces = (end - begin) / piece;
  const auto split = static_cast<int32_t>(out->splits.size());
  out->splits.push_back({row, static_cast<int32_t>(out->pieces), static_cast<int32_t>(pieces)});
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t piece_end = i + 1 == pieces ? end : begin + (i + 1) * piece;
    out->tasks.push_back(
        {row, row + 1, begin + i * piece, piece_end, static_cast<int32_t>(out->pieces + i), split});
  }
  out->pieces += pieces;
}

// Entries of a piece that leaves `piece_bytes`.
int64_t PieceEntries(int64_t entries, int64_t chunk, size_t piece_bytes) {
  const auto most = int64_t(kMostPartialBytes / std::max<size_t>(piece_bytes, 1));
  return most == 0 ? entries + 1 : std::max(chunk, entries / most + 1);
}

}  // namespace

RowPartition PartitionRows(const int32_t* offsets, int64_t m, int64_t chunk, int64_t piece) {
  RowPartition out;
  out.tasks.reserve(size_t((offsets[m] + m) / chunk + 1));  // short rows may leave more
  for (int64_t row = 0, rows = 1; row < m;) {
    const int64_t next = RowAtWork(offsets, row, m, offsets[row] + row + chunk, row + rows);
    rows = next - row;
    const int64_t last_begin = offsets[next - 1], last_end = offsets[next];
    // Only the last row of a task can be that long.
    const bool split = last_end - last_begin >= 2 * piece;
    const int64_t whole_end = split ? next - 1 : next;
    if (whole_end > row) {
      out.tasks.push_back({row, whole_end, offsets[row], offsets[whole_end], -1, -1});
    }
    if (split) SplitRowIntoPieces(next - 1, last_begin, last_end, piece, &out);
    row = next;
  }
  return out;
}

RowTasks ProductPlan::Cut(const int32_t* offsets, int64_t m, int64_t chunk, int64_t walks,
                          size_t piece_bytes) {
  const int64_t piece = PieceEntries(offsets[m], chunk, piece_bytes);
  partition = PartitionRows(offsets, m, chunk, piece);
  const auto split_rows = static_cast<int64_t>(partition.splits.size());
  if (partition.pieces > 0) {
    partials.reset(new char[size_t(partition.pieces) * piece_bytes]);
    remaining.reset(new int32_t[size_t(walks * split_rows)]);
    for (int64_t i = 0; i < walks * split_rows; ++i) {
      remaining[i] = partition.splits[i % split_rows].pieces;
    }
  }
  return {partition.tasks.data(),  static_cast<int64_t>(partition.tasks.size()),
          partition.splits.data(), split_rows,
          partition.pieces,        partials.get(),
          remaining.get()};
}

}  // namespace sgap
