// What the handlers of operations on rows share: entries as vectors of one number, and the checks.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/common/ffi_arguments.h"
#include "xla/ffi/api/ffi.h"

namespace sgap {

// What values [batch, vectors, V] are: `rows` is m. Entries are values [batch, nnz], with V = 1.
struct VectorShape {
  size_t rank;
  int64_t rows, vectors, length;

  int64_t BlockRows() const { return (rows + length - 1) / length; }
  int64_t Numbers() const { return vectors * length; }
};

// The shapes that buffers claim; CheckVectors says whether they have them.
inline VectorShape OfEntries(xla::ffi::AnyBuffer values, xla::ffi::AnyBuffer offsets) {
  const auto shape = values.dimensions(), ends = offsets.dimensions();
  return {2, ends.size() == 1 ? ends[0] - 1 : 0, shape.size() == 2 ? shape[1] : 0, 1};
}

inline VectorShape OfVectors(xla::ffi::AnyBuffer values, int64_t rows) {
  const auto shape = values.dimensions();
  const bool vectors = shape.size() == 3;
  return {3, rows, vectors ? shape[1] : 0, vectors ? shape[2] : 0};
}

// Empty where values and offsets are those of `shape`.
inline std::string CheckVectors(const char* name, const VectorShape& shape,
                                xla::ffi::AnyBuffer values, xla::ffi::AnyBuffer offsets,
                                int64_t chunk_nonzeros) {
  namespace ffi = xla::ffi;
  std::string error = BadChunk(chunk_nonzeros);
  if (!error.empty()) return error;
  const ffi::DataType type = values.element_type();
  if (!ToDtype(type)) {
    return std::string(name) + ": expected float32, float64, bfloat16 or float16";
  }
  error = shape.rank == 2 ? Mismatch(name, values, type, {kAnySize, kAnySize})
                          : Mismatch(name, values, type, {kAnySize, kAnySize, kAnySize});
  if (!error.empty()) return error;
  if (!(error = BadLength(shape.length)).empty()) return error;
  if (!(error = Mismatch("offsets", offsets, ffi::S32, {kAnySize})).empty()) return error;
  if (offsets.dimensions()[0] < 1) return "offsets: expected at least one element, got 0";
  if (shape.rows < 0 || offsets.dimensions()[0] - 1 != shape.BlockRows()) {
    return "offsets: expected one for each of the block rows of " + std::to_string(shape.rows) +
           " rows in vectors of " + std::to_string(shape.length) + ", and one more, got " +
           std::to_string(offsets.dimensions()[0]);
  }
  return "";
}

}  // namespace sgap
