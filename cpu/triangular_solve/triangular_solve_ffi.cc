// FFI targets of triangular matrices:
//   sgap_triangular_solve_csr_v1  x with T x = b, where T is a triangle of a sparse matrix
//   sgap_incomplete_lu_csr_v1     the factors of level 0 of a sparse matrix, in its own entries
//
// Rows of a triangle form levels: those of a level need x of levels before only (Saltz, 1990). Wide
// levels are cut into tasks, neighbouring narrow ones are one task. Levels depend on the structure
// alone: they are made once and kept with a copy of its index arrays, which every call compares
// with its own. So index arrays may hold anything, and change at any time. A row is summed in the
// order of its entries by one thread: the bits depend on neither levels nor threads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskWork = 1 << 12;  // entries and rows of a task
constexpr int64_t kWideLevel = 2 * kTaskWork;
constexpr int64_t kColumns = 32;   // of b in a task
constexpr int64_t kEntryWork = 4;  // of an entry, in units of ParallelPhases: it is a gather
constexpr size_t kKeptPlans = 8;
constexpr size_t kKeptBytes = size_t(1) << 28;

struct Triangle {
  const int32_t* offsets;  // [rows + 1]
  const int32_t* indices;  // [nnz]
  int64_t rows, nnz;
  bool lower;
};

struct Plan {
  std::vector<int32_t> offsets, indices;  // as given
  bool lower;

  // The entries beside the diagonal that take part: their columns, and where their values are.
  std::vector<int32_t> begin, columns, places;
  std::vector<int32_t> diagonal_begin, diagonal_places;
  std::vector<int32_t> order;   // of rows; those of a task follow each other
  std::vector<int32_t> ends;    // of tasks, in `order`
  std::vector<int64_t> phases;  // how many tasks each has

  explicit Plan(const Triangle& given)
      : offsets(given.offsets, given.offsets + given.rows + 1),
        indices(given.indices, given.indices + given.nnz),
        lower(given.lower) {
    CollectEntries(given.rows, given.nnz);
    CutIntoTasks(given.rows);
  }

  bool Is(const Triangle& other) const {
    return lower == other.lower && int64_t(offsets.size()) == other.rows + 1 &&
           int64_t(indices.size()) == other.nnz &&
           std::memcmp(offsets.data(), other.offsets, offsets.size() * sizeof(int32_t)) == 0 &&
           (other.nnz == 0 ||
            std::memcmp(indices.data(), other.indices, indices.size() * sizeof(int32_t)) == 0);
  }

  size_t Bytes() const { return sizeof(int32_t) * (3 * indices.size() + 6 * offsets.size()); }

 private:
  void CollectEntries(int64_t rows, int64_t nnz) {
    std::vector<int32_t> valid(rows + 1);
    MakeValid(offsets.data(), rows + 1, nnz, valid.data());
    begin.assign(rows + 1, 0);
    diagonal_begin.assign(rows + 1, 0);
    columns.reserve(nnz);
    places.reserve(nnz);
    diagonal_places.reserve(rows);
    for (int64_t row = 0; row < rows; ++row) {
      for (int32_t p = valid[row]; p < valid[row + 1]; ++p) {
        const int64_t column = indices[p];
        if (column == row) {
          diagonal_places.push_back(p);
        } else if (column >= 0 && column < rows && (column < row) == lower) {
          columns.push_back(int32_t(column));
          places.push_back(p);
        }
      }
      begin[row + 1] = int32_t(columns.size());
      diagonal_begin[row + 1] = int32_t(diagonal_places.size());
    }
  }

  int64_t Row(int64_t i, int64_t rows) const { return lower ? i : rows - 1 - i; }
  int64_t RowWork(int64_t row) const { return begin[row + 1] - begin[row] + 1; }

