#include "cpu/common/workspace.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace sgap {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kMostKept = size_t(32) << 20;

struct Block {
  void* memory;
  size_t bytes;
};

// Blocks that were given back: of all, the largest that are kMostKept together.
class KeptBlocks {
 public:
  // The smallest of at least `bytes`; null if there is none.
  Workspace Take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int i = 0; i < count_; ++i) {
      if (blocks_[i].bytes >= bytes) {
        const Block taken = Remove(i);
        return Workspace(taken.memory, {taken.bytes});
      }
    }
    return nullptr;
  }

  void Put(Block block) {
    Block freed[kMost + 1];
    int free_count = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      Insert(block);
      while (count_ > kMost || bytes_ > kMostKept) freed[free_count++] = Remove(0);
    }
    while (free_count > 0) std::free(freed[--free_count].memory);
  }

 private:
  static constexpr int kMost = 16;

  void Insert(Block block) {
    int i = count_++;
    for (; i > 0 && blocks_[i - 1].bytes > block.bytes; --i) blocks_[i] = blocks_[i - 1];
    blocks_[i] = block;
    bytes_ += block.bytes;
  }

  Block Remove(int i) {
    const Block block = blocks_[i];
    std::copy(blocks_ + i + 1, blocks_ + count_, blocks_ + i);
    --count_;
    bytes_ -= block.bytes;
    return block;
  }

  std::mutex mutex_;
  Block blocks_[kMost + 1];  // by size
  int count_ = 0;
  size_t bytes_ = 0;
};

KeptBlocks kept;

}  // namespace

void ReturnWorkspace::operator()(void* memory) const {
  bytes > kMostKept ? std::free(memory) : kept.Put({memory, bytes});
}

Workspace AcquireWorkspace(size_t bytes) {
  if (Workspace found = kept.Take(bytes)) return found;
  const size_t boundary = bytes >= kHugePage / 2 ? kHugePage : kLine;
  const size_t rounded = (bytes + boundary - 1) / boundary * boundary;
  void* memory = std::aligned_alloc(boundary, rounded);
  if (memory) AdviseHugePages(memory, rounded);
  return Workspace(memory, {rounded});
}

void AdviseHugePages(void* data, size_t bytes) {
#if defined(__linux__)
  if (bytes < kHugePage) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

bool KeepFreedMemory([[maybe_unused]] int64_t bytes) {
#if defined(__GLIBC__)
  // From a heap that is never trimmed, a block of this size or less is not mapped for itself.
  const int most = int(std::clamp<int64_t>(bytes, 0, INT_MAX));
  return mallopt(M_MMAP_THRESHOLD, most) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
  return false;
#endif
}

}  // namespace sgap
