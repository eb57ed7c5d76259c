// What the handlers of row reductions and of softmax share: entries as vectors of length 1, checks,
// and the plan of a call's phases.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/partition.h"
#include "cpu/common/structure.h"
#include "cpu/row_reduce/row_reduce.h"
#include "xla/ffi/api/ffi.h"

namespace sgap {

// The shape of values [batch, vectors, V] (rank 3) or of entries, [batch, nnz] (rank 2, V = 1);
// `rows` is m.
struct VectorShape {
  size_t rank;
  int64_t rows, vectors, length;

  int64_t BlockRows() const { return (rows + length - 1) / length; }
  int64_t Numbers() const { return vectors * length; }
};

// The shape that buffers claim; CheckVectors says whether they have it. Targets of vectors have an
// attribute `rows`, which shapes do not tell where the last block row is not full; those of entries
// have none.
inline VectorShape ClaimedShape(xla::ffi::AnyBuffer values, xla::ffi::AnyBuffer offsets,
                                std::optional<int64_t> rows) {
  const auto shape = values.dimensions(), ends = offsets.dimensions();
  if (!rows) return {2, ends.size() == 1 ? ends[0] - 1 : 0, shape.size() == 2 ? shape[1] : 0, 1};
  const bool vectors = shape.size() == 3;
  return {3, *rows, vectors ? shape[1] : 0, vectors ? shape[2] : 0};
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

// Vectors of `length` values in a task of about chunk_nonzeros values.
inline int64_t ChunkOfVectors(int64_t chunk_nonzeros, int64_t length) {
  return chunk_nonzeros > length ? chunk_nonzeros / length : 1;
}

// Owns what the RowPhases of a call point to, until its last task is done.
struct RowPlan {
  ValidOffsets offsets;
  RowPartition partition;
  std::vector<RowTask> piece_tasks;
  std::vector<double> partials, totals;

  // `vectors` vectors in block rows of `length` rows each, `rows` rows in all; a task takes about
  // chunk_nonzeros values.
  RowPhases Cut(const int32_t* given, int64_t rows, int64_t length, int64_t vectors, int64_t batch,
                int64_t chunk_nonzeros) {
    const int64_t block_rows = (rows + length - 1) / length;
    offsets = ValidOffsets(given, block_rows, vectors);
    const int64_t chunk = ChunkOfVectors(chunk_nonzeros, length);
    partition = PartitionRows(offsets.data(), block_rows, chunk, chunk);
    for (const RowTask& task : partition.tasks) {
      if (task.piece >= 0) piece_tasks.push_back(task);
    }
    partials.resize(size_t(batch) * partition.pieces * 2 * length);
    totals.resize(size_t(batch) * partition.splits.size() * 2 * length);
    RowPhases phases;
    phases.offsets = offsets.data();
    phases.rows = rows;
    phases.length = length;
    phases.tasks = partition.tasks.data();
    phases.row_tasks = static_cast<int64_t>(partition.tasks.size());
    phases.splits = partition.splits.data();
    phases.split_rows = static_cast<int64_t>(partition.splits.size());
    phases.piece_tasks = piece_tasks.data();
    phases.pieces = partition.pieces;
    phases.batch = batch;
    phases.partials = partials.data();
    phases.totals = totals.data();
    return phases;
  }
};

// The number of tasks of each phase. Without `write` the pieces have nothing to do once they are
// combined.
inline std::vector<int64_t> PhaseTasks(const RowPhases& phases, bool write) {
  return {phases.batch * phases.row_tasks, phases.batch * phases.split_rows,
          write ? phases.batch * phases.pieces : 0};
}

}  // namespace sgap
