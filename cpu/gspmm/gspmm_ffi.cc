// FFI targets sgap_gspmm_csr_v1, sgap_gspmm_vectors_csr_v1 (of values that are vectors) and, for
// the derivatives of the first, the gathers sgap_gspmm_arg_gather_csr_v1,
// sgap_gspmm_arg_gather_to_x_csr_v1 and sgap_gspmm_arg_gather_to_values_csr_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "cpu/common/each_structure.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/partition.h"
#include "cpu/common/slab_memory.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/gspmm/gspmm.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Multiply-adds that take as long as one entry of a single column.
constexpr int64_t kEntryWork = 16;

// What a call owns until its last task is done.
struct GspmmCall {
  GspmmArgs args;
  ProductPlan plan;
  std::unique_ptr<int32_t[]> partial_arg;
  std::unique_ptr<uint8_t[]> finite;
  SlabMemory slabs;
  int64_t tasks, work;

  bool Run(const Structure& structure, int64_t task) const {
    if (!structure.EntriesHold(args.EntriesOf(task))) return false;
    Kernels().Gspmm(args, task);
    return true;
  }
  void Finish(const CompactStructure&) const {}
};

std::string CheckGspmm(ffi::AnyBuffer values, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                       ffi::AnyBuffer permutation, ffi::AnyBuffer x, ffi::AnyBuffer y,
                       int64_t chunk_nonzeros, bool vectors = false) {
  const ffi::DataType type = values.element_type();
  if (!ToDtype(type)) return "values: expected float32, float64, bfloat16 or float16";
  std::string error = BadChunk(chunk_nonzeros);
  if (!error.empty()) return error;
  if (!(error = Mismatch("x", x, type, {kAnySize, kAnySize, kAnySize})).empty()) return error;
  error = vectors ? Mismatch("values", values, type, {kAnySize, kAnySize, x.dimensions()[2]})
                  : Mismatch("values", values, type, {kAnySize, kAnySize});
  if (!error.empty()) return error;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {kAnySize})).empty()) return error;
  if (offsets.dimensions()[0] < 1) return "offsets: expected at least one element, got 0";
  const int64_t nnz = values.dimensions()[1];
  if (!(error = Mismatch("indices", indices, ffi::S32, {nnz})).empty()) return error;
  if (permutation.element_count() > 0 &&
      !(error = Mismatch("permutation", permutation, ffi::S32, {nnz})).empty()) {
    return error;
  }
  const int64_t batch = y.dimensions().size() == 3 ? y.dimensions()[0] : -1;
  for (const int64_t own : {values.dimensions()[0], x.dimensions()[0]}) {
    if (own != 1 && own != batch) {
      return "values and x: expected batches of 1 or that of the result, got " +
             std::to_string(own) + " for " + std::to_string(batch);
    }
  }
  return Mismatch("y", y, type, {batch, offsets.dimensions()[0] - 1, x.dimensions()[2]});
}

// The call, of operands that CheckGspmm has passed.
std::shared_ptr<GspmmCall> Begin(const GspmmArgs& operands, const Structure& structure,
                                 int64_t batch, int64_t chunk_nonzeros, int64_t threads) {
  auto call = std::make_shared<GspmmCall>();
  GspmmArgs& args = call->args;
  args = operands;
  args.offsets = structure.offsets;
  args.indices = structure.indices;
  args.permutation = structure.permutation;
  const size_t position = args.arg ? sizeof(int32_t) : 0;
  const size_t piece = size_t(batch) * args.n * (AccumulatorBytes(args.dtype) + position);
  static_cast<RowTasks&>(args) = call->plan.Cut(args.offsets, args.m, chunk_nonzeros, batch, piece);
  if (args.arg) call->partial_arg.reset(new int32_t[size_t(args.pieces) * batch * args.n]);
  args.partial_arg = call->partial_arg.get();
  call->finite.reset(new uint8_t[batch]());
  args.finite = call->finite.get();
  call->tasks = batch * args.row_tasks;
  const int64_t stored = args.offsets[args.m];
  const bool extremum = args.fold != Fold::kSumProduct && args.fold != Fold::kArgGather;
  if (extremum && args.dtype == Dtype::kFloat16 && !args.vectors && !args.permutation &&
      WideningPays(args.k, args.k * args.n, /*room=*/0, stored)) {
    const size_t slab = size_t(args.k) * args.n * sizeof(float);
    args.slabs = call->slabs.Acquire(threads, call->tasks, slab);
  }
  const int64_t entries = args.offsets[args.m] + args.m;
  call->work = 2 * batch * entries * std::max<int64_t>(args.n, kEntryWork);
  return call;
}

