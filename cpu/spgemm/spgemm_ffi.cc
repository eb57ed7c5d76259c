// FFI targets of the product of two sparse matrices A [rows, inner] and B [inner, columns]:
//   sgap_spgemm_offsets_v1   row offsets of A B, 2^31 - 1 where there are as many entries or more
//   sgap_spgemm_indices_v1   its column indices, ascending, where the offsets have room for them
//   sgap_spgemm_csr_v1       its values at the entries of a pattern
// Entries that take no part (structure.h) are left out.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/common/each_structure.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/spgemm/row_products.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kProductWork = 4;  // in units of ParallelPhases

// A and B, looked at. `inner` is the number of A's columns and B's rows.
struct Factors {
  CheckedRows a, b;
  Factors(ffi::AnyBuffer a_offsets, ffi::AnyBuffer a_indices, ffi::AnyBuffer b_offsets,
          ffi::AnyBuffer b_indices, int64_t columns, int64_t threads)
      : a(StructureOf(a_offsets, a_indices, {}, b_offsets.dimensions()[0] - 1), threads),
        b(StructureOf(b_offsets, b_indices, {}, columns), threads) {}

  static Structure StructureOf(ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                               const int32_t* permutation, int64_t size) {
    return {Ints(offsets),           Ints(indices), permutation, offsets.dimensions()[0] - 1,
            indices.dimensions()[0], size};
  }
};

// First rows of tasks of about the same work, and after them the number of rows.
struct RowTasks {
  std::vector<int32_t> rows;
  int64_t products;

  RowTasks(const Factors& factors, int64_t threads) {
    const RowProducts found(factors.a.Rows(), factors.b.Rows(), factors.a.view().rows, threads);
    rows = found.Cut(threads);
    products = found.Total();
  }
  int64_t Count() const { return int64_t(rows.size()) - 1; }
};

// Empty for index arrays of a matrix in CSR.
std::string BadRows(const char* name, ffi::AnyBuffer offsets, ffi::AnyBuffer indices) {
  std::string error = Mismatch("offsets", offsets, ffi::S32, {kAnySize});
  if (error.empty()) error = Mismatch("indices", indices, ffi::S32, {kAnySize});
  if (error.empty() && offsets.dimensions()[0] < 1) error = "offsets: expected one at least";
  return error.empty() ? "" : std::string(name) + ": " + error;
}

std::string BadFactors(ffi::AnyBuffer a_offsets, ffi::AnyBuffer a_indices, ffi::AnyBuffer b_offsets,
                       ffi::AnyBuffer b_indices, int64_t columns) {
  std::string error = BadRows("A", a_offsets, a_indices);
  if (error.empty()) error = BadRows("B", b_offsets, b_indices);
  if (error.empty() && (columns < 0 || columns > INT32_MAX)) {
    error = "columns: expected 0 to 2147483647, got " + std::to_string(columns);
  }
  return error;
}

struct PatternCall {
  Factors factors;
  RowTasks tasks;
  SpgemmPatternArgs args;
  std::vector<int32_t> counts;
  ValidOffsets given;
  TaskScratch scratch;

  PatternCall(ffi::AnyBuffer a_offsets, ffi::AnyBuffer a_indices, ffi::AnyBuffer b_offsets,
              ffi::AnyBuffer b_indices, int64_t columns, int64_t threads)
      : factors(a_offsets, a_indices, b_offsets, b_indices, columns, threads),
        tasks(factors, threads) {
    args = {factors.a.Rows(), factors.b.Rows(), columns,           nullptr,
            nullptr,          nullptr,          tasks.rows.data(), nullptr};
  }

  int64_t Work() const { return tasks.products * kProductWork; }

  bool AcquireScratch(int64_t threads) {
    const int64_t bytes = ColumnSetWords(args.columns) * int64_t(sizeof(uint64_t));
    return scratch.Acquire(std::clamp<int64_t>(tasks.Count(), 1, threads), bytes, bytes);
  }

  void Run(int64_t task) {
    scratch.With([&](char* part) {
      SpgemmPatternArgs own = args;
      own.scratch = reinterpret_cast<uint64_t*>(part);
      Kernels().SpgemmPattern(own, task);
    });
  }
};

constexpr char kNoMemory[] = "spgemm: no memory for its scratch";

