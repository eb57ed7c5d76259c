#include "cpu/common/workspace.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <utility>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace sgap {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kMostKept = size_t(32) << 20;

std::mutex mutex;
void* kept = nullptr;
size_t kept_bytes = 0;

}  // namespace

void ReturnWorkspace::operator()(void* memory) const {
  size_t size = bytes;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (size <= kMostKept && size > kept_bytes) {
      std::swap(memory, kept);
      std::swap(size, kept_bytes);
    }
  }
  std::free(memory);
}

Workspace AcquireWorkspace(size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (kept_bytes >= bytes && kept) {
      return Workspace(std::exchange(kept, nullptr), {std::exchange(kept_bytes, 0)});
    }
  }
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