GspmmArgs Operands(Fold fold, ffi::AnyBuffer values, ffi::AnyBuffer x, ffi::AnyBuffer y) {
  GspmmArgs args = {};
  SetOperands(values, x, y, args);
  args.fold = fold;
  args.vectors = values.dimensions().size() == 3;
  args.nnz = values.dimensions()[1];
  AdviseHugePages(args.y, y.size_bytes());
  return args;
}

ffi::Future Run(const Pool& pool, const GspmmArgs& args, const Structure& structure, int64_t batch,
                int64_t chunk_nonzeros) {
  return RunOnStructure(pool, structure,
                        [=](const Structure& valid, const CompactStructure*, int64_t threads) {
                          return Begin(args, valid, batch, chunk_nonzeros, threads);
                        });
}

ffi::Future RunGspmm(const Pool& pool, Fold fold, bool vectors, ffi::AnyBuffer values,
                     ffi::AnyBuffer offsets, ffi::AnyBuffer indices, ffi::AnyBuffer permutation,
                     ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                     ffi::Result<ffi::AnyBuffer> arg, int64_t chunk_nonzeros) {
  std::string error =
      CheckGspmm(values, offsets, indices, permutation, x, *y, chunk_nonzeros, vectors);
  if (!error.empty()) return Failed("gspmm: " + error);
  const int64_t batch = y->dimensions()[0], m = y->dimensions()[1], n = y->dimensions()[2];
  const bool positions = fold != Fold::kSumProduct && (vectors || arg->element_count() > 0);
  if (positions) error = Mismatch("arg", *arg, ffi::S32, {batch, m, n});
  if (!error.empty()) return Failed("gspmm: " + error);
  if (batch == 0 || m == 0 || n == 0) return Finished();
  GspmmArgs args = Operands(fold, values, x, *y);
  if (positions) {
    args.arg = Ints(*arg);
    AdviseHugePages(args.arg, arg->size_bytes());
  }
  return Run(pool, args, StructureOf(offsets, indices, permutation, args.k), batch, chunk_nonzeros);
}

Fold ExtremumOf(bool add, bool minimum) {
  return add ? (minimum ? Fold::kMinSum : Fold::kMaxSum)
             : (minimum ? Fold::kMinProduct : Fold::kMaxProduct);
}

ffi::Future GspmmHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets, IndexArray indices,
                         IndexArray permutation, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                         ffi::Result<ffi::AnyBuffer> arg, bool add, bool minimum,
                         int64_t chunk_nonzeros) {
  return RunGspmm(pool, ExtremumOf(add, minimum), /*vectors=*/false, values, offsets, indices,
                  permutation, x, y, arg, chunk_nonzeros);
}

ffi::Future GspmmVectorsHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                                IndexArray indices, IndexArray permutation, ffi::AnyBuffer x,
                                ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> arg,
                                bool sum, bool add, bool minimum, int64_t chunk_nonzeros) {
  if (sum && (add || minimum)) return Failed("gspmm: expected products where they are summed");
  return RunGspmm(pool, sum ? Fold::kSumProduct : ExtremumOf(add, minimum), /*vectors=*/true,
                  values, offsets, indices, permutation, x, y, arg, chunk_nonzeros);
}

ffi::Future GspmmArgGatherToXHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                                     IndexArray indices, IndexArray permutation, ffi::AnyBuffer d,
                                     ffi::AnyBuffer arg, ffi::Result<ffi::AnyBuffer> y,
                                     int64_t chunk_nonzeros) {
  std::string error = CheckGspmm(values, offsets, indices, permutation, d, *y, chunk_nonzeros);
  if (!error.empty()) return Failed("gspmm_arg_gather_to_x: " + error);
  const auto shape = d.dimensions();
  error = Mismatch("arg", arg, ffi::S32, {kAnySize, shape[1], shape[2]});
  const int64_t batch = y->dimensions()[0], m = y->dimensions()[1];
  if (error.empty() && arg.dimensions()[0] != 1 && arg.dimensions()[0] != batch) {
    error =
        "arg: expected a batch of 1 or that of the result, got " + ShapeString(arg.dimensions());
  }
  if (!error.empty()) return Failed("gspmm_arg_gather_to_x: " + error);
  if (batch == 0 || m == 0 || shape[2] == 0) return Finished();
  GspmmArgs args = Operands(Fold::kArgGather, values, d, *y);
  args.given_arg = Ints(arg);
  args.given_arg_stride = arg.dimensions()[0] == 1 ? 0 : shape[1] * shape[2];
  return Run(pool, args, StructureOf(offsets, indices, permutation, args.k), batch, chunk_nonzeros);
}

