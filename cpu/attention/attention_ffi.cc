// FFI target sgap_attention_cvs_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "cpu/attention/attention.h"
#include "cpu/attention/attention_operands.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/row_plan.h"
#include "cpu/common/workspace.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// What a call owns until its last task is done.
struct AttentionCall {
  AttentionArgs args;
  StructureAndBias owned;
  ProductPlan plan;
  Workspace memory;
};

ffi::Future AttentionHandler(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                             ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer sinks,
                             ffi::AnyBuffer lengths, ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                             int64_t vector_length, double scale, bool is_causal,
                             int64_t chunk_nonzeros, bool pack) {
  const Operands in{q, k, v, bias, lengths, offsets, indices, vector_length};
  std::string error =
      Mismatch("out", *out, q.element_type(), {kAnySize, kAnySize, kAnySize, kAnySize});
  const int64_t batch = error.empty() ? out->dimensions()[0] : 0;
  if (error.empty()) error = Check(in, batch);
  if (error.empty()) error = BadChunk(chunk_nonzeros);
  if (!error.empty()) return Failed("attention: " + error);
  auto call = std::make_shared<AttentionCall>();
  AttentionArgs& args = call->args;
  args = {};
  static_cast<AttentionProblem&>(args) = Describe(in, batch, scale, is_causal, &call->owned);
  const ffi::DataType wide = WideType(q.element_type());
  error = Mismatch("out", *out, q.element_type(), {batch, args.rows, args.heads, args.value_depth});
  if (error.empty()) error = Mismatch("lse", *lse, wide, {batch, args.rows, args.heads});
  if (error.empty() && !Absent(sinks)) {
    error = Mismatch("sinks", sinks, wide, {kAnySize, args.heads});
    if (error.empty()) error = BadBatch("sinks", sinks, batch);
    args.sinks = sinks.untyped_data();
    args.sinks_stride = BatchStride(sinks);
  }
  if (error.empty() && !pack) error = CannotRead(args);
  if (!error.empty()) return Failed("attention: " + error);
  args.out = out->untyped_data();
  args.lse = lse->untyped_data();
  AdviseHugePages(args.out, out->size_bytes());
  if (batch == 0 || args.rows == 0) return Finished();

  const int64_t blocks = offsets.dimensions()[0] - 1, walks = batch * args.heads;
  const int64_t chunk = std::max<int64_t>(1, chunk_nonzeros / vector_length);
  const size_t piece =
      size_t(walks * vector_length * (args.padded_value_depth + 2)) * AccumulatorBytes(args.dtype);
  static_cast<RowTasks&>(args) = call->plan.Cut(args.offsets, blocks, chunk, walks, piece);
  const int64_t tasks = args.heads / args.key_heads * args.row_tasks;  // of a key head
  args.group = batch * args.key_heads;
  if (pack) {
    if (!SharesKeys(in, batch)) {
      args.group = GroupSize(args, HeadBytes(args), tasks, pool.num_threads());
    }
    call->memory = AcquireWorkspace(size_t(std::max<int64_t>(CopiesBytes(in, args), 64)));
    if (!call->memory) return Failed("attention: no memory for a copy of K and V");
  }
  PlaceKeys(in, static_cast<char*>(call->memory.get()), &args);
  return ParallelPhases(
      pool, PhasesOfGroups(args, /*phases=*/1, tasks), MultiplyAdds(args),
      [call, kernel = Kernels().attention](int64_t task) { kernel(call->args, task); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionCvs, AttentionHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // q [batch or 1, L, H, D]
                                  .Arg<ffi::AnyBuffer>()  // k [batch or 1, S, Hk, D]
                                  .Arg<ffi::AnyBuffer>()  // v [batch or 1, S, Hk, Dv]
                                  .Arg<ffi::AnyBuffer>()  // bias [batch or 1, H or 1, ...]
                                  .Arg<ffi::AnyBuffer>()  // sinks [batch or 1, H]
                                  .Arg<ffi::AnyBuffer>()  // lengths [batch or 1, 1]
                                  .Arg<ffi::AnyBuffer>()  // offsets [ceil(L / V) + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [vectors]
                                  .Ret<ffi::AnyBuffer>()  // out [batch, L, H, Dv]
                                  .Ret<ffi::AnyBuffer>()  // lse [batch, L, H]
                                  .Attr<int64_t>("vector_length")
                                  .Attr<double>("scale")
                                  .Attr<bool>("is_causal")
                                  .Attr<int64_t>("chunk_nonzeros")
                                  .Attr<bool>("pack"));

}  // namespace sgap
