// FFI targets sgap_attention_cvs_v1 and v2, which has more terms, and those of matrix tiles and of
// blocks: the forward pass.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "cpu/attention/attention_calls.h"
#include "cpu/common/isa.h"
#include "cpu/common/partition.h"
#include "cpu/common/workspace.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;
using namespace attention;

// What a call owns until its last task is done.
struct AttentionCall {
  AttentionArgs args;
  StructureAndBias owned;
  ProductPlan plan;
  Workspace memory;
};

// How many block rows a task takes against all blocks of keys: so many rows that on average 256,
// four passes, see a block, but few enough for tasks on all threads. Results do not depend on it.
int64_t BlockRowsOfTask(const AttentionProblem& problem, int64_t block_rows, int64_t threads) {
  constexpr int64_t kFewestRows = 256, kMostRows = 4096, kSeeing = 256, kTasksOfThread = 4;
  const int64_t stored = problem.offsets[block_rows];
  const int64_t of_row = std::max<int64_t>(stored / std::max<int64_t>(block_rows, 1), 1);
  const int64_t full = kSeeing * problem.blocks.count / of_row;
  const int64_t all =
      block_rows * problem.length * std::max<int64_t>(problem.batch * problem.heads, 1);
  const int64_t busy = all / std::max<int64_t>(kTasksOfThread * threads, 1);
  const int64_t rows = std::clamp(std::min(full, busy), kFewestRows, kMostRows);
  return std::max<int64_t>(rows / problem.length, 1);
}

template <bool kOctets>
ffi::Future RunAttention(const Pool& pool, const Window& window, ffi::AnyBuffer q, ffi::AnyBuffer k,
                         ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer sinks,
                         ffi::AnyBuffer lengths, IndexArray offsets, IndexArray indices,
                         ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                         int64_t vector_length, double scale, bool is_causal,
                         int64_t chunk_nonzeros, int64_t key_pieces, bool pack, const Terms& terms,
                         int64_t block_width) {
  const Operands in{q,       k,           v,      bias, lengths, offsets, indices, vector_length,
                    kOctets, block_width, window, terms};
  std::string error =
      Mismatch("out", *out, q.element_type(), {kAnySize, kAnySize, kAnySize, kAnySize});
  const int64_t batch = error.empty() ? out->dimensions()[0] : 0;
  if (error.empty()) error = Check(in, batch);
  if (error.empty()) error = BadChunk(chunk_nonzeros);
  if (error.empty() && (key_pieces < 1 || key_pieces > INT32_MAX)) {
    error = "key_pieces: expected at least 1";
  }
  if (!error.empty()) return Failed("attention: " + error);
  auto call = std::make_shared<AttentionCall>();
  AttentionArgs& args = call->args;
  args = {};
  static_cast<AttentionProblem&>(args) = Describe(in, scale, is_causal, &call->owned);
  const ffi::DataType wide = WideType(q.element_type());
  error =
      Mismatch("out", *out, q.element_type(), {batch, args.rows, args.row_heads, args.value_depth});
  if (error.empty()) error = Mismatch("lse", *lse, wide, {batch, args.rows, args.row_heads});
  if (error.empty() && !Absent(sinks)) {
    error = Mismatch("sinks", sinks, wide, {kAnySize, args.row_heads});
    if (error.empty()) error = BadBatch("sinks", sinks, batch);
  }
  if (error.empty() && !pack) error = CannotRead(args, kOctets);
  if (error.empty() && kOctets) error = BadOctets(args);
  if (!error.empty()) return Failed("attention: " + error);
  if (batch == 0 || args.rows == 0) return Finished();
  if (!Absent(sinks)) {
    args.sinks = in.From(sinks, in.FirstHead(), 1);
    args.sinks_stride = BatchStride(sinks);
  }
  args.out = in.From(*out, in.FirstHead(), args.value_depth);
  args.lse = in.From(*lse, in.FirstHead(), 1);
  args.key_pieces = key_pieces;
  if (window.IsFirst()) AdviseHugePages(args.out, out->size_bytes());

  const int64_t blocks = offsets.dimensions()[0] - 1, walks = args.batch * args.heads;
  const int64_t q_heads = args.heads / args.key_heads, threads = pool.num_threads();
  const auto wide_bytes = int64_t(AccumulatorBytes(args.dtype));
  int64_t state_bytes = 0;  // of a key head
  if (block_width > 0) {
    args.blocks.range = BlockRowsOfTask(args, blocks, threads);
    args.row_tasks = (blocks + args.blocks.range - 1) / args.blocks.range;
    const int64_t row = args.padded_depth + args.padded_value_depth + 2;
    state_bytes = q_heads * args.rows * row * wide_bytes;
  } else {
    const int64_t chunk = std::max<int64_t>(1, chunk_nonzeros / vector_length);
    const int64_t piece = walks * vector_length * (args.padded_value_depth + 2) * wide_bytes;
    static_cast<RowTasks&>(args) =
        call->plan.Cut(args.offsets, blocks, chunk, walks, size_t(piece));
  }
  const int64_t tasks = q_heads * args.row_tasks;  // of a key head
  args.group = args.batch * args.key_heads;
  if (pack) {
    const int64_t bytes = kOctets ? HeadBytes(args) / 2 : HeadBytes(args) + state_bytes;
    // Of blocks the states of rows, which nothing shares, take more memory than what would be
    // shared.
    if (block_width > 0 || !SharesKeys(in, args.batch)) {
      args.group = GroupSize(args, bytes, tasks, threads);
    }
    const int64_t copies = CopiesBytes(in, args);
    call->memory =
        AcquireWorkspace(size_t(std::max<int64_t>(copies + args.group * state_bytes, 64)));
    if (!call->memory) return Failed("attention: no memory for a copy of K and V");
    args.blocks.states = static_cast<char*>(call->memory.get()) + copies;
  }
  PlaceKeys(in, static_cast<char*>(call->memory.get()), &args);
  const auto kernel = block_width > 0 ? Kernels().AttentionBlocks
                      : kOctets       ? Kernels().AttentionOctet
                                      : Kernels().Attention;
  return ParallelPhases(pool, PhasesOfGroups(args, /*phases=*/1, tasks), MultiplyAdds(args),
                        [call, kernel](int64_t task) { kernel(call->args, task); });
}

