// FFI target sgap_attention_backward_cvs_v1.
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/attention/attention_operands.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/workspace.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// What a call owns until its last task is done.
struct BackwardCall {
  AttentionBackwardArgs args;
  StructureAndBias owned;
  std::unique_ptr<char[]> dbias;  // of compacted vectors
  std::vector<int64_t> pieces;
  Workspace memory;
};

// Block rows in `pieces` of about as many vectors.
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

ffi::Future BackwardHandler(ffi::ThreadPool pool, ffi::AnyBuffer dout, ffi::AnyBuffer dlse,
                            ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::AnyBuffer bias, ffi::AnyBuffer lengths, ffi::AnyBuffer out,
                            ffi::AnyBuffer lse, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                            ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                            ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dbias,
                            int64_t vector_length, double scale, bool is_causal, bool wrt_bias,
                            int64_t pieces, bool pack) {
  const Operands in{q, k, v, bias, lengths, offsets, indices, vector_length};
  const ffi::DataType type = q.element_type(), wide = WideType(type);
  std::string error = Mismatch("dq", *dq, type, {kAnySize, kAnySize, kAnySize, kAnySize});
  const int64_t batch = error.empty() ? dq->dimensions()[0] : 0;
  if (error.empty()) error = Check(in, batch);
  if (error.empty() && (pieces < 1 || pieces > INT32_MAX)) error = "pieces: expected at least 1";
  if (!error.empty()) return Failed("attention_backward: " + error);
  auto call = std::make_shared<BackwardCall>();
  AttentionBackwardArgs& args = call->args;
  args = {};
  static_cast<AttentionProblem&>(args) = Describe(in, batch, scale, is_causal, &call->owned);
  const auto expect = [&](const char* name, ffi::AnyBuffer buffer, ffi::DataType of,
                          std::initializer_list<int64_t> shape) {
    if (error.empty()) error = Mismatch(name, buffer, of, shape);
  };
  expect("dq", *dq, type, {batch, args.rows, args.heads, args.depth});
  expect("dk", *dk, type, {batch, args.keys, args.key_heads, args.depth});
  expect("dv", *dv, type, {batch, args.keys, args.key_heads, args.value_depth});
  expect("dout", dout, type, {kAnySize, args.rows, args.heads, args.value_depth});
  expect("out", out, type, {kAnySize, args.rows, args.heads, args.value_depth});
  expect("dlse", dlse, wide, {kAnySize, args.rows, args.heads});
  expect("lse", lse, wide, {kAnySize, args.rows, args.heads});
  if (error.empty()) error = BadBatch("dout", dout, batch);
  if (error.empty()) error = BadBatch("out", out, batch);
  if (error.empty()) error = BadBatch("dlse", dlse, batch);
  if (error.empty()) error = BadBatch("lse", lse, batch);
  const int64_t stored = args.vectors * args.length;
  if (error.empty() && wrt_bias &&
      (dbias->element_type() != wide ||
       int64_t(dbias->element_count()) != batch * args.heads * stored)) {
    error = "dbias: expected accumulators [batch, heads, vectors, V], got " +
            ShapeString(dbias->dimensions());
  }
  if (error.empty() && !pack) error = CannotRead(args);
  if (!error.empty()) return Failed("attention_backward: " + error);
  args.dout = dout.untyped_data();
  args.out = out.untyped_data();
  args.dlse = dlse.untyped_data();
  args.lse = lse.untyped_data();
  args.dout_stride = BatchStride(dout);
  args.out_stride = BatchStride(out);
  args.dlse_stride = BatchStride(dlse);
  args.lse_stride = BatchStride(lse);
  args.dq = dq->untyped_data();
  args.dk = dk->untyped_data();
  args.dv = dv->untyped_data();
  for (ffi::AnyBuffer result : {*dq, *dk, *dv}) {
    AdviseHugePages(result.untyped_data(), result.size_bytes());
  }
  if (batch == 0) return Finished();
  const int64_t blocks = offsets.dimensions()[0] - 1;
  const size_t element = AccumulatorBytes(args.dtype);
  if (wrt_bias) {
    args.dbias = dbias->untyped_data();
    if (call->owned.structure.compact()) {
      call->dbias.reset(new char[dbias->size_bytes()]);
      args.dbias = call->dbias.get();
    }
    const size_t used = size_t(blocks > 0 ? args.offsets[blocks] : 0) * args.length;
    for (int64_t i = 0; i < batch * args.heads && used < size_t(stored); ++i) {
      char* own = static_cast<char*>(args.dbias) + size_t(i) * stored * element;
      std::fill_n(own + used * element, (stored - used) * element, 0);
    }
  }
  // dk and dv are added up where K and V are read, in place or in memory of the group.
  const int64_t sum_bytes = pack ? HeadBytes(args) : 0;
  const int64_t q_rows = args.heads / args.key_heads * args.rows;  // of a key head
  const bool partial = pieces > 1 && element != ffi::ByteWidth(type);
  const int64_t dq_bytes = partial ? q_rows * args.padded_depth * int64_t(element) : 0;
  const int64_t delta_bytes = q_rows * int64_t(element);
  const int64_t bytes = sum_bytes + dq_bytes + delta_bytes + args.keys;
  args.pieces = pieces;
  args.group = batch * args.key_heads;
  if (pack && !SharesKeys(in, batch)) {
    args.group = GroupSize(args, sum_bytes + bytes, pieces, pool.num_threads());
  }
  const int64_t copies = pack ? CopiesBytes(in, args) : 0;
  call->memory = AcquireWorkspace(size_t(std::max<int64_t>(copies + args.group * bytes, 64)));
  if (!call->memory) return Failed("attention_backward: no memory for sums");
  char* memory = static_cast<char*>(call->memory.get());
  PlaceKeys(in, pack ? memory : nullptr, &args);
  memory += copies;
  args.sums = pack ? memory : nullptr;
  memory += args.group * sum_bytes;
  args.dq_sums = dq_bytes > 0 ? memory : nullptr;
  memory += args.group * dq_bytes;
  args.deltas = memory;
  args.added = reinterpret_cast<uint8_t*>(memory + args.group * delta_bytes);
  call->pieces = CutPieces(args.offsets, blocks, pieces);
  args.piece_begin = call->pieces.data();
  std::vector<int64_t> phases = PhasesOfGroups(args, /*phases=*/pieces, pieces);
  const int64_t tasks = std::accumulate(phases.begin(), phases.end(), int64_t(0));
  void* const result = wrt_bias ? dbias->untyped_data() : nullptr;
  if (call->dbias) phases.push_back(1);
  return ParallelPhases(pool, phases, 3 * MultiplyAdds(args),
                        [call, tasks, result, kernel = Kernels().attention_backward](int64_t task) {
                          if (task < tasks) return kernel(call->args, task);
                          const AttentionBackwardArgs& args = call->args;
                          PutEntries(call->dbias.get(), args.batch * args.heads,
                                     size_t(args.length) * AccumulatorBytes(args.dtype),
                                     *call->owned.structure.compact(), result);
                        });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardCvs, BackwardHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // dout [batch or 1, L, H, Dv]
                                  .Arg<ffi::AnyBuffer>()  // dlse [batch or 1, L, H]
                                  .Arg<ffi::AnyBuffer>()  // q [batch or 1, L, H, D]
                                  .Arg<ffi::AnyBuffer>()  // k [batch or 1, S, Hk, D]
                                  .Arg<ffi::AnyBuffer>()  // v [batch or 1, S, Hk, Dv]
                                  .Arg<ffi::AnyBuffer>()  // bias [batch or 1, H or 1, ...]
                                  .Arg<ffi::AnyBuffer>()  // lengths [batch or 1, 1]
                                  .Arg<ffi::AnyBuffer>()  // out [batch or 1, L, H, Dv]
                                  .Arg<ffi::AnyBuffer>()  // lse [batch or 1, L, H]
                                  .Arg<ffi::AnyBuffer>()  // offsets [ceil(L / V) + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [vectors]
                                  .Ret<ffi::AnyBuffer>()  // dq [batch, L, H, D]
                                  .Ret<ffi::AnyBuffer>()  // dk [batch, S, Hk, D]
                                  .Ret<ffi::AnyBuffer>()  // dv [batch, S, Hk, Dv]
                                  .Ret<ffi::AnyBuffer>()  // dbias [batch, H, ...] or [1, 0]
                                  .Attr<int64_t>("vector_length")
                                  .Attr<double>("scale")
                                  .Attr<bool>("is_causal")
                                  .Attr<bool>("wrt_bias")
                                  .Attr<int64_t>("pieces")
                                  .Attr<bool>("pack"));

}  // namespace sgap
