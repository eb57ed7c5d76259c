// FFI targets sgap_attention_cvs_v1 and sgap_attention_backward_cvs_v1.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "ffi_arguments.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "row_plan.h"
#include "workspace.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kPackBytes = 64 << 10;  // of one task
constexpr int64_t kSumBytes = 256 << 10;
constexpr int64_t kExpWork = 16;  // multiply-adds that take as long as one exponential

// What a call owns until its last task is done.
struct AttentionCall {
  AttentionArgs args;
  ProductPlan plan;
  Workspace memory;
};

struct BackwardCall {
  AttentionBackwardArgs args;
  std::vector<int64_t> pieces;
  Workspace memory;
};

// The operands that both directions have.
struct Operands {
  ffi::AnyBuffer q, k, v, bias, lengths, offsets, indices;
  int64_t vector_length;
};

ffi::DataType WideType(ffi::DataType type) { return type == ffi::F64 ? ffi::F64 : ffi::F32; }

// An array that may be absent: [1, 0].
bool Absent(ffi::AnyBuffer buffer) {
  return buffer.dimensions().size() == 2 && buffer.dimensions()[1] == 0;
}

// Empty where `buffer` has one batch element or `batch` of them, of `size` elements in all.
std::string BadBatch(const char* name, ffi::AnyBuffer buffer, int64_t batch) {
  const int64_t got = buffer.dimensions()[0];
  if (got == 1 || got == batch) return "";
  return std::string(name) + ": expected a batch of 1 or " + std::to_string(batch) + ", got " +
         std::to_string(got);
}

int64_t BatchStride(ffi::AnyBuffer buffer) {
  const int64_t batch = buffer.dimensions()[0];
  return batch <= 1 ? 0 : int64_t(buffer.element_count()) / batch;
}

std::string Check(const Operands& in, int64_t batch) {
  const ffi::DataType type = in.q.element_type();
  if (!ToDtype(type)) return "q: expected float32, float64, bfloat16 or float16";
  const auto any = {kAnySize, kAnySize, kAnySize, kAnySize};
  std::string error = Mismatch("q", in.q, type, any);
  if (!error.empty()) return error;
  if (!(error = Mismatch("k", in.k, type, {kAnySize, kAnySize, kAnySize, in.q.dimensions()[3]}))
           .empty())
    return error;
  const int64_t keys = in.k.dimensions()[1], key_heads = in.k.dimensions()[2];
  if (!(error = Mismatch("v", in.v, type, {kAnySize, keys, key_heads, kAnySize})).empty())
    return error;
  const int64_t rows = in.q.dimensions()[1], heads = in.q.dimensions()[2];
  if (key_heads < 1 || heads < 1 || heads % key_heads != 0)
    return "k: its heads do not divide those of q";
  for (const int64_t depth : {in.q.dimensions()[3], in.v.dimensions()[3]}) {
    if (depth > kMostDepth) {
      return "expected heads of at most " + std::to_string(kMostDepth) + " numbers, got " +
             std::to_string(depth);
    }
  }
  if (!(error = BadLength(in.vector_length)).empty()) return error;
  if (!(error = Mismatch("indices", in.indices, ffi::S32, {kAnySize})).empty()) return error;
  const int64_t blocks = (rows + in.vector_length - 1) / in.vector_length;
  if (!(error = Mismatch("offsets", in.offsets, ffi::S32, {blocks + 1})).empty()) return error;
  if (!Absent(in.bias)) {
    const auto shape = in.bias.dimensions();
    const int64_t stored = in.indices.dimensions()[0] * in.vector_length;
    const bool fits = in.bias.element_type() == WideType(type) && shape.size() >= 3 &&
                      (shape[1] == 1 || shape[1] == heads) &&
                      int64_t(in.bias.element_count()) == shape[0] * shape[1] * stored;
    if (!fits)
      return "bias: expected accumulators [batch, heads, vectors, V], got " + ShapeString(shape);
  }
  if (!Absent(in.lengths)) {
    if (!(error = Mismatch("lengths", in.lengths, ffi::S32, {kAnySize, 1})).empty()) return error;
  }
  if (!(error = BadBatch("q", in.q, batch)).empty()) return error;
  if (!(error = BadBatch("k", in.k, batch)).empty()) return error;
  if (!(error = BadBatch("v", in.v, batch)).empty()) return error;
  if (!(error = BadBatch("bias", in.bias, batch)).empty()) return error;
  return BadBatch("lengths", in.lengths, batch);
}

