// FFI targets sgap_attention_cvs_v1 and sgap_attention_backward_cvs_v1, and the two of matrix
// tiles: their common operands are checked, described and placed first, then come the two handlers.
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/common/each_structure.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/partition.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kCopyBytes = 64 << 10;  // of one task
constexpr int64_t kHeldBytes = 1 << 20;   // of copies and sums, for each thread
constexpr int64_t kExpWork = 16;          // multiply-adds that take as long as one exponential

// The sequences and heads of keys that a structure is for: some of all sequences with all heads, or
// some heads of one.
struct Window {
  int64_t first, batch;
  int64_t first_key_head, key_heads;

  bool IsFirst() const { return first == 0 && first_key_head == 0; }
};

// The operands that both directions have, and whether they are for matrix tiles.
struct Operands {
  ffi::AnyBuffer q, k, v, bias, lengths, offsets, indices;
  int64_t vector_length;
  bool octets;
  Window window;

  // The window's first head of q.
  int64_t FirstHead() const {
    return window.first_key_head * (q.dimensions()[2] / k.dimensions()[2]);
  }
  // What `buffer` has from the window's first sequence and from `head` on, where heads are `size`
  // elements apart.
  char* From(ffi::AnyBuffer buffer, int64_t head, int64_t size) const {
    const int64_t batch = buffer.dimensions()[0];
    const int64_t stride = batch <= 1 ? 0 : int64_t(buffer.element_count()) / batch;
    const int64_t elements = window.first * stride + head * size;
    char* data = static_cast<char*>(buffer.untyped_data());
    return data + elements * int64_t(ffi::ByteWidth(buffer.element_type()));
  }
};

// What a call owns of its operands: a valid structure, and the bias at the vectors of that.
struct StructureAndBias {
  ValidStructure structure;
  std::unique_ptr<char[]> bias;
};

ffi::DataType WideType(ffi::DataType type) { return type == ffi::F64 ? ffi::F64 : ffi::F32; }

// Whether an optional array is absent: [1, 0].
bool Absent(ffi::AnyBuffer buffer) {
  return buffer.dimensions().size() == 2 && buffer.dimensions()[1] == 0;
}

// Empty where `buffer` has one batch element or `batch` of them.
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

// Bytes of a number of the copies of K and V.
int64_t CopiedBytes(const AttentionProblem& problem, bool octets) {
  return int64_t(octets ? sizeof(BFloat16) : AccumulatorBytes(problem.dtype));
}

AttentionProblem Describe(const Operands& in, double scale, bool is_causal,
                          StructureAndBias* owned) {
  AttentionProblem out{};
  out.dtype = *ToDtype(in.q.element_type());
  out.batch = in.window.batch;
  out.rows = in.q.dimensions()[1];
  out.keys = in.k.dimensions()[1];
  out.row_heads = in.q.dimensions()[2];
  out.row_key_heads = in.k.dimensions()[2];
  out.key_heads = in.window.key_heads;
  out.heads = out.row_heads / out.row_key_heads * out.key_heads;
  out.depth = in.q.dimensions()[3];
  out.q = in.From(in.q, in.FirstHead(), out.depth);
  out.value_depth = in.v.dimensions()[3];
  out.vectors = in.indices.dimensions()[0];
  out.length = in.vector_length;
  const int64_t whole = 64 / CopiedBytes(out, in.octets), least = in.octets ? 1 : 0;
  const auto padded = [&](int64_t depth) {
    return (std::max(depth, least) + whole - 1) / whole * whole;
  };
  out.padded_depth = padded(out.depth);
  out.padded_value_depth = padded(out.value_depth);
  out.q_stride = BatchStride(in.q);
  if (!Absent(in.bias)) {
    out.bias_stride = BatchStride(in.bias);
    out.bias_head_stride = in.bias.dimensions()[1] == 1 ? 0 : out.vectors * out.length;
    out.bias = in.From(in.bias, in.FirstHead(), out.bias_head_stride);
  }
  if (!Absent(in.lengths)) {
    out.lengths = reinterpret_cast<const int32_t*>(in.From(in.lengths, 0, 0));
    out.lengths_stride = BatchStride(in.lengths);
  }
  out.scale = scale;
  out.is_causal = is_causal;
  const int64_t blocks = in.offsets.dimensions()[0] - 1;
  owned->structure =
      ValidStructure({Ints(in.offsets), Ints(in.indices), nullptr, blocks, out.vectors, out.keys});
  out.offsets = owned->structure.view().offsets;
  out.indices = owned->structure.view().indices;
  if (const CompactStructure* compact = owned->structure.compact(); compact && out.bias) {
    // What the window has of a bias is in one piece, as the window's sequences or heads are.
    const size_t vector = size_t(out.length) * AccumulatorBytes(out.dtype);
    const auto shape = in.bias.dimensions();
    const int64_t sequences = shape[0] == 1 ? 1 : out.batch, heads = shape[1] == 1 ? 1 : out.heads;
    owned->bias = TakeEntries(out.bias, sequences * heads, vector, *compact);
    out.bias = owned->bias.get();
  }
  return out;
}

