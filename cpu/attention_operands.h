// The operands that both handlers of attention have: checked, described, K and V placed.
#pragma once

#include <algorithm>
#include <string>

#include "attention.h"
#include "ffi_arguments.h"

namespace sgap {

constexpr int64_t kPackBytes = 64 << 10;  // of one task
constexpr int64_t kExpWork = 16;          // multiply-adds that take as long as one exponential

// The operands that both directions have.
struct Operands {
  xla::ffi::AnyBuffer q, k, v, bias, lengths, offsets, indices;
  int64_t vector_length;
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

inline AttentionProblem Describe(const Operands& in, int64_t batch, double scale, bool is_causal) {
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
inline int64_t PackedSize(xla::ffi::AnyBuffer x, int64_t padded) {
  return x.dimensions()[0] * x.dimensions()[1] * x.dimensions()[2] * padded;
}

// How the kernel reads the heads of x: where they are, or packed to `packed`.
inline HeadRows Rows(xla::ffi::AnyBuffer x, int64_t padded, void* packed, HeadPacking* packing,
                     int64_t* tasks) {
  const auto shape = x.dimensions();
  const int64_t rows = shape[1], heads = shape[2], depth = shape[3];
  if (!packed) {
    return {x.untyped_data(), heads * depth, depth, BatchStride(x)};
  }
  const int64_t chunk = std::max<int64_t>(1, kPackBytes / std::max<int64_t>(1, heads * padded * 4));
  const int64_t chunks = (rows + chunk - 1) / chunk;
  *packing = {x.untyped_data(), packed, rows, heads, depth, padded, chunk, chunks};
  *tasks = shape[0] * chunks;
  return {packed, padded, rows * padded, shape[0] == 1 ? 0 : heads * rows * padded};
}

// Sets how K and V are read, packed into `memory` where that is not null.
inline void PlaceKeys(const Operands& in, char* memory, AttentionProblem* out) {
  const int64_t k_bytes =
      PackedSize(in.k, out->padded_depth) * int64_t(AccumulatorBytes(out->dtype));
  char* v_memory = memory ? memory + k_bytes : nullptr;
  out->k = Rows(in.k, out->padded_depth, memory, &out->pack_k, &out->pack_k_tasks);
  out->v = Rows(in.v, out->padded_value_depth, v_memory, &out->pack_v, &out->pack_v_tasks);
}

inline size_t PackedBytes(const Operands& in, const AttentionProblem& problem) {
  const int64_t elements =
      PackedSize(in.k, problem.padded_depth) + PackedSize(in.v, problem.padded_value_depth);
  return size_t(elements) * AccumulatorBytes(problem.dtype);
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