  void CutIntoTasks(int64_t rows) {
    std::vector<int32_t> level(rows, 0);
    std::vector<int64_t> work;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = Row(i, rows);
      int32_t own = 0;
      for (int32_t q = begin[row]; q < begin[row + 1]; ++q) {
        own = std::max(own, level[columns[q]] + 1);
      }
      level[row] = own;
      if (own >= int64_t(work.size())) work.push_back(0);  // levels begin in their order
      work[own] += RowWork(row);
    }
    order.resize(rows);
    const auto is_wide = [](int64_t level_work) { return level_work >= kWideLevel; };
    if (std::none_of(work.begin(), work.end(), is_wide)) {
      for (int64_t i = 0; i < rows; ++i) order[i] = int32_t(Row(i, rows));
      ends = {int32_t(rows)};
      phases = {1};
      return;
    }
    std::vector<int32_t> place(work.size() + 1, 0);
    for (int64_t row = 0; row < rows; ++row) ++place[level[row] + 1];
    for (size_t i = 1; i < place.size(); ++i) place[i] += place[i - 1];
    const std::vector<int32_t> starts = place;
    for (int64_t row = 0; row < rows; ++row) order[place[level[row]]++] = int32_t(row);
    bool narrow = false;  // whether the last task is of narrow levels
    for (size_t l = 0; l < work.size(); ++l) {
      if (!is_wide(work[l])) {
        if (!narrow) phases.push_back(1), ends.push_back(0);
        ends.back() = starts[l + 1];
        narrow = true;
        continue;
      }
      narrow = false;
      int64_t tasks = 0, held = 0;
      for (int32_t i = starts[l]; i < starts[l + 1]; ++i) {
        held += RowWork(order[i]);
        if (held < kTaskWork && i + 1 < starts[l + 1]) continue;
        ends.push_back(i + 1);
        held = 0, ++tasks;
      }
      phases.push_back(tasks);
    }
  }
};

using PlanPtr = std::shared_ptr<const Plan>;

// The plan of a structure: one that is kept, or a new one.
PlanPtr PlanOf(const Triangle& given) {
  static std::mutex mutex;
  static std::vector<PlanPtr>* const kept = new std::vector<PlanPtr>;  // the latest used is last
  std::vector<PlanPtr> candidates;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    candidates = *kept;
  }
  PlanPtr found;
  for (auto plan = candidates.rbegin(); plan != candidates.rend() && !found; ++plan) {
    if ((*plan)->Is(given)) found = *plan;
  }
  if (!found) found = std::make_shared<const Plan>(given);
  const std::lock_guard<std::mutex> lock(mutex);
  kept->erase(std::remove(kept->begin(), kept->end(), found), kept->end());
  kept->push_back(found);
  size_t bytes = 0;
  for (const PlanPtr& plan : *kept) bytes += plan->Bytes();
  while (kept->size() > 1 && (kept->size() > kKeptPlans || bytes > kKeptBytes)) {
    bytes -= kept->front()->Bytes();
    kept->erase(kept->begin());
  }
  return found;
}

template <typename T>
struct Solve {
  const Plan* plan;
  const T *values, *b;
  T* x;
  int64_t n;  // columns of b and x
  bool unit;

  // Columns [first, first + kCount) of the rows of a task.
  template <int kCount>
  void Columns(int64_t begin, int64_t end, int64_t first) const {
    const Plan& p = *plan;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = p.order[i];
      T sum[kCount];
      for (int c = 0; c < kCount; ++c) sum[c] = b[row * n + first + c];
      for (int32_t q = p.begin[row]; q < p.begin[row + 1]; ++q) {
        const T value = values[p.places[q]];
        const T* other = x + int64_t(p.columns[q]) * n + first;
        for (int c = 0; c < kCount; ++c) sum[c] -= value * other[c];
      }
      if (!unit) {
        T diagonal = 0;
        for (int32_t q = p.diagonal_begin[row]; q < p.diagonal_begin[row + 1]; ++q) {
          diagonal += values[p.diagonal_places[q]];
        }
        for (int c = 0; c < kCount; ++c) sum[c] /= diagonal;
      }
      for (int c = 0; c < kCount; ++c) x[row * n + first + c] = sum[c];
    }
  }

  void Run(int64_t task, int64_t tile) const {
    const int64_t begin = task == 0 ? 0 : plan->ends[task - 1], end = plan->ends[task];
    int64_t first = tile * kColumns;
    const int64_t last = std::min(first + kColumns, n);
    for (; first + 8 <= last; first += 8) Columns<8>(begin, end, first);
    for (; first + 4 <= last; first += 4) Columns<4>(begin, end, first);
    for (; first < last; ++first) Columns<1>(begin, end, first);
  }
};

template <typename T>
struct SolveCall {
  std::vector<PlanPtr> plans;
  std::vector<Solve<T>> solves;
  std::vector<int64_t> phases, first_of_phase;

  // The tasks of all systems whose plans are one run together; other systems follow.
  struct Group {
    int64_t begin, end, first_phase;
  };
  std::vector<Group> groups;
  int64_t tiles = 1;

