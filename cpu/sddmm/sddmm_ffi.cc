// FFI targets sgap_sddmm_csr_v1 and sgap_sddmm_cvs_v1, for which a result of rank 2 has vectors of
// length 1, and sgap_sddmm_octet_v1: one handler.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "cpu/common/each_structure.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/slab_memory.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/sddmm/sddmm.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Rows of y in reach that take this many bytes are prefetched: fewer are near anyway, and with more
// it did not pay (measured: 0.9 to 1.05x). On Zen 5 it does, further ahead: graphs whose y has 12
// to 134 MB took 0.75 to 0.97 of the time in float32, 0.52 to 0.98 in float16 and 0.69 to 0.98 in
// bfloat16; 8 KB ahead 0.56 to 1.0, 32 KB 0.54 to 1.0. With up to 12 MB 8 KB are better there too.
constexpr int64_t kPrefetchFrom = 768 << 10, kPrefetchTo = 12 << 20;
constexpr int64_t kPrefetchBytes = 8 << 10;      // so far ahead
constexpr int64_t kPrefetchBytesFar = 16 << 10;  // on Zen 5, beyond kPrefetchTo

constexpr int64_t kLeastChunk = 4096;  // entries, as chunks where these are few (choose_schedule)

// Whether rows of float16 are widened before they are used, of entries or of vectors of `length`.
// Entries of more than 96 features take as long in float16 as in float32 without (measured on Zen
// 4: of 128 1.01, of 256 0.92, widened first 0.96). On Intel, of weights of 2048 x 1024 at 90%,
// widened first 1.01 and 0.93, else 1.12 and 0.99. On Zen 5 entries and vectors of 2 and 3 rows are
// faster without: a uniform pattern of 10,000 columns took 0.97 with 32 features, widened
// first 1.17, and V = 2 with 128 and 256 0.96 and 0.72, widened first 1.05 and 1.02; V = 4 1.11
// to 1.27 and 1.02 to 1.11, V = 8 0.95 to 1.12 and 0.95 to 1.10.
bool Widens(int64_t length, int64_t features) {
  const Machine& machine = ThisMachine();
  if (machine.zen5()) return length >= 4;
  return length > 1 || features <= (machine.intel ? 256 : 96);
}

// Empty for x and y of 1 batch or all of out's, weights like `out` and a scale of one value per
// batch; of the last two an absent one has no elements.
std::string BadFactors(ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::AnyBuffer weights,
                       ffi::AnyBuffer scale, ffi::AnyBuffer out) {
  const ffi::DataType type = out.element_type();
  const auto results = out.dimensions();
  for (const int64_t own : {x.dimensions()[0], y.dimensions()[0]}) {
    if (own != 1 && own != results[0]) {
      return "x and y: expected batches of 1 or that of the result, got " + std::to_string(own) +
             " for " + std::to_string(results[0]);
    }
  }
  std::string error;
  const auto one_or_all = [&](ffi::AnyBuffer factor) {
    return factor.dimensions().size() > 0 && factor.dimensions()[0] == 1 ? 1 : results[0];
  };
  if (weights.element_count() > 0) {
    const int64_t own = one_or_all(weights);
    error = results.size() == 2 ? Mismatch("weights", weights, type, {own, results[1]})
                                : Mismatch("weights", weights, type, {own, results[1], results[2]});
  }
  if (error.empty() && scale.element_count() > 0) {
    error =
        Mismatch("scale", scale, type == ffi::F64 ? ffi::F64 : ffi::F32, {one_or_all(scale), 1});
  }
  return error;
}

std::string CheckSddmm(ffi::AnyBuffer offsets, ffi::AnyBuffer indices, ffi::AnyBuffer x,
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
  const int64_t entries = indices.dimensions()[0];
  const bool vectors = out.dimensions().size() == 3;
  error = vectors ? Mismatch("values", out, type, {batch, entries, kAnySize})
                  : Mismatch("values", out, type, {batch, entries});
  if (!error.empty()) return error;
  const int64_t length = vectors ? out.dimensions()[2] : 1;
  if (!(error = BadLength(length)).empty()) return error;
  error = Mismatch("offsets", offsets, ffi::S32, {(m + length - 1) / length + 1});
  return error.empty() ? BadFactors(x, y, weights, scale, out) : error;
}

