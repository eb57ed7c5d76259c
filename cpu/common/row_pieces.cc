#include "cpu/common/row_pieces.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu/common/workspace.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sgap {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kKeptBytes = size_t(8) << 20, kKeptCount = 4;  // 32 MiB in all
constexpr size_t kMostSpace = size_t(1) << 32;                  // that is kept, address space

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
    for (Kept& region : kept) {
      if (region.bytes < bytes) continue;
      std::swap(region, kept.back());
      data_ = kept.back().data, bytes_ = kept.back().bytes;
      kept.pop_back();
      return;
    }
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;
  AdviseHugePages(memory, bytes);
  data_ = static_cast<char*>(memory);
#else
  data_ = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
#endif
  bytes_ = bytes;
}

Pages::~Pages() {
  if (!data_) return;
#if defined(__linux__)
  if (bytes_ <= kMostSpace) {
    if (bytes_ > kKeptBytes) madvise(data_ + kKeptBytes, bytes_ - kKeptBytes, MADV_DONTNEED);
    const std::lock_guard<std::mutex> lock(mutex);
    if (kept.size() < kKeptCount) {
      kept.push_back({data_, bytes_});
      return;
    }
    const auto least = std::min_element(
        kept.begin(), kept.end(), [](const Kept& a, const Kept& b) { return a.bytes < b.bytes; });
    if (least->bytes < bytes_) {
      std::swap(least->data, data_);
      std::swap(least->bytes, bytes_);
    }
  }
  munmap(data_, bytes_);
#else
  std::free(data_);
#endif
}

void Pages::ReturnUntil(size_t place) {
#if defined(__linux__)
  place = place / kHugePage * kHugePage;
  const size_t from = std::max(returned_, kKeptBytes);
  if (place <= from) return;
  madvise(data_ + from, place - from, MADV_DONTNEED);
  returned_ = place;
#else
  (void)place;
#endif
}

void FreeArray::operator()(char* memory) const { std::free(memory); }

namespace {

ResultArray TakeArray(size_t bytes) {
  constexpr size_t kLine = 64;
  bytes = (bytes + kLine) / kLine * kLine;
  ResultArray array(static_cast<char*>(std::aligned_alloc(kLine, bytes)));
  if (array) AdviseHugePages(array.get(), bytes);
  return array;
}

}  // namespace

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
    } catch (const std::system_error&) {  // the system has no more: the others do it
      break;
    }
  }
  shared->Work(0);
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->ended.wait(lock, [&] { return shared->done == tasks; });
}

RowPieces::RowPieces(const std::vector<int32_t>& first_rows, std::vector<size_t> widths,
                     int64_t bound, int64_t slack, int64_t threads)
    : first_rows_(first_rows),
      widths_(std::move(widths)),
      counts_(first_rows.back()),
      workers_(std::clamp<int64_t>(int64_t(first_rows.size()) - 1, 1, threads)) {
  for (Worker& worker : workers_) {
    for (const size_t width : widths_) {
      worker.arrays.emplace_back(size_t(bound + slack) * width);
      ready_ = ready_ && worker.arrays.back().data();
    }
  }
}

int64_t RowPieces::EntriesOf(int64_t task) const {
  int64_t entries = 0;
  for (int64_t row = first_rows_[task]; row < first_rows_[task + 1]; ++row) entries += counts_[row];
  return entries;
}

void RowPieces::Wrote(int64_t task, int64_t worker) {
  Worker& own = workers_[worker];
  own.tasks.push_back(task);
  own.entries += EntriesOf(task);
}

bool RowPieces::Join(RowResult& result) {
  const auto rows = int64_t(counts_.size());
  result.rows = rows;
  for (const Worker& worker : workers_) result.entries += worker.entries;
  result.offsets = TakeArray((rows + 1) * 4);
  if (!result.offsets) return false;
  auto* const offsets = reinterpret_cast<int32_t*>(result.offsets.get());
  int64_t before = 0;
  for (int64_t row = 0; row < rows; ++row) {
    offsets[row] = int32_t(before);
    before += counts_[row];
  }
  offsets[rows] = int32_t(before);
  for (const size_t width : widths_) {
    result.arrays.push_back(TakeArray(size_t(result.entries) * width));
    if (!result.arrays.back()) return false;
  }
  const auto workers = int64_t(workers_.size());
  RunOnThreads(workers, workers, [&](int64_t i, int64_t) {
    Worker& worker = workers_[i];
    size_t done = 0;
    for (const int64_t task : worker.tasks) {
      const size_t begin = offsets[first_rows_[task]];
      const size_t count = offsets[first_rows_[task + 1]] - begin;
      for (size_t array = 0; array < widths_.size(); ++array) {
        const size_t width = widths_[array];
        std::memcpy(result.arrays[array].get() + begin * width,
                    worker.arrays[array].data() + done * width, count * width);
      }
      done += count;
      for (size_t array = 0; array < widths_.size(); ++array) {
        worker.arrays[array].ReturnUntil(done * widths_[array]);
      }
    }
  });
  return true;
}

}  // namespace sgap
