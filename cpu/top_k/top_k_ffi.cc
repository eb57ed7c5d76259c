// FFI target sgap_top_k_csr_v1: the k greatest scores of each row, as a CSR structure of capacity
// k for each row, and the scores as its values.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/workspace.h"
#include "cpu/top_k/top_k.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskScores = 1 << 16;

// Rows are written where they begin if each has all that its limit allows. Where one has fewer,
// for scores of -infinity, the rows behind it move up in a second phase.
struct TopKCall {
  TopKArgs args;
  size_t value_bytes;
  int64_t batch;
  int32_t* out_offsets;  // [batch, rows + 1]
  std::vector<int32_t> offsets, counts;
  Workspace memory;
  std::mutex mutex;
  std::vector<char*> scratch;  // what no task uses

  void Select(int64_t task) {
    TopKArgs own = args;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      own.scratch = scratch.back();
      scratch.pop_back();
    }
    Kernels().TopK(own, task);
    const std::lock_guard<std::mutex> lock(mutex);
    scratch.push_back(own.scratch);
  }

  void MoveUp(int64_t b) const {
    const int32_t* begins = offsets.data() + b * (args.rows + 1);
    const int32_t* found = counts.data() + b * args.rows;
    int32_t *ends = out_offsets + b * (args.rows + 1), *indices = args.indices;
    char* values = static_cast<char*>(args.values);
    const int64_t capacity = args.rows * args.k;
    indices += b * capacity;
    values += b * capacity * value_bytes;
    int64_t place = 0;
    ends[0] = 0;
    for (int64_t r = 0; r < args.rows; ++r) {
      if (place != begins[r]) {
        std::memmove(indices + place, indices + begins[r], found[r] * sizeof(int32_t));
        std::memmove(values + place * value_bytes, values + begins[r] * value_bytes,
                     found[r] * value_bytes);
      }
      place += found[r];
      ends[r + 1] = int32_t(place);
    }
    std::memset(indices + place, 0, (capacity - place) * sizeof(int32_t));
    std::memset(values + place * value_bytes, 0, (capacity - place) * value_bytes);
  }
};

ffi::Future TopKHandler(ffi::ThreadPool pool, ffi::AnyBuffer scores, ffi::AnyBuffer limits,
                        ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> offsets,
                        ffi::Result<ffi::AnyBuffer> indices, int64_t k) {
  const ffi::DataType type = scores.element_type();
  if (!ToDtype(type)) {
    return Failed("top_k: scores: expected float32, float64, bfloat16 or float16");
  }
  std::string error = Mismatch("scores", scores, type, {kAnySize, kAnySize, kAnySize});
  if (error.empty()) error = Mismatch("limits", limits, ffi::S32, {kAnySize, kAnySize});
  if (!error.empty()) return Failed("top_k: " + error);
  const auto shape = scores.dimensions();
  const int64_t batch = shape[0], rows = shape[1], columns = shape[2];
  const int64_t limit_batch = limits.dimensions()[0];
  if (limit_batch != batch && limit_batch != 1) {
    error = UnlikeBatches("scores and limits", batch, limit_batch);
    if (error.empty()) error = "limits: more in a batch than scores";
  }
  if (error.empty()) error = Mismatch("limits", limits, ffi::S32, {kAnySize, rows});
  if (error.empty() && columns > INT32_MAX) error = "scores: 2^31 columns or more";
  if (error.empty() && (k < 0 || k > columns || (rows > 0 && k > INT32_MAX / rows))) {
    error = "k: expected 0 to the number of columns, and fewer than 2^31 for all rows, got " +
            std::to_string(k);
  }
  if (error.empty()) error = Mismatch("values", *values, type, {batch, rows * k});
  if (error.empty()) error = Mismatch("offsets", *offsets, ffi::S32, {batch, rows + 1});
  if (error.empty()) error = Mismatch("indices", *indices, ffi::S32, {batch, rows * k});
  if (!error.empty()) return Failed("top_k: " + error);
  if (batch == 0) return Finished();

  const auto call = std::make_shared<TopKCall>();
  TopKArgs& args = call->args;
  args.dtype = *ToDtype(type);
  args.scores = scores.untyped_data();
  args.limits = Ints(limits);
  args.limits_stride = limit_batch == 1 ? 0 : rows;
  args.indices = Ints(*indices);
  args.values = values->untyped_data();
  args.rows = rows;
  args.columns = columns;
  args.k = k;
  args.task_rows = std::clamp<int64_t>(kTaskScores / std::max<int64_t>(columns, 1), 1, 1024);
  args.row_tasks = (rows + args.task_rows - 1) / args.task_rows;
  call->batch = batch;
  call->value_bytes = DtypeBytes(args.dtype);
  call->out_offsets = Ints(*offsets);
  call->counts.resize(size_t(batch) * rows);
  call->offsets.resize(size_t(batch) * (rows + 1));
  for (int64_t b = 0; b < batch; ++b) {
    int32_t* begins = call->offsets.data() + b * (rows + 1);
    const int32_t* own = args.limits + b * args.limits_stride;
    for (int64_t r = 0; r < rows; ++r) {
      begins[r + 1] = begins[r] + int32_t(std::min(k, TopKLimit(own[r], columns)));
    }
  }
  args.offsets = call->offsets.data();
  args.counts = call->counts.data();
  const int64_t tasks = batch * args.row_tasks;
  const auto threads =
      size_t(std::clamp<int64_t>(tasks, 1, std::max<int64_t>(pool.num_threads(), 1)));
  const size_t bytes = (size_t(TopKScratch(columns)) + 63) / 64 * 64;
  call->memory = AcquireWorkspace(threads * bytes);
  if (!call->memory) return Failed("top_k: no memory for its scratch");
  for (size_t i = 0; i < threads; ++i) {
    call->scratch.push_back(static_cast<char*>(call->memory.get()) + i * bytes);
  }
  return ParallelPhases(pool, {tasks, batch}, batch * rows * columns, [call, tasks](int64_t task) {
    if (task < tasks) return call->Select(task);
    call->MoveUp(task - tasks);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TopKFfi, TopKHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // scores [batch, rows, columns]
                                  .Arg<ffi::AnyBuffer>()  // limits [batch or 1, rows]
                                  .Ret<ffi::AnyBuffer>()  // values [batch, rows * k]
                                  .Ret<ffi::AnyBuffer>()  // offsets [batch, rows + 1]
                                  .Ret<ffi::AnyBuffer>()  // indices [batch, rows * k]
                                  .Attr<int64_t>("k"));

}  // namespace sgap
