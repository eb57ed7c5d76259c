// Kernels that were compiled while the process runs (sgap_jax/compiler/llvm.py), by their content.
#pragma once

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
};

// For the life of the process; a key says all that the code depends on, so the first one stays.
void RegisterCompiled(const std::string& key, CompiledKernel kernel);

// Null where this process has not compiled it.
std::shared_ptr<const CompiledKernel> FindCompiled(std::string_view key);

}  // namespace sgap
