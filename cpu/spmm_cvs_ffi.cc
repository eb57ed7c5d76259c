// FFI target sgap_spmm_cvs_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "ffi_arguments.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "product_operands.h"
#include "row_plan.h"
#include "spmm_cvs.h"
#include "workspace.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Multiply-adds that take as long as one vector of a single column.
constexpr int64_t kVectorWork = 16;

// What a call owns until its last task is done.
struct SpmmCvsCall {
  SpmmCvsArgs args;
  ProductPlan plan;
  TilePlan tiles;
};

std::string CheckSpmmCvs(ffi::AnyBuffer values, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                         ffi::AnyBuffer permutation, ffi::AnyBuffer x, ffi::AnyBuffer y,
                         bool transpose) {
  const ffi::DataType type = values.element_type();
  if (!ToDtype(type)) return "values: expected float32, float64, bfloat16 or float16";
  std::string error = Mismatch("values", values, type, {kAnySize, kAnySize, kAnySize});
  if (!error.empty()) return error;
  const int64_t vectors = values.dimensions()[1], length = values.dimensions()[2];
  if (!(error = BadLength(length)).empty()) return error;
  if (!(error = Mismatch("x", x, type, {kAnySize, kAnySize, kAnySize})).empty()) return error;
  if (!(error = Mismatch("indices", indices, ffi::S32, {vectors})).empty()) return error;
  error = Mismatch("permutation", permutation, ffi::S32, {transpose ? vectors : 0});
  if (!error.empty()) return error;
  const int64_t value_batch = values.dimensions()[0], x_batch = x.dimensions()[0];
  if (!(error = UnlikeBatches("values and x", value_batch, x_batch)).empty()) return error;
  const int64_t batch = value_batch == 1 ? x_batch : value_batch;
  if (!(error = Mismatch("y", y, type, {batch, kAnySize, x.dimensions()[2]})).empty()) return error;
  const int64_t m = y.dimensions()[1], rows = transpose ? m : (m + length - 1) / length;
  return Mismatch("offsets", offsets, ffi::S32, {rows + 1});
}

ffi::Future SpmmCvsHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                           ffi::AnyBuffer indices, ffi::AnyBuffer permutation, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> y, bool transpose, int64_t tile_columns,
                           int64_t chunk_nonzeros, bool pack) {
  std::string error = CheckSpmmCvs(values, offsets, indices, permutation, x, *y, transpose);
  if (error.empty()) error = BadChunk(chunk_nonzeros);
  if (tile_columns < 0) {
    error = "tile_columns: expected >= 0, got " + std::to_string(tile_columns);
  }
  if (!error.empty()) return Failed("spmm: " + error);

  auto call = std::make_shared<SpmmCvsCall>();
  SpmmCvsArgs& args = call->args;
  SetOperands(values, offsets, indices, x, *y, args);
  args.permutation = Ints(permutation);
  args.transpose = transpose;
  args.vectors = values.dimensions()[1];
  args.length = values.dimensions()[2];
  const int64_t batch = args.batch = y->dimensions()[0], rows = offsets.dimensions()[0] - 1;
  if (batch == 0 || args.m == 0 || args.n == 0) return Finished();

  AdviseHugePages(args.y, y->size_bytes());
  call->tiles.Cut(tile_columns, &args);
  const int64_t chunk = std::max<int64_t>(1, chunk_nonzeros / args.length);
  args.piece_rows = transpose ? 1 : args.length;
  const size_t piece = size_t(batch) * args.piece_rows * args.n * AccumulatorBytes(args.dtype);
  static_cast<RowTasks&>(args) = call->plan.Cut(args.offsets, rows, chunk, args.Walks(), piece);

  const int64_t entries = args.offsets[rows] + rows;
  const int64_t work = batch * entries * std::max<int64_t>(args.length * args.n, kVectorWork);
  if (pack) call->tiles.AddSlabs(ffi::ByteWidth(x.element_type()), pool.num_threads(), &args);
  return ParallelTasks(pool, args.Tasks(), work, [call, kernel = Kernels().spmm_cvs](int64_t task) {
    kernel(call->args, task);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpmmCvs, SpmmCvsHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch or 1, vectors, V]
                                  .Arg<ffi::AnyBuffer>()  // offsets [ceil(m / V) + 1] or [m + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [vectors]
                                  .Arg<ffi::AnyBuffer>()  // permutation [0] or [vectors]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, k, n]
                                  .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
                                  .Attr<bool>("transpose")
                                  .Attr<int64_t>("tile_columns")
                                  .Attr<int64_t>("chunk_nonzeros")
                                  .Attr<bool>("pack"));

}  // namespace sgap
