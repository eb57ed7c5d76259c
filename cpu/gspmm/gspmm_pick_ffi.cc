// FFI targets sgap_gspmm_pick_csr_v1 and sgap_gspmm_pick_to_values_csr_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"
#include "cpu/gspmm/gspmm_pick.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

std::string BadBatch(const char* name, ffi::AnyBuffer buffer, int64_t batch) {
  const int64_t own = buffer.dimensions()[0];
  if (own == 1 || own == batch) return "";
  return std::string(name) + ": expected a batch of 1 or that of the result, got " +
         ShapeString(buffer.dimensions()) + " for " + std::to_string(batch);
}

// Fills in what both calls have, and says what is wrong with it. x and arg have three dimensions
// and one last one; the matrix gives the two middle ones.
std::string Common(ffi::AnyBuffer offsets, ffi::AnyBuffer indices, ffi::AnyBuffer x,
                   ffi::AnyBuffer arg, bool transposed, int64_t batch, PickArgs* args) {
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

ffi::Future Run(ffi::ThreadPool& pool, PickArgs args, Kernel<PickArgs> kernel,
                const int32_t* offsets, int64_t tasks, int64_t work) {
  const auto valid = std::make_shared<ValidOffsets>(offsets, args.matrix_rows, args.nnz);
  args.offsets = valid->data();
  return ParallelTasks(pool, tasks, work,
                       [args, kernel, valid](int64_t task) { kernel(args, task); });
}

ffi::Future GspmmPickHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                             ffi::AnyBuffer indices, ffi::AnyBuffer x, ffi::AnyBuffer arg,
                             ffi::Result<ffi::AnyBuffer> y, bool transposed,
                             int64_t chunk_nonzeros) {
  PickArgs args = {};
  const int64_t batch = y->dimensions().size() == 3 ? y->dimensions()[0] : -1;
  std::string error = BadChunk(chunk_nonzeros);
  if (error.empty()) error = Common(offsets, indices, x, arg, transposed, batch, &args);
  const ffi::DataType type = x.element_type();
  if (error.empty()) error = Mismatch("values", values, type, {kAnySize, args.nnz});
  if (error.empty()) error = BadBatch("values", values, batch);
  if (error.empty()) error = Mismatch("y", *y, type, {batch, args.m, args.n});
  if (!error.empty()) return Failed("gspmm_pick: " + error);
  args.values = values.untyped_data();
  args.values_stride = values.dimensions()[0] == 1 ? 0 : args.nnz;
  args.y = y->untyped_data();
  // A task takes as many numbers as one of a row operation takes nonzeros.
  args.chunk_size = std::max<int64_t>(1, chunk_nonzeros / std::max<int64_t>(args.n, 1));
  args.chunks = (args.m + args.chunk_size - 1) / args.chunk_size;
  return Run(pool, args, Kernels().gspmm_pick, Ints(offsets), batch * args.chunks,
             batch * args.m * args.n * 4);
}

ffi::Future GspmmPickToValuesHandler(ffi::ThreadPool pool, ffi::AnyBuffer offsets,
                                     ffi::AnyBuffer indices, ffi::AnyBuffer x, ffi::AnyBuffer d,
                                     ffi::AnyBuffer arg, ffi::Result<ffi::AnyBuffer> out,
                                     bool transposed, int64_t chunk_nonzeros) {
  PickArgs args = {};
  const int64_t batch = out->dimensions().size() == 2 ? out->dimensions()[0] : -1;
  std::string error = BadChunk(chunk_nonzeros);
  if (error.empty()) error = Common(offsets, indices, x, arg, transposed, batch, &args);
  const ffi::DataType type = x.element_type();
  if (error.empty()) error = Mismatch("d", d, type, {kAnySize, args.m, args.n});
  if (error.empty()) error = BadBatch("d", d, batch);
  if (error.empty()) error = Mismatch("values", *out, type, {batch, args.nnz});
  if (!error.empty()) return Failed("gspmm_pick_to_values: " + error);
  args.d = d.untyped_data();
  args.d_stride = d.dimensions()[0] == 1 ? 0 : args.m * args.n;
  args.out = out->untyped_data();
  args.chunk_size = chunk_nonzeros;
  args.chunks = (args.nnz + chunk_nonzeros - 1) / chunk_nonzeros;
  return Run(pool, args, Kernels().gspmm_pick_to_values, Ints(offsets), batch * args.chunks,
             2 * batch * args.nnz * std::max<int64_t>(args.n, 1));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GspmmPickCsr, GspmmPickHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch or 1, nnz]
                                  .Arg<ffi::AnyBuffer>()  // offsets [rows of the matrix + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [nnz]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, sources, n]
                                  .Arg<ffi::AnyBuffer>()  // arg [batch or 1, m, n]
                                  .Ret<ffi::AnyBuffer>()  // y [batch, m, n]
                                  .Attr<bool>("transposed")
                                  .Attr<int64_t>("chunk_nonzeros"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GspmmPickToValuesCsr, GspmmPickToValuesHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // offsets [rows of the matrix + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [nnz]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, sources, n]
                                  .Arg<ffi::AnyBuffer>()  // d [batch or 1, m, n]
                                  .Arg<ffi::AnyBuffer>()  // arg [batch or 1, m, n]
                                  .Ret<ffi::AnyBuffer>()  // values [batch, nnz]
                                  .Attr<bool>("transposed")
                                  .Attr<int64_t>("chunk_nonzeros"));

}  // namespace sgap
