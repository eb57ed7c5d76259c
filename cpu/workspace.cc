#include "workspace.h"

#include <cstdlib>
#include <mutex>
#include <utility>

namespace sgap {
namespace {

constexpr size_t kLine = 64;
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
  const size_t rounded = (bytes + kLine - 1) / kLine * kLine;
  return Workspace(std::aligned_alloc(kLine, rounded), {rounded});
}

}  // namespace sgap