std::string BadBatch(const char* name, ffi::AnyBuffer buffer, int64_t batch) {
  const int64_t own = buffer.dimensions()[0];
  if (own == 1 || own == batch) return "";
  return std::string(name) + ": expected a batch of 1 or that of the result, got " +
         ShapeString(buffer.dimensions()) + " for " + std::to_string(batch);
}

// Checks the operands that the gathers of derivatives share and writes them to `args`; returns what
// is wrong. x [batch or 1, sources, n] has a row for each column of the matrix, arg [batch or 1, m,
// n] one for each row; if `transposed`, the other way round.
std::string Common(ffi::AnyBuffer offsets, ffi::AnyBuffer indices, ffi::AnyBuffer x,
                   ffi::AnyBuffer arg, bool transposed, int64_t batch, ArgGatherArgs* args) {
  const ffi::DataType type = x.element_type();
  if (!ToDtype(type)) return "x: expected float32, float64, bfloat16 or float16";
  std::string error;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {kAnySize})).empty()) return error;
  if (offsets.dimensions()[0] < 1) return "offsets: expected at least one element, got 0";
  if (!(error = Mismatch("indices", indices, ffi::S32, {kAnySize})).empty()) return error;
  args->matrix_rows = offsets.dimensions()[0] - 1;
  const int64_t rows = transposed ? kAnySize : args->matrix_rows;
  const int64_t sources = transposed ? args->matrix_rows : kAnySize;
  if (!(error = Mismatch("x", x, type, {kAnySize, sources, kAnySize})).empty()) return error;
  args->n = x.dimensions()[2];
  if (!(error = Mismatch("arg", arg, ffi::S32, {kAnySize, rows, args->n})).empty()) return error;
  if (!(error = BadBatch("x", x, batch)).empty()) return error;
  if (!(error = BadBatch("arg", arg, batch)).empty()) return error;
  args->dtype = *ToDtype(type);
  args->transposed = transposed;
  args->indices = static_cast<const int32_t*>(indices.untyped_data());
  args->x = x.untyped_data();
  args->arg = static_cast<const int32_t*>(arg.untyped_data());
  args->m = arg.dimensions()[1];
  args->sources = x.dimensions()[1];
  args->nnz = indices.dimensions()[0];
  args->x_stride = x.dimensions()[0] == 1 ? 0 : args->sources * args->n;
  args->arg_stride = arg.dimensions()[0] == 1 ? 0 : args->m * args->n;
  return "";
}

ffi::Future RunArgGather(const Pool& pool, ArgGatherArgs args, Kernel<ArgGatherArgs> kernel,
                         const int32_t* offsets, int64_t tasks, int64_t work) {
  const auto valid = std::make_shared<ValidOffsets>(offsets, args.matrix_rows, args.nnz);
  args.offsets = valid->data();
  return ParallelTasks(pool, tasks, work,
                       [args, kernel, valid](int64_t task) { kernel(args, task); });
}

ffi::Future GspmmArgGatherHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                                  IndexArray indices, ffi::AnyBuffer x, ffi::AnyBuffer arg,
                                  ffi::Result<ffi::AnyBuffer> y, bool transposed,
                                  int64_t chunk_nonzeros) {
  ArgGatherArgs args = {};
  const int64_t batch = y->dimensions().size() == 3 ? y->dimensions()[0] : -1;
  std::string error = BadChunk(chunk_nonzeros);
  if (error.empty()) error = Common(offsets, indices, x, arg, transposed, batch, &args);
  const ffi::DataType type = x.element_type();
  if (error.empty()) error = Mismatch("values", values, type, {kAnySize, args.nnz});
  if (error.empty()) error = BadBatch("values", values, batch);
  if (error.empty()) error = Mismatch("y", *y, type, {batch, args.m, args.n});
  if (!error.empty()) return Failed("gspmm_arg_gather: " + error);
  args.values = values.untyped_data();
  args.values_stride = values.dimensions()[0] == 1 ? 0 : args.nnz;
  args.y = y->untyped_data();
  // A task takes chunk_nonzeros values of y.
  args.chunk_size = std::max<int64_t>(1, chunk_nonzeros / std::max<int64_t>(args.n, 1));
  args.chunks = (args.m + args.chunk_size - 1) / args.chunk_size;
  return RunArgGather(pool, args, Kernels().GspmmArgGather, Ints(offsets), batch * args.chunks,
                      batch * args.m * args.n * 4);
}

