// Calls an FFI handler of the CPU without XLA, for tests: any instruction set and number of threads
// in one process, and nothing to compile. Here is what a handler takes from XLA: errors, futures
// and a thread pool.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <variant>
#include <vector>

#include "cpu/common/isa.h"
#include "xla/ffi/api/c_api.h"

// To handlers these types are opaque.
struct XLA_FFI_Error {
  std::string message;
};

struct XLA_FFI_Future {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::unique_ptr<XLA_FFI_Error> error;

  void End(XLA_FFI_Error* with) {
    const std::lock_guard lock(mutex);
    error.reset(with);
    done = true;
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
};

// The thread pool: a thread for each scheduled task.
struct XLA_FFI_ExecutionContext {
  int64_t threads;
  std::mutex mutex;
  std::vector<std::thread> running;
};

namespace sgap {
namespace {

namespace nb = nanobind;

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
    return new XLA_FFI_Error{args->message};
  };
  api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
    args->message = args->error->message.c_str();
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) {
    *args->num_threads = args->ctx->threads;
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) {
    const std::lock_guard lock(args->ctx->mutex);
    args->ctx->running.emplace_back(args->task, args->data);
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  api.XLA_FFI_Future_Create = [](XLA_FFI_Future_Create_Args* args) {
    args->future = new XLA_FFI_Future;
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  api.XLA_FFI_Future_SetAvailable = [](XLA_FFI_Future_SetAvailable_Args* args) {
    args->future->End(nullptr);
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  api.XLA_FFI_Future_SetError = [](XLA_FFI_Future_SetError_Args* args) {
    args->future->End(args->error);
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  return api;
}

using Array = std::tuple<uintptr_t, int, std::vector<int64_t>>;  // address, type, shape
using Attribute = std::variant<bool, int64_t, double>;

std::vector<XLA_FFI_Buffer> BuffersOf(std::vector<Array>& arrays) {
  std::vector<XLA_FFI_Buffer> buffers;
  for (auto& [address, type, shape] : arrays) {
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(type),
                       reinterpret_cast<void*>(address), static_cast<int64_t>(shape.size()),
                       shape.data()});
  }
  return buffers;
}

template <typename T>
std::vector<void*> PointersTo(std::vector<T>& items) {
  std::vector<void*> pointers;
  for (T& item : items) pointers.push_back(&item);
  return pointers;
}

// The error of the call, or null.
std::unique_ptr<XLA_FFI_Error> Call(XLA_FFI_Handler* handler, std::vector<Array> operands,
                                    std::vector<Array> results,
                                    std::map<std::string, Attribute> attributes, int64_t threads) {
  static const XLA_FFI_Api api = MakeApi();
  XLA_FFI_ExecutionContext context{threads, {}, {}};
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;

  auto inputs = BuffersOf(operands), outputs = BuffersOf(results);
  auto input_pointers = PointersTo(inputs), output_pointers = PointersTo(outputs);
  std::vector<XLA_FFI_ArgType> input_types(inputs.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> output_types(outputs.size(), XLA_FFI_RetType_BUFFER);
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(inputs.size()),
                input_types.data(), input_pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(outputs.size()),
                output_types.data(), output_pointers.data()};

  std::vector<XLA_FFI_ByteSpan> names;
  std::vector<XLA_FFI_Scalar> scalars;
  for (auto& [name, attribute] : attributes) {  // sorted by name, as handlers expect
    constexpr XLA_FFI_DataType kTypes[] = {XLA_FFI_DataType_PRED, XLA_FFI_DataType_S64,
                                           XLA_FFI_DataType_F64};
    names.push_back({name.data(), name.size()});
    void* const value = std::visit([](auto& held) -> void* { return &held; }, attribute);
    scalars.push_back({kTypes[attribute.index()], value});
  }
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  for (XLA_FFI_ByteSpan& name : names) name_pointers.push_back(&name);
  auto scalar_pointers = PointersTo(scalars);
  std::vector<XLA_FFI_AttrType> scalar_types(scalars.size(), XLA_FFI_AttrType_SCALAR);
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(scalars.size()),
                 scalar_types.data(),
                 name_pointers.data(),
                 scalar_pointers.data()};

  std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  const std::unique_ptr<XLA_FFI_Future> future(frame.future);
  if (future) {
    future->Wait();
    error = std::move(future->error);
  }
  for (std::thread& thread : context.running) thread.join();
  return error;
}

// As `target`, a capsule of targets(), is called by XLA. `isa` is in use for the time of the call,
// by the whole process: no other thread may call a handler meanwhile.
void TestCall(const nb::capsule& target, std::vector<Array> operands, std::vector<Array> results,
              std::map<std::string, Attribute> attributes, const std::string& isa,
              int64_t threads) {
  auto* const handler = reinterpret_cast<XLA_FFI_Handler*>(target.data());
  struct Restored {
    std::string before = Kernels().isa;
    ~Restored() { SelectIsa(before); }
  } restored;
  SelectIsa(isa);
  const auto error =
      Call(handler, std::move(operands), std::move(results), std::move(attributes), threads);
  if (error) throw std::invalid_argument(error->message);
}

}  // namespace

void DefineTestCall(nb::module_& module) {
  module.def("_test_call", &TestCall, nb::arg("target"), nb::arg("operands"), nb::arg("results"),
             nb::arg("attributes"), nb::arg("isa"), nb::arg("threads"),
             "For tests: calls a target without XLA on arrays (address, FFI type, shape).");
}

}  // namespace sgap
