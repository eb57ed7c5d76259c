// FFI target sgap_spmm_cvs_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/product_operands.h"
#include "cpu/common/row_plan.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/spmm/spmm_cvs.h"

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
  std::unique_ptr<char[]> values;  // of compacted vectors
  int64_t tasks, work;

  bool Run(const Structure& structure, int64_t task) const {
    if (!structure.EntriesHold(args.EntriesOf(task))) return false;
    Kernels().spmm_cvs(args, task);
    return true;
  }
  void Finish(const CompactStructure&) const {}
};

std::shared_ptr<SpmmCvsCall> Begin(const SpmmCvsArgs& operands, const Structure& structure,
                                   const CompactStructure* compact, int64_t tile_columns,
                                   int64_t chunk_nonzeros, bool pack, int64_t threads) {
  auto call = std::make_shared<SpmmCvsCall>();
  SpmmCvsArgs& args = call->args;
  args = operands;
  args.offsets = structure.offsets;
  args.indices = structure.indices;
  args.permutation = structure.permutation;
  if (compact && !args.transpose) {  // without a permutation the vectors have to move
    const size_t vector = args.length * DtypeBytes(args.dtype);
    const int64_t batch = args.values_stride == 0 ? 1 : args.batch;
    call->values = TakeEntries(args.values, batch, vector, *compact);
    args.values = call->values.get();
  }
  call->tiles.Cut(tile_columns, &args);
  const int64_t chunk = std::max<int64_t>(1, chunk_nonzeros / args.length);
  args.piece_rows = args.transpose ? 1 : args.length;
  const size_t piece = size_t(args.batch) * args.piece_rows * args.n * AccumulatorBytes(args.dtype);
  static_cast<RowTasks&>(args) =
      call->plan.Cut(args.offsets, structure.rows, chunk, args.Walks(), piece);
  call->tasks = args.Tasks();
  const int64_t entries = args.offsets[structure.rows] + structure.rows;
  call->work = args.batch * entries * std::max<int64_t>(args.length * args.n, kVectorWork);
  if (pack) call->tiles.AddSlabs(DtypeBytes(args.dtype), threads, &args);
  return call;
}

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

  SpmmCvsArgs args;
  SetOperands(values, x, *y, args);
  args.transpose = transpose;
  args.vectors = values.dimensions()[1];
  args.length = values.dimensions()[2];
  args.batch = y->dimensions()[0];
  if (args.batch == 0 || args.m == 0 || args.n == 0) return Finished();

  AdviseHugePages(args.y, y->size_bytes());
  const int64_t size = transpose ? (args.k + args.length - 1) / args.length : args.k;
  return RunOnStructure(
      pool, OfArrays(offsets, indices, permutation, size),
      [=](const Structure& valid, const CompactStructure* compact, int64_t threads) {
        return Begin(args, valid, compact, tile_columns, chunk_nonzeros, pack, threads);
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
