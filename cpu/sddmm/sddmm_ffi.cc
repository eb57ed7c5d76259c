// FFI target sgap_sddmm_csr_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"
#include "cpu/sddmm/sddmm.h"
#include "cpu/sddmm/sddmm_factors.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Rows of y in reach that take this many bytes are prefetched: fewer are near anyway, and with more
// it did not pay (measured: 0.9 to 1.05x).
constexpr int64_t kPrefetchFrom = 768 << 10, kPrefetchTo = 12 << 20;
constexpr int64_t kPrefetchBytes = 8 << 10;  // so far ahead

std::string CheckSddmm(ffi::AnyBuffer offsets, ffi::AnyBuffer indices, ffi::AnyBuffer x,
                       ffi::AnyBuffer y, ffi::AnyBuffer weights, ffi::AnyBuffer scale,
                       ffi::AnyBuffer out) {
  const ffi::DataType type = x.element_type();
  if (!ToDtype(type)) return "x: expected float32, float64, bfloat16 or float16";
  std::string error;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {kAnySize})).empty()) return error;
  if (offsets.dimensions()[0] < 1) return "offsets: expected at least one element, got 0";
  const int64_t m = offsets.dimensions()[0] - 1;
  if (!(error = Mismatch("indices", indices, ffi::S32, {kAnySize})).empty()) return error;
  if (!(error = Mismatch("x", x, type, {kAnySize, m, kAnySize})).empty()) return error;
  const int64_t d = x.dimensions()[2];
  if (!(error = Mismatch("y", y, type, {kAnySize, kAnySize, d})).empty()) return error;
  const int64_t batch = out.dimensions().size() > 0 ? out.dimensions()[0] : -1;
  error = Mismatch("values", out, type, {batch, indices.dimensions()[0]});
  return error.empty() ? BadFactors(x, y, weights, scale, out) : error;
}

// Rows of y that neighbouring entries spread over, from a few samples: all for a random matrix, few
// for a banded one.
int64_t RowsInReach(const SddmmArgs& args) {
  constexpr int64_t kSamples = 16, kEntries = 128;
  const int64_t stored = args.offsets[args.m];
  if (stored < kSamples * kEntries) return std::min(args.k, stored);
  int64_t spans = 0;
  for (int64_t i = 0; i < kSamples; ++i) {
    const int32_t* sample = args.indices + (stored - kEntries) / (kSamples - 1) * i;
    const auto [least, greatest] = std::minmax_element(sample, sample + kEntries);
    spans += int64_t(*greatest) - *least + 1;
  }
  return std::min(args.k, spans / kSamples);
}

// How many entries ahead rows of y are prefetched.
int64_t PrefetchEntries(int64_t element, const SddmmArgs& args) {
  const int64_t row = std::max<int64_t>(args.d * element, 1);
  if (args.k * row <= kPrefetchFrom) return 0;
  const int64_t operand = row * RowsInReach(args);
  if (operand <= kPrefetchFrom || operand > kPrefetchTo) return 0;
  return std::clamp<int64_t>(kPrefetchBytes / row, 2, 24);
}

// What a call owns until its last task is done.
struct SddmmCall {
  SddmmArgs args;
  SampledEntries compacted;
  int64_t tasks, work;

  bool Run(const Structure& structure, int64_t task) const {
    const int64_t begin = task % args.chunks * args.chunk_nonzeros, stored = args.offsets[args.m];
    const int64_t end = std::min(begin + args.chunk_nonzeros, stored);
    if (!structure.EntriesHold({std::min(begin, stored), end})) return false;
    Kernels().sddmm(args, task);
    return true;
  }
  void Finish(const CompactStructure& structure) const { compacted.Put(structure); }
};

std::shared_ptr<SddmmCall> Begin(const SddmmArgs& operands, const Structure& structure,
                                 const CompactStructure* compact, int64_t batch) {
  auto call = std::make_shared<SddmmCall>();
  SddmmArgs& args = call->args;
  args = operands;
  args.offsets = structure.offsets;
  args.indices = structure.indices;
  if (compact) call->compacted.Take(*compact, batch, /*length=*/1, &args);
  args.prefetch_entries = PrefetchEntries(DtypeBytes(args.dtype), args);
  call->tasks = batch * args.chunks;
  call->work = batch * args.nnz * std::max<int64_t>(args.d, 1);
  return call;
}

ffi::Future SddmmHandler(ffi::ThreadPool pool, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                         ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::AnyBuffer weights,
                         ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> out,
                         int64_t chunk_nonzeros) {
  std::string error = CheckSddmm(offsets, indices, x, y, weights, scale, *out);
  if (error.empty()) error = BadChunk(chunk_nonzeros);
  if (!error.empty()) return Failed("sddmm: " + error);

  SddmmArgs args;
  SetFactors(x, y, weights, scale, *out, args);
  args.nnz = indices.dimensions()[0];
  args.chunk_nonzeros = chunk_nonzeros;
  args.chunks = (args.nnz + chunk_nonzeros - 1) / chunk_nonzeros;
  const int64_t batch = out->dimensions()[0];
  if (batch == 0 || args.nnz == 0) return Finished();

  const Structure structure{Ints(offsets), Ints(indices), nullptr, args.m, args.nnz, args.k};
  return RunOnStructure(pool, structure,
                        [=](const Structure& valid, const CompactStructure* compact, int64_t) {
                          return Begin(args, valid, compact, batch);
                        });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SddmmCsr, SddmmHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // offsets [m + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [nnz]
                                  .Arg<ffi::AnyBuffer>()  // x [batch or 1, m, d]
                                  .Arg<ffi::AnyBuffer>()  // y [batch or 1, k, d]
                                  .Arg<ffi::AnyBuffer>()  // weights [batch or 1, nnz or 0]
                                  .Arg<ffi::AnyBuffer>()  // scale [batch or 1, 1 or 0]
                                  .Ret<ffi::AnyBuffer>()  // values [batch, nnz]
                                  .Attr<int64_t>("chunk_nonzeros"));

}  // namespace sgap
