// FFI targets sgap_attention_cvs_v1 and sgap_attention_backward_cvs_v1, the two of matrix tiles,
// and those with more terms (v2): first how keys, values and sums are placed, then the two
// directions, then the handlers.
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/attention/attention_operands.h"
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
using namespace attention;

constexpr int64_t kCopyBytes = 64 << 10;  // of one task
constexpr int64_t kHeldBytes = 1 << 20;   // of copies and sums, for each thread
constexpr int64_t kExpWork = 16;          // multiply-adds that take as long as one exponential

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
                         int64_t chunk_nonzeros, int64_t key_pieces, bool pack,
                         const Terms& terms) {
  const Operands in{q,       k,      v,    bias, lengths, offsets, indices, vector_length,
                    kOctets, window, terms};
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
                        const TermGradients& of_terms) {
  const Operands in{q,       k,      v,    bias, lengths, offsets, indices, vector_length,
                    kOctets, window, terms};
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
  const bool partial = pieces > 1 && element != ffi::ByteWidth(type);
  const int64_t dq_bytes = partial ? q_rows * args.padded_depth * int64_t(element) : 0;
  const int64_t delta_bytes = q_rows * int64_t(element);
  const int64_t bytes = sum_bytes + dq_bytes + delta_bytes + args.keys;
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
  if (call->dbias || args.term_sums) phases.push_back(1);
  const auto kernel = kOctets ? Kernels().AttentionBackwardOctet : Kernels().AttentionBackward;
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
  const auto entries = int64_t(indices.element_count());
  return RunEach(threads, batch == 0 ? 0 : structures, entries, [&](const Pool& pool, int64_t i) {
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
ffi::Future AnyAttention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k,
                         ffi::AnyBuffer v, ffi::AnyBuffer bias, ffi::AnyBuffer sinks,
                         ffi::AnyBuffer lengths, IndexArray offsets, IndexArray indices,
                         ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                         int64_t vector_length, double scale, bool is_causal,
                         int64_t chunk_nonzeros, bool pack, std::optional<int64_t> key_pieces,
                         const Terms& terms) {
  return EachWindow(
      threads, "attention", k, offsets, indices, *out,
      [&](const Pool& pool, const Window& window, IndexArray offsets, IndexArray indices) {
        return RunAttention<kOctets>(pool, window, q, k, v, bias, sinks, lengths, offsets, indices,
                                     out, lse, vector_length, scale, is_causal, chunk_nonzeros,
                                     key_pieces.value_or(1), pack, terms);
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

// What the targets with terms have beside the others: arrays, which come before the structure,
// results, which come last, and attributes.
template <bool kTerms, typename Binding>
decltype(auto) WithTermArrays(Binding&& bound) {
  if constexpr (!kTerms) {
    return std::move(bound);
  } else {
    return std::move(bound)
        .template Arg<ffi::AnyBuffer>()   // slopes [batch or 1, H, 1]
        .template Arg<ffi::AnyBuffer>()   // table [batch or 1, H, range]
        .template Arg<ffi::AnyBuffer>()   // query_segments [batch or 1, L]
        .template Arg<ffi::AnyBuffer>()   // key_segments [batch or 1, S]
        .template Arg<ffi::AnyBuffer>()   // offset [batch or 1, 1]
        .template Arg<ffi::AnyBuffer>();  // seeds [batch or 1, H, 2]
  }
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

template <bool kTerms, typename Binding>
decltype(auto) WithTermNumbers(Binding&& bound) {
  if constexpr (!kTerms) {
    return std::move(bound);
  } else {
    return std::move(bound)
        .template Attr<double>("softcap")
        .template Attr<int64_t>("kept")
        .template Attr<double>("keep_scale");
  }
}

template <bool kTerms>
auto BindAttention() {
  auto arrays = ffi::Ffi::Bind()
                    .Ctx<ffi::ThreadPool>()
                    .Arg<ffi::AnyBuffer>()   // q [batch or 1, L, H, D]
                    .Arg<ffi::AnyBuffer>()   // k [batch or 1, S, Hk, D]
                    .Arg<ffi::AnyBuffer>()   // v [batch or 1, S, Hk, Dv]
                    .Arg<ffi::AnyBuffer>()   // bias [batch or 1, H or 1, ...]
                    .Arg<ffi::AnyBuffer>()   // sinks [batch or 1, H]
                    .Arg<ffi::AnyBuffer>();  // lengths [batch or 1, 1]
  auto all = WithTermArrays<kTerms>(std::move(arrays))
                 .template Arg<IndexArray>()      // offsets [ceil(L / V) + 1]
                 .template Arg<IndexArray>()      // indices [vectors]
                 .template Ret<ffi::AnyBuffer>()  // out [batch, L, H, Dv]
                 .template Ret<ffi::AnyBuffer>()  // lse [batch, L, H]
                 .template Attr<int64_t>("vector_length")
                 .template Attr<double>("scale")
                 .template Attr<bool>("is_causal")
                 .template Attr<int64_t>("chunk_nonzeros");
  return WithTermNumbers<kTerms>(std::move(all)).template Attr<bool>("pack");
}

template <bool kTerms>
auto BindBackward() {
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
  auto all = WithTermResults<kTerms>(std::move(results))
                 .template Attr<int64_t>("vector_length")
                 .template Attr<double>("scale")
                 .template Attr<bool>("is_causal")
                 .template Attr<bool>("wrt_bias")
                 .template Attr<int64_t>("pieces");
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardFfi, BackwardHandler<false>, BindBackward<false>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardOctetFfi, BackwardHandler<true>,
                              BindBackward<false>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionTermsFfi, TermsHandler,
                              BindAttention<true>().Attr<int64_t>("key_pieces"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackwardTermsFfi, BackwardTermsHandler,
                              BindBackward<true>());

}  // namespace sgap
