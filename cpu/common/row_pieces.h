// Results by rows whose number of entries is known only when they are made, for calls outside of
// XLA. A task whose place in the result is known, since those before it are done, writes there.
// Others write to memory of their thread, one behind the other; from there their rows go to the
// result, while they are in the cache, as soon as the tasks before them are done. So the result is
// there once, and its pages are fetched from the system once. Few entries are put together when all
// are there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace sgap {

// Calls run(task, worker) for all tasks below `tasks` on up to `threads` threads, this one among
// them; workers count from 0. `run` must not throw.
void RunOnThreads(int64_t tasks, int64_t threads,
                  const std::function<void(int64_t task, int64_t worker)>& run);

// Address space that takes memory where it is written to. Some of it stays with the process for the
// next call: faults for fresh pages cost more than what is done with them.
class Pages {
 public:
  Pages() = default;
  // No data() where there is no memory.
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(Pages&& other) noexcept { *this = std::move(other); }
  Pages& operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }

  char* data() const { return data_; }
  // Gives back the memory behind the first `used` bytes.
  void Trim(size_t used);

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

struct FreeArray {
  void operator()(char* memory) const;
};

// An array on the boundary of a cache line, as JAX wants those that it does not copy: of the heap,
// or pages. No data() where there was no memory.
class ResultArray {
 public:
  ResultArray() = default;
  explicit ResultArray(size_t bytes);
  explicit ResultArray(Pages pages) : pages_(std::move(pages)) {}

  char* data() const { return heap_ ? heap_.get() : pages_.data(); }
  // Takes no more memory than the first `used` bytes need: what the region had before, for a larger
  // result, would stay as long as this one.
  void Fit(size_t used);

 private:
  std::unique_ptr<char, FreeArray> heap_;
  Pages pages_;
};

// A matrix in CSR: arrays are its indices and what else there is for each entry.
struct RowResult {
  int64_t rows = 0, entries = 0;
  ResultArray offsets;  // int32 [rows + 1]
  std::vector<ResultArray> arrays;
};

// First rows of about `tasks` tasks of like work, and after them the number of rows. `work(row)` is
// that of all rows before it; each row costs something.
template <typename Work>
std::vector<int32_t> FirstRows(int64_t rows, int64_t tasks, Work work) {
  std::vector<int32_t> first = {0};
  for (int64_t task = 1; task < tasks; ++task) {
    int64_t low = first.back(), high = rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (work(middle) < work(rows) / tasks * task) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low > first.back()) first.push_back(int32_t(low));
  }
  if (first.back() < rows || rows == 0) first.push_back(int32_t(rows));
  return first;
}

// A matrix in CSR whose arrays may hold anything. Values may be null.
struct DirectMatrix {
  const int32_t *offsets, *indices;
  const void* values;
  int64_t rows, entries, columns;
};

class RowPieces {
 public:
  // Task t has the rows from first_rows[t] on, with bounds[t] entries at most; each has `widths`
  // bytes in several arrays, the first of which are its index (4). A task may write `slack` entries
  // too many.
  RowPieces(const std::vector<int32_t>& first_rows, std::vector<size_t> widths,
            std::vector<int64_t> bounds, int64_t slack, int64_t threads);

  // Whether there was memory.
  bool Ready() const { return ready_; }
  int32_t* counts() { return counts_.data(); }  // [rows] entries, which tasks set

  // Makes room for a task, which the worker runs next. Its tasks ascend.
  void Begin(int64_t task, int64_t worker);
  // Where it writes array i.
  char* Next(int64_t worker, size_t i) const;
  // It has written its entries.
  void Wrote(int64_t task, int64_t worker);

  // Puts all rows together. False where there is no memory. There must be fewer than 2^31 entries.
  bool Join(RowResult& result);

 private:
  struct alignas(64) Worker {
    std::vector<Pages> arrays;
    int64_t entries = 0;         // in the arrays
    std::vector<int64_t> tasks;  // that they are of
    size_t moved = 0;            // tasks that are in the result
    int64_t moved_entries = 0;
    int64_t task = 0, place = 0;  // a task, and how many entries are before it
    bool in_place = false;        // whether its task writes to the result
  };
  // Whether all tasks before this one are done: then `place` is where it begins.
  bool FindsPlace(Worker& own, int64_t task) const;
  // Copies what the worker has to the result, as far as its places are known.
  void Move(Worker& own);

  const std::vector<int32_t>& first_rows_;
  const std::vector<size_t> widths_;
  const std::vector<int64_t> bounds_;
  const int64_t slack_;
  std::vector<int32_t> counts_;
  std::vector<std::atomic<int64_t>> entries_of_;  // [tasks], -1 before it is done
  std::vector<Worker> workers_;
  std::vector<ResultArray> results_;  // where they are large
  int64_t room_ = 0;                  // entries of a worker's arrays
  bool ready_ = true;
};

}  // namespace sgap