// The number of key heads in a group, each of which takes `bytes` of memory and has `tasks` that
// can run at once: few, so that the memory stays in the cache, but enough work for `threads`.
// Results do not depend on it.
int64_t GroupSize(const AttentionProblem& problem, int64_t bytes, int64_t tasks, int64_t threads) {
  constexpr int64_t kTasks = 4;  // of a thread: they end at about the same time
  const int64_t all = problem.batch * problem.key_heads;
  const int64_t fit = threads * kHeldBytes / std::max<int64_t>(bytes, 1);
  const int64_t busy = (kTasks * threads + tasks - 1) / std::max<int64_t>(tasks, 1);
  return std::clamp<int64_t>(std::max(fit, busy), 1, std::max<int64_t>(all, 1));
}

// Whether all batch elements share keys or values: these are copied once, so there is one group.
bool SharesKeys(const Operands& in, int64_t batch) {
  return batch > 1 && (in.k.dimensions()[0] == 1 || in.v.dimensions()[0] == 1);
}

// How many key heads of a group have rows of their own in x.
int64_t Slots(const AttentionProblem& problem, ffi::AnyBuffer x) {
  const bool shared = BatchStride(x) == 0 && problem.batch > 1;
  return shared ? problem.key_heads : problem.group;
}

// Bytes of the copies of a group's keys and values.
int64_t CopiesBytes(const Operands& in, const AttentionProblem& problem) {
  const int64_t row = Slots(problem, in.k) * problem.padded_depth +
                      Slots(problem, in.v) * problem.padded_value_depth;
  return problem.keys * row * CopiedBytes(problem, in.octets);
}

// Bytes of the keys and values of one head in accumulators.
int64_t HeadBytes(const AttentionProblem& problem) {
  const int64_t row = problem.padded_depth + problem.padded_value_depth;
  return problem.keys * row * int64_t(AccumulatorBytes(problem.dtype));
}

// Sets how K and V are read: where they are, or from copies of a group's in the CopiesBytes at
// `memory`.
void PlaceKeys(const Operands& in, char* memory, AttentionProblem* out) {
  const auto rows = [&](ffi::AnyBuffer x, int64_t padded, char* copies) {
    const int64_t slots = copies ? Slots(*out, x) : 0;
    const int64_t depth = x.dimensions()[3];
    const void* source = in.From(x, in.window.first_key_head, depth);
    return KeyRows{source, depth, padded, BatchStride(x), copies, slots};
  };
  const int64_t element = CopiedBytes(*out, in.octets);
  const int64_t k_bytes = Slots(*out, in.k) * out->keys * out->padded_depth * element;
  out->k = rows(in.k, out->padded_depth, memory);
  out->v = rows(in.v, out->padded_value_depth, memory ? memory + k_bytes : nullptr);
  const int64_t row = std::max<int64_t>(out->padded_depth, out->padded_value_depth) * element;
  out->copy_rows = std::max<int64_t>(1, kCopyBytes / std::max<int64_t>(1, row));
  out->copy_chunks = (out->keys + out->copy_rows - 1) / out->copy_rows;
}