template <bool kOctets>
ffi::Future AnyAttention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k,
                         ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer sinks,
                         ffi::AnyBuffer lengths, IndexArray offsets, IndexArray indices,
                         ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                         int64_t vector_length, double scale, bool is_causal,
                         int64_t chunk_nonzeros, bool pack, std::optional<int64_t> key_pieces,
                         const Terms& terms, int64_t block_width = 0) {
  return EachWindow(
      threads, "attention", k, offsets, indices, *out,
      [&](const Pool& pool, const Window& window, IndexArray offsets, IndexArray indices) {
        return RunAttention<kOctets>(pool, window, q, k, v, bias, sinks, lengths, offsets, indices,
                                     out, lse, vector_length, scale, is_causal, chunk_nonzeros,
                                     key_pieces.value_or(1), pack, terms, block_width);
      });
}

template <bool kOctets>
ffi::Future AttentionHandler(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k,
                             ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer sinks,
                             ffi::AnyBuffer lengths, IndexArray offsets, IndexArray indices,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                             int64_t vector_length, double scale, bool is_causal,
                             int64_t chunk_nonzeros, bool pack, std::optional<int64_t> key_pieces) {
  return AnyAttention<kOctets>(threads, q, k, v, bias, sinks, lengths, offsets, indices, out, lse,
                               vector_length, scale, is_causal, chunk_nonzeros, pack, key_pieces,
                               std::nullopt);
}

ffi::Future BlocksHandler(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k,
                          ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer sinks,
                          ffi::AnyBuffer lengths, IndexArray offsets, IndexArray indices,
                          ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                          int64_t vector_length, double scale, bool is_causal,
                          int64_t block_width) {
  if (block_width < 1) return Failed("attention: block_width: expected at least 1");
  return AnyAttention<false>(threads, q, k, v, bias, sinks, lengths, offsets, indices, out, lse,
                             vector_length, scale, is_causal, /*chunk_nonzeros=*/1, /*pack=*/true,
                             std::nullopt, std::nullopt, block_width);
}

ffi::Future TermsHandler(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k,
                         ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer sinks,
                         ffi::AnyBuffer lengths, ffi::AnyBuffer slopes, ffi::AnyBuffer table,
                         ffi::AnyBuffer query_segments, ffi::AnyBuffer key_segments,
                         ffi::AnyBuffer offset, ffi::AnyBuffer seeds, IndexArray offsets,
                         IndexArray indices, ffi::Result<ffi::AnyBuffer> out,
                         ffi::Result<ffi::AnyBuffer> lse, int64_t vector_length, double scale,
                         bool is_causal, int64_t chunk_nonzeros, double softcap, int64_t kept,
                         double keep_scale, bool pack, int64_t key_pieces) {
  const Terms terms = TermOperands{slopes, table,   query_segments, key_segments, offset,
                                   seeds,  softcap, kept,           keep_scale};
  return AnyAttention<false>(threads, q, k, v, bias, sinks, lengths, offsets, indices, out, lse,
                             vector_length, scale, is_causal, chunk_nonzeros, pack, key_pieces,
                             terms);
}

// The operands, results and attributes that all targets have.
template <bool kTerms>
auto BindOperands() {
  auto arrays = ffi::Ffi::Bind()
                    .Ctx<ffi::ThreadPool>()
                    .Arg<ffi::AnyBuffer>()   // q [batch or 1, L, H, D]
                    .Arg<ffi::AnyBuffer>()   // k [batch or 1, S, Hk, D]
                    .Arg<ffi::AnyBuffer>()   // v [batch or 1, S, Hk, Dv]
                    .Arg<ffi::AnyBuffer>()   // bias [batch or 1, H or 1, ...]
                    .Arg<ffi::AnyBuffer>()   // sinks [batch or 1, H]
                    .Arg<ffi::AnyBuffer>();  // lengths [batch or 1, 1]
  return WithTermArrays<kTerms>(std::move(arrays))
      .template Arg<IndexArray>()      // offsets [ceil(L / V) + 1]
      .template Arg<IndexArray>()      // indices [vectors]
      .template Ret<ffi::AnyBuffer>()  // out [batch, L, H, Dv]
      .template Ret<ffi::AnyBuffer>()  // lse [batch, L, H]
      .template Attr<int64_t>("vector_length")
      .template Attr<double>("scale")
      .template Attr<bool>("is_causal");
}

template <bool kTerms>
auto BindAttention() {
  auto all = BindOperands<kTerms>().template Attr<int64_t>("chunk_nonzeros");
  return WithTermNumbers<kTerms>(std::move(all)).template Attr<bool>("pack");
}

}  // namespace

extern "C" XLA_FFI_Error* AttentionFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, AttentionHandler<false>, BindAttention<false>>(frame,
                                                                                  "key_pieces");
}

extern "C" XLA_FFI_Error* AttentionOctetFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, AttentionHandler<true>, BindAttention<false>>(frame,
                                                                                 "key_pieces");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBlocksFfi, BlocksHandler,
                              BindOperands<false>().Attr<int64_t>("block_width"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionTermsFfi, TermsHandler,
                              BindAttention<true>().Attr<int64_t>("key_pieces"));

}  // namespace sgap
