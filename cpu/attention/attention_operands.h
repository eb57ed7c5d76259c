// The operands that both handlers of attention have: checked, described, K and V placed.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/structure.h"

namespace sgap {

constexpr int64_t kCopyBytes = 64 << 10;  // of one task
constexpr int64_t kHeldBytes = 1 << 20;   // of copies and sums, for each thread
constexpr int64_t kExpWork = 16;          // multiply-adds that take as long as one exponential

// The operands that both directions have.
struct Operands {
  xla::ffi::AnyBuffer q, k, v, bias, lengths, offsets, indices;
  int64_t vector_length;
};

// What a call owns of them: a structure that is valid, and a bias of that.
struct StructureAndBias {
  ValidStructure structure;
  std::unique_ptr<char[]> bias;
};

inline xla::ffi::DataType WideType(xla::ffi::DataType type) {
  return type == xla::ffi::F64 ? xla::ffi::F64 : xla::ffi::F32;
}

// An array that may be absent: [1, 0].
inline bool Absent(xla::ffi::AnyBuffer buffer) {
  return buffer.dimensions().size() == 2 && buffer.dimensions()[1] == 0;
}

// Empty where `buffer` has one batch element or `batch` of them, of `size` elements in all.
inline std::string BadBatch(const char* name, xla::ffi::AnyBuffer buffer, int64_t batch) {
  const int64_t got = buffer.dimensions()[0];
  if (got == 1 || got == batch) return "";
  return std::string(name) + ": expected a batch of 1 or " + std::to_string(batch) + ", got " +
         std::to_string(got);
}

inline int64_t BatchStride(xla::ffi::AnyBuffer buffer) {
  const int64_t batch = buffer.dimensions()[0];
  return batch <= 1 ? 0 : int64_t(buffer.element_count()) / batch;
}

inline std::string Check(const Operands& in, int64_t batch) {
  const xla::ffi::DataType type = in.q.element_type();
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
  if (!(error = Mismatch("indices", in.indices, xla::ffi::S32, {kAnySize})).empty()) return error;
  const int64_t blocks = (rows + in.vector_length - 1) / in.vector_length;
  if (!(error = Mismatch("offsets", in.offsets, xla::ffi::S32, {blocks + 1})).empty()) return error;
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
    if (!(error = Mismatch("lengths", in.lengths, xla::ffi::S32, {kAnySize, 1})).empty())
      return error;
  }
  if (!(error = BadBatch("q", in.q, batch)).empty()) return error;
  if (!(error = BadBatch("k", in.k, batch)).empty()) return error;
  if (!(error = BadBatch("v", in.v, batch)).empty()) return error;
  if (!(error = BadBatch("bias", in.bias, batch)).empty()) return error;
  return BadBatch("lengths", in.lengths, batch);
}

inline AttentionProblem Describe(const Operands& in, int64_t batch, double scale, bool is_causal,
                                 StructureAndBias* owned) {
  AttentionProblem out{};
  out.dtype = *ToDtype(in.q.element_type());
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
  const int64_t blocks = in.offsets.dimensions()[0] - 1;
  owned->structure =
      ValidStructure({Ints(in.offsets), Ints(in.indices), nullptr, blocks, out.vectors, out.keys});
  out.offsets = owned->structure.view().offsets;
  out.indices = owned->structure.view().indices;
  if (const CompactStructure* compact = owned->structure.compact(); compact && out.bias) {
    const size_t vector = size_t(out.length) * AccumulatorBytes(out.dtype);
    const auto shape = in.bias.dimensions();
    owned->bias = TakeEntries(out.bias, shape[0] * shape[1], vector, *compact);
    out.bias = owned->bias.get();
  }
  return out;
}

// Key heads of a group, each of which takes `bytes` of memory and has `tasks` that can run at once:
// few of them, but work for `threads`. Results do not depend on it.
inline int64_t GroupSize(const AttentionProblem& problem, int64_t bytes, int64_t tasks,
                         int64_t threads) {
  constexpr int64_t kTasks = 4;  // of a thread: they end at about the same time
  const int64_t all = problem.batch * problem.key_heads;
  const int64_t fit = threads * kHeldBytes / std::max<int64_t>(bytes, 1);
  const int64_t busy = (kTasks * threads + tasks - 1) / std::max<int64_t>(tasks, 1);
  return std::clamp<int64_t>(std::max(fit, busy), 1, std::max<int64_t>(all, 1));
}

// Keys or values that all batch elements share are copied once: in one group, then.
inline bool SharesKeys(const Operands& in, int64_t batch) {
  return batch > 1 && (in.k.dimensions()[0] == 1 || in.v.dimensions()[0] == 1);
}

// Key heads of a group that have rows of their own in x.
inline int64_t Slots(const AttentionProblem& problem, xla::ffi::AnyBuffer x) {
  const bool shared = BatchStride(x) == 0 && problem.batch > 1;
  return shared ? problem.key_heads : problem.group;
}

// Bytes of the copies of a group's keys and values.
inline int64_t CopiesBytes(const Operands& in, const AttentionProblem& problem) {
  const int64_t row = Slots(problem, in.k) * problem.padded_depth +
                      Slots(problem, in.v) * problem.padded_value_depth;
  return problem.keys * row * int64_t(AccumulatorBytes(problem.dtype));
}

// Bytes of the keys and values of one head in accumulators.
inline int64_t HeadBytes(const AttentionProblem& problem) {
  const int64_t row = problem.padded_depth + problem.padded_value_depth;
  return problem.keys * row * int64_t(AccumulatorBytes(problem.dtype));
}

// Sets how K and V are read: where they are, or from copies of a group's in the CopiesBytes at
// `memory`.
inline void PlaceKeys(const Operands& in, char* memory, AttentionProblem* out) {
  const auto rows = [&](xla::ffi::AnyBuffer x, int64_t padded, char* copies) {
    const int64_t slots = copies ? Slots(*out, x) : 0;
    return KeyRows{x.untyped_data(), x.dimensions()[3], padded, BatchStride(x), copies, slots};
  };
  const int64_t element = int64_t(AccumulatorBytes(out->dtype));
  const int64_t k_bytes = Slots(*out, in.k) * out->keys * out->padded_depth * element;
  out->k = rows(in.k, out->padded_depth, memory);
  out->v = rows(in.v, out->padded_value_depth, memory ? memory + k_bytes : nullptr);
  const int64_t row = std::max<int64_t>(out->padded_depth, out->padded_value_depth) * element;
  out->copy_rows = std::max<int64_t>(1, kCopyBytes / std::max<int64_t>(1, row));
  out->copy_chunks = (out->keys + out->copy_rows - 1) / out->copy_rows;
}

// Tasks of each phase: in each group copying, then `phases` phases of `tasks` for each key head.
inline std::vector<int64_t> PhasesOfGroups(const AttentionProblem& problem, int64_t phases,
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
inline std::string CannotRead(const AttentionProblem& problem) {
  const bool narrow = problem.dtype == Dtype::kBFloat16 || problem.dtype == Dtype::kFloat16;
  const bool ragged =
      problem.depth != problem.padded_depth || problem.value_depth != problem.padded_value_depth;
  return narrow || ragged ? "pack: these K and V can be read only where they are packed" : "";
}

inline int64_t MultiplyAdds(const AttentionProblem& problem) {
  const int64_t scores = problem.batch * problem.heads * (problem.vectors + 1) * problem.length;
  return scores * (problem.depth + problem.value_depth + kExpWork);
}

}  // namespace sgap
