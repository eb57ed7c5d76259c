// The operands that the handlers of attention have in common: checked, and described to the
// kernels.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/structure.h"

namespace sgap::attention {

namespace ffi = xla::ffi;

// The sequences and heads of keys that a structure is for: some of all sequences with all heads, or
// some heads of one.
struct Window {
  int64_t first, batch;
  int64_t first_key_head, key_heads;

  bool IsFirst() const { return first == 0 && first_key_head == 0; }
};

// The operands and attributes of ScoreTerms.
struct TermOperands {
  ffi::AnyBuffer slopes, table, query_segments, key_segments, offset, seeds;
  double softcap;
  int64_t kept;
  double keep_scale;
};

using Terms = std::optional<TermOperands>;

// The operands that both directions have, and which kernels they are for.
struct Operands {
  ffi::AnyBuffer q, k, v, bias, lengths, offsets, indices;
  int64_t vector_length;
  bool octets;
  int64_t block_width;  // 0: indices are of keys, not of blocks of them
  Window window;
  const Terms& terms;

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

// What a call owns of its operands: a valid structure, the rows that see each of its blocks, and
// the bias at its vectors.
struct StructureAndBias {
  ValidStructure structure;
  std::vector<int32_t> block_offsets, block_rows;
  std::unique_ptr<char[]> bias;
};

// Lists the rows of a valid structure that see each of its blocks, in their order.
inline void ListBlockRows(const Structure& structure, StructureAndBias* owned) {
  const int32_t *offsets = structure.offsets, *indices = structure.indices;
  std::vector<int32_t>& places = owned->block_offsets;
  places.assign(structure.size + 1, 0);
  owned->block_rows.resize(offsets[structure.rows]);
  for (int64_t p = 0; p < offsets[structure.rows]; ++p) ++places[indices[p]];
  int32_t end = 0;
  for (int32_t& place : places) place = end += place;
  for (int64_t row = structure.rows - 1; row >= 0; --row) {  // from the back: places become begins
    for (int64_t p = offsets[row]; p < offsets[row + 1]; ++p) {
      owned->block_rows[--places[indices[p]]] = int32_t(row);
    }
  }
}

inline ffi::DataType WideType(ffi::DataType type) { return type == ffi::F64 ? ffi::F64 : ffi::F32; }

// Whether an optional array is absent: [1, 0].
inline bool Absent(ffi::AnyBuffer buffer) {
  return buffer.dimensions().size() == 2 && buffer.dimensions()[1] == 0;
}

// Empty where `buffer` has one batch element or `batch` of them.
inline std::string BadBatch(const char* name, ffi::AnyBuffer buffer, int64_t batch) {
  const int64_t got = buffer.dimensions()[0];
  if (got == 1 || got == batch) return "";
  return std::string(name) + ": expected a batch of 1 or " + std::to_string(batch) + ", got " +
         std::to_string(got);
}

inline int64_t BatchStride(ffi::AnyBuffer buffer) {
  const int64_t batch = buffer.dimensions()[0];
  return batch <= 1 ? 0 : int64_t(buffer.element_count()) / batch;
}

// Empty for terms that fit the other operands.
inline std::string CheckTerms(const Operands& in, int64_t batch) {
  if (!in.terms) return "";
  const TermOperands& terms = *in.terms;
  const ffi::DataType wide = WideType(in.q.element_type());
  const int64_t rows = in.q.dimensions()[1], heads = in.q.dimensions()[2];
  std::string error;
  const auto expect = [&](const char* name, ffi::AnyBuffer buffer, ffi::DataType type,
                          std::initializer_list<int64_t> shape) {
    if (!error.empty() || Absent(buffer)) return;
    error = Mismatch(name, buffer, type, shape);
    if (error.empty()) error = BadBatch(name, buffer, batch);
  };
  expect("slopes", terms.slopes, wide, {kAnySize, heads, 1});
  expect("table", terms.table, wide, {kAnySize, heads, kAnySize});
  expect("query_segments", terms.query_segments, ffi::S32, {kAnySize, rows});
  expect("key_segments", terms.key_segments, ffi::S32, {kAnySize, in.k.dimensions()[1]});
  expect("offset", terms.offset, ffi::S32, {kAnySize, 1});
  expect("seeds", terms.seeds, ffi::U32, {kAnySize, heads, 2});
  if (!error.empty()) return error;
  if (!Absent(terms.table)) {
    const int64_t range = terms.table.dimensions()[2];
    if (range < 1 || range > INT32_MAX / 2) return "table: expected from 1 to 2^30 distances";
  }
  if (!(terms.softcap >= 0)) return "softcap: expected at least 0";
  if (terms.kept < 0 || terms.kept > UINT32_MAX) return "kept: expected a number below 2^32";
  return "";
}

inline std::string Check(const Operands& in, int64_t batch) {
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
  if (in.block_width > 0) {
    if (in.vector_length > kMostBlockRows) return "expected blocks of at most 32 rows";
    for (const int64_t depth : {in.q.dimensions()[3], in.v.dimensions()[3]}) {
      if (depth > kMostBlockDepth) return "expected heads of at most 256 numbers";
    }
    if (!Absent(in.bias) || in.terms) return "bias: expected none where indices are of blocks";
  }
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
  if (!(error = BadBatch("lengths", in.lengths, batch)).empty()) return error;
  return CheckTerms(in, batch);
}

inline ScoreTerms DescribeTerms(const Operands& in) {
  ScoreTerms out{};
  if (!in.terms) return out;
  const TermOperands& terms = *in.terms;
  out.any = true;
  out.softcap = terms.softcap;
  const auto place = [&](ffi::AnyBuffer buffer, int64_t head, int64_t size, auto* to,
                         int64_t* stride) {
    if (Absent(buffer)) return;
    *to = reinterpret_cast<std::remove_pointer_t<decltype(to)>>(in.From(buffer, head, size));
    *stride = BatchStride(buffer);
  };
  const int64_t first = in.FirstHead();
  out.range = Absent(terms.table) ? 0 : terms.table.dimensions()[2];
  place(terms.slopes, first, 1, &out.slopes, &out.slopes_stride);
  place(terms.table, first, out.range, &out.table, &out.table_stride);
  place(terms.query_segments, 0, 0, &out.query_segments, &out.query_segments_stride);
  if (out.query_segments) {
    place(terms.key_segments, 0, 0, &out.key_segments, &out.key_segments_stride);
    if (!out.key_segments) out.query_segments = nullptr;  // there are no keys
  }
  place(terms.offset, 0, 0, &out.offset, &out.offset_stride);
  place(terms.seeds, first, 2, &out.seeds, &out.seeds_stride);
  out.kept = uint32_t(terms.kept);
  out.keep_scale = terms.keep_scale;
  return out;
}

// Bytes of a number of the copies of K and V.
inline int64_t CopiedBytes(const AttentionProblem& problem, bool octets) {
  return int64_t(octets ? sizeof(BFloat16) : AccumulatorBytes(problem.dtype));
}

inline AttentionProblem Describe(const Operands& in, double scale, bool is_causal,
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
  out.terms = DescribeTerms(in);
  const int64_t rows = in.offsets.dimensions()[0] - 1, width = in.block_width;
  const int64_t columns = width > 0 ? out.keys / width + (out.keys % width != 0) : out.keys;
  owned->structure =
      ValidStructure({Ints(in.offsets), Ints(in.indices), nullptr, rows, out.vectors, columns});
  out.offsets = owned->structure.view().offsets;
  out.indices = owned->structure.view().indices;
  if (width > 0) {
    ListBlockRows(owned->structure.view(), owned);
    out.blocks = {width, columns, owned->block_offsets.data(), owned->block_rows.data(),
                  0,     nullptr};
  }
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

}  // namespace sgap::attention
