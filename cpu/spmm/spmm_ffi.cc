// FFI target sgap_spmm_csr_v1.
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
#include "cpu/spmm/spmm.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Multiply-adds that take as long as one entry of a single column: 0.5 ns.
constexpr int64_t kEntryWork = 16;

// What a call owns until its last task is done.
struct SpmmCall {
  SpmmArgs args;
  ProductPlan plan;
  TilePlan tiles;
  int64_t tasks, work;

  bool Run(const Structure& structure, int64_t task) const {
    if (!structure.EntriesHold(args.EntriesOf(task))) return false;
    Kernels().spmm(args, task);
    return true;
  }
  void Finish(const CompactStructure&) const {}
};

std::shared_ptr<SpmmCall> Begin(const SpmmArgs& operands, const Structure& structure,
                                int64_t tile_columns, int64_t chunk_nonzeros, bool pack,
                                int64_t threads) {
  auto call = std::make_shared<SpmmCall>();
  SpmmArgs& args = call->args;
  args = operands;
  args.offsets = structure.offsets;
  args.indices = structure.indices;
  args.permutation = structure.permutation;
  call->tiles.Cut(tile_columns, &args);
  const size_t piece = size_t(args.batch) * args.n * AccumulatorBytes(args.dtype);
  static_cast<RowTasks&>(args) =
      call->plan.Cut(args.offsets, args.m, chunk_nonzeros, args.Walks(), piece);
  call->tasks = args.Tasks();
  const int64_t entries = args.offsets[args.m] + args.m;
  // An entry costs a load of its index and a row of x, however few columns that row has.
  call->work = args.batch * entries * std::max<int64_t>(args.n, kEntryWork);
  if (pack) call->tiles.AddSlabs(DtypeBytes(args.dtype), threads, &args);
  return call;
}

std::string CheckSpmm(ffi::AnyBuffer values, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                      ffi::AnyBuffer permutation, ffi::AnyBuffer x, ffi::AnyBuffer y) {
  const ffi::DataType type = values.element_type();
  if (!ToDtype(type)) return "values: expected float32, float64, bfloat16 or float16";
  std::string error;
  if (!(error = Mismatch("values", values, type, {kAnySize, kAnySize})).empty()) return error;
  if (!(error = Mismatch("x", x, type, {kAnySize, kAnySize, kAnySize})).empty()) return error;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {kAnySize})).empty()) return error;
  if (offsets.dimensions()[0] < 1) return "offsets: expected at least one element, got 0";
  const int64_t nnz = values.dimensions()[1];
  if (!(error = Mismatch("indices", indices, ffi::S32, {nnz})).empty()) return error;
  if (permutation.element_count() > 0 &&
      !(error = Mismatch("permutation", permutation, ffi::S32, {nnz})).empty()) {
    return error;
  }
  const int64_t value_batch = values.dimensions()[0], x_batch = x.dimensions()[0];
  if (!(error = UnlikeBatches("values and x", value_batch, x_batch)).empty()) return error;
  const int64_t batch = value_batch == 1 ? x_batch : value_batch;
  return Mismatch("y", y, type, {batch, offsets.dimensions()[0] - 1, x.dimensions()[2]});
}

ffi::Future SpmmHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                        ffi::AnyBuffer indices, ffi::AnyBuffer permutation, ffi::AnyBuffer x,
                        ffi::Result<ffi::AnyBuffer> y, int64_t tile_columns, int64_t chunk_nonzeros,
                        bool pack) {
  std::string error = CheckSpmm(values, offsets, indices, permutation, x, *y);
  if (error.empty()) error = BadChunk(chunk_nonzeros);
  if (tile_columns < 0) {
    error = "tile_columns: expected >= 0, got " + std::to_string(tile_columns);
  }
  if (!error.empty()) return Failed("spmm: " + error);

  SpmmArgs args;
  SetOperands(values, x, *y, args);
  args.nnz = values.dimensions()[1];
  args.batch = y->dimensions()[0];
  if (args.batch == 0 || args.m == 0 || args.n == 0) return Finished();

  AdviseHugePages(args.y, y->size_bytes());
  const Structure structure = OfArrays(offsets, indices, permutation, args.k);
  return RunOnStructure(pool, structure,
                        [=](const Structure& valid, const CompactStructure*, int64_t threads) {
                          return Begin(args, valid, tile_columns, chunk_nonzeros, pack, threads);
                        });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpmmCsr, SpmmHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch or 1, nnz]
                                  .Arg<ffi::AnyBuffer>()  // offsets [m + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [nnz]
                                  .Arg<ffi::AnyBuffer>()  // permutation [nnz] or [0]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, k, n]
                                  .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
                                  .Attr<int64_t>("tile_columns")
                                  .Attr<int64_t>("chunk_nonzeros")
                                  .Attr<bool>("pack"));

}  // namespace sgap