ffi::Future OffsetsHandler(ffi::ThreadPool pool, ffi::AnyBuffer a_offsets, ffi::AnyBuffer a_indices,
                           ffi::AnyBuffer b_offsets, ffi::AnyBuffer b_indices,
                           ffi::Result<ffi::AnyBuffer> offsets, int64_t columns) {
  std::string error = BadFactors(a_offsets, a_indices, b_offsets, b_indices, columns);
  if (error.empty()) error = Mismatch("offsets", *offsets, ffi::S32, {a_offsets.dimensions()[0]});
  if (!error.empty()) return Failed("spgemm: " + error);
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const auto call =
      std::make_shared<PatternCall>(a_offsets, a_indices, b_offsets, b_indices, columns, threads);
  const int64_t rows = a_offsets.dimensions()[0] - 1, tasks = call->tasks.Count();
  call->counts.resize(rows);
  call->args.counts = call->counts.data();
  if (!call->AcquireScratch(threads)) return Failed(kNoMemory);
  int32_t* out = Ints(*offsets);
  return ParallelPhases(pool, {tasks, 1}, call->Work(), [call, tasks, rows, out](int64_t task) {
    if (task < tasks) return call->Run(task);
    int64_t total = out[0] = 0;
    for (int64_t r = 0; r < rows; ++r) {
      total = std::min<int64_t>(total + call->counts[r], INT32_MAX);
      out[r + 1] = int32_t(total);
    }
  });
}

ffi::Future IndicesHandler(ffi::ThreadPool pool, ffi::AnyBuffer a_offsets, ffi::AnyBuffer a_indices,
                           ffi::AnyBuffer b_offsets, ffi::AnyBuffer b_indices,
                           ffi::AnyBuffer offsets, ffi::Result<ffi::AnyBuffer> indices,
                           int64_t columns) {
  std::string error = BadFactors(a_offsets, a_indices, b_offsets, b_indices, columns);
  if (error.empty()) error = Mismatch("offsets", offsets, ffi::S32, {a_offsets.dimensions()[0]});
  if (error.empty()) error = Mismatch("indices", *indices, ffi::S32, {kAnySize});
  if (!error.empty()) return Failed("spgemm: " + error);
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const auto call =
      std::make_shared<PatternCall>(a_offsets, a_indices, b_offsets, b_indices, columns, threads);
  const int64_t rows = a_offsets.dimensions()[0] - 1, capacity = indices->dimensions()[0];
  call->given = ValidOffsets(Ints(offsets), rows, capacity);
  call->args.offsets = call->given.data();
  call->args.indices = Ints(*indices);
  const int64_t used = call->args.offsets[rows];
  std::fill(Ints(*indices) + used, Ints(*indices) + capacity, 0);
  if (!call->AcquireScratch(threads)) return Failed(kNoMemory);
  return ParallelPhases(pool, {call->tasks.Count()}, call->Work(),
                        [call](int64_t task) { call->Run(task); });
}

struct ValuesCall {
  Factors factors;
  CheckedRows c;
  RowTasks tasks;
  SpgemmArgs args;
  std::unique_ptr<char[]> a_values, b_values, results;
  void* out;
  int64_t batch;
  TaskScratch scratch;

  ValuesCall(const SpgemmArgs& operands, Factors both, CheckedRows pattern, int64_t batch,
             int64_t threads)
      : factors(std::move(both)),
        c(std::move(pattern)),
        tasks(factors, threads),
        args(operands),
        out(operands.out),
        batch(batch) {
    args.a = factors.a.Rows(), args.b = factors.b.Rows(), args.c = c.Rows();
    args.task_rows = tasks.rows.data();
    args.row_tasks = tasks.Count();
    const size_t bytes = DtypeBytes(args.dtype);
    Take(factors.a, args.a_stride, bytes, args.a_values, a_values);
    Take(factors.b, args.b_stride, bytes, args.b_values, b_values);
    if (const CompactStructure* compact = c.compact()) {
      results.reset(new char[batch * compact->nnz * bytes]);
      args.out = results.get();
    }
  }

  // The values of a compact structure, in place of those that the call was given.
  void Take(const CheckedRows& structure, int64_t stride, size_t bytes, const void*& values,
            std::unique_ptr<char[]>& own) const {
    if (!structure.compact()) return;
    own = TakeEntries(values, stride == 0 ? 1 : batch, bytes, *structure.compact());
    values = own.get();
  }

  bool AcquireScratch(int64_t threads) {
    int64_t longest = 0;
    for (int64_t r = 0; r < c.view().rows; ++r) {
      longest = std::max<int64_t>(longest, args.c.offsets[r + 1] - args.c.offsets[r]);
    }
    const auto bytes = int64_t(AccumulatorBytes(args.dtype));
    const int64_t parts = std::clamp<int64_t>(batch * tasks.Count(), 1, threads);
    args.slots = SpgemmSlots(args.columns, longest);
    args.longest = longest;
    const SpgemmScratch own(args.columns, args.slots, longest, bytes);
    return scratch.Acquire(parts, own.bytes, own.filled, own.fill);
  }

  void Run(int64_t task) {
    scratch.With([&](char* part) {
      SpgemmArgs own = args;
      own.scratch = part;
      Kernels().Spgemm(own, task);
    });
  }

