// Index arrays that nobody has checked, or that something has changed since: a call looks at them
// as it goes, and where they are not valid it runs on those entries that take part.
//
// A task looks at the indices of its entries just before it reads them, so that they come from the
// cache when it does. The first one that finds a wrong index ends the attempt, and what comes after
// the last task begins the call anew, on a compact copy of the structure.
//
// What counts: row r has the entries o[r] .. o[r + 1] - 1, where o[r] is the greatest of
// offsets[0 .. r], each clamped to 0 .. nnz. An entry takes part if its index is in 0 .. size - 1
// and its permutation, where there is one, in 0 .. nnz - 1.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "isa.h"
#include "parallel.h"

namespace sgap {

struct Structure {
  const int32_t* offsets;      // [rows + 1]
  const int32_t* indices;      // [nnz]
  const int32_t* permutation;  // [nnz], or null
  int64_t rows, nnz, size;

  bool OffsetsHold() const { return Kernels().offsets_hold(offsets, rows, nnz); }

  // Whether all of the entries [begin, end) take part.
  bool EntriesHold(int64_t begin, int64_t end) const {
    const auto holds = Kernels().indices_hold;
    return holds(indices + begin, end - begin, size) &&
           (!permutation || holds(permutation + begin, end - begin, nnz));
  }
};

// The greatest of offsets[0 .. i], each clamped to 0 .. nnz, for every i.
void MakeValid(const int32_t* offsets, int64_t count, int64_t nnz, int32_t* out);

// The entries of a structure that take part, moved together. Entry p of it was entry entries[p], or
// permutation[that] where there is a permutation; arrays are as long as those of the structure.
struct CompactStructure {
  std::vector<int32_t> offsets, indices, entries;

  explicit CompactStructure(const Structure& given);

  Structure View(const Structure& given) const {
    return {offsets.data(), indices.data(), entries.data(), given.rows, given.nnz, given.size};
  }
};

// What an operand [batch, nnz, bytes] holds for the compacted entries; null for a null one.
std::unique_ptr<char[]> TakeEntries(const void* operand, int64_t batch, size_t bytes,
                                    const std::vector<int32_t>& entries);

// A result [batch, nnz, bytes] of compacted entries, where those were; zero everywhere else.
void PutEntries(const char* compact, int64_t batch, size_t bytes, const CompactStructure& structure,
                void* result);

// Runs the call that begin(structure, compact, threads) makes; `compact` is null where the
// structure is as given. A call has `tasks` and `work`, Run(task), Entries(task), which is the
// range of entries that a task reads, and Finish(), for a compact one. `begin` outlives the
// handler.
template <typename Begin>
xla::ffi::Future RunOnStructure(xla::ffi::ThreadPool& pool, const Structure& given, Begin begin) {
  if (!given.OffsetsHold()) {
    const auto compact = std::make_shared<CompactStructure>(given);
    const auto call = begin(compact->View(given), compact.get(), int64_t(pool.num_threads()));
    return ParallelPhases(pool, {call->tasks, 1}, call->work, [call, compact](int64_t task) {
      task < call->tasks ? call->Run(task) : call->Finish(*compact);
    });
  }
  struct Attempt {
    decltype(begin(given, nullptr, int64_t(1))) call;
    std::atomic<bool> failed{false};
  };
  const auto attempt = std::make_shared<Attempt>();
  attempt->call = begin(given, nullptr, int64_t(pool.num_threads()));
  const auto run = [attempt, given, begin](int64_t task) {
    const auto& call = attempt->call;
    if (task < call->tasks) {
      if (attempt->failed.load(std::memory_order_relaxed)) return;
      const std::pair<int64_t, int64_t> entries = call->Entries(task);
      if (given.EntriesHold(entries.first, entries.second)) {
        call->Run(task);
      } else {
        attempt->failed.store(true, std::memory_order_relaxed);
      }
    } else if (attempt->failed.load(std::memory_order_relaxed)) {
      const CompactStructure compact(given);
      const auto again = begin(compact.View(given), &compact, int64_t(1));
      for (int64_t i = 0; i < again->tasks; ++i) again->Run(i);
      again->Finish(compact);
    }
  };
  return ParallelPhases(pool, {attempt->call->tasks, 1}, attempt->call->work, run);
}

// A structure that was looked at as a whole, for calls that take long next to that: the given one,
// or a compact copy.
class ValidStructure {
 public:
  ValidStructure() = default;
  explicit ValidStructure(const Structure& given) : view_(given) {
    if (given.OffsetsHold() && given.EntriesHold(0, given.offsets[given.rows])) return;
    compact_ = std::make_unique<CompactStructure>(given);
    view_ = compact_->View(given);
  }

  const Structure& view() const { return view_; }
  const CompactStructure* compact() const { return compact_.get(); }

 private:
  Structure view_ = {};
  std::unique_ptr<CompactStructure> compact_;
};

// Offsets that are valid: the given ones, or a copy.
class ValidOffsets {
 public:
  ValidOffsets() = default;
  ValidOffsets(const int32_t* offsets, int64_t rows, int64_t nnz) : data_(offsets) {
    if (Kernels().offsets_hold(offsets, rows, nnz)) return;
    copy_.resize(rows + 1);
    MakeValid(offsets, rows + 1, nnz, copy_.data());
    copy_[0] = 0;
    data_ = copy_.data();
  }

  const int32_t* data() const { return data_; }

 private:
  const int32_t* data_ = nullptr;
  std::vector<int32_t> copy_;
};

}  // namespace sgap
