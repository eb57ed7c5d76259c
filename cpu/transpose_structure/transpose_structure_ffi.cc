// FFI target sgap_transpose_structure_v1: the structure of the transpose, by a stable counting
// sort.
//
// For entries p of rows given by offsets, with indices[p] < size, sorted by index and those of one
// index in their order:
//   permutation[i]  the entry at place i     rows[i]  its row     transposed_offsets  of each index
// Entries that take no part (structure.h) and the padding come last, also in their order.
//
// The entries are cut into chunks. Phases: each chunk counts its entries of each index; two passes
// over blocks of indices turn counts into the places where the entries of a chunk begin; each chunk
// puts its entries there. The result does not depend on the chunks.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/parallel.h"
#include "cpu/common/structure.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kLeastChunk = 1 << 14;  // entries
constexpr int64_t kLeastBlock = 1 << 12;  // indices
constexpr int64_t kEntryWork = 64;        // of an entry, in units of ParallelPhases

class TransposeCall {
 public:
  TransposeCall(const int32_t* offsets, int64_t rows, const int32_t* indices, int64_t nnz,
                int64_t size, int64_t batch, int64_t threads, int32_t* out_offsets,
                int32_t* out_rows, int32_t* permutation)
      : rows_(rows),
        nnz_(nnz),
        size_(size),
        batch_(batch),
        indices_(indices),
        out_offsets_(out_offsets),
        out_rows_(out_rows),
        permutation_(permutation) {
    // Counts of all chunks take at most about as much memory as the entries.
    const int64_t most = std::min(nnz / kLeastChunk, 2 * nnz / (size + 1));
    chunks_ = std::clamp<int64_t>(most, 1, std::max<int64_t>(threads, 1));
    blocks_ = std::clamp<int64_t>(size / kLeastBlock, 1, chunks_);
    counts_.reset(new int32_t[batch * chunks_ * (size + 1)]);
    totals_.reset(new int64_t[batch * blocks_]);
    offsets_.resize(batch);
    starts_.resize(batch);
    for (int64_t b = 0; b < batch; ++b) {
      offsets_[b] = ValidOffsets(offsets + b * (rows + 1), rows, nnz);
      // Entries before the first row take no part; ValidOffsets' copies begin at 0.
      starts_[b] = std::clamp<int64_t>(offsets[b * (rows + 1)], 0, nnz);
    }
  }

  std::vector<int64_t> Phases() const {
    return {batch_ * chunks_, batch_ * blocks_, batch_ * blocks_, batch_ * chunks_};
  }
  int64_t Work() const { return batch_ * (nnz_ + size_) * kEntryWork; }

  void Run(int64_t task) {
    const int64_t of_chunks = batch_ * chunks_, of_blocks = batch_ * blocks_;
    if (task < of_chunks) return Count(task / chunks_, task % chunks_);
    task -= of_chunks;
    if (task < of_blocks) return Add(task / blocks_, task % blocks_);
    task -= of_blocks;
    if (task < of_blocks) return Begin(task / blocks_, task % blocks_);
    task -= of_blocks;
    Put(task / chunks_, task % chunks_);
  }

 private:
  int32_t* Counts(int64_t b, int64_t chunk) const {
    return counts_.get() + (b * chunks_ + chunk) * (size_ + 1);
  }
  int64_t FirstEntry(int64_t chunk) const { return nnz_ * chunk / chunks_; }
  int64_t FirstIndex(int64_t block) const { return size_ * block / blocks_; }

  // The bin of an index: the last one, `size`, if it is out of range.
  uint32_t Key(int32_t index) const { return std::min(uint32_t(index), uint32_t(size_)); }

  // The entries of a chunk: those before [first, last) and those behind it take no part.
  struct Chunk {
    int64_t begin, first, last, end;
  };

  Chunk ChunkOf(int64_t b, int64_t chunk) const {
    const int64_t begin = FirstEntry(chunk), end = FirstEntry(chunk + 1);
    const int64_t first = std::clamp(starts_[b], begin, end);
    return {begin, first, std::clamp<int64_t>(offsets_[b].data()[rows_], first, end), end};
  }

  void Count(int64_t b, int64_t chunk) const {
    const auto [begin, first, last, end] = ChunkOf(b, chunk);
    const int32_t* indices = indices_ + b * nnz_;
    int32_t* counts = Counts(b, chunk);
    std::fill_n(counts, size_ + 1, 0);
    counts[size_] = int32_t(first - begin + end - last);
    for (int64_t p = first; p < last; ++p) ++counts[Key(indices[p])];
  }

