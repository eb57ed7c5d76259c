// Index arrays that nobody has checked, or that something has changed since: a call looks at them
// as it goes, and where they are not valid it runs on those entries that take part.
//
// A task looks at the indices of its entries just before it reads them, so that they come from the
// cache when it does; pieces of a task, looked at one by one, took longer (measured on Zen 4). The
// first task that finds a wrong index ends the attempt: those that follow do nothing, and then the
// threads run the whole call again, on a compact copy of the structure. All calls look, also those
// on arrays that were checked when they were made: tree_map, psum or a restored checkpoint puts
// others in their place, and a program cannot tell.
//
// What counts: row r has the entries o[r] .. o[r + 1] - 1, where o[r] is the greatest of
// offsets[0 .. r], each clamped to 0 .. nnz. An entry takes part if its index is in 0 .. size - 1
// and its permutation, where there is one, in 0 .. nnz - 1.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"

namespace sgap {

struct Structure {
  const int32_t* offsets;      // [rows + 1]
  const int32_t* indices;      // [nnz]
  const int32_t* permutation;  // [nnz], or null
  int64_t rows, nnz, size;

  bool OffsetsHold() const { return Kernels().offsets_hold(offsets, rows, nnz); }

  // Whether all of the entries [begin, end) take part.
  bool EntriesHold(std::pair<int64_t, int64_t> entries) const {
    const auto [begin, end] = entries;
    const auto holds = Kernels().indices_hold;
    return holds(indices + begin, end - begin, size) &&
           (!permutation || holds(permutation + begin, end - begin, nnz));
  }
};

// The structure of checked index arrays, with indices in 0 .. size - 1; an empty permutation is
// none.
inline Structure StructureOf(xla::ffi::AnyBuffer offsets, xla::ffi::AnyBuffer indices,
                             xla::ffi::AnyBuffer permutation, int64_t size) {
  const int32_t* places = permutation.element_count() > 0 ? Ints(permutation) : nullptr;
  const int64_t rows = offsets.dimensions()[0] - 1, nnz = indices.dimensions()[0];
  return {Ints(offsets), Ints(indices), places, rows, nnz, size};
}

// The greatest of offsets[0 .. i], each clamped to 0 .. nnz, for every i.
void MakeValid(const int32_t* offsets, int64_t count, int64_t nnz, int32_t* out);

// The entries of a structure that take part, moved together. entries[p] is where entry p was, or
// what the permutation says there where there is one. Arrays are as long as those of the structure;
// nothing is written behind the entries that take part, offsets[rows] of them.
struct CompactStructure {
  int64_t rows, nnz;
  std::unique_ptr<int32_t[]> offsets, indices, entries;

  explicit CompactStructure(const Structure& given);

  int64_t Count() const { return offsets[rows]; }
  Structure View(const Structure& given) const {
    return {offsets.get(), indices.get(), entries.get(), given.rows, given.nnz, given.size};
  }
};

// What an operand [batch, nnz, bytes] holds for the compacted entries; null for a null one.
std::unique_ptr<char[]> TakeEntries(const void* operand, int64_t batch, size_t bytes,
                                    const CompactStructure& structure);

// A result [batch, nnz, bytes] of compacted entries, where those were; zero everywhere else.
void PutEntries(const char* compact, int64_t batch, size_t bytes, const CompactStructure& structure,
                void* result);

// Runs the call that begin(structure, compact, threads) makes; `compact` is null where the
// structure is as given. A call has `tasks` and `work`, Run(structure, task), which is false where
// an entry of the task is wrong, and Finish(), for a compact one. `begin` is copied: it runs again
// when the handler has returned.
template <typename Begin>
class StructureJob {
  using Call = decltype(std::declval<Begin>()(std::declval<Structure>(), nullptr, int64_t(1)));

 public:
  StructureJob(const Structure& given, const Begin& begin, int64_t threads)
      : given_(given), begin_(begin), threads_(threads) {
    if (given.OffsetsHold()) {
      call_ = begin(given, nullptr, threads);
    } else {
      failed_ = true;
      Compact();
    }
  }

  // The tasks of the given structure, then as many as threads: those share the tasks of the compact
  // one, where it is needed.
  std::vector<int64_t> Phases() const { return {call_ ? call_->tasks : 0, threads_}; }
  int64_t Work() const { return call_ ? call_->work : again_->work; }
  bool Failed() const { return failed_.load(std::memory_order_relaxed); }

  void Run(int64_t task) {
    if (call_ && task < call_->tasks) {
      if (!Failed() && !call_->Run(given_, task)) failed_.store(true, std::memory_order_relaxed);
      return;
    }
    if (!Failed()) return;
    {
      // Not std::call_once, which does not let exceptions through on every platform (GCC's 66146).
      const std::lock_guard<std::mutex> lock(compacting_);
      Compact();
    }
    const Structure compact = compact_->View(given_);
    for (int64_t i = next_++; i < again_->tasks; i = next_++) {
      again_->Run(compact, i);
      if (++done_ == again_->tasks) again_->Finish(*compact_);
    }
    if (again_->tasks == 0 && done_++ == 0) again_->Finish(*compact_);
  }

 private:
  // Leaves all as it was where there is no memory: another thread then tries again.
  void Compact() {
    if (compact_) return;
    auto compact = std::make_unique<CompactStructure>(given_);
    again_ = begin_(compact->View(given_), compact.get(), threads_);
    compact_ = std::move(compact);
  }

  const Structure given_;
  const Begin begin_;
  const int64_t threads_;
  std::atomic<bool> failed_{false};
  std::mutex compacting_;
  std::unique_ptr<CompactStructure> compact_;
  Call call_, again_;
  std::atomic<int64_t> next_{0}, done_{0};
};

template <typename Begin>
xla::ffi::Future RunOnStructure(const Pool& pool, const Structure& given, Begin begin) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const auto job = std::make_shared<StructureJob<Begin>>(given, begin, threads);
  return ParallelPhases(
      pool, job->Phases(), job->Work(), [job](int64_t task) { job->Run(task); },
      [job] { return job->Failed(); });
}

// A structure that was looked at as a whole, for calls that take long next to that: the given one,
// or a compact copy.
class ValidStructure {
 public:
  ValidStructure() = default;
  explicit ValidStructure(const Structure& given) : view_(given) {
    if (given.OffsetsHold() && given.EntriesHold({0, given.offsets[given.rows]})) return;
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
