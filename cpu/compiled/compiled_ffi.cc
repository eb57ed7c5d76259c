// FFI target sgap_compiled_v1: runs what this process has compiled. The program names it by its
// content, so that it may outlive the process; an executable holds it from INSTANTIATE on.
#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/parallel.h"
#include "cpu/common/workspace.h"
#include "cpu/compiled/compiled.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// Tasks for a thread, where the program leaves it open: few enough to cost nothing, enough to even
// out rows of unlike lengths.
constexpr int64_t kTasksPerThread = 32;

constexpr int64_t kCacheLine = 64;

struct Table {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<const HeldKernel>, std::less<>> kernels;
  std::vector<int64_t> unused;
};

// Never destroyed: threads of XLA may still run when the process ends.
Table& TheTable() {
  static Table* const table = new Table;
  return *table;
}

// What an executable has of a call. A program that was loaded may come before its kernel.
class CompiledState {
 public:
  static ffi::TypeId id;

  explicit CompiledState(HeldKernelPtr kernel) { Take(std::move(kernel)); }

  HeldKernelPtr Kernel(std::string_view key) {
    const std::lock_guard lock(mutex_);
    if (!kernel_) Take(FindCompiled(key));
    return kernel_;
  }

 private:
  void Take(HeldKernelPtr kernel) {
    kernel_ = std::move(kernel);
    if (kernel_) kernel_->taken.fetch_add(1, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  HeldKernelPtr kernel_;
};
ffi::TypeId CompiledState::id = {};  // assigned by RegisterState

// What a call owns until its last task is done.
struct CompiledCall {
  HeldKernelPtr held;
  const CompiledKernel* kernel = nullptr;
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

// Whether the last of the inputs is not the kernel's: a bool scalar.
bool HasLook(ffi::RemainingArgs args, size_t kernel_inputs) {
  if (args.size() != kernel_inputs + 1) return false;
  const auto last = args.get<ffi::AnyBuffer>(kernel_inputs);
  return last.has_value() && last->element_type() == ffi::PRED && last->element_count() == 1;
}

// Fills `arrays`; a message where they are not those of the kernel, or were found not to hold.
std::string TakeArrays(ffi::RemainingArgs args, ffi::RemainingRets rets, CompiledCall* call) {
  const size_t kernel_arrays = call->kernel->array_bytes.size();
  const size_t kernel_inputs = kernel_arrays - std::min(kernel_arrays, rets.size());
  size_t inputs = args.size();
  if (HasLook(args, kernel_inputs)) {
    inputs = kernel_inputs;
    if (!*static_cast<const bool*>(args.get<ffi::AnyBuffer>(inputs)->untyped_data())) {
      return "the index arrays of a sparse operand are not those that were checked when it was "
             "made: one is out of range, or not in the order that loops need. Something changed "
             "them (jax.tree.map and psum change every array of a pytree); make a new operand "
             "with from_arrays, or change its values alone (A.with_values)";
    }
  }
  const size_t count = inputs + rets.size();
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
  for (size_t i = 0; i < inputs; ++i) {
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

// XLA wants all attributes bound, here too.
ffi::ErrorOr<std::unique_ptr<CompiledState>> Instantiate(std::string_view key, int64_t, int64_t) {
  return std::make_unique<CompiledState>(FindCompiled(key));
}

ffi::Future Execute(ffi::ThreadPool pool, CompiledState* state, ffi::RemainingArgs args,
                    ffi::RemainingRets rets, std::string_view key, int64_t chunk, int64_t work) {
  auto call = std::make_shared<CompiledCall>();
  call->held = state->Kernel(key);
  if (!call->held) {
    return Failed("compiled kernel " + std::string(key) +
                  " is not in this process: a program that was exported, or loaded from disk, does "
                  "not carry machine code. Lower the same expression once in this process (call it "
                  "or .lower() it under jax.jit), or build the program with schedule=Reference()");
  }
  call->kernel = &call->held->kernel;
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

XLA_FFI_DEFINE_HANDLER(
    kInstantiate, Instantiate,
    ffi::Ffi::BindInstantiate().Attr<std::string_view>("key").Attr<int64_t>("chunk").Attr<int64_t>(
        "work"));

// As in cuda/launch/launch_ffi.cc: the type is registered when XLA asks for the handler's metadata.
// JAX replays queued handlers before or after queued types.
XLA_FFI_Error* RegisterState(const XLA_FFI_Api* api) {
  static std::mutex mutex;
  static const XLA_FFI_Api* registered = nullptr;
  static constexpr XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CompiledState>();
  const std::lock_guard lock(mutex);
  if (registered == api) return nullptr;
  XLA_FFI_Error* error =
      ffi::Ffi::RegisterTypeId(api, "sgap_compiled_state_v1", &CompiledState::id, &info);
  if (error == nullptr) registered = api;
  return error;
}

// The last holder has gone: no thread runs the code any more.
void Forget(const std::string& key, const HeldKernel* held) {
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  table.unused.push_back(held->kernel.code);
  const auto found = table.kernels.find(key);
  if (found != table.kernels.end() && found->second.expired()) table.kernels.erase(found);
  delete held;
}

}  // namespace

HeldKernelPtr RegisterCompiled(const std::string& key, CompiledKernel kernel) {
  if (HeldKernelPtr there = FindCompiled(key)) return there;
  auto* const held = new HeldKernel;
  held->kernel = std::move(kernel);
  HeldKernelPtr made(held, [key](const HeldKernel* last) { Forget(key, last); });
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  table.kernels[key] = made;
  return made;
}

HeldKernelPtr FindCompiled(std::string_view key) {
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  const auto found = table.kernels.find(key);
  return found == table.kernels.end() ? nullptr : found->second.lock();
}

std::vector<int64_t> TakeUnused() {
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  return std::exchange(table.unused, {});
}

extern "C" XLA_FFI_Error* CompiledInstantiate(XLA_FFI_CallFrame* call_frame) {
  if (XLA_FFI_Error* error = RegisterState(call_frame->api)) return error;
  return kInstantiate(call_frame);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CompiledExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Ctx<ffi::State<CompiledState>>()
                                  // The kernel's inputs; then, where the program looked at their
                                  // index arrays, whether these hold: a bool scalar.
                                  .RemainingArgs()
                                  .RemainingRets()  // the kernel's outputs
                                  .Attr<std::string_view>("key")
                                  .Attr<int64_t>("chunk")   // iterations of a task; 0: open
                                  .Attr<int64_t>("work"));  // multiply-adds, about

}  // namespace sgap