// Of checked operands.
SddmmArgs Operands(ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::AnyBuffer weights, ffi::AnyBuffer scale,
                   ffi::AnyBuffer out) {
  SddmmArgs args;
  args.dtype = *ToDtype(x.element_type());
  args.x = x.untyped_data();
  args.y = y.untyped_data();
  args.out = out.untyped_data();
  args.m = x.dimensions()[1];
  args.k = y.dimensions()[1];
  args.d = x.dimensions()[2];
  args.entries = out.dimensions()[1];
  args.length = out.dimensions().size() == 3 ? out.dimensions()[2] : 1;
  args.x_stride = x.dimensions()[0] == 1 ? 0 : args.m * args.d;
  args.y_stride = y.dimensions()[0] == 1 ? 0 : args.k * args.d;
  const int64_t weighted = weights.element_count(), scaled = scale.element_count();
  args.weights = weighted > 0 ? weights.untyped_data() : nullptr;
  args.scale = scaled > 0 ? scale.untyped_data() : nullptr;
  args.weights_stride =
      weighted > 0 && weights.dimensions()[0] > 1 ? weighted / weights.dimensions()[0] : 0;
  args.scale_stride = scaled > 1 ? 1 : 0;
  args.prefetch_entries = 0;
  args.slabs = {};
  args.block_rows = 0;
  args.cursors = {};
  return args;
}

