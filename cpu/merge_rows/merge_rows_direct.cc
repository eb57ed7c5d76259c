#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "cpu/check_levels/check_levels.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/structure.h"
#include "cpu/merge_rows/merge_rows.h"

namespace sgap {
namespace {

constexpr int64_t kTasksOfThread = 8, kLeastTask = 1 << 14;  // entries of A and B
constexpr int64_t kMostTask = 1 << 16;

Structure StructureOf(const DirectMatrix& x) {
  return {x.offsets, x.indices, nullptr, x.rows, x.entries, x.columns};
}

// Whether each of these rows ascends, from 0 on and below x.columns.
bool RowsAscend(const DirectMatrix& x, int64_t begin, int64_t end) {
  const int64_t first = x.offsets[begin], last = x.offsets[end];
  while (begin < end && x.offsets[begin + 1] == first) ++begin;
  if (begin == end) return true;
  if (last - first == 1) return x.indices[first] >= 0 && x.indices[first] < x.columns;
  const LevelPiece pieces[] = {
      {LevelCheck::kRises, true, 0, first + 1, last, x.indices, nullptr, x.columns},
      {LevelCheck::kStarts, true, 0, begin + 1, end, x.indices, x.offsets, last}};
  int64_t falls[2];
  const CheckLevelsArgs args = {pieces, falls, nullptr, 0};
  for (const int64_t piece : {0, 1}) Kernels().CheckLevels(args, piece);
  return falls[0] + falls[1] == 0;
}

}  // namespace

Merged DirectMerge(const DirectMatrix& a, const DirectMatrix& b, Merge merge, Dtype dtype,
                   bool places, int64_t threads, RowResult& result) {
  for (const DirectMatrix* x : {&a, &b}) {
    if (!StructureOf(*x).OffsetsHold()) return Merged::kNotAscending;
  }
  const int64_t rows = a.rows;
  const auto work = [&](int64_t row) { return int64_t(a.offsets[row]) + b.offsets[row] + row; };
  const bool intersection = merge == Merge::kMultiply;
  const int64_t total = work(rows) - rows;
  if (!intersection && total >= INT32_MAX) return Merged::kTooMany;
  threads = std::clamp<int64_t>(total / kLeastTask, 1, std::max<int64_t>(threads, 1));
  const int64_t most = std::max(threads * kTasksOfThread, total / kMostTask);
  const int64_t tasks = std::clamp<int64_t>(total / kLeastTask, 1, most);
  const std::vector<int32_t> first_rows = FirstRows(rows, tasks, work);

  MergeRowsArgs args = {};
  args.a = {a.offsets, a.indices}, args.b = {b.offsets, b.indices};
  args.columns = a.columns;
  args.dtype = dtype;
  args.merge = merge;
  args.a_values = a.values, args.b_values = b.values;
  args.task_rows = first_rows.data();
  std::vector<size_t> widths = {4};
  if (a.values) {
    widths = {4, DtypeBytes(dtype)};
  } else if (places) {
    widths = {4, 4, 4};
  }
  const auto cut = int64_t(first_rows.size()) - 1;
  std::vector<int64_t> bounds(cut);
  for (int64_t task = 0; task < cut; ++task) {
    const int64_t begin = first_rows[task], end = first_rows[task + 1];
    const int64_t of_a = a.offsets[end] - a.offsets[begin],
                  of_b = b.offsets[end] - b.offsets[begin];
    bounds[task] = intersection ? std::min(of_a, of_b) : of_a + of_b;
  }
  RowPieces pieces(first_rows, std::move(widths), std::move(bounds), kMergeSlack, threads);
  if (!pieces.Ready()) throw std::bad_alloc();
  args.counts = pieces.counts();
  std::atomic<bool> ascending{true};
  RunOnThreads(cut, threads, [&](int64_t task, int64_t worker) {
    const int64_t begin = first_rows[task], end = first_rows[task + 1];
    if (!RowsAscend(a, begin, end) || !RowsAscend(b, begin, end)) {
      ascending.store(false, std::memory_order_relaxed);
    }
    pieces.Begin(task, worker);
    if (!ascending.load(std::memory_order_relaxed)) {  // others wait until its rows are known
      std::fill(args.counts + begin, args.counts + end, 0);
      pieces.Wrote(task, worker);
      return;
    }
    MergeRowsArgs own = args;
    own.indices = reinterpret_cast<int32_t*>(pieces.Next(worker, 0));
    if (a.values) {
      own.values = pieces.Next(worker, 1);
    } else if (places) {
      own.a_places = reinterpret_cast<int32_t*>(pieces.Next(worker, 1));
      own.b_places = reinterpret_cast<int32_t*>(pieces.Next(worker, 2));
    }
    Kernels().MergeRows(own, task);
    pieces.Wrote(task, worker);
  });
  if (!ascending.load()) return Merged::kNotAscending;
  if (!pieces.Join(result)) throw std::bad_alloc();
  return Merged::kDone;
}

}  // namespace sgap
