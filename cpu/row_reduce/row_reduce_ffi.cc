// FFI targets sgap_row_sum_csr_v1, sgap_row_max_csr_v1 and sgap_row_broadcast_csr_v1, and the same
// handlers for column vectors, sgap_*_cvs_v1; sgap_row_sum_one_pass_cvs_v1 and
// sgap_row_max_or_zero_cvs_v1 of these alone.
#include <memory>
#include <optional>
#include <string>

#include "cpu/common/each_structure.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/workspace.h"
#include "cpu/row_reduce/row_ffi.h"
#include "cpu/row_reduce/row_reduce.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

struct RowReduceCall {
  RowReduceArgs args;
  RowPlan plan;
};

// values of `shape`, and rows [batch, m] of one type; of whole vectors rows may be [batch, m/V, V].
std::string CheckRows(const VectorShape& shape, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                      ffi::AnyBuffer rows, int64_t chunk_nonzeros) {
  std::string error = CheckVectors("values", shape, values, offsets, chunk_nonzeros);
  if (!error.empty()) return error;
  const int64_t batch = values.dimensions()[0];
  if (shape.rank == 3 && shape.rows % shape.length == 0 && rows.dimensions().size() == 3) {
    return Mismatch("rows", rows, values.element_type(), {batch, shape.BlockRows(), shape.length});
  }
  return Mismatch("rows", rows, values.element_type(), {batch, shape.rows});
}

ffi::Future Reduce(const char* name, RowOperation operation, const Pool& pool,
                   ffi::AnyBuffer values, ffi::AnyBuffer offsets, ffi::AnyBuffer rows,
                   int64_t chunk_nonzeros, std::optional<int64_t> m) {
  const VectorShape shape = ClaimedShape(values, offsets, m);
  const std::string error = CheckRows(shape, values, offsets, rows, chunk_nonzeros);
  if (!error.empty()) return Failed(std::string(name) + ": " + error);
  const int64_t batch = values.dimensions()[0];
  auto call = std::make_shared<RowReduceCall>();
  RowReduceArgs& args = call->args;
  args.dtype = *ToDtype(values.element_type());
  args.operation = operation;
  args.values = values.untyped_data();
  args.rows = rows.untyped_data();
  args.numbers = shape.Numbers();
  if (batch == 0 || shape.rows == 0) return Finished();
  AdviseHugePages(args.rows, rows.size_bytes());
  args.phases =
      call->plan.Cut(Ints(offsets), shape.rows, shape.length, shape.vectors, batch, chunk_nonzeros);
  return ParallelPhases(
      pool, PhaseTasks(args.phases, /*write=*/false), batch * (args.numbers + 4 * shape.rows),
      [call, kernel = Kernels().RowReduce](int64_t task) { kernel(call->args, task); });
}

ffi::Future RowSumHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                          ffi::Result<ffi::AnyBuffer> rows, int64_t chunk_nonzeros,
                          std::optional<int64_t> m) {
  return Reduce("row_sum", RowOperation::kSum, pool, values, offsets, *rows, chunk_nonzeros, m);
}

ffi::Future RowSumOnePassHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                                 ffi::Result<ffi::AnyBuffer> rows, int64_t chunk_nonzeros,
                                 std::optional<int64_t> m) {
  return Reduce("row_sum", RowOperation::kSumOnePass, pool, values, offsets, *rows, chunk_nonzeros,
                m);
}

ffi::Future RowMaxHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                          ffi::Result<ffi::AnyBuffer> rows, int64_t chunk_nonzeros,
                          std::optional<int64_t> m) {
  return Reduce("row_max", RowOperation::kMax, pool, values, offsets, *rows, chunk_nonzeros, m);
}

ffi::Future RowMaxOrZeroHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                                ffi::Result<ffi::AnyBuffer> rows, int64_t chunk_nonzeros,
                                std::optional<int64_t> m) {
  return Reduce("row_max", RowOperation::kMaxOrZero, pool, values, offsets, *rows, chunk_nonzeros,
                m);
}

ffi::Future RowBroadcastHandler(Pool pool, ffi::AnyBuffer rows, IndexArray offsets,
                                ffi::Result<ffi::AnyBuffer> values, int64_t chunk_nonzeros,
                                std::optional<int64_t> m) {
  const VectorShape shape = ClaimedShape(*values, offsets, m);
  const std::string error = CheckRows(shape, *values, offsets, rows, chunk_nonzeros);
  if (!error.empty()) return Failed("row_broadcast: " + error);
  RowBroadcastArgs args;
  args.dtype = *ToDtype(rows.element_type());
  const auto valid =
      std::make_shared<ValidOffsets>(Ints(offsets), shape.BlockRows(), shape.vectors);
  args.offsets = valid->data();
  args.rows = rows.untyped_data();
  args.values = values->untyped_data();
  AdviseHugePages(args.values, values->size_bytes());
  args.m = shape.rows;
  args.length = shape.length;
  args.block_rows = shape.BlockRows();
  args.vectors = shape.vectors;
  args.chunk_vectors = ChunkOfVectors(chunk_nonzeros, shape.length);
  args.chunks = (shape.vectors + args.chunk_vectors - 1) / args.chunk_vectors;
  const int64_t batch = rows.dimensions()[0];
  return ParallelTasks(
      pool, batch * args.chunks, batch * shape.Numbers(),
      [args, valid, kernel = Kernels().RowBroadcast](int64_t task) { kernel(args, task); });
}

// One operand, offsets and one result.
auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // values [batch, nnz] or [batch, vectors, V], or rows
      .Arg<IndexArray>()      // offsets [ceil(m / V) + 1]
      .Ret<ffi::AnyBuffer>()  // rows, or values
      .Attr<int64_t>("chunk_nonzeros");
}

}  // namespace

extern "C" XLA_FFI_Error* RowSumFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, EachStructure<RowSumHandler>::Call, Bind>(frame, "rows");
}

extern "C" XLA_FFI_Error* RowSumOnePassFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, EachStructure<RowSumOnePassHandler>::Call, Bind>(frame, "rows");
}

extern "C" XLA_FFI_Error* RowMaxFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, EachStructure<RowMaxHandler>::Call, Bind>(frame, "rows");
}

extern "C" XLA_FFI_Error* RowMaxOrZeroFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, EachStructure<RowMaxOrZeroHandler>::Call, Bind>(frame, "rows");
}

extern "C" XLA_FFI_Error* RowBroadcastFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, EachStructure<RowBroadcastHandler>::Call, Bind>(frame, "rows");
}

}  // namespace sgap
