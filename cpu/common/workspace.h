// Memory of one call.
#pragma once

#include <cstddef>
#include <memory>

namespace sgap {

struct ReturnWorkspace {
  size_t bytes = 0;
  void operator()(void* memory) const;
};

using Workspace = std::unique_ptr<void, ReturnWorkspace>;

// Uninitialised memory on a cache line's boundary; null where there is none. One block of up to
// 32 MiB stays with the process for the next call: the page faults of fresh memory cost as much as
// what it is used for.
Workspace AcquireWorkspace(size_t bytes);

// Fresh outputs of many megabytes are dominated by page faults: one per 2 MiB where the system
// grants it, not one per 4 KiB. Only a hint, and without effect on memory that is already mapped.
void AdviseHugePages(void* data, size_t bytes);

}  // namespace sgap
