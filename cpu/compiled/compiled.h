// Kernels that were compiled while the process runs (sgap_jax/compiler/llvm/machine_code.py), by
// their content.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sgap {

// Runs iterations [begin, end) of a phase. `arrays`: inputs, outputs, then scratch.
using CompiledPhase = void (*)(void* const* arrays, int64_t begin, int64_t end);

// Phases come one after another; the iterations of one come in any order, on any thread.
struct CompiledKernel {
  std::vector<CompiledPhase> phases;
  std::vector<int64_t> iterations;   // of each phase
  std::vector<int64_t> array_bytes;  // of each input and output
  int64_t scratch_bytes = 0;         // of each task
  int64_t code = 0;                  // the caller's number of what holds the machine code
};

// One that can run. Whoever holds it keeps the machine code: executables of XLA, calls that are
// under way, and this process's compiler for those that it made last
// (sgap_jax/compiler/llvm/machine_code.py).
struct HeldKernel {
  CompiledKernel kernel;
  mutable std::atomic<int64_t> taken{0};  // by how many executables, so far
};
using HeldKernelPtr = std::shared_ptr<const HeldKernel>;

// Known by its key for as long as somebody holds it. A key says all that the code depends on: the
// one that is there stays.
HeldKernelPtr RegisterCompiled(const std::string& key, CompiledKernel kernel);

// Null where nobody holds it.
HeldKernelPtr FindCompiled(std::string_view key);

// The `code` of kernels that nobody holds any more, each once: their machine code may go.
std::vector<int64_t> TakeUnused();

}  // namespace sgap
