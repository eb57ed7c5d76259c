#include "cpu/common/row_pieces.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "cpu/common/workspace.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sgap {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSmallPages = 4 * kHugePage;  // of each region: a huge page may be mostly unused
constexpr size_t kKeptBytes = size_t(32) << 20, kKeptInAll = 2 * kKeptBytes;
constexpr size_t kLeastPages = size_t(1) << 20;  // of a result that keeps its region
constexpr size_t kMostSpace = size_t(1) << 32;   // that is kept, address space
constexpr int64_t kEntriesAtOnce = 1 << 16;      // that are put together when all are there
constexpr int64_t kLeastRoom = 1 << 16;          // entries of a worker
constexpr int64_t kPartOfRoom = 8;               // of the result, that all workers have

struct Kept {
  char* data;
  size_t bytes;
};
std::mutex mutex;
std::vector<Kept> kept;

}  // namespace

Pages::Pages(size_t bytes) {
#if defined(__linux__)
  bytes = (std::max<size_t>(bytes, 1) + kHugePage - 1) / kHugePage * kHugePage;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    Kept* least = nullptr;  // that is large enough
    for (Kept& region : kept) {
      if (region.bytes >= bytes && (!least || region.bytes < least->bytes)) least = &region;
    }
    if (least) {
      std::swap(*least, kept.back());
      data_ = kept.back().data, bytes_ = kept.back().bytes;
      kept.pop_back();
      return;
    }
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;
  data_ = static_cast<char*>(memory);
  if (bytes > kSmallPages) AdviseHugePages(data_ + kSmallPages, bytes - kSmallPages);
#else
  data_ = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
#endif
  bytes_ = bytes;
}

Pages::~Pages() {
  if (!data_) return;
#if defined(__linux__)
  if (bytes_ > kMostSpace) {
    munmap(data_, bytes_);
    return;
  }
  if (bytes_ > kKeptBytes) madvise(data_ + kKeptBytes, bytes_ - kKeptBytes, MADV_DONTNEED);
  const std::lock_guard<std::mutex> lock(mutex);
  kept.push_back({data_, bytes_});
  size_t all = 0;
  for (const Kept& region : kept) all += std::min(region.bytes, kKeptBytes);
  while (all > kKeptInAll) {
    const auto least = std::min_element(
        kept.begin(), kept.end(), [](const Kept& a, const Kept& b) { return a.bytes < b.bytes; });
    all -= std::min(least->bytes, kKeptBytes);
    munmap(least->data, least->bytes);
    *least = kept.back();
    kept.pop_back();
  }
#else
  std::free(data_);
#endif
}

void Pages::Trim(size_t used) {
#if defined(__linux__)
  constexpr size_t kPage = 4096;  // or more, where this does nothing
  used = (used + kPage - 1) / kPage * kPage;
  if (used < bytes_) madvise(data_ + used, bytes_ - used, MADV_DONTNEED);
#endif
}

void FreeArray::operator()(char* memory) const { std::free(memory); }

ResultArray::ResultArray(size_t bytes) {
  constexpr size_t kLine = 64;
  bytes = (bytes + kLine) / kLine * kLine;
  heap_.reset(static_cast<char*>(std::aligned_alloc(kLine, bytes)));
  if (heap_) AdviseHugePages(heap_.get(), bytes);
}

void ResultArray::Fit(size_t used) {
  if (heap_) return;
  if (used > kLeastPages) {
    pages_.Trim(used);
    return;
  }
  ResultArray few(used);
  if (!few.data()) return;
  std::memcpy(few.data(), pages_.data(), used);
  *this = std::move(few);
}

namespace {

// What the threads of a call share. A helper that starts when everything is taken looks at `next`
// only, so nobody waits for it: on a busy machine that would take milliseconds.
struct Shared {
  Shared(int64_t tasks, const std::function<void(int64_t, int64_t)>& run)
      : tasks(tasks), run(&run) {}

  const int64_t tasks;
  const std::function<void(int64_t, int64_t)>* const run;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable ended;

  void Work(int64_t worker) {
    for (int64_t task = next++; task < tasks; task = next++) {
      (*run)(task, worker);
      if (++done < tasks) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      ended.notify_all();
    }
  }
};

}  // namespace

void RunOnThreads(int64_t tasks, int64_t threads,
                  const std::function<void(int64_t, int64_t)>& run) {
  threads = std::min(threads, tasks);
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; ++task) run(task, 0);
    return;
  }
  const auto shared = std::make_shared<Shared>(tasks, run);
  for (int64_t i = 1; i < threads; ++i) {
    try {
      std::thread([shared, i] { shared->Work(i); }).detach();
    } catch (const std::exception&) {  // no more threads, or no memory for one: the others do it
      break;
    }
  }
  shared->Work(0);
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->ended.wait(lock, [&] { return shared->done == tasks; });
}