  // Padding, and entries of the pattern that take no part, are zero.
  void Finish() const {
    const size_t bytes = DtypeBytes(args.dtype);
    if (const CompactStructure* compact = c.compact()) {
      return PutEntries(results.get(), batch, bytes, *compact, out);
    }
    const int64_t used = args.c.offsets[c.view().rows];
    for (int64_t b = 0; b < batch; ++b) {
      char* row = static_cast<char*>(out) + b * args.out_stride * bytes;
      std::memset(row + used * bytes, 0, (args.out_stride - used) * bytes);
    }
  }
};

ffi::Future ValuesHandler(Pool pool, IndexArray a_offsets, IndexArray a_indices,
                          IndexArray b_offsets, IndexArray b_indices, IndexArray c_offsets,
                          IndexArray c_indices, ffi::AnyBuffer a_values, ffi::AnyBuffer b_values,
                          ffi::Result<ffi::AnyBuffer> out, int64_t columns, bool complete) {
  const ffi::DataType type = a_values.element_type();
  if (!ToDtype(type)) return Failed("spgemm: expected float32, float64, bfloat16 or float16");
  std::string error = BadFactors(a_offsets, a_indices, b_offsets, b_indices, columns);
  if (error.empty()) error = BadRows("C", c_offsets, c_indices);
  if (error.empty())
    error = Mismatch("C: offsets", c_offsets, ffi::S32, {a_offsets.dimensions()[0]});
  const auto values = [&](const char* name, ffi::AnyBuffer given, IndexArray indices) {
    if (error.empty()) error = Mismatch(name, given, type, {kAnySize, indices.dimensions()[0]});
  };
  values("a_values", a_values, a_indices);
  values("b_values", b_values, b_indices);
  values("values", *out, c_indices);
  if (!error.empty()) return Failed("spgemm: " + error);
  const int64_t batch = out->dimensions()[0], c_entries = c_indices.dimensions()[0];
  for (const int64_t own : {a_values.dimensions()[0], b_values.dimensions()[0]}) {
    if (own != 1 && own != batch) {
      return Failed("spgemm: values: expected batches of 1 or that of the result, got " +
                    std::to_string(own) + " for " + std::to_string(batch));
    }
  }
  if (batch == 0 || c_entries == 0) return Finished();

  SpgemmArgs args = {};
  args.dtype = *ToDtype(type);
  args.columns = columns;
  args.a_values = a_values.untyped_data();
  args.b_values = b_values.untyped_data();
  args.out = out->untyped_data();
  args.a_stride = a_values.dimensions()[0] == 1 ? 0 : a_indices.dimensions()[0];
  args.b_stride = b_values.dimensions()[0] == 1 ? 0 : b_indices.dimensions()[0];
  args.out_stride = c_entries;
  args.complete = complete;
  // Of a call of several structures, all threads may be in the tasks of one.
  const int64_t threads = std::max<int64_t>(pool.threads().num_threads(), 1);
  AdviseHugePages(args.out, out->size_bytes());
  const auto call = std::make_shared<ValuesCall>(
      args, Factors(a_offsets, a_indices, b_offsets, b_indices, columns, threads),
      CheckedRows(Factors::StructureOf(c_offsets, c_indices, nullptr, columns), threads), batch,
      threads);
  if (!call->AcquireScratch(threads)) return Failed(kNoMemory);
  const int64_t tasks = batch * call->tasks.Count(), work = batch * call->tasks.products;
  return ParallelPhases(pool, {tasks, 1}, work * kProductWork, [call, tasks](int64_t task) {
    task < tasks ? call->Run(task) : call->Finish();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpgemmOffsetsFfi, OffsetsHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // A: offsets [rows + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices
                                  .Arg<ffi::AnyBuffer>()  // B: offsets [inner + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices
                                  .Ret<ffi::AnyBuffer>()  // offsets [rows + 1]
                                  .Attr<int64_t>("columns"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpgemmIndicesFfi, IndicesHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // A, B as above
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()  // offsets [rows + 1]
                                  .Ret<ffi::AnyBuffer>()  // indices [capacity]
                                  .Attr<int64_t>("columns"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpgemmFfi, EachStructure<ValuesHandler>::Call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<IndexArray>()  // A, B as above
                                  .Arg<IndexArray>()
                                  .Arg<IndexArray>()
                                  .Arg<IndexArray>()
                                  .Arg<IndexArray>()      // C: offsets [rows + 1]
                                  .Arg<IndexArray>()      // indices
                                  .Arg<ffi::AnyBuffer>()  // values of A [batch or 1, entries]
                                  .Arg<ffi::AnyBuffer>()  // values of B [batch or 1, entries]
                                  .Ret<ffi::AnyBuffer>()  // values of C [batch, entries]
                                  .Attr<int64_t>("columns")
                                  .Attr<bool>("complete"));

}  // namespace sgap