  void Add(PlanPtr plan, Solve<T> solve) {
    if (plans.empty() || plans.back() != plan) {
      groups.push_back({int64_t(solves.size()), 0, 0});
      plans.push_back(std::move(plan));
    }
    solve.plan = plans.back().get();
    solves.push_back(solve);
    groups.back().end = int64_t(solves.size());
  }

  void Cut(int64_t columns) {
    tiles = (columns + kColumns - 1) / kColumns;
    int64_t tasks = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      groups[g].first_phase = int64_t(phases.size());
      for (const int64_t count : plans[g]->phases) {
        first_of_phase.push_back(tasks);
        phases.push_back(count * (groups[g].end - groups[g].begin) * tiles);
        tasks += phases.back();
      }
    }
  }

  void Run(int64_t task) const {
    const auto after = std::upper_bound(first_of_phase.begin(), first_of_phase.end(), task);
    const int64_t phase = after - first_of_phase.begin() - 1;
    size_t g = groups.size() - 1;
    while (groups[g].first_phase > phase) --g;
    const Plan& plan = *plans[g];
    int64_t first = 0;
    for (int64_t i = groups[g].first_phase; i < phase; ++i) {
      first += plan.phases[i - groups[g].first_phase];
    }
    const int64_t own = task - first_of_phase[phase];
    const int64_t count = plan.phases[phase - groups[g].first_phase];
    const int64_t unit = own / count;
    solves[groups[g].begin + unit / tiles].Run(first + own % count, unit % tiles);
  }
};

// The sizes of a batch of matrices and an error; each operand has the leading axes of `values`.
struct Sizes {
  int64_t batch, rows, nnz;
  std::string error;
};

Sizes CheckMatrices(ffi::AnyBuffer offsets, ffi::AnyBuffer indices, ffi::AnyBuffer values) {
  Sizes found = {Leading(values, 1), 0, 0, ""};
  if (found.batch < 0 || Leading(offsets, 1) < 0) {
    found.error = "expected values [..., nnz] and offsets [..., rows + 1]";
    return found;
  }
  found.nnz = values.dimensions().back();
  found.rows = offsets.dimensions().back() - 1;
  const auto dtype = values.element_type();
  if (dtype != ffi::F32 && dtype != ffi::F64) found.error = "expected values in float32 or float64";
  if (found.rows < 0 || found.rows >= INT32_MAX || found.nnz > INT32_MAX) {
    found.error = "2^31 rows or entries or more, or no offsets";
  }
  const auto add = [&](std::string error) {
    if (found.error.empty()) found.error = std::move(error);
  };
  add(NotEach("offsets", "values", offsets, ffi::S32, found.batch, {found.rows + 1}));
  add(NotEach("indices", "values", indices, ffi::S32, found.batch, {found.nnz}));
  return found;
}

template <typename T>
ffi::Future SolveAll(ffi::ThreadPool pool, const Sizes& of, int64_t columns, ffi::AnyBuffer offsets,
                     ffi::AnyBuffer indices, ffi::AnyBuffer values, ffi::AnyBuffer b, void* x,
                     bool lower, bool unit) {
  const auto call = std::make_shared<SolveCall<T>>();
  const int64_t size = of.rows * columns;
  for (int64_t i = 0; i < of.batch; ++i) {
    const Triangle own = {Ints(offsets) + i * (of.rows + 1), Ints(indices) + i * of.nnz, of.rows,
                          of.nnz, lower};
    call->Add(PlanOf(own), {nullptr, static_cast<const T*>(values.untyped_data()) + i * of.nnz,
                            static_cast<const T*>(b.untyped_data()) + i * size,
                            static_cast<T*>(x) + i * size, columns, unit});
  }
  call->Cut(columns);
  const int64_t work = of.batch * (of.nnz + of.rows) * columns * kEntryWork;
  return ParallelPhases(pool, call->phases, work, [call](int64_t task) { call->Run(task); });
}