RowPieces::RowPieces(const std::vector<int32_t>& first_rows, std::vector<size_t> widths,
                     std::vector<int64_t> bounds, int64_t slack, int64_t threads)
    : first_rows_(first_rows),
      widths_(std::move(widths)),
      bounds_(std::move(bounds)),
      slack_(slack),
      counts_(first_rows.back()),
      entries_of_(bounds_.size()),
      workers_(std::clamp<int64_t>(int64_t(bounds_.size()), 1, threads)) {
  int64_t bound = 0, longest = 0;
  for (const int64_t own : bounds_) bound += own, longest = std::max(longest, own);
  for (std::atomic<int64_t>& entries : entries_of_) entries.store(-1, std::memory_order_relaxed);
  room_ = bound;
  if (bound > kEntriesAtOnce) {
    const auto workers = int64_t(workers_.size());
    room_ = std::min(bound, std::max({kLeastRoom, 2 * longest, bound / (kPartOfRoom * workers)}));
    for (const size_t width : widths_) {
      Pages pages(size_t(bound + slack) * width);
      ready_ = ready_ && pages.data();
      results_.emplace_back(std::move(pages));
    }
    if (workers == 1) return;  // it writes in place
  }
  for (Worker& worker : workers_) {
    worker.tasks.reserve(bounds_.size());  // a thread of RunOnThreads must not throw
    for (const size_t width : widths_) {
      worker.arrays.emplace_back(size_t(room_ + slack) * width);
      ready_ = ready_ && worker.arrays.back().data();
    }
  }
}

void RowPieces::Begin(int64_t task, int64_t worker) {
  if (results_.empty()) return;
  Worker& own = workers_[worker];
  // The tasks before those that wait here are in the hands of others, the first of whom does not
  // wait.
  for (;;) {
    Move(own);
    own.in_place = own.entries == 0 && FindsPlace(own, task);
    if (own.in_place || own.entries + bounds_[task] <= room_) return;
    std::this_thread::yield();
  }
}

char* RowPieces::Next(int64_t worker, size_t i) const {
  const Worker& own = workers_[worker];
  return own.in_place ? results_[i].data() + own.place * widths_[i]
                      : own.arrays[i].data() + own.entries * widths_[i];
}

void RowPieces::Wrote(int64_t task, int64_t worker) {
  Worker& own = workers_[worker];
  int64_t entries = 0;
  for (int64_t row = first_rows_[task]; row < first_rows_[task + 1]; ++row) entries += counts_[row];
  if (!std::exchange(own.in_place, false)) {
    own.tasks.push_back(task);
    own.entries += entries;
  }
  entries_of_[task].store(entries, std::memory_order_release);
  if (!results_.empty()) Move(own);
}

bool RowPieces::FindsPlace(Worker& own, int64_t task) const {
  for (; own.task < task; ++own.task) {
    const int64_t entries = entries_of_[own.task].load(std::memory_order_acquire);
    if (entries < 0) return false;
    own.place += entries;
  }
  return true;
}

void RowPieces::Move(Worker& own) {
  for (; own.moved < own.tasks.size(); ++own.moved) {
    const int64_t task = own.tasks[own.moved];
    if (!FindsPlace(own, task)) return;
    const int64_t count = entries_of_[task].load(std::memory_order_relaxed);
    for (size_t array = 0; array < widths_.size(); ++array) {
      const size_t width = widths_[array];
      std::memcpy(results_[array].data() + own.place * width,
                  own.arrays[array].data() + own.moved_entries * width, count * width);
    }
    own.moved_entries += count;
  }
  own.entries = own.moved_entries = 0;
}

bool RowPieces::Join(RowResult& result) {
  const auto rows = int64_t(counts_.size());
  result.rows = rows;
  result.offsets = ResultArray((rows + 1) * 4);
  if (!result.offsets.data()) return false;
  auto* const offsets = reinterpret_cast<int32_t*>(result.offsets.data());
  int64_t before = 0;
  for (int64_t row = 0; row < rows; ++row) {
    offsets[row] = int32_t(before);
    before += counts_[row];
  }
  offsets[rows] = int32_t(before);
  result.entries = before;
  if (results_.empty()) {
    for (const size_t width : widths_) {
      results_.emplace_back(size_t(before) * width);
      if (!results_.back().data()) return false;
    }
  }
  const auto workers = int64_t(workers_.size());
  RunOnThreads(workers, workers, [&](int64_t i, int64_t) { Move(workers_[i]); });
  for (size_t array = 0; array < widths_.size(); ++array) {
    results_[array].Fit(size_t(before) * widths_[array]);
  }
  result.arrays = std::move(results_);
  return true;
}

}  // namespace sgap
