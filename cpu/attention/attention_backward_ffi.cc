// FFI targets sgap_attention_backward_cvs_v1 and v2, which has more terms, and those of matrix
// tiles and of blocks.
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "cpu/attention/attention_calls.h"
#include "cpu/common/isa.h"
#include "cpu/common/workspace.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;
using namespace attention;

// The gradients of slopes [batch, heads, 1] and table [batch, heads, range]; [1, 0] where nobody
// asks.
struct TermGradients {
  std::optional<ffi::AnyBuffer> slopes, table;

  bool Asked(const std::optional<ffi::AnyBuffer>& one) const { return one && !Absent(*one); }
  bool Any() const { return Asked(slopes) || Asked(table); }
};

// What a call owns until its last task is done.
struct BackwardCall {
  AttentionBackwardArgs args;
  StructureAndBias owned;
  std::unique_ptr<char[]> dbias;  // of compacted vectors
  std::vector<double> term_sums;
  void *dslopes, *dtable;  // of the window, or null
  std::vector<int64_t> pieces;
  Workspace memory;
};

// Adds up the gradients of slopes and tables of all pieces of rows, in their order.
template <typename Acc>
void EndTerms(const BackwardCall& call) {
  const AttentionBackwardArgs& args = call.args;
  const int64_t range = args.terms.range, row = range + 1;
  for (int64_t head = 0; head < args.batch * args.heads; ++head) {
    const double* sums = args.term_sums + head * args.pieces * row;
    for (int64_t i = 0; i < row; ++i) {
      double sum = 0;
      for (int64_t piece = 0; piece < args.pieces; ++piece) sum += sums[piece * row + i];
      Acc* const slopes = static_cast<Acc*>(call.dslopes);
      Acc* const table = static_cast<Acc*>(call.dtable);
      if (i == 0 && slopes) slopes[head] = Acc(sum);
      if (i > 0 && table) table[head * range + i - 1] = Acc(sum);
    }
  }
}

// Cuts block rows into `pieces` of about equally many vectors: where each begins, and the end.
std::vector<int64_t> CutPieces(const int32_t* offsets, int64_t blocks, int64_t pieces) {
  std::vector<int64_t> begin(pieces + 1, blocks);
  begin[0] = 0;
  for (int64_t i = 1; i < pieces; ++i) {
    const int64_t work = (int64_t(offsets[blocks]) + blocks) * i / pieces;
    int64_t low = begin[i - 1], high = blocks;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      (offsets[middle] + middle < work) ? low = middle + 1 : high = middle;
    }
    begin[i] = low;
  }
  return begin;
}

