// FFI target sgap_compiled_v1: runs what this process has compiled. The program names it by its
// content, so that it may outlive the process.
#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "compiled.h"
#include "ffi_arguments.h"
#include "handlers.h"
#include "parallel.h"
#include "workspace.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Tasks for a thread, where the program leaves it open: few enough to cost nothing, enough to even
// out rows of unlike lengths.
constexpr int64_t kTasksPerThread = 32;

constexpr int64_t kCacheLine = 64;

struct Table {
  std::shared_mutex mutex;
  std::map<std::string, std::shared_ptr<const CompiledKernel>, std::less<>> kernels;
};

// Never destroyed: threads of XLA may still run when the process ends.
Table& TheTable() {
  static Table* const table = new Table;
  return *table;
}

// What a call owns until its last task is done.
struct CompiledCall {
  std::shared_ptr<const CompiledKernel> kernel;
  std::vector<void*> arrays;
  std::vector<int64_t> chunks, ends;  // of each phase: iterations of a task; tasks up to its end
  int64_t scratch_stride = 0;
  Workspace scratch;

  void Run(int64_t task) const {
    const size_t phase = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
    const int64_t begin = (task - (phase == 0 ? 0 : ends[phase - 1])) * chunks[phase];
    const int64_t end = std::min(begin + chunks[phase], kernel->iterations[phase]);
    if (!scratch) return kernel->phases[phase](arrays.data(), begin, end);
    std::vector<void*> own = arrays;
    own.push_back(static_cast<char*>(scratch.get()) + task * scratch_stride);
    kernel->phases[phase](own.data(), begin, end);
  }
};

// Fills `arrays`; a message where they are not those of the kernel.
std::string TakeArrays(ffi::RemainingArgs args, ffi::RemainingRets rets, CompiledCall* call) {
  const size_t count = args.size() + rets.size();
  if (count != call->kernel->array_bytes.size()) {
    return "expected " + std::to_string(call->kernel->array_bytes.size()) + " arrays, got " +
           std::to_string(count);
  }
  const auto take = [&](const ffi::AnyBuffer& buffer) {
    const size_t i = call->arrays.size();
    const int64_t want = call->kernel->array_bytes[i], got = int64_t(buffer.size_bytes());
    call->arrays.push_back(buffer.untyped_data());
    if (got == want) return std::string();
    return "array " + std::to_string(i) + ": expected " + std::to_string(want) + " bytes, got " +
           std::to_string(got);
  };
  for (size_t i = 0; i < args.size(); ++i) {
    auto input = args.get<ffi::AnyBuffer>(i);
    if (input.has_error()) return input.error().message();
    if (std::string error = take(*input); !error.empty()) return error;
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto output = rets.get<ffi::AnyBuffer>(i);
    if (output.has_error()) return output.error().message();
    if (std::string error = take(**output); !error.empty()) return error;
    AdviseHugePages((*output)->untyped_data(), (*output)->size_bytes());
  }
  return "";
}

ffi::Future CompiledHandler(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            std::string_view key, int64_t chunk, int64_t work) {
  auto call = std::make_shared<CompiledCall>();
  call->kernel = FindCompiled(key);
  if (!call->kernel) {
    return Failed("compiled kernel " + std::string(key) +
                  " is not in this process: a program that was exported, or loaded from disk, does "
                  "not carry machine code. Lower the same expression once in this process (call it "
                  "or .lower() it under jax.jit), or build the program with schedule=Reference()");
  }
  if (chunk < 0) return Failed("compiled: chunk: expected >= 0, got " + std::to_string(chunk));
  const std::string error = TakeArrays(args, rets, call.get());
  if (!error.empty()) return Failed("compiled: " + error);

  std::vector<int64_t> phase_tasks;
  int64_t tasks = 0;
  for (const int64_t iterations : call->kernel->iterations) {
    const int64_t most = std::max<int64_t>(pool.num_threads(), 1) * kTasksPerThread;
    const int64_t size = std::max<int64_t>(chunk > 0 ? chunk : (iterations + most - 1) / most, 1);
    phase_tasks.push_back((iterations + size - 1) / size);
    call->chunks.push_back(size);
    call->ends.push_back(tasks += phase_tasks.back());
  }
  if (tasks == 0) return Finished();
  if (const int64_t bytes = call->kernel->scratch_bytes; bytes > 0) {
    call->scratch_stride = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    call->scratch = AcquireWorkspace(size_t(tasks) * call->scratch_stride);
    if (!call->scratch) {
      return Failed("compiled: no memory for workspaces of " + std::to_string(bytes) +
                    " bytes in each of " + std::to_string(tasks) + " tasks");
    }
  }
  // Leading phases of one task (a small output is filled) are done before anyone else is called.
  int64_t done = 0;
  size_t first = 0;
  for (; first + 1 < phase_tasks.size() && phase_tasks[first] <= 1; ++first) {
    for (const int64_t end = done + phase_tasks[first]; done < end; ++done) call->Run(done);
  }
  phase_tasks.erase(phase_tasks.begin(), phase_tasks.begin() + first);
  return ParallelPhases(pool, phase_tasks, work,
                        [call, done](int64_t task) { call->Run(done + task); });
}

}  // namespace

void RegisterCompiled(const std::string& key, CompiledKernel kernel) {
  Table& table = TheTable();
  const std::unique_lock lock(table.mutex);
  table.kernels.emplace(key, std::make_shared<const CompiledKernel>(std::move(kernel)));
}

std::shared_ptr<const CompiledKernel> FindCompiled(std::string_view key) {
  Table& table = TheTable();
  const std::shared_lock lock(table.mutex);
  const auto found = table.kernels.find(key);
  return found == table.kernels.end() ? nullptr : found->second;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Compiled, CompiledHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()  // the kernel's inputs
                                  .RemainingRets()  // the kernel's outputs
                                  .Attr<std::string_view>("key")
                                  .Attr<int64_t>("chunk")   // iterations of a task; 0: open
                                  .Attr<int64_t>("work"));  // multiply-adds, about

}  // namespace sgap
