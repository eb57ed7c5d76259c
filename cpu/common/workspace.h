// Memory of one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace sgap {

struct ReturnWorkspace {
  size_t bytes = 0;
  void operator()(void* memory) const;
};

using Workspace = std::unique_ptr<void, ReturnWorkspace>;

// Uninitialised memory on a cache line's boundary, of a MiB or more on huge pages where the system
// grants them: what is scattered over it misses no small pages. Null where there is none. The
// largest blocks that calls gave back, 32 MiB and 16 blocks at most, stay with the process for the
// next ones: the page faults of fresh memory cost as much as what it is used for.
Workspace AcquireWorkspace(size_t bytes);

// Scratch memory of which each task that runs has a part of its own; `filled` bytes of it begin as
// `fill`, and tasks leave them so.
class TaskScratch {
 public:
  bool Acquire(int64_t threads, int64_t bytes, int64_t filled, uint8_t fill = 0) {
    bytes = (bytes + 63) / 64 * 64;
    memory_ = AcquireWorkspace(size_t(threads * bytes));
    if (!memory_) return false;
    for (int64_t i = 0; i < threads; ++i) {
      free_.push_back(static_cast<char*>(memory_.get()) + i * bytes);
      std::memset(free_.back(), fill, size_t(filled));
    }
    return true;
  }

  // Calls run(part); there are as many parts as threads.
  template <typename Run>
  void With(Run run) {
    char* part;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      part = free_.back();
      free_.pop_back();
    }
    run(part);
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(part);
  }

 private:
  Workspace memory_;
  std::mutex mutex_;
  std::vector<char*> free_;
};

// Fresh outputs of many megabytes are dominated by page faults: one per 2 MiB where the system
// grants it, not one per 4 KiB. Only a hint, and without effect on memory that is already mapped.
void AdviseHugePages(void* data, size_t bytes);

// Asks the C library to keep freed blocks of up to `bytes` in the process, XLA's results among
// them, and not to return their pages to the system. False where it has no such setting.
bool KeepFreedMemory(int64_t bytes);

}  // namespace sgap
