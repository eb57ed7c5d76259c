// FFI targets sgap_row_sum_csr_v1, sgap_row_max_csr_v1 and sgap_row_broadcast_csr_v1.
#include <memory>
#include <string>

#include "ffi_arguments.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "row_plan.h"
#include "row_reduce.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

struct RowReduceCall {
  RowReduceArgs args;
  RowPlan plan;
};

// values [batch, nnz] and rows [batch, m] of one type.
std::string CheckRows(ffi::AnyBuffer values, ffi::AnyBuffer offsets, ffi::AnyBuffer rows,
                      int64_t chunk_nonzeros) {
  std::string error = BadChunk(chunk_nonzeros);
  if (!error.empty()) return error;
  const ffi::DataType type = values.element_type();
  if (!ToDtype(type)) return "values: expected float32, float64, bfloat16 or float16";
  if (!(error = Mismatch("values", values, type, {kAnySize, kAnySize})).empty()) return error;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {kAnySize})).empty()) return error;
  if (offsets.dimensions()[0] < 1) return "offsets: expected at least one element, got 0";
  return Mismatch("rows", rows, type, {values.dimensions()[0], offsets.dimensions()[0] - 1});
}

ffi::Future Reduce(const char* name, RowOperation operation, ffi::ThreadPool pool,
                   ffi::AnyBuffer values, ffi::AnyBuffer offsets, ffi::AnyBuffer rows,
                   int64_t chunk_nonzeros) {
  const std::string error = CheckRows(values, offsets, rows, chunk_nonzeros);
  if (!error.empty()) return Failed(std::string(name) + ": " + error);
  const int64_t batch = values.dimensions()[0];
  auto call = std::make_shared<RowReduceCall>();
  RowReduceArgs& args = call->args;
  args.dtype = *ToDtype(values.element_type());
  args.operation = operation;
  args.values = values.untyped_data();
  args.rows = rows.untyped_data();
  args.m = rows.dimensions()[1];
  args.nnz = values.dimensions()[1];
  if (batch == 0 || args.m == 0) return Finished();
  args.phases = call->plan.Cut(Ints(offsets), args.m, batch, chunk_nonzeros);
  return ParallelPhases(
      pool, PhaseTasks(args.phases, /*write=*/false), batch * (args.nnz + 4 * args.m),
      [call, kernel = Kernels().row_reduce](int64_t task) { kernel(call->args, task); });
}

ffi::Future RowSumHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                          ffi::Result<ffi::AnyBuffer> rows, int64_t chunk_nonzeros) {
  return Reduce("row_sum", RowOperation::kSum, pool, values, offsets, *rows, chunk_nonzeros);
}

ffi::Future RowMaxHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                          ffi::Result<ffi::AnyBuffer> rows, int64_t chunk_nonzeros) {
  return Reduce("row_max", RowOperation::kMax, pool, values, offsets, *rows, chunk_nonzeros);
}

ffi::Future RowBroadcastHandler(ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::AnyBuffer offsets,
                                ffi::Result<ffi::AnyBuffer> values, int64_t chunk_nonzeros) {
  const std::string error = CheckRows(*values, offsets, rows, chunk_nonzeros);
  if (!error.empty()) return Failed("row_broadcast: " + error);
  RowBroadcastArgs args;
  args.dtype = *ToDtype(rows.element_type());
  args.offsets = Ints(offsets);
  args.rows = rows.untyped_data();
  args.values = values->untyped_data();
  args.m = rows.dimensions()[1];
  args.nnz = values->dimensions()[1];
  args.chunk_nonzeros = chunk_nonzeros;
  args.chunks = (args.nnz + chunk_nonzeros - 1) / chunk_nonzeros;
  const int64_t batch = rows.dimensions()[0];
  return ParallelTasks(
      pool, batch * args.chunks, batch * args.nnz,
      [args, kernel = Kernels().row_broadcast](int64_t task) { kernel(args, task); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RowSumCsr, RowSumHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch, nnz]
                                  .Arg<ffi::AnyBuffer>()  // offsets [m + 1]
                                  .Ret<ffi::AnyBuffer>()  // rows [batch, m]
                                  .Attr<int64_t>("chunk_nonzeros"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RowMaxCsr, RowMaxHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch, nnz]
                                  .Arg<ffi::AnyBuffer>()  // offsets [m + 1]
                                  .Ret<ffi::AnyBuffer>()  // rows [batch, m]
                                  .Attr<int64_t>("chunk_nonzeros"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RowBroadcastCsr, RowBroadcastHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // rows [batch, m]
                                  .Arg<ffi::AnyBuffer>()  // offsets [m + 1]
                                  .Ret<ffi::AnyBuffer>()  // values [batch, nnz]
                                  .Attr<int64_t>("chunk_nonzeros"));

}  // namespace sgap