ffi::Future TriangularSolveHandler(ffi::ThreadPool pool, ffi::AnyBuffer offsets,
                                   ffi::AnyBuffer indices, ffi::AnyBuffer values, ffi::AnyBuffer b,
                                   ffi::Result<ffi::AnyBuffer> x, bool lower, bool unit_diagonal) {
  Sizes of = CheckMatrices(offsets, indices, values);
  const int64_t columns = b.dimensions().size() < 2 ? -1 : b.dimensions().back();
  if (of.error.empty() && columns < 0) of.error = "expected b [..., rows, columns]";
  if (of.error.empty()) {
    of.error = NotEach("b", "values", b, values.element_type(), of.batch, {of.rows, columns});
  }
  if (of.error.empty()) {
    of.error = NotEach("x", "b", *x, values.element_type(), of.batch, {of.rows, columns});
  }
  if (!of.error.empty()) return Failed("triangular_solve: " + of.error);
  if (of.batch == 0 || of.rows == 0 || columns == 0) return Finished();
  const auto solve = values.element_type() == ffi::F64 ? SolveAll<double> : SolveAll<float>;
  return solve(pool, of, columns, offsets, indices, values, b, x->untyped_data(), lower,
               unit_diagonal);
}

// Row by row: a[i, k] /= a[k, k] for k < i in ascending order, then a[i, j] -= a[i, k] a[k, j] for
// j > k, where A stores an entry (i, j). Of entries at one place the first takes part; rows without
// a diagonal entry are not eliminated with.
template <typename T>
void Factor(const int32_t* given, const int32_t* indices, int64_t rows, int64_t nnz, T* a) {
  std::vector<int32_t> offsets(rows + 1), diagonal(rows, -1), at(rows, -1), before;
  MakeValid(given, rows + 1, nnz, offsets.data());
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t first = offsets[row], last = offsets[row + 1];
    before.clear();
    for (int32_t p = first; p < last; ++p) {
      const int32_t column = indices[p];
      if (column < 0 || column >= rows || at[column] >= 0) continue;
      at[column] = p;
      if (column < row) before.push_back(column);
    }
    diagonal[row] = at[row];
    if (!std::is_sorted(before.begin(), before.end())) std::sort(before.begin(), before.end());
    for (const int32_t k : before) {
      if (diagonal[k] < 0) continue;
      const T factor = a[at[k]] /= a[diagonal[k]];
      for (int32_t p = offsets[k]; p < offsets[k + 1]; ++p) {
        const int32_t j = indices[p];
        if (j > k && j < rows && at[j] >= 0) a[at[j]] -= factor * a[p];
      }
    }
    for (int32_t p = first; p < last; ++p) {
      if (indices[p] >= 0 && indices[p] < rows) at[indices[p]] = -1;
    }
  }
}

ffi::Future IncompleteLuHandler(ffi::ThreadPool pool, ffi::AnyBuffer offsets,
                                ffi::AnyBuffer indices, ffi::AnyBuffer values,
                                ffi::Result<ffi::AnyBuffer> factors) {
  Sizes of = CheckMatrices(offsets, indices, values);
  if (of.error.empty()) {
    of.error = NotEach("factors", "values", *factors, values.element_type(), of.batch, {of.nnz});
  }
  if (!of.error.empty()) return Failed("incomplete_lu: " + of.error);
  const bool wide = values.element_type() == ffi::F64;
  const size_t bytes = size_t(of.nnz) * (wide ? sizeof(double) : sizeof(float));
  char* const out = static_cast<char*>(factors->untyped_data());
  const auto factor = [=](int64_t i) {
    char* own = out + i * bytes;
    if (bytes) std::memcpy(own, static_cast<const char*>(values.untyped_data()) + i * bytes, bytes);
    const int32_t *o = Ints(offsets) + i * (of.rows + 1), *c = Ints(indices) + i * of.nnz;
    wide ? Factor(o, c, of.rows, of.nnz, reinterpret_cast<double*>(own))
         : Factor(o, c, of.rows, of.nnz, reinterpret_cast<float*>(own));
  };
  if (of.batch == 0) return Finished();
  return ParallelTasks(pool, of.batch, of.batch * (of.nnz + of.rows) * kEntryWork, factor);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TriangularSolveFfi, TriangularSolveHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // offsets [..., rows + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [..., nnz]
                                  .Arg<ffi::AnyBuffer>()  // values [..., nnz]
                                  .Arg<ffi::AnyBuffer>()  // b [..., rows, columns]
                                  .Ret<ffi::AnyBuffer>()  // x [..., rows, columns]
                                  .Attr<bool>("lower")
                                  .Attr<bool>("unit_diagonal"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(IncompleteLuFfi, IncompleteLuHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // offsets [..., rows + 1]
                                  .Arg<ffi::AnyBuffer>()    // indices [..., nnz]
                                  .Arg<ffi::AnyBuffer>()    // values [..., nnz]
                                  .Ret<ffi::AnyBuffer>());  // factors [..., nnz]

}  // namespace sgap