// Tasks of each phase: in each group copying, then `phases` phases of `tasks` for each key head.
std::vector<int64_t> PhasesOfGroups(const AttentionProblem& problem, int64_t phases,
                                    int64_t tasks) {
  std::vector<int64_t> found;
  const int64_t all = problem.batch * problem.key_heads;
  for (int64_t first = 0; first < all; first += problem.group) {
    const int64_t count = std::min(problem.group, all - first);
    found.push_back(SGAP_ISA::CopyTasks(problem, problem.k, count) +
                    SGAP_ISA::CopyTasks(problem, problem.v, count));
    for (int64_t i = 0; i < phases; ++i) found.push_back(count * tasks);
  }
  return found;
}

// Why K and V cannot be read where they are; empty if they can.
std::string CannotRead(const AttentionProblem& problem, bool octets) {
  const bool narrow = problem.dtype == Dtype::kBFloat16 || problem.dtype == Dtype::kFloat16;
  const bool ragged =
      problem.depth != problem.padded_depth || problem.value_depth != problem.padded_value_depth;
  return (narrow && !octets) || ragged
             ? "pack: these K and V can be read only where they are packed"
             : "";
}

// Empty for what kernels of tiles take: bfloat16, in vectors of 4 to 32 rows.
std::string BadOctets(const AttentionProblem& problem) {
  const int64_t length = problem.length;
  const bool holds = length >= 4 && length <= 32 && (length & (length - 1)) == 0;
  if (problem.dtype != Dtype::kBFloat16 || !holds)
    return "expected bfloat16 in vectors of 4, 8, 16 or 32 rows";
  if (std::max(problem.depth, problem.value_depth) > kMostOctetDepth)
    return "expected heads of at most " + std::to_string(kMostOctetDepth) + " numbers";
  return "";
}

int64_t MultiplyAdds(const AttentionProblem& problem) {
  const int64_t scores = problem.batch * problem.heads * (problem.vectors + 1) * problem.length;
  return scores * (problem.depth + problem.value_depth + kExpWork);
}

// What a call owns until its last task is done.
struct AttentionCall {
  AttentionArgs args;
  StructureAndBias owned;
  ProductPlan plan;
  Workspace memory;
};

template <bool kOctets>
ffi::Future RunAttention(const Pool& pool, const Window& window, ffi::AnyBuffer q, ffi::AnyBuffer k,
                         ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer sinks,
                         ffi::AnyBuffer lengths, IndexArray offsets, IndexArray indices,
                         ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                         int64_t vector_length, double scale, bool is_causal,
                         int64_t chunk_nonzeros, int64_t key_pieces, bool pack) {
  const Operands in{q, k, v, bias, lengths, offsets, indices, vector_length, kOctets, window};
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
  const int64_t chunk = std::max<int64_t>(1, chunk_nonzeros / vector_length);
  const size_t piece =
      size_t(walks * vector_length * (args.padded_value_depth + 2)) * AccumulatorBytes(args.dtype);
  static_cast<RowTasks&>(args) = call->plan.Cut(args.offsets, blocks, chunk, walks, piece);
  const int64_t tasks = args.heads / args.key_heads * args.row_tasks;  // of a key head
  args.group = args.batch * args.key_heads;
  if (pack) {
    if (!SharesKeys(in, args.batch)) {
      args.group = GroupSize(args, kOctets ? HeadBytes(args) / 2 : HeadBytes(args), tasks,
                             pool.num_threads());
    }
    call->memory = AcquireWorkspace(size_t(std::max<int64_t>(CopiesBytes(in, args), 64)));
    if (!call->memory) return Failed("attention: no memory for a copy of K and V");
  }
  PlaceKeys(in, static_cast<char*>(call->memory.get()), &args);
  const auto kernel = kOctets ? Kernels().AttentionOctet : Kernels().Attention;
  return ParallelPhases(pool, PhasesOfGroups(args, /*phases=*/1, tasks), MultiplyAdds(args),
                        [call, kernel](int64_t task) { kernel(call->args, task); });
}

