#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/spgemm/row_products.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap {
namespace {

struct Operand {
  CheckedRows rows;
  std::unique_ptr<char[]> own;  // values, where not all entries take part
  const void* values;

  Operand(const DirectMatrix& x, size_t bytes, int64_t threads)
      : rows({x.offsets, x.indices, nullptr, x.rows, x.entries, x.columns}, threads),
        values(x.values) {
    if (!values || !rows.compact()) return;
    own = TakeEntries(values, 1, bytes, *rows.compact());
    values = own.get();
  }
};

// Whether A B has fewer than 2^31 - 1 entries: counted, where there are as many products.
bool CountIsInt32(const SpgemmRowsArgs& product, const std::vector<int32_t>& first_rows,
                  int64_t threads) {
  const int64_t rows = first_rows.back(), tasks = int64_t(first_rows.size()) - 1;
  std::vector<int32_t> counts(rows);
  SpgemmPatternArgs args = {};
  args.a = product.a, args.b = product.b;
  args.columns = product.columns;
  args.counts = counts.data();
  args.task_rows = first_rows.data();
  const int64_t bytes = ColumnSetWords(args.columns) * int64_t(sizeof(uint64_t));
  TaskScratch scratch;
  if (!scratch.Acquire(std::clamp<int64_t>(threads, 1, tasks), bytes, bytes)) {
    throw std::bad_alloc();
  }
  RunOnThreads(tasks, threads, [&](int64_t task, int64_t) {
    scratch.With([&](char* part) {
      SpgemmPatternArgs own = args;
      own.scratch = reinterpret_cast<uint64_t*>(part);
      Kernels().SpgemmPattern(own, task);
    });
  });
  return std::accumulate(counts.begin(), counts.end(), int64_t(0)) < INT32_MAX;
}

}  // namespace

bool DirectProduct(const DirectMatrix& a, const DirectMatrix& b, Dtype dtype, RowSums sums,
                   int64_t threads, RowResult& result) {
  const size_t bytes = DtypeBytes(dtype);
  const Operand left(a, bytes, threads), right(b, bytes, threads);
  SpgemmRowsArgs args = {};
  args.dtype = dtype;
  args.sums = sums;
  args.a = left.rows.Rows(), args.b = right.rows.Rows();
  args.a_values = left.values, args.b_values = right.values;
  args.columns = b.columns;

  const RowProducts products(args.a, args.b, a.rows, threads);
  const std::vector<int32_t> first_rows = products.Cut(threads);
  const auto tasks = int64_t(first_rows.size()) - 1;
  std::vector<int64_t> bounds(tasks);
  for (int64_t task = 0; task < tasks; ++task) {
    for (int64_t row = first_rows[task]; row < first_rows[task + 1]; ++row) {
      bounds[task] += std::min(products.Of(row), b.columns);
    }
  }
  const int64_t bound = std::accumulate(bounds.begin(), bounds.end(), int64_t(0));
  args.longest = std::min(products.Longest(), b.columns);
  args.products = products.Before();
  args.task_rows = first_rows.data();
  if (bound >= INT32_MAX && !CountIsInt32(args, first_rows, threads)) return false;

  args.slots =
      sums == RowSums::kAny ? SpgemmSlots(b.columns, args.longest) : SpgemmSlotsOf(args.longest);
  const SpgemmRowsScratch parts(args.columns, args.slots, args.longest, AccumulatorBytes(dtype));
  const int64_t workers = std::clamp<int64_t>(products.Threads(threads), 1, tasks);
  const Workspace scratch = AcquireWorkspace(size_t(workers * parts.bytes));
  RowPieces pieces(first_rows, {4, bytes}, std::move(bounds), kSpgemmSlack, workers);
  if (!scratch || !pieces.Ready()) throw std::bad_alloc();
  args.counts = pieces.counts();
  std::vector<char> began(workers, 0);
  RunOnThreads(tasks, workers, [&](int64_t task, int64_t worker) {
    SpgemmRowsArgs own = args;
    own.scratch = static_cast<char*>(scratch.get()) + worker * parts.bytes;
    if (!std::exchange(began[worker], 1)) std::memset(own.scratch, 0, size_t(parts.list));
    pieces.Begin(task, worker);
    own.indices = reinterpret_cast<int32_t*>(pieces.Next(worker, 0));
    own.values = pieces.Next(worker, 1);
    Kernels().SpgemmRows(own, task);
    pieces.Wrote(task, worker);
  });
  if (!pieces.Join(result)) throw std::bad_alloc();
  return true;
}

}  // namespace sgap
