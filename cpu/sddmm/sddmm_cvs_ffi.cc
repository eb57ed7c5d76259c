// FFI target sgap_sddmm_cvs_v1.
#include <algorithm>
#include <string>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"
#include "cpu/sddmm/sddmm_cvs.h"
#include "cpu/sddmm/sddmm_factors.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

std::string CheckSddmmCvs(ffi::AnyBuffer offsets, ffi::AnyBuffer indices, ffi::AnyBuffer x,
                          ffi::AnyBuffer y, ffi::AnyBuffer weights, ffi::AnyBuffer scale,
                          ffi::AnyBuffer out) {
  const ffi::DataType type = x.element_type();
  if (!ToDtype(type)) return "x: expected float32, float64, bfloat16 or float16";
  std::string error = Mismatch("x", x, type, {kAnySize, kAnySize, kAnySize});
  if (!error.empty()) return error;
  if (!(error = Mismatch("indices", indices, ffi::S32, {kAnySize})).empty()) return error;
  const int64_t m = x.dimensions()[1], d = x.dimensions()[2];
  if (!(error = Mismatch("y", y, type, {kAnySize, kAnySize, d})).empty()) return error;
  const int64_t batch = out.dimensions().size() > 0 ? out.dimensions()[0] : -1;
  const int64_t vectors = indices.dimensions()[0];
  if (!(error = Mismatch("values", out, type, {batch, vectors, kAnySize})).empty()) return error;
  const int64_t length = out.dimensions()[2];
  if (!(error = BadLength(length)).empty()) return error;
  error = Mismatch("offsets", offsets, ffi::S32, {(m + length - 1) / length + 1});
  return error.empty() ? BadFactors(x, y, weights, scale, out) : error;
}

// What a call owns until its last task is done.
struct SddmmCvsCall {
  SddmmCvsArgs args;
  SampledEntries compacted;
  int64_t stored, tasks, work;

  bool Run(const Structure& structure, int64_t task) const {
    const int64_t begin = task % args.chunks * args.chunk_vectors;
    const int64_t end = std::min(begin + args.chunk_vectors, stored);
    if (!structure.EntriesHold({std::min(begin, stored), end})) return false;
    Kernels().sddmm_cvs(args, task);
    return true;
  }
  void Finish(const CompactStructure& structure) const { compacted.Put(structure); }
};

std::shared_ptr<SddmmCvsCall> Begin(const SddmmCvsArgs& operands, const Structure& structure,
                                    const CompactStructure* compact, int64_t batch) {
  auto call = std::make_shared<SddmmCvsCall>();
  SddmmCvsArgs& args = call->args;
  args = operands;
  args.offsets = structure.offsets;
  args.indices = structure.indices;
  if (compact) call->compacted.Take(*compact, batch, args.length, &args);
  call->stored = structure.offsets[structure.rows];
  call->tasks = batch * args.chunks;
  call->work = batch * args.vectors * args.length * std::max<int64_t>(args.d, 1);
  return call;
}

ffi::Future SddmmCvsHandler(ffi::ThreadPool pool, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                            ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::AnyBuffer weights,
                            ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> out,
                            int64_t chunk_nonzeros) {
  std::string error = CheckSddmmCvs(offsets, indices, x, y, weights, scale, *out);
  if (error.empty()) error = BadChunk(chunk_nonzeros);
  if (!error.empty()) return Failed("sddmm: " + error);

  SddmmCvsArgs args;
  SetFactors(x, y, weights, scale, *out, args);
  args.vectors = indices.dimensions()[0];
  args.length = out->dimensions()[2];
  args.chunk_vectors = std::max<int64_t>(1, chunk_nonzeros / args.length);
  args.chunks = (args.vectors + args.chunk_vectors - 1) / args.chunk_vectors;
  const int64_t batch = out->dimensions()[0];
  if (batch == 0 || args.vectors == 0) return Finished();

  const int64_t blocks = offsets.dimensions()[0] - 1;
  const Structure structure{Ints(offsets), Ints(indices), nullptr, blocks, args.vectors, args.k};
  return RunOnStructure(pool, structure,
                        [=](const Structure& valid, const CompactStructure* compact, int64_t) {
                          return Begin(args, valid, compact, batch);
                        });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SddmmCvs, SddmmCvsHandler,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()  // offsets [ceil(m / V) + 1]
        .Arg<ffi::AnyBuffer>()  // indices [vectors]
        .Arg<ffi::AnyBuffer>()  // x [batch or 1, m, d]
        .Arg<ffi::AnyBuffer>()  // y [batch or 1, k, d]
        .Arg<ffi::AnyBuffer>()  // weights [batch or 1, vectors or 0, V or 0]
        .Arg<ffi::AnyBuffer>()  // scale [batch or 1, 1 or 0]
        .Ret<ffi::AnyBuffer>()  // values [batch, vectors, V]
        .Attr<int64_t>("chunk_nonzeros"));

}  // namespace sgap
