// FFI targets sgap_nucleus_csr_v1, the most probable entries of each row of a CSR structure
// (nucleus.h), and where each of them was, and sgap_nucleus_totals_v1, the totals of rows. Index
// arrays may hold anything.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/nucleus/nucleus.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskEntries = 1 << 13, kTaskScores = 1 << 16;
constexpr int64_t kWorkOfEntry = 16, kWorkOfScore = 8;  // an exponential, and sums

struct NucleusCall {
  NucleusArgs args;
  std::vector<int32_t> offsets;  // [batch, rows + 1]
  Workspace marks;
  TaskScratch scratch;

  // False where there is no memory.
  bool Place(const int32_t* given, int64_t threads) {
    const int64_t rows = args.rows, count = rows + 1;
    offsets.resize(size_t(args.batch * count));
    for (int64_t b = 0; b < args.batch; ++b) {
      MakeValid(given + b * count, count, rows * args.k, offsets.data() + b * count);
    }
    args.offsets = offsets.data();
    marks = AcquireWorkspace(
        size_t(std::max<int64_t>(args.batch * rows * NucleusWords(args.k), 1)) * sizeof(uint64_t));
    args.marks = static_cast<uint64_t*>(marks.get());
    const int64_t together =
        std::clamp<int64_t>(args.batch * args.row_tasks, 1, std::max<int64_t>(threads, 1));
    return marks && scratch.Acquire(together, NucleusScratch(args.k), 0);
  }

  void Run(int64_t task) {
    const int64_t tasks = args.batch * args.row_tasks;
    if (task < tasks) {
      return scratch.With([&](char* part) {
        NucleusArgs own = args;
        own.scratch = part;
        Kernels().Nucleus(own, task);
      });
    }
    if (task >= tasks + args.batch) return Kernels().Nucleus(args, task - args.batch);
    int32_t* ends = args.out_offsets + (task - tasks) * (args.rows + 1);
    ends[0] = 0;
    for (int64_t r = 0; r < args.rows; ++r) ends[r + 1] += ends[r];
  }
};

ffi::Future NucleusHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer ranked,
                           ffi::AnyBuffer greatest, ffi::AnyBuffer total, ffi::AnyBuffer p,
                           ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                           ffi::Result<ffi::AnyBuffer> out_offsets,
                           ffi::Result<ffi::AnyBuffer> out_indices,
                           ffi::Result<ffi::AnyBuffer> out_entries, int64_t k, int64_t columns,
                           bool kept) {
  const ffi::DataType type = values.element_type();
  if (!ToDtype(type)) {
    return Failed("nucleus: values: expected float32, float64, bfloat16 or float16");
  }
  const ffi::DataType wide = type == ffi::F64 ? ffi::F64 : ffi::F32;
  std::string error = Mismatch("p", p, wide, {kAnySize, kAnySize});
  if (!error.empty()) return Failed("nucleus: " + error);
  const int64_t batch = p.dimensions()[0], rows = p.dimensions()[1];
  if (k < 0 || k > INT32_MAX || (k > 0 && rows > INT32_MAX / k) || columns < 0) {
    return Failed(
        "nucleus: k and columns: expected 0 or more, and k for all rows below 2^31, got " +
        std::to_string(k) + " and " + std::to_string(columns));
  }
  const int64_t capacity = rows * k;
  if (error.empty()) error = Mismatch("greatest", greatest, wide, {batch, rows});
  if (error.empty()) error = Mismatch("total", total, wide, {batch, rows});
  if (error.empty()) error = Mismatch("values", values, type, {batch, capacity});
  if (error.empty()) error = Mismatch("ranked", ranked, type, {batch, capacity});
  if (error.empty()) error = Mismatch("offsets", offsets, ffi::S32, {batch, rows + 1});
  if (error.empty()) error = Mismatch("indices", indices, ffi::S32, {batch, capacity});
  if (error.empty()) error = Mismatch("new offsets", *out_offsets, ffi::S32, {batch, rows + 1});
  if (error.empty()) error = Mismatch("new indices", *out_indices, ffi::S32, {batch, capacity});
  if (error.empty()) error = Mismatch("entries", *out_entries, ffi::S32, {batch, capacity});
  if (!error.empty()) return Failed("nucleus: " + error);
  if (batch == 0) return Finished();

  const auto call = std::make_shared<NucleusCall>();
  NucleusArgs& args = call->args;
  args = {};
  args.dtype = *ToDtype(type);
  args.values = values.untyped_data();
  args.ranked = kept ? ranked.untyped_data() : nullptr;
  args.greatest = greatest.untyped_data();
  args.total = total.untyped_data();
  args.p = p.untyped_data();
  args.indices = Ints(indices);
  args.out_offsets = Ints(*out_offsets);
  args.out_indices = Ints(*out_indices);
  args.out_entries = Ints(*out_entries);
  args.batch = batch;
  args.rows = rows;
  args.k = k;
  args.columns = columns;
  args.task_rows = std::clamp<int64_t>(kTaskEntries / std::max<int64_t>(k, 1), 1, 1024);
  args.row_tasks = (rows + args.task_rows - 1) / args.task_rows;
  if (!call->Place(Ints(offsets), pool.num_threads())) {
    return Failed("nucleus: no memory for its scratch");
  }
  const int64_t tasks = batch * args.row_tasks;
  return ParallelPhases(pool, {tasks, batch, tasks}, batch * capacity * kWorkOfEntry,
                        [call](int64_t task) { call->Run(task); });
}