template <bool kOctets>
ffi::Future RunBackward(const Pool& pool, const Window& window, ffi::AnyBuffer dout,
                        ffi::AnyBuffer dlse, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                        ffi::AnyBuffer bias, ffi::AnyBuffer lengths, ffi::AnyBuffer out,
                        ffi::AnyBuffer lse, IndexArray offsets, IndexArray indices,
                        ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                        ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dbias,
                        int64_t vector_length, double scale, bool is_causal, bool wrt_bias,
                        int64_t pieces, bool pack, const Terms& terms,
                        const TermGradients& of_terms, int64_t block_width = 0) {
  const Operands in{q,       k,           v,      bias, lengths, offsets, indices, vector_length,
                    kOctets, block_width, window, terms};
  const ffi::DataType type = q.element_type(), wide = WideType(type);
  std::string error = Mismatch("dq", *dq, type, {kAnySize, kAnySize, kAnySize, kAnySize});
  const int64_t batch = error.empty() ? dq->dimensions()[0] : 0;
  if (error.empty()) error = Check(in, batch);
  if (error.empty() && (pieces < 1 || pieces > INT32_MAX)) error = "pieces: expected at least 1";
  if (!error.empty()) return Failed("attention_backward: " + error);
  auto call = std::make_shared<BackwardCall>();
  AttentionBackwardArgs& args = call->args;
  args = {};
  static_cast<AttentionProblem&>(args) = Describe(in, scale, is_causal, &call->owned);
  const auto expect = [&](const char* name, ffi::AnyBuffer buffer, ffi::DataType of,
                          std::initializer_list<int64_t> shape) {
    if (error.empty()) error = Mismatch(name, buffer, of, shape);
  };
  expect("dq", *dq, type, {batch, args.rows, args.row_heads, args.depth});
  expect("dk", *dk, type, {batch, args.keys, args.row_key_heads, args.depth});
  expect("dv", *dv, type, {batch, args.keys, args.row_key_heads, args.value_depth});
  expect("dout", dout, type, {kAnySize, args.rows, args.row_heads, args.value_depth});
  expect("out", out, type, {kAnySize, args.rows, args.row_heads, args.value_depth});
  expect("dlse", dlse, wide, {kAnySize, args.rows, args.row_heads});
  expect("lse", lse, wide, {kAnySize, args.rows, args.row_heads});
  if (error.empty()) error = BadBatch("dout", dout, batch);
  if (error.empty()) error = BadBatch("out", out, batch);
  if (error.empty()) error = BadBatch("dlse", dlse, batch);
  if (error.empty()) error = BadBatch("lse", lse, batch);
  const int64_t stored = args.vectors * args.length;
  if (error.empty() && wrt_bias &&
      (dbias->element_type() != wide ||
       int64_t(dbias->element_count()) != batch * args.row_heads * stored)) {
    error = "dbias: expected accumulators [batch, heads, vectors, V], got " +
            ShapeString(dbias->dimensions());
  }
  if (of_terms.Asked(of_terms.slopes)) {
    expect("dslopes", *of_terms.slopes, wide, {batch, args.row_heads, 1});
  }
  if (of_terms.Asked(of_terms.table)) {
    expect("dtable", *of_terms.table, wide, {batch, args.row_heads, args.terms.range});
  }
  if (error.empty() && !pack) error = CannotRead(args, kOctets);
  if (error.empty() && kOctets) error = BadOctets(args);
  if (!error.empty()) return Failed("attention_backward: " + error);
  if (batch == 0) return Finished();
  args.dout_stride = BatchStride(dout);
  args.out_stride = BatchStride(out);
  args.dlse_stride = BatchStride(dlse);
  args.lse_stride = BatchStride(lse);
  args.dout = in.From(dout, in.FirstHead(), args.value_depth);
  args.out = in.From(out, in.FirstHead(), args.value_depth);
  args.dlse = in.From(dlse, in.FirstHead(), 1);
  args.lse = in.From(lse, in.FirstHead(), 1);
  args.dq = in.From(*dq, in.FirstHead(), args.depth);
  args.dk = in.From(*dk, window.first_key_head, args.depth);
  args.dv = in.From(*dv, window.first_key_head, args.value_depth);
  if (window.IsFirst()) {
    for (ffi::AnyBuffer result : {*dq, *dk, *dv}) {
      AdviseHugePages(result.untyped_data(), result.size_bytes());
    }
  }
  const int64_t blocks = offsets.dimensions()[0] - 1;
  const size_t element = AccumulatorBytes(args.dtype);
  void* dbias_rows = nullptr;
  if (wrt_bias) {
    // A window's heads are next to each other: all of some sequences, or some of one.
    args.dbias = dbias_rows = in.From(*dbias, in.FirstHead(), stored);
    if (call->owned.structure.compact()) {
      call->dbias.reset(new char[size_t(args.batch * args.heads * stored) * element]);
      args.dbias = call->dbias.get();
    }
    const size_t used = size_t(blocks > 0 ? args.offsets[blocks] : 0) * args.length;
    for (int64_t i = 0; i < args.batch * args.heads && used < size_t(stored); ++i) {
      char* own = static_cast<char*>(args.dbias) + size_t(i) * stored * element;
      std::fill_n(own + used * element, (stored - used) * element, 0);
    }
  }
  // dk and dv are added up in memory of the group, but where K and V are read in place and are
  // accumulators themselves: there.
  const bool sums = pack || kOctets;
  const int64_t sum_bytes = sums ? HeadBytes(args) : 0;
  const int64_t q_rows = args.heads / args.key_heads * args.rows;  // of a key head
  const bool partial = pieces > 1 && element != ffi::ByteWidth(type) && block_width == 0;
  const int64_t dq_bytes = partial ? q_rows * args.padded_depth * int64_t(element) : 0;
  const int64_t state_row = 2 * args.padded_depth + args.padded_value_depth + 2;
  // In one piece a head of q is done before the next of its key head begins.
  const int64_t state_rows = block_width == 0 ? 0 : pieces == 1 ? args.rows : q_rows;
  const int64_t state_bytes = state_rows * state_row * int64_t(element);
  const int64_t delta_bytes = q_rows * int64_t(element);
  const int64_t bytes = sum_bytes + dq_bytes + state_bytes + delta_bytes + args.keys;
  args.pieces = pieces;
  if (of_terms.Any()) {
    const auto& [slopes, table] = of_terms;
    const int64_t range = args.terms.range;
    call->term_sums.resize(size_t(args.batch * args.heads * pieces * (range + 1)));
    args.term_sums = call->term_sums.data();
    call->dslopes = of_terms.Asked(slopes) ? in.From(*slopes, in.FirstHead(), 1) : nullptr;
    call->dtable = of_terms.Asked(table) ? in.From(*table, in.FirstHead(), range) : nullptr;
  }
  args.group = args.batch * args.key_heads;
  if (sums && (block_width > 0 || !(pack && SharesKeys(in, args.batch)))) {
    // Copies take about as much as sums.
    args.group = GroupSize(args, sum_bytes + bytes, pieces, pool.num_threads());
  }
  const int64_t copies = pack ? CopiesBytes(in, args) : 0;
  call->memory = AcquireWorkspace(size_t(std::max<int64_t>(copies + args.group * bytes, 64)));
  if (!call->memory) return Failed("attention_backward: no memory for sums");
  char* memory = static_cast<char*>(call->memory.get());
  PlaceKeys(in, pack ? memory : nullptr, &args);
  memory += copies;
  args.sums = sums ? memory : nullptr;
  memory += args.group * sum_bytes;
  args.dq_sums = dq_bytes > 0 ? memory : nullptr;
  memory += args.group * dq_bytes;
  args.blocks.states = memory;
  memory += args.group * state_bytes;
  args.deltas = memory;
  args.added = reinterpret_cast<uint8_t*>(memory + args.group * delta_bytes);
  call->pieces = CutPieces(args.offsets, blocks, pieces);
  args.piece_begin = call->pieces.data();
  std::vector<int64_t> phases = PhasesOfGroups(args, /*phases=*/pieces, pieces);
  const int64_t tasks = std::accumulate(phases.begin(), phases.end(), int64_t(0));
  if (call->dbias || args.term_sums) phases.push_back(1);
  const auto kernel = block_width > 0 ? Kernels().AttentionBackwardBlocks
                      : kOctets       ? Kernels().AttentionBackwardOctet
                                      : Kernels().AttentionBackward;
  return ParallelPhases(
      pool, phases, 3 * MultiplyAdds(args), [call, tasks, dbias_rows, kernel](int64_t task) {
        if (task < tasks) return kernel(call->args, task);
        const AttentionBackwardArgs& args = call->args;
        if (args.term_sums) {
          args.dtype == Dtype::kFloat64 ? EndTerms<double>(*call) : EndTerms<float>(*call);
        }
        if (!call->dbias) return;
        PutEntries(call->dbias.get(), args.batch * args.heads,
                   size_t(args.length) * AccumulatorBytes(args.dtype),
                   *call->owned.structure.compact(), dbias_rows);
      });
}