ffi::Future GspmmArgGatherToValuesHandler(Pool pool, IndexArray offsets, IndexArray indices,
                                          ffi::AnyBuffer x, ffi::AnyBuffer d, ffi::AnyBuffer arg,
                                          ffi::Result<ffi::AnyBuffer> out, bool transposed,
                                          int64_t chunk_nonzeros) {
  ArgGatherArgs args = {};
  const int64_t batch = out->dimensions().size() == 2 ? out->dimensions()[0] : -1;
  std::string error = BadChunk(chunk_nonzeros);
  if (error.empty()) error = Common(offsets, indices, x, arg, transposed, batch, &args);
  const ffi::DataType type = x.element_type();
  if (error.empty()) error = Mismatch("d", d, type, {kAnySize, args.m, args.n});
  if (error.empty()) error = BadBatch("d", d, batch);
  if (error.empty()) error = Mismatch("values", *out, type, {batch, args.nnz});
  if (!error.empty()) return Failed("gspmm_arg_gather_to_values: " + error);
  args.d = d.untyped_data();
  args.d_stride = d.dimensions()[0] == 1 ? 0 : args.m * args.n;
  args.out = out->untyped_data();
  args.chunk_size = chunk_nonzeros;
  args.chunks = (args.nnz + chunk_nonzeros - 1) / chunk_nonzeros;
  return RunArgGather(pool, args, Kernels().GspmmArgGatherToValues, Ints(offsets),
                      batch * args.chunks, 2 * batch * args.nnz * std::max<int64_t>(args.n, 1));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GspmmFfi, EachStructure<GspmmHandler>::Call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch or 1, nnz]
                                  .Arg<IndexArray>()      // offsets [m + 1]
                                  .Arg<IndexArray>()      // indices [nnz]
                                  .Arg<IndexArray>()      // permutation [nnz] or [0]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, k, n]
                                  .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
                                  .Ret<ffi::AnyBuffer>()  // arg [batch, m, n] or [0]
                                  .Attr<bool>("add")
                                  .Attr<bool>("minimum")
                                  .Attr<int64_t>("chunk_nonzeros"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GspmmVectorsFfi, EachStructure<GspmmVectorsHandler>::Call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch or 1, nnz, n]
                                  .Arg<IndexArray>()      // offsets [m + 1]
                                  .Arg<IndexArray>()      // indices [nnz]
                                  .Arg<IndexArray>()      // permutation [nnz] or [0]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, k, n]
                                  .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
                                  .Ret<ffi::AnyBuffer>()  // arg [batch, m, n], of a sum [0]
                                  .Attr<bool>("sum")
                                  .Attr<bool>("add")
                                  .Attr<bool>("minimum")
                                  .Attr<int64_t>("chunk_nonzeros"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GspmmArgGatherToXFfi, EachStructure<GspmmArgGatherToXHandler>::Call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch or 1, nnz]
                                  .Arg<IndexArray>()      // offsets [m + 1]
                                  .Arg<IndexArray>()      // indices [nnz]
                                  .Arg<IndexArray>()      // permutation [nnz] or [0]
                                  .Arg<ffi::AnyBuffer>()  // d [batch or 1, k, n]
                                  .Arg<ffi::AnyBuffer>()  // arg [batch or 1, k, n]
                                  .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
                                  .Attr<int64_t>("chunk_nonzeros"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GspmmArgGatherFfi, EachStructure<GspmmArgGatherHandler>::Call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch or 1, nnz]
                                  .Arg<IndexArray>()      // offsets [rows of the matrix + 1]
                                  .Arg<IndexArray>()      // indices [nnz]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, sources, n]
                                  .Arg<ffi::AnyBuffer>()  // arg [batch or 1, m, n]
                                  .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
                                  .Attr<bool>("transposed")
                                  .Attr<int64_t>("chunk_nonzeros"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GspmmArgGatherToValuesFfi,
                              EachStructure<GspmmArgGatherToValuesHandler>::Call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<IndexArray>()      // offsets [rows of the matrix + 1]
                                  .Arg<IndexArray>()      // indices [nnz]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, sources, n]
                                  .Arg<ffi::AnyBuffer>()  // d [batch or 1, m, n]
                                  .Arg<ffi::AnyBuffer>()  // arg [batch or 1, m, n]
                                  .Ret<ffi::AnyBuffer>()  // values [batch, nnz]
                                  .Attr<bool>("transposed")
                                  .Attr<int64_t>("chunk_nonzeros"));

}  // namespace sgap
