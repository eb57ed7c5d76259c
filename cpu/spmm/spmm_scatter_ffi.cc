// FFI target sgap_spmm_cvs_scatter_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/product_operands.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/spmm/spmm_scatter.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Numbers of y that one task adds up.
constexpr int64_t kAddedNumbers = 16 << 10;

struct SpmmScatterCall {
  SpmmScatterArgs args;
  Workspace sums;
  ValidStructure structure;
  std::unique_ptr<char[]> values;  // of compacted vectors
};

std::string CheckSpmmScatter(ffi::AnyBuffer values, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                             ffi::AnyBuffer x, ffi::AnyBuffer y) {
  const ffi::DataType type = values.element_type();
  if (!ToDtype(type)) return "values: expected float32, float64, bfloat16 or float16";
  std::string error = Mismatch("values", values, type, {kAnySize, kAnySize, kAnySize});
  if (!error.empty()) return error;
  const int64_t vectors = values.dimensions()[1], length = values.dimensions()[2];
  if (!(error = BadLength(length)).empty()) return error;
  if (!(error = Mismatch("x", x, type, {kAnySize, kAnySize, kAnySize})).empty()) return error;
  if (!(error = Mismatch("indices", indices, ffi::S32, {vectors})).empty()) return error;
  const int64_t blocks = (x.dimensions()[1] + length - 1) / length;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {blocks + 1})).empty()) return error;
  const int64_t value_batch = values.dimensions()[0], x_batch = x.dimensions()[0];
  if (!(error = UnlikeBatches("values and x", value_batch, x_batch)).empty()) return error;
  const int64_t batch = value_batch == 1 ? x_batch : value_batch;
  return Mismatch("y", y, type, {batch, kAnySize, x.dimensions()[2]});
}

ffi::Future SpmmScatterHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                               ffi::AnyBuffer indices, ffi::AnyBuffer x,
                               ffi::Result<ffi::AnyBuffer> y, int64_t tile_columns,
                               int64_t pieces) {
  std::string error = CheckSpmmScatter(values, offsets, indices, x, *y);
  if (tile_columns < 1) {
    error = "tile_columns: expected >= 1, got " + std::to_string(tile_columns);
  }
  if (pieces < 1 || pieces > 1024) {
    error = "pieces: expected 1 to 1024, got " + std::to_string(pieces);
  }
  if (!error.empty()) return Failed("spmm: " + error);

  auto call = std::make_shared<SpmmScatterCall>();
  SpmmScatterArgs& args = call->args;
  SetOperands(values, x, *y, args);
  args.length = values.dimensions()[2];
  args.blocks = offsets.dimensions()[0] - 1;
  args.batch = y->dimensions()[0];
  if (args.batch == 0 || args.m == 0 || args.n == 0) return Finished();
  const int64_t vectors = indices.dimensions()[0];
  call->structure =
      ValidStructure({Ints(offsets), Ints(indices), nullptr, args.blocks, vectors, args.m});
  args.offsets = call->structure.view().offsets;
  args.indices = call->structure.view().indices;
  if (const CompactStructure* compact = call->structure.compact()) {
    const size_t vector = args.length * DtypeBytes(args.dtype);
    call->values = TakeEntries(args.values, values.dimensions()[0], vector, *compact);
    args.values = call->values.get();
  }

  AdviseHugePages(args.y, y->size_bytes());
  args.tile_columns = std::min(tile_columns, args.n);
  args.tiles = (args.n + args.tile_columns - 1) / args.tile_columns;
  args.pieces = pieces;
  const size_t sums = size_t(args.batch) * pieces * args.m * args.n;
  call->sums = AcquireWorkspace(sums * AccumulatorBytes(args.dtype));
  if (!call->sums)
    return Failed("spmm: no memory for the sums of " + std::to_string(pieces) + " pieces");
  args.sums = call->sums.get();
  args.chunk_rows = std::max<int64_t>(1, kAddedNumbers / (args.n * pieces));
  args.chunks = (args.m + args.chunk_rows - 1) / args.chunk_rows;

  const int64_t entries = args.offsets[args.blocks] * args.length;
  const int64_t work = args.batch * args.n * (entries + args.m * pieces);
  return ParallelPhases(
      pool, {args.batch * pieces * args.tiles, args.batch * args.chunks}, work,
      [call, kernel = Kernels().spmm_scatter](int64_t task) { kernel(call->args, task); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpmmCvsScatter, SpmmScatterHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch or 1, vectors, V]
                                  .Arg<ffi::AnyBuffer>()  // offsets [ceil(k / V) + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [vectors]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, k, n]
                                  .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
                                  .Attr<int64_t>("tile_columns")
                                  .Attr<int64_t>("pieces"));

}  // namespace sgap