template <bool kOctets>
ffi::Future BackwardHandler(ffi::ThreadPool threads, ffi::AnyBuffer dout, ffi::AnyBuffer dlse,
                            ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::AnyBuffer bias, ffi::AnyBuffer lengths, ffi::AnyBuffer out,
                            ffi::AnyBuffer lse, IndexArray offsets, IndexArray indices,
                            ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                            ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dbias,
                            int64_t vector_length, double scale, bool is_causal, bool wrt_bias,
                            int64_t pieces, bool pack) {
  return EachWindow(
      threads, "attention_backward", k, offsets, indices, *dq,
      [&](const Pool& pool, const Window& window, IndexArray offsets, IndexArray indices) {
        return RunBackward<kOctets>(pool, window, dout, dlse, q, k, v, bias, lengths, out, lse,
                                    offsets, indices, dq, dk, dv, dbias, vector_length, scale,
                                    is_causal, wrt_bias, pieces, pack, std::nullopt, {});
      });
}

ffi::Future BackwardBlocksHandler(ffi::ThreadPool threads, ffi::AnyBuffer dout, ffi::AnyBuffer dlse,
                                  ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                                  ffi::AnyBuffer bias, ffi::AnyBuffer lengths, ffi::AnyBuffer out,
                                  ffi::AnyBuffer lse, IndexArray offsets, IndexArray indices,
                                  ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                                  ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dbias,
                                  int64_t vector_length, double scale, bool is_causal,
                                  bool wrt_bias, int64_t pieces, int64_t block_width) {
  if (block_width < 1 || wrt_bias) {
    return Failed("attention_backward: blocks: expected a width and no gradient of a bias");
  }
  return EachWindow(
      threads, "attention_backward", k, offsets, indices, *dq,
      [&](const Pool& pool, const Window& window, IndexArray offsets, IndexArray indices) {
        return RunBackward<false>(pool, window, dout, dlse, q, k, v, bias, lengths, out, lse,
                                  offsets, indices, dq, dk, dv, dbias, vector_length, scale,
                                  is_causal, wrt_bias, pieces, /*pack=*/true, std::nullopt, {},
                                  block_width);
      });
}