// What a call owns until its last task is done.
struct BackwardCall {
  AttentionBackwardArgs args;
  StructureAndBias owned;
  std::unique_ptr<char[]> dbias;  // of compacted vectors
  std::vector<int64_t> pieces;
  Workspace memory;
};

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
                        int64_t pieces, bool pack) {
  const Operands in{q, k, v, bias, lengths, offsets, indices, vector_length, kOctets, window};
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
  const bool partial = pieces > 1 && element != ffi::ByteWidth(type);
  const int64_t dq_bytes = partial ? q_rows * args.padded_depth * int64_t(element) : 0;
  const int64_t delta_bytes = q_rows * int64_t(element);
  const int64_t bytes = sum_bytes + dq_bytes + delta_bytes + args.keys;
  args.pieces = pieces;
  args.group = args.batch * args.key_heads;
  if (sums && !(pack && SharesKeys(in, args.batch))) {
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
  args.deltas = memory;
  args.added = reinterpret_cast<uint8_t*>(memory + args.group * delta_bytes);
  call->pieces = CutPieces(args.offsets, blocks, pieces);
  args.piece_begin = call->pieces.data();
  std::vector<int64_t> phases = PhasesOfGroups(args, /*phases=*/pieces, pieces);
  const int64_t tasks = std::accumulate(phases.begin(), phases.end(), int64_t(0));
  if (call->dbias) phases.push_back(1);
  const auto kernel = kOctets ? Kernels().AttentionBackwardOctet : Kernels().AttentionBackward;
  return ParallelPhases(pool, phases, 3 * MultiplyAdds(args),
                        [call, tasks, dbias_rows, kernel](int64_t task) {
                          if (task < tasks) return kernel(call->args, task);
                          const AttentionBackwardArgs& args = call->args;
                          PutEntries(call->dbias.get(), args.batch * args.heads,
                                     size_t(args.length) * AccumulatorBytes(args.dtype),
                                     *call->owned.structure.compact(), dbias_rows);
                        });
}

// Runs call(pool, window, offsets, indices) for the window of each structure. Structures are for as
// many heads of keys each, sequence by sequence: for whole sequences, or for heads of one.
template <typename Call>
ffi::Future EachWindow(ffi::ThreadPool threads, const char* op, ffi::AnyBuffer k,
                       IndexArray offsets, IndexArray indices, ffi::AnyBuffer result, Call call) {
  const auto rank4 = [](ffi::AnyBuffer x) { return x.dimensions().size() == 4; };
  if (!rank4(result) || !rank4(k) || k.dimensions()[2] < 1) {
    return Failed(std::string(op) + ": k and the first result: expected rank 4 and heads");
  }
  const int64_t batch = result.dimensions()[0], heads = k.dimensions()[2];
  StructureCount count;
  count.See(offsets);
  count.See(indices);
  if (!count.Found()) return call(Pool(threads), Window{0, batch, 0, heads}, offsets, indices);
  const int64_t structures = *count.Found();
  const bool fits = structures <= batch
                        ? structures > 0 && batch % structures == 0
                        : batch > 0 && structures % batch == 0 && heads % (structures / batch) == 0;
  std::string error = count.Error();
  if (error.empty() && !fits && batch > 0) {
    error = "index arrays: expected one structure for as many heads of keys each, of " +
            std::to_string(batch) + " x " + std::to_string(heads) + ", got " +
            std::to_string(structures);
  }
  if (!error.empty()) return Failed(std::string(op) + ": " + error);
  return RunEach(threads, batch == 0 ? 0 : structures, [&](const Pool& pool, int64_t i) {
    StructureSlice slice(i, structures);
    const int64_t of_batch = std::max<int64_t>(1, structures / batch);  // of one sequence
    const int64_t own = heads / of_batch;
    const Window window = structures <= batch
                              ? Window{batch / structures * i, batch / structures, 0, heads}
                              : Window{i / of_batch, 1, i % of_batch * own, own};
    return call(pool, window, slice(offsets), slice(indices));
  });
}

template <bool kOctets>
ffi::Future AttentionHandler(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k,
                             ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer sinks,
                             ffi::AnyBuffer lengths, IndexArray offsets, IndexArray indices,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                             int64_t vector_length, double scale, bool is_causal,
                             int64_t chunk_nonzeros, bool pack, std::optional<int64_t> key_pieces) {
  return EachWindow(
      threads, "attention", k, offsets, indices, *out,
      [&](const Pool& pool, const Window& window, IndexArray offsets, IndexArray indices) {
        return RunAttention<kOctets>(pool, window, q, k, v, bias, sinks, lengths, offsets, indices,
                                     out, lse, vector_length, scale, is_causal, chunk_nonzeros,
                                     key_pieces.value_or(1), pack);
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
                                    is_causal, wrt_bias, pieces, pack);
      });
}