AttentionProblem Describe(const Operands& in, int64_t batch, double scale, bool is_causal) {
  AttentionProblem out{};
  out.dtype = *ToDtype(in.q.element_type());
  out.offsets = Ints(in.offsets);
  out.indices = Ints(in.indices);
  out.q = in.q.untyped_data();
  out.batch = batch;
  out.rows = in.q.dimensions()[1];
  out.keys = in.k.dimensions()[1];
  out.heads = in.q.dimensions()[2];
  out.key_heads = in.k.dimensions()[2];
  out.depth = in.q.dimensions()[3];
  out.value_depth = in.v.dimensions()[3];
  out.vectors = in.indices.dimensions()[0];
  out.length = in.vector_length;
  const int64_t whole = 64 / int64_t(AccumulatorBytes(out.dtype));
  out.padded_depth = (out.depth + whole - 1) / whole * whole;
  out.padded_value_depth = (out.value_depth + whole - 1) / whole * whole;
  out.q_stride = BatchStride(in.q);
  if (!Absent(in.bias)) {
    out.bias = in.bias.untyped_data();
    out.bias_stride = BatchStride(in.bias);
    out.bias_head_stride = in.bias.dimensions()[1] == 1 ? 0 : out.vectors * out.length;
  }
  if (!Absent(in.lengths)) {
    out.lengths = Ints(in.lengths);
    out.lengths_stride = BatchStride(in.lengths);
  }
  out.scale = scale;
  out.is_causal = is_causal;
  return out;
}

// Elements that the packed rows of `x` take.
int64_t PackedSize(ffi::AnyBuffer x, int64_t padded) {
  return x.dimensions()[0] * x.dimensions()[1] * x.dimensions()[2] * padded;
}

// How the kernel reads the heads of x: where they are, or packed to `packed`.
HeadRows Rows(ffi::AnyBuffer x, int64_t padded, void* packed, HeadPacking* packing,
              int64_t* tasks) {
  const auto shape = x.dimensions();
  const int64_t rows = shape[1], heads = shape[2], depth = shape[3];
  if (!packed) {
    return {x.untyped_data(), heads * depth, depth, BatchStride(x)};
  }
  const int64_t chunk = std::max<int64_t>(1, kPackBytes / std::max<int64_t>(1, padded * 4));
  const int64_t chunks = (rows + chunk - 1) / chunk;
  *packing = {x.untyped_data(), packed, rows, heads, depth, padded, chunk, chunks};
  *tasks = shape[0] * heads * chunks;
  return {packed, padded, rows * padded, shape[0] == 1 ? 0 : heads * rows * padded};
}

// Sets how K and V are read, packed into `memory` where that is not null.
void PlaceKeys(const Operands& in, char* memory, AttentionProblem* out) {
  const int64_t k_bytes =
      PackedSize(in.k, out->padded_depth) * int64_t(AccumulatorBytes(out->dtype));
  char* v_memory = memory ? memory + k_bytes : nullptr;
  out->k = Rows(in.k, out->padded_depth, memory, &out->pack_k, &out->pack_k_tasks);
  out->v = Rows(in.v, out->padded_value_depth, v_memory, &out->pack_v, &out->pack_v_tasks);
}

size_t PackedBytes(const Operands& in, const AttentionProblem& problem) {
  const int64_t elements =
      PackedSize(in.k, problem.padded_depth) + PackedSize(in.v, problem.padded_value_depth);
  return size_t(elements) * AccumulatorBytes(problem.dtype);
}

// Why K and V cannot be read where they are; empty if they can.
std::string CannotRead(const AttentionProblem& problem) {
  const bool narrow = problem.dtype == Dtype::kBFloat16 || problem.dtype == Dtype::kFloat16;
  const bool ragged =
      problem.depth != problem.padded_depth || problem.value_depth != problem.padded_value_depth;
  return narrow || ragged ? "pack: these K and V can be read only where they are packed" : "";
}

int64_t Work(const AttentionProblem& problem) {
  const int64_t scores = problem.batch * problem.heads * (problem.vectors + 1) * problem.length;
  return scores * (problem.depth + problem.value_depth + kExpWork);
}

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
  static_cast<AttentionProblem&>(args) = Describe(in, batch, scale, is_causal);
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
  if (batch == 0 || args.rows == 0) return Finished();

  if (pack) {
    call->memory = AcquireWorkspace(std::max<size_t>(PackedBytes(in, args), 64));
    if (!call->memory) return Failed("attention: no memory for a copy of K and V");
  }
  PlaceKeys(in, static_cast<char*>(call->memory.get()), &args);
  const int64_t blocks = offsets.dimensions()[0] - 1, walks = batch * args.heads;
  const int64_t chunk = std::max<int64_t>(1, chunk_nonzeros / vector_length);
  const size_t piece =
      size_t(walks * vector_length * (args.padded_value_depth + 2)) * AccumulatorBytes(args.dtype);
  static_cast<RowTasks&>(args) = call->plan.Cut(args.offsets, blocks, chunk, walks, piece);
  return ParallelPhases(
      pool, {args.pack_k_tasks + args.pack_v_tasks, walks * args.row_tasks}, Work(args),
      [call, kernel = Kernels().attention](int64_t task) { kernel(call->args, task); });
}

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

