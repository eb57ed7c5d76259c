// FFI target sgap_gsddmm_csr_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "cpu/common/each_structure.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/gsddmm/gsddmm.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

std::string CheckGsddmm(ffi::AnyBuffer offsets, ffi::AnyBuffer indices, ffi::AnyBuffer x,
                        ffi::AnyBuffer y, ffi::AnyBuffer out, int64_t chunk_nonzeros) {
  const ffi::DataType type = x.element_type();
  if (!ToDtype(type)) return "x: expected float32, float64, bfloat16 or float16";
  std::string error = BadChunk(chunk_nonzeros);
  if (!error.empty()) return error;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {kAnySize})).empty()) return error;
  if (offsets.dimensions()[0] < 1) return "offsets: expected at least one element, got 0";
  if (!(error = Mismatch("indices", indices, ffi::S32, {kAnySize})).empty()) return error;
  const int64_t m = offsets.dimensions()[0] - 1;
  if (!(error = Mismatch("x", x, type, {kAnySize, m, kAnySize})).empty()) return error;
  const int64_t n = x.dimensions()[2];
  if (!(error = Mismatch("y", y, type, {kAnySize, kAnySize, n})).empty()) return error;
  const int64_t batch = out.dimensions().size() == 3 ? out.dimensions()[0] : -1;
  for (const int64_t own : {x.dimensions()[0], y.dimensions()[0]}) {
    if (own != 1 && own != batch) return "x and y: expected batches of 1 or that of the result";
  }
  return Mismatch("result", out, type, {batch, indices.dimensions()[0], n});
}

ffi::Future GsddmmHandler(Pool pool, IndexArray offsets, IndexArray indices, ffi::AnyBuffer x,
                          ffi::AnyBuffer y, ffi::Result<ffi::AnyBuffer> out, bool add,
                          int64_t chunk_nonzeros) {
  const std::string error = CheckGsddmm(offsets, indices, x, y, *out, chunk_nonzeros);
  if (!error.empty()) return Failed("gsddmm: " + error);
  GsddmmArgs args = {};
  args.dtype = *ToDtype(x.element_type());
  args.add = add;
  args.indices = Ints(indices);
  args.x = x.untyped_data();
  args.y = y.untyped_data();
  args.out = out->untyped_data();
  args.m = x.dimensions()[1];
  args.k = y.dimensions()[1];
  args.n = x.dimensions()[2];
  args.nnz = indices.dimensions()[0];
  args.x_stride = x.dimensions()[0] == 1 ? 0 : args.m * args.n;
  args.y_stride = y.dimensions()[0] == 1 ? 0 : args.k * args.n;
  const int64_t batch = out->dimensions()[0];
  if (batch == 0 || args.nnz == 0 || args.n == 0) return Finished();
  AdviseHugePages(args.out, out->size_bytes());
  // A task takes chunk_nonzeros elements of the result.
  args.chunk_size = std::max<int64_t>(1, chunk_nonzeros / args.n);
  args.chunks = (args.nnz + args.chunk_size - 1) / args.chunk_size;
  const auto valid = std::make_shared<ValidOffsets>(Ints(offsets), args.m, args.nnz);
  args.offsets = valid->data();
  int32_t first;
  MakeValid(Ints(offsets), 1, args.nnz, &first);
  args.first = first;
  return ParallelTasks(
      pool, batch * args.chunks, batch * args.nnz * args.n,
      [args, valid, kernel = Kernels().Gsddmm](int64_t task) { kernel(args, task); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GsddmmFfi, EachStructure<GsddmmHandler>::Call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<IndexArray>()      // offsets [m + 1]
                                  .Arg<IndexArray>()      // indices [nnz]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, m, n]
                                  .Arg<ffi::AnyBuffer>()  // y [batch or 1, k, n]
                                  .Ret<ffi::AnyBuffer>()  // [batch, nnz, n]
                                  .Attr<bool>("add")
                                  .Attr<int64_t>("chunk_nonzeros"));

}  // namespace sgap