auto BindAttention() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // q [batch or 1, L, H, D]
      .Arg<ffi::AnyBuffer>()  // k [batch or 1, S, Hk, D]
      .Arg<ffi::AnyBuffer>()  // v [batch or 1, S, Hk, Dv]
      .Arg<ffi::AnyBuffer>()  // bias [batch or 1, H or 1, ...]
      .Arg<ffi::AnyBuffer>()  // sinks [batch or 1, H]
      .Arg<ffi::AnyBuffer>()  // lengths [batch or 1, 1]
      .Arg<IndexArray>()      // offsets [ceil(L / V) + 1]
      .Arg<IndexArray>()      // indices [vectors]
      .Ret<ffi::AnyBuffer>()  // out [batch, L, H, Dv]
      .Ret<ffi::AnyBuffer>()  // lse [batch, L, H]
      .Attr<int64_t>("vector_length")
      .Attr<double>("scale")
      .Attr<bool>("is_causal")
      .Attr<int64_t>("chunk_nonzeros")
      .Attr<bool>("pack");
}

auto BindBackward() {
  return ffi::Ffi::Bind()
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
      .Arg<IndexArray>()      // offsets [ceil(L / V) + 1]
      .Arg<IndexArray>()      // indices [vectors]
      .Ret<ffi::AnyBuffer>()  // dq [batch, L, H, D]
      .Ret<ffi::AnyBuffer>()  // dk [batch, S, Hk, D]
      .Ret<ffi::AnyBuffer>()  // dv [batch, S, Hk, Dv]
      .Ret<ffi::AnyBuffer>()  // dbias [batch, H, ...] or [1, 0]
      .Attr<int64_t>("vector_length")
      .Attr<double>("scale")
      .Attr<bool>("is_causal")
      .Attr<bool>("wrt_bias")
      .Attr<int64_t>("pieces")
      .Attr<bool>("pack");
}

}  // namespace

extern "C" XLA_FFI_Error* AttentionFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, AttentionHandler<false>, BindAttention>(frame, "key_pieces");
}

extern "C" XLA_FFI_Error* AttentionOctetFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, AttentionHandler<true>, BindAttention>(frame, "key_pieces");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardFfi, BackwardHandler<false>, BindBackward());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardOctetFfi, BackwardHandler<true>, BindBackward());

}  // namespace sgap