ffi::Future BackwardHandler(ffi::ThreadPool pool, ffi::AnyBuffer dout, ffi::AnyBuffer delta,
                            ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::AnyBuffer bias, ffi::AnyBuffer lengths, ffi::AnyBuffer lse,
                            ffi::AnyBuffer offsets, ffi::AnyBuffer indices,
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
  static_cast<AttentionProblem&>(args) = Describe(in, batch, scale, is_causal);
  const auto expect = [&](const char* name, ffi::AnyBuffer buffer, ffi::DataType of,
                          std::initializer_list<int64_t> shape) {
    if (error.empty()) error = Mismatch(name, buffer, of, shape);
  };
  expect("dq", *dq, type, {batch, args.rows, args.heads, args.depth});
  expect("dk", *dk, type, {batch, args.keys, args.key_heads, args.depth});
  expect("dv", *dv, type, {batch, args.keys, args.key_heads, args.value_depth});
  expect("dout", dout, type, {kAnySize, args.rows, args.heads, args.value_depth});
  expect("delta", delta, wide, {kAnySize, args.rows, args.heads});
  expect("lse", lse, wide, {kAnySize, args.rows, args.heads});
  if (error.empty()) error = BadBatch("dout", dout, batch);
  if (error.empty()) error = BadBatch("delta", delta, batch);
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
  args.delta = delta.untyped_data();
  args.lse = lse.untyped_data();
  args.dout_stride = BatchStride(dout);
  args.delta_stride = BatchStride(delta);
  args.lse_stride = BatchStride(lse);
  args.dq = dq->untyped_data();
  args.dk = dk->untyped_data();
  args.dv = dv->untyped_data();
  if (batch == 0) return Finished();
  const int64_t blocks = offsets.dimensions()[0] - 1;
  const size_t element = AccumulatorBytes(args.dtype);
  if (wrt_bias) {
    args.dbias = dbias->untyped_data();
    const size_t used = size_t(blocks > 0 ? args.offsets[blocks] : 0) * args.length;
    for (int64_t i = 0; i < batch * args.heads && used < size_t(stored); ++i) {
      char* own = static_cast<char*>(args.dbias) + size_t(i) * stored * element;
      std::fill_n(own + used * element, (stored - used) * element, 0);
    }
  }
  const bool whole = element == ffi::ByteWidth(type) && CannotRead(args).empty();
  const int64_t sum_row = args.padded_depth + args.padded_value_depth;
  const size_t pack_bytes = pack ? PackedBytes(in, args) : 0;
  args.pieces = pieces;
  const bool summed = pieces > 1 || !whole;
  const size_t sum_bytes =
      summed ? size_t(batch * args.key_heads * pieces * args.keys * sum_row) * element : 0;
  call->memory = AcquireWorkspace(std::max<size_t>(pack_bytes + sum_bytes, 64));
  if (!call->memory) return Failed("attention_backward: no memory for sums");
  char* memory = static_cast<char*>(call->memory.get());
  PlaceKeys(in, pack ? memory : nullptr, &args);
  args.sums = summed ? memory + pack_bytes : nullptr;
  args.chunk_keys =
      std::max<int64_t>(1, kSumBytes / std::max<int64_t>(1, pieces * sum_row * int64_t(element)));
  args.chunks = (args.keys + args.chunk_keys - 1) / args.chunk_keys;
  call->pieces = CutPieces(args.offsets, blocks, pieces);
  args.piece_begin = call->pieces.data();
  const int64_t walks = batch * args.key_heads;
  return ParallelPhases(
      pool,
      {args.pack_k_tasks + args.pack_v_tasks, walks * pieces, summed ? walks * args.chunks : 0},
      3 * Work(args),
      [call, kernel = Kernels().attention_backward](int64_t task) { kernel(call->args, task); });
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardCvs, BackwardHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // dout [batch or 1, L, H, Dv]
                                  .Arg<ffi::AnyBuffer>()  // delta [batch or 1, L, H]
                                  .Arg<ffi::AnyBuffer>()  // q [batch or 1, L, H, D]
                                  .Arg<ffi::AnyBuffer>()  // k [batch or 1, S, Hk, D]
                                  .Arg<ffi::AnyBuffer>()  // v [batch or 1, S, Hk, Dv]
                                  .Arg<ffi::AnyBuffer>()  // bias [batch or 1, H or 1, ...]
                                  .Arg<ffi::AnyBuffer>()  // lengths [batch or 1, 1]
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