// Rows of y that neighbouring entries spread over, from a few samples: all for a random matrix, few
// for a banded one.
int64_t RowsInReach(const SddmmArgs& args, int64_t stored) {
  constexpr int64_t kSamples = 16, kEntries = 128;
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
int64_t PrefetchEntries(const SddmmArgs& args, int64_t stored) {
  const int64_t row = std::max<int64_t>(args.d * int64_t(DtypeBytes(args.dtype)), 1);
  if (args.k * row <= kPrefetchFrom) return 0;
  const int64_t operand = row * RowsInReach(args, stored);
  if (operand <= kPrefetchFrom) return 0;
  if (operand <= kPrefetchTo) return std::clamp<int64_t>(kPrefetchBytes / row, 2, 24);
  return ThisMachine().zen5() ? std::clamp<int64_t>(kPrefetchBytesFar / row, 2, 128) : 0;
}

// What a call owns until its last task is done.
struct SddmmCall {
  SddmmArgs args;
  Kernel<SddmmArgs> kernel;
  SlabMemory slabs, cursors;
  int64_t stored, tasks, work;

  // Of a compact structure, whose weights and results lie elsewhere than those of the call.
  std::unique_ptr<char[]> weights, results;
  void* out;
  int64_t batch;

  bool Run(const Structure& structure, int64_t task) const {
    const int64_t begin = task % args.chunks * args.chunk_entries;
    const int64_t end = std::min(begin + args.chunk_entries, stored);
    if (!structure.EntriesHold({std::min(begin, stored), end})) return false;
    kernel(args, task);
    return true;
  }

  // Slabs where they pay: a conversion takes the place of a multiply-add, and each row of y is
  // converted at each of its uses.
  void WidenRows(int64_t threads) {
    if (args.dtype != Dtype::kFloat16 || args.d > INT32_MAX) return;
    if (!Widens(kernel == Kernels().Sddmm ? 1 : args.length, args.d)) return;
    const int64_t values = args.k * args.d, room = args.length * args.d;  // of y, of a block of x
    if (!WideningPays(args.k, values, room, stored)) return;
    args.slabs = slabs.Acquire(threads, tasks, size_t(values + room) * sizeof(float));
  }

  // Blocks come with large chunks, a few for each core, which the schedule has cut from the
  // capacity of the structure: where it stores less, one core would have all entries. So as many
  // chunks of what is stored.
  void CutStored() {
    const int64_t chunk = (args.chunk_entries * stored + args.entries - 1) / args.entries;
    args.chunk_entries = std::max(chunk, std::min(args.chunk_entries, kLeastChunk));
    args.chunks = (args.entries + args.chunk_entries - 1) / args.chunk_entries;
  }

  size_t EntryBytes() const { return args.length * DtypeBytes(args.dtype); }

  void TakeCompacted(const CompactStructure& structure) {
    const int64_t weight_batch = args.weights_stride == 0 ? 1 : batch;
    weights = TakeEntries(args.weights, weight_batch, EntryBytes(), structure);
    results.reset(new char[batch * structure.nnz * EntryBytes()]);
    out = args.out;
    args.weights = weights.get();
    args.out = results.get();
  }

  void Finish(const CompactStructure& structure) const {
    PutEntries(results.get(), batch, EntryBytes(), structure, out);
  }
};

std::shared_ptr<SddmmCall> Begin(const SddmmArgs& operands, Kernel<SddmmArgs> kernel,
                                 const Structure& structure, const CompactStructure* compact,
                                 int64_t batch, int64_t threads) {
  auto call = std::make_shared<SddmmCall>();
  call->kernel = kernel;
  call->batch = batch;
  SddmmArgs& args = call->args;
  args = operands;
  args.offsets = structure.offsets;
  args.indices = structure.indices;
  call->stored = structure.offsets[structure.rows];
  if (compact) call->TakeCompacted(*compact);
  if (kernel == Kernels().Sddmm) args.prefetch_entries = PrefetchEntries(args, call->stored);
  if (args.block_rows > 0) call->CutStored();
  call->tasks = batch * args.chunks;
  call->work = batch * args.entries * args.length * std::max<int64_t>(args.d, 1);
  call->WidenRows(threads);
  // Rows in reach stay near by themselves. Without memory for cursors each task takes its rows one
  // by one, to the same results.
  const bool far = kernel == Kernels().Sddmm && args.block_rows < RowsInReach(args, call->stored);
  if (!far) args.block_rows = 0;
  if (args.block_rows > 0) {
    args.cursors = call->cursors.Acquire(threads, call->tasks, size_t(args.m) * sizeof(int32_t));
  }
  return call;
}

// Empty for the results that kernels of tiles give: bfloat16, in vectors of 4 to 32.
std::string BadOctets(ffi::AnyBuffer out) {
  const int64_t length = out.dimensions().size() == 3 ? out.dimensions()[2] : 1;
  const bool holds = length >= 4 && length <= 32 && (length & (length - 1)) == 0;
  if (out.element_type() == ffi::BF16 && holds) return "";
  return "values: expected vectors of 4, 8, 16 or 32 bfloat16";
}

template <bool kOctets>
ffi::Future SddmmHandler(Pool pool, IndexArray offsets, IndexArray indices, ffi::AnyBuffer x,
                         ffi::AnyBuffer y, ffi::AnyBuffer weights, ffi::AnyBuffer scale,
                         ffi::Result<ffi::AnyBuffer> out, int64_t chunk_nonzeros,
                         std::optional<int64_t> block_rows) {
  std::string error = CheckSddmm(offsets, indices, x, y, weights, scale, *out);
  if (error.empty()) error = BadChunk(chunk_nonzeros);
  if (error.empty() && block_rows && *block_rows < 0) error = "block_rows: expected 0 or more";
  if (error.empty() && kOctets) error = BadOctets(*out);
  if (!error.empty()) return Failed("sddmm: " + error);

  SddmmArgs args = Operands(x, y, weights, scale, *out);
  args.chunk_entries = std::max<int64_t>(1, chunk_nonzeros / args.length);
  args.chunks = (args.entries + args.chunk_entries - 1) / args.chunk_entries;
  args.block_rows = block_rows.value_or(0);
  const bool vectors = out->dimensions().size() == 3;
  const Kernel<SddmmArgs> kernel = kOctets   ? Kernels().SddmmOctet
                                   : vectors ? Kernels().SddmmCvs
                                             : Kernels().Sddmm;
  const int64_t batch = out->dimensions()[0];
  if (batch == 0 || args.entries == 0) return Finished();
  AdviseHugePages(args.out, out->size_bytes());

  const int64_t rows = offsets.dimensions()[0] - 1;
  const Structure structure{Ints(offsets), Ints(indices), nullptr, rows, args.entries, args.k};
  return RunOnStructure(
      pool, structure,
      [=](const Structure& valid, const CompactStructure* compact, int64_t threads) {
        return Begin(args, kernel, valid, compact, batch, threads);
      });
}

auto BindSddmm() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<IndexArray>()      // offsets [ceil(m / V) + 1]
      .Arg<IndexArray>()      // indices [entries]
      .Arg<ffi::AnyBuffer>()  // x [batch or 1, m, d]
      .Arg<ffi::AnyBuffer>()  // y [batch or 1, k, d]
      .Arg<ffi::AnyBuffer>()  // weights [batch or 1, entries] or [..., V], or no elements
      .Arg<ffi::AnyBuffer>()  // scale [batch or 1, 1 or 0]
      .Ret<ffi::AnyBuffer>()  // values [batch, entries] or [..., V]
      .Attr<int64_t>("chunk_nonzeros");
}

}  // namespace

extern "C" XLA_FFI_Error* SddmmFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, EachStructure<SddmmHandler<false>>::Call, BindSddmm>(
      frame, "block_rows");
}

extern "C" XLA_FFI_Error* SddmmOctetFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, EachStructure<SddmmHandler<true>>::Call, BindSddmm>(
      frame, "block_rows");
}

}  // namespace sgap