  void Add(int64_t b, int64_t block) {
    int64_t total = 0;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const int32_t* counts = Counts(b, chunk);
      for (int64_t i = FirstIndex(block), end = FirstIndex(block + 1); i < end; ++i)
        total += counts[i];
    }
    totals_[b * blocks_ + block] = total;
  }

  void Begin(int64_t b, int64_t block) const {
    int64_t place = 0;
    for (int64_t i = 0; i < block; ++i) place += totals_[b * blocks_ + i];
    int32_t* offsets = out_offsets_ + b * (size_ + 1);
    // The last block has the bin of those that take no part too.
    const int64_t end = block + 1 == blocks_ ? size_ + 1 : FirstIndex(block + 1);
    for (int64_t i = FirstIndex(block); i < end; ++i) {
      offsets[i] = int32_t(place);
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        int32_t& count = Counts(b, chunk)[i];
        const int32_t own = count;
        count = int32_t(place);
        place += own;
      }
    }
  }

  void Put(int64_t b, int64_t chunk) const {
    const auto [begin, first, last, end] = ChunkOf(b, chunk);
    const int32_t* indices = indices_ + b * nnz_;
    const auto none = [this](int64_t) { return uint32_t(size_); };
    PutRange(b, chunk, begin, first, none);
    PutRange(b, chunk, first, last, [this, indices](int64_t p) { return Key(indices[p]); });
    PutRange(b, chunk, last, end, none);
  }

  // Row by row, without a branch for each entry.
  template <typename KeyOf>
  void PutRange(int64_t b, int64_t chunk, int64_t begin, int64_t end, KeyOf key) const {
    int32_t *places = Counts(b, chunk), *permutation = permutation_ + b * nnz_;
    int32_t* out_rows = out_rows_ + b * nnz_;
    const int32_t* offsets = offsets_[b].data();
    int64_t p = begin;
    for (int64_t row = RowOf(offsets, begin); p < end; ++row) {
      const int64_t stop = row + 1 < rows_ ? std::min<int64_t>(offsets[row + 1], end) : end;
      for (; p < stop; ++p) {
        const int32_t place = places[key(p)]++;
        permutation[place] = int32_t(p);
        out_rows[place] = int32_t(row);
      }
    }
  }

  // The number of rows but the first that begin at or before entry p.
  int64_t RowOf(const int32_t* offsets, int64_t p) const {
    if (rows_ <= 1) return 0;
    return std::upper_bound(offsets + 1, offsets + rows_, p) - offsets - 1;
  }

  const int64_t rows_, nnz_, size_, batch_;
  const int32_t* const indices_;  // [batch, nnz]
  int32_t* const out_offsets_;    // [batch, size + 1]
  int32_t *const out_rows_, *const permutation_;
  int64_t chunks_, blocks_;
  std::unique_ptr<int32_t[]> counts_;  // [batch, chunks, size + 1], then places
  std::unique_ptr<int64_t[]> totals_;  // [batch, blocks]
  std::vector<ValidOffsets> offsets_;
  std::vector<int64_t> starts_;
};

ffi::Future TransposeStructureHandler(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> offsets,
                                      ffi::Buffer<ffi::S32> indices,
                                      ffi::Result<ffi::Buffer<ffi::S32>> out_offsets,
                                      ffi::Result<ffi::Buffer<ffi::S32>> out_rows,
                                      ffi::Result<ffi::Buffer<ffi::S32>> permutation) {
  const auto given = offsets.dimensions(), entries = indices.dimensions();
  const auto sizes = out_offsets->dimensions();
  const size_t rank = given.size();
  const auto like_entries = [entries](ffi::Span<const int64_t> shape) {
    return std::equal(shape.begin(), shape.end(), entries.begin(), entries.end());
  };
  bool alike = rank >= 1 && entries.size() == rank && sizes.size() == rank &&
               like_entries(out_rows->dimensions()) && like_entries(permutation->dimensions());
  int64_t batch = 1;
  for (size_t i = 0; alike && i + 1 < rank; ++i) {
    alike = entries[i] == given[i] && sizes[i] == given[i];
    batch *= given[i];
  }
  if (!alike || given[rank - 1] < 1 || sizes[rank - 1] < 1 || entries[rank - 1] > INT32_MAX) {
    return Failed(
        "transpose_structure: expected offsets [..., rows + 1], indices [..., nnz], and "
        "out [..., size + 1], [..., nnz], [..., nnz], got " +
        ShapeString(given) + ", " + ShapeString(entries) + " and " + ShapeString(sizes));
  }
  const auto call = std::make_shared<TransposeCall>(
      offsets.typed_data(), given[rank - 1] - 1, indices.typed_data(), entries[rank - 1],
      sizes[rank - 1] - 1, batch, pool.num_threads(), out_offsets->typed_data(),
      out_rows->typed_data(), permutation->typed_data());
  return ParallelPhases(pool, call->Phases(), call->Work(),
                        [call](int64_t task) { call->Run(task); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TransposeStructureFfi, TransposeStructureHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

}  // namespace sgap