ffi::Future NucleusTotalsHandler(ffi::ThreadPool pool, ffi::AnyBuffer scores, ffi::AnyBuffer limits,
                                 ffi::Result<ffi::AnyBuffer> greatest,
                                 ffi::Result<ffi::AnyBuffer> total) {
  const ffi::DataType type = scores.element_type();
  if (!ToDtype(type)) {
    return Failed("nucleus: scores: expected float32, float64, bfloat16 or float16");
  }
  std::string error = Mismatch("scores", scores, type, {kAnySize, kAnySize, kAnySize});
  if (error.empty()) error = Mismatch("limits", limits, ffi::S32, {kAnySize, kAnySize});
  if (!error.empty()) return Failed("nucleus: " + error);
  const auto shape = scores.dimensions();
  const int64_t batch = shape[0], rows = shape[1], columns = shape[2];
  const int64_t limit_batch = limits.dimensions()[0] == 1 ? 1 : batch;
  const ffi::DataType wide = type == ffi::F64 ? ffi::F64 : ffi::F32;
  error = Mismatch("limits", limits, ffi::S32, {limit_batch, rows});
  if (error.empty()) error = Mismatch("greatest", *greatest, wide, {batch, rows});
  if (error.empty()) error = Mismatch("total", *total, wide, {batch, rows});
  if (!error.empty()) return Failed("nucleus: " + error);
  if (batch == 0) return Finished();

  NucleusTotalsArgs args = {};
  args.dtype = *ToDtype(type);
  args.scores = scores.untyped_data();
  args.limits = Ints(limits);
  args.limits_stride = limit_batch == 1 ? 0 : rows;
  args.greatest = greatest->untyped_data();
  args.total = total->untyped_data();
  args.rows = rows;
  args.columns = columns;
  args.task_rows = std::clamp<int64_t>(kTaskScores / std::max<int64_t>(columns, 1), 1, 1024);
  args.row_tasks = (rows + args.task_rows - 1) / args.task_rows;
  return ParallelTasks(pool, batch * args.row_tasks, batch * rows * columns * kWorkOfScore,
                       [args](int64_t task) { Kernels().NucleusTotals(args, task); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(NucleusTotalsFfi, NucleusTotalsHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // scores [batch, rows, columns]
                                  .Arg<ffi::AnyBuffer>()    // limits [batch or 1, rows]
                                  .Ret<ffi::AnyBuffer>()    // greatest [batch, rows]
                                  .Ret<ffi::AnyBuffer>());  // total [batch, rows]

XLA_FFI_DEFINE_HANDLER_SYMBOL(NucleusFfi, NucleusHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch, rows * k]
                                  .Arg<ffi::AnyBuffer>()  // ranked [batch, rows * k]
                                  .Arg<ffi::AnyBuffer>()  // greatest [batch, rows]
                                  .Arg<ffi::AnyBuffer>()  // total [batch, rows]
                                  .Arg<ffi::AnyBuffer>()  // p [batch, rows]
                                  .Arg<ffi::AnyBuffer>()  // offsets [batch, rows + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [batch, rows * k]
                                  .Ret<ffi::AnyBuffer>()  // offsets [batch, rows + 1]
                                  .Ret<ffi::AnyBuffer>()  // indices [batch, rows * k]
                                  .Ret<ffi::AnyBuffer>()  // entries [batch, rows * k]
                                  .Attr<int64_t>("k")
                                  .Attr<int64_t>("columns")
                                  .Attr<bool>("kept"));

}  // namespace sgap
