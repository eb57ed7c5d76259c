// The memory of slabs, for handlers. Kernels include cpu/common/slabs.h alone: they are compiled
// for each instruction set, and what the standard library has inline would be linked from any of
// these.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "cpu/common/isa.h"
#include "cpu/common/machine.h"
#include "cpu/common/slabs.h"
#include "cpu/common/workspace.h"

namespace sgap {

// Owns the slabs of a call, until its last task is done.
class SlabMemory {
 public:
  // One of `bytes` for each thread that has a task. None where there is no memory: tasks then read
  // the operand itself, which is slower and gives the same result, but for last bits of bfloat16
  // where there are products of pairs.
  Slabs Acquire(int64_t threads, int64_t tasks, size_t bytes) {
    const int64_t count = std::max<int64_t>(std::min(threads, tasks), 1);
    bytes = (bytes + 63) / 64 * 64;
    memory_ = AcquireWorkspace(size_t(count) * bytes);
    if (!memory_ || bytes == 0) return {};
    slabs_.reset(new Slab[count]);
    for (int64_t i = 0; i < count; ++i) {
      slabs_[i].memory = static_cast<char*>(memory_.get()) + i * bytes;
    }
    return {slabs_.get(), count};
  }

 private:
  std::unique_ptr<Slab[]> slabs_;
  Workspace memory_;
};

// Whether to widen rows of float16, `values` of them in all, in slabs before they are used, so many
// times in all; a slab has `room` values beside them. It pays where each core uses a row often, up
// to slabs of two second-level caches, which also bounds the memory that a thread has (of one or
// two of them operations took 0.90 to 0.95 of the time, measured on Zen 4; with 13 uses 0.99 to
// 1.04); not with registers of 32 bytes, which one instruction fills (1.0 to 1.15). Of the
// machine's cores, not the threads of the call: where a sum is rounded may depend on it.
constexpr int64_t kWidenedUses = 8;

inline bool WideningPays(int64_t rows, int64_t values, int64_t room, int64_t uses) {
  const Machine& machine = ThisMachine();
  const int64_t most = machine.l2_bytes / int64_t(sizeof(float));
  if (values <= 0 || values + room > 2 * most || Kernels().vector_bytes == 32) return false;
  const int64_t least = values > most / 2 ? 2 * kWidenedUses : kWidenedUses;
  return uses / least >= rows * machine.cores;
}

}  // namespace sgap