ffi::Future BackwardTermsHandler(
    ffi::ThreadPool threads, ffi::AnyBuffer dout, ffi::AnyBuffer dlse, ffi::AnyBuffer q,
    ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer lengths,
    ffi::AnyBuffer out, ffi::AnyBuffer lse, ffi::AnyBuffer slopes, ffi::AnyBuffer table,
    ffi::AnyBuffer query_segments, ffi::AnyBuffer key_segments, ffi::AnyBuffer offset,
    ffi::AnyBuffer seeds, IndexArray offsets, IndexArray indices, ffi::Result<ffi::AnyBuffer> dq,
    ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
    ffi::Result<ffi::AnyBuffer> dbias, ffi::Result<ffi::AnyBuffer> dslopes,
    ffi::Result<ffi::AnyBuffer> dtable, int64_t vector_length, double scale, bool is_causal,
    bool wrt_bias, int64_t pieces, double softcap, int64_t kept, double keep_scale, bool pack) {
  const Terms terms = TermOperands{slopes, table,   query_segments, key_segments, offset,
                                   seeds,  softcap, kept,           keep_scale};
  const TermGradients of_terms{*dslopes, *dtable};
  return EachWindow(
      threads, "attention_backward", k, offsets, indices, *dq,
      [&](const Pool& pool, const Window& window, IndexArray offsets, IndexArray indices) {
        return RunBackward<false>(pool, window, dout, dlse, q, k, v, bias, lengths, out, lse,
                                  offsets, indices, dq, dk, dv, dbias, vector_length, scale,
                                  is_causal, wrt_bias, pieces, pack, terms, of_terms);
      });
}

template <bool kTerms, typename Binding>
decltype(auto) WithTermResults(Binding&& bound) {
  if constexpr (!kTerms) {
    return std::move(bound);
  } else {
    return std::move(bound)
        .template Ret<ffi::AnyBuffer>()   // dslopes [batch, H, 1] or [1, 0]
        .template Ret<ffi::AnyBuffer>();  // dtable [batch, H, range] or [1, 0]
  }
}

// The operands, results and attributes that all targets have.
template <bool kTerms>
auto BindOperands() {
  auto arrays = ffi::Ffi::Bind()
                    .Ctx<ffi::ThreadPool>()
                    .Arg<ffi::AnyBuffer>()   // dout [batch or 1, L, H, Dv]
                    .Arg<ffi::AnyBuffer>()   // dlse [batch or 1, L, H]
                    .Arg<ffi::AnyBuffer>()   // q [batch or 1, L, H, D]
                    .Arg<ffi::AnyBuffer>()   // k [batch or 1, S, Hk, D]
                    .Arg<ffi::AnyBuffer>()   // v [batch or 1, S, Hk, Dv]
                    .Arg<ffi::AnyBuffer>()   // bias [batch or 1, H or 1, ...]
                    .Arg<ffi::AnyBuffer>()   // lengths [batch or 1, 1]
                    .Arg<ffi::AnyBuffer>()   // out [batch or 1, L, H, Dv]
                    .Arg<ffi::AnyBuffer>();  // lse [batch or 1, L, H]
  auto results = WithTermArrays<kTerms>(std::move(arrays))
                     .template Arg<IndexArray>()       // offsets [ceil(L / V) + 1]
                     .template Arg<IndexArray>()       // indices [vectors]
                     .template Ret<ffi::AnyBuffer>()   // dq [batch, L, H, D]
                     .template Ret<ffi::AnyBuffer>()   // dk [batch, S, Hk, D]
                     .template Ret<ffi::AnyBuffer>()   // dv [batch, S, Hk, Dv]
                     .template Ret<ffi::AnyBuffer>();  // dbias [batch, H, ...] or [1, 0]
  return WithTermResults<kTerms>(std::move(results))
      .template Attr<int64_t>("vector_length")
      .template Attr<double>("scale")
      .template Attr<bool>("is_causal")
      .template Attr<bool>("wrt_bias")
      .template Attr<int64_t>("pieces");
}

template <bool kTerms>
auto BindBackward() {
  return WithTermNumbers<kTerms>(BindOperands<kTerms>()).template Attr<bool>("pack");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardFfi, BackwardHandler<false>, BindBackward<false>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardOctetFfi, BackwardHandler<true>,
                              BindBackward<false>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardBlocksFfi, BackwardBlocksHandler,
                              BindOperands<false>().Attr<int64_t>("block_width"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardTermsFfi, BackwardTermsHandler,
                              BindBackward<true>());

}  // namespace sgap
