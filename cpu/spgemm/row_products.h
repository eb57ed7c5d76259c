// What both products of sparse matrices begin with: structures that were looked at, how much work
// each row of A B is, and tasks of about the same work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/common/row_pieces.h"
#include "cpu/common/structure.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap {

// A structure of which all entries take part: the given one, or a compact copy. `threads` look,
// where there is enough to look at.
class CheckedRows {
 public:
  CheckedRows(const Structure& given, int64_t threads) : view_(given) {
    if (Holds(threads)) return;
    compact_ = std::make_unique<CompactStructure>(given);
    view_ = compact_->View(given);
  }

  const Structure& view() const { return view_; }
  const CompactStructure* compact() const { return compact_.get(); }
  SparseRows Rows() const { return {view_.offsets, view_.indices}; }

 private:
  static constexpr int64_t kLeastPart = 1 << 18;

  bool Holds(int64_t threads) const {
    if (!view_.OffsetsHold()) return false;
    const int64_t entries = view_.offsets[view_.rows];
    const int64_t parts =
        std::clamp<int64_t>(entries / kLeastPart, 1, std::max<int64_t>(threads, 1));
    std::atomic<bool> holds{true};
    RunOnThreads(parts, threads, [&](int64_t part, int64_t) {
      const int64_t begin = entries * part / parts, end = entries * (part + 1) / parts;
      if (!view_.EntriesHold({begin, end})) holds.store(false, std::memory_order_relaxed);
    });
    return holds.load();
  }

  Structure view_;
  std::unique_ptr<CompactStructure> compact_;
};

class RowProducts {
 public:
  // `threads` count, where there is enough to count.
  RowProducts(const SparseRows& a, const SparseRows& b, int64_t rows, int64_t threads)
      : rows_(rows), a_offsets_(a.offsets), until_(new int64_t[rows + 1]) {
    until_[0] = 0;
    const int64_t parts = std::clamp<int64_t>(a.offsets[rows] / kLeastPart, 1, threads);
    std::vector<int64_t> longest(parts, 0);
    RunOnThreads(parts, threads, [&](int64_t part, int64_t) {
      int64_t longest_here = 0, sum = 0;
      for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
        int64_t own = 0;
        for (int64_t e = a.offsets[r]; e < a.offsets[r + 1]; ++e) {
          const int64_t k = a.indices[e];
          own += b.offsets[k + 1] - b.offsets[k];
        }
        sum += own;
        until_[r + 1] = sum;
        longest_here = std::max(longest_here, own);
      }
      longest[part] = longest_here;
    });
    int64_t before = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
      if (part > 0) {
        for (int64_t r = begin; r < end; ++r) until_[r + 1] += before;
      }
      if (end > begin) before = until_[end];
      longest_ = std::max(longest_, longest[part]);
    }
  }

  int64_t Of(int64_t row) const { return until_[row + 1] - until_[row]; }
  const int64_t* Before() const { return until_.get(); }  // [rows + 1] of each row
  int64_t Longest() const { return longest_; }
  int64_t Total() const { return until_[rows_]; }
  // As many of `threads` as have something to do.
  int64_t Threads(int64_t threads) const {
    return std::clamp<int64_t>(Work(rows_) / kLeastTask, 1, std::max<int64_t>(threads, 1));
  }

  // First rows of tasks, and after them the number of rows. A row counts for its products, its
  // entries in A and once.
  std::vector<int32_t> Cut(int64_t threads) const {
    const int64_t most =
        std::max(std::max<int64_t>(threads, 1) * kTasksOfThread, Work(rows_) / kMostTask);
    const int64_t tasks = std::clamp<int64_t>(Work(rows_) / kLeastTask, 1, most);
    return FirstRows(rows_, tasks, [&](int64_t row) { return Work(row); });
  }

 private:
  static constexpr int64_t kTasksOfThread = 32, kLeastTask = 1 << 13, kMostTask = 1 << 16;
  static constexpr int64_t kLeastPart = 1 << 15;

  int64_t Work(int64_t row) const { return until_[row] + a_offsets_[row] - a_offsets_[0] + row; }

  const int64_t rows_;
  const int32_t* a_offsets_;
  const std::unique_ptr<int64_t[]> until_;  // products before each row
  int64_t longest_ = 0;
};

}  // namespace sgap
