// A libcuda.so.1 without a GPU. Each call is a line in the file SGAP_STANDIN_LOG, and the call that
// SGAP_STANDIN_FAIL names ("cuLaunchKernel=719") fails; "cuLaunchKernel=719@Octet" only where its
// arguments contain that text. A stream's last hex digit is its device; device d has the one
// context 0xc0 + d. Device memory is host memory.
//
// SGAP_STANDIN_GPUS     the compute capabilities of the devices, "9.0" by default
// SGAP_STANDIN_VERSION  what cuDriverGetVersion says, 13000 by default
// SGAP_STANDIN_FREE     the free bytes of each device, 4 GiB by default
// SGAP_STANDIN_ANSWERS  a file of lines "kernel<tab>file": what the kernel writes. That file has,
//                       for each result: int64 position among the arguments, int64 bytes, bytes
// SGAP_STANDIN_ENDS     a launch of a kernel with this in its name ends the process
// SGAP_STANDIN_HANGS    a launch of a kernel with this in its name does not return
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace {

thread_local std::vector<void*> contexts;

struct Kernel {
  std::string name;
};

void Log(const std::string& line) {
  const char* path = std::getenv("SGAP_STANDIN_LOG");
  if (path == nullptr) return;
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  const std::string text = line + "\n";
  if (write(file, text.data(), text.size()) < 0) std::abort();
  close(file);
}

std::string Hex(const void* pointer) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(uintptr_t(pointer)));
  return text;
}

int Called(const std::string& call, const std::string& arguments = "") {
  Log(call + "(" + arguments + ")");
  const char* fail = std::getenv("SGAP_STANDIN_FAIL");
  if (fail == nullptr) return 0;
  const std::string wanted = fail;
  const size_t split = wanted.find('='), only = wanted.find('@');
  if (wanted.substr(0, split) != call) return 0;
  if (only != std::string::npos && arguments.find(wanted.substr(only + 1)) == std::string::npos) {
    return 0;
  }
  return std::atoi(wanted.c_str() + split + 1);
}

// The compute capabilities of the devices, as "9.0".
std::vector<std::string> Devices() {
  const char* named = std::getenv("SGAP_STANDIN_GPUS");
  std::vector<std::string> found;
  std::string left = named == nullptr ? "9.0" : named;
  while (!left.empty()) {
    const size_t end = left.find(',');
    found.push_back(left.substr(0, end));
    left = end == std::string::npos ? "" : left.substr(end + 1);
  }
  return found;
}

// Whether the environment variable is part of a kernel's name.
bool Names(const char* variable, const std::string& kernel) {
  const char* part = std::getenv(variable);
  return part != nullptr && kernel.find(part) != std::string::npos;
}

// Writes the results of a kernel that SGAP_STANDIN_ANSWERS has.
void Answer(const std::string& kernel, void** arguments) {
  const char* path = std::getenv("SGAP_STANDIN_ANSWERS");
  if (path == nullptr) return;
  std::ifstream index(path);
  for (std::string line; std::getline(index, line);) {
    const size_t tab = line.find('\t');
    if (line.substr(0, tab) != kernel) continue;
    std::ifstream file(line.substr(tab + 1), std::ios::binary);
    for (int64_t head[2]; file.read(reinterpret_cast<char*>(head), sizeof(head));) {
      file.read(*static_cast<char**>(arguments[head[0]]), head[1]);
    }
  }
}

// y[i] += a * x[i]
void Axpy(void** arguments) {
  const float* x = *static_cast<const float**>(arguments[0]);
  float* y = *static_cast<float**>(arguments[1]);
  const int64_t n = *static_cast<int64_t*>(arguments[2]);
  const int64_t a = *static_cast<int64_t*>(arguments[3]);
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) { return Called("cuInit", std::to_string(flags)); }

int cuDriverGetVersion(int* version) {
  const char* named = std::getenv("SGAP_STANDIN_VERSION");
  *version = named == nullptr ? 13000 : std::atoi(named);
  return Called("cuDriverGetVersion");
}

int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(Devices().size());
  return Called("cuDeviceGetCount");
}

int cuDeviceGet(int* device, int index) {
  *device = index;
  return Called("cuDeviceGet", std::to_string(index));
}

int cuDeviceGetName(char* name, int length, int device) {
  std::snprintf(name, length, "Stand-in GPU");
  return Called("cuDeviceGetName", std::to_string(device));
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = size_t{8} << 30;
  return Called("cuDeviceTotalMem", std::to_string(device));
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const std::string capability = Devices()[device];
  const size_t point = capability.find('.');
  *value = std::atoi(capability.c_str() + (attribute == 75 ? 0 : point + 1));
  return Called("cuDeviceGetAttribute", std::to_string(attribute));
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(0xc0 + uintptr_t(device));
  return Called("cuDevicePrimaryCtxRetain", std::to_string(device));
}

int cuCtxSetCurrent(void* context) {
  if (!contexts.empty()) contexts.pop_back();
  if (context != nullptr) contexts.push_back(context);
  return Called("cuCtxSetCurrent", Hex(context));
}

int cuCtxSynchronize() { return Called("cuCtxSynchronize"); }

int cuMemGetInfo_v2(size_t* free, size_t* total) {
  const char* named = std::getenv("SGAP_STANDIN_FREE");
  *free = named == nullptr ? size_t{4} << 30 : std::atoll(named);
  *total = size_t{8} << 30;
  return Called("cuMemGetInfo");
}

int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  *address = reinterpret_cast<uintptr_t>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return Called("cuMemAlloc", std::to_string(bytes));
}

int cuMemFree_v2(unsigned long long address) {
  std::free(reinterpret_cast<void*>(address));
  return Called("cuMemFree");
}

int cuMemcpyHtoD_v2(unsigned long long address, const void* host, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(address), host, bytes);
  return Called("cuMemcpyHtoD", std::to_string(bytes));
}

int cuMemcpyDtoH_v2(void* host, unsigned long long address, size_t bytes) {
  std::memcpy(host, reinterpret_cast<const void*>(address), bytes);
  return Called("cuMemcpyDtoH", std::to_string(bytes));
}

// Streams, events and graphs: what a capture holds has run when it ends; each event is 1 ms later.
int cuStreamCreate(void** stream, unsigned flags) {
  *stream = reinterpret_cast<void*>(0x10);
  return Called("cuStreamCreate", std::to_string(flags));
}

int cuEventCreate(void** event, unsigned flags) {
  *event = new float(0);
  return Called("cuEventCreate", std::to_string(flags));
}

int cuEventRecord(void* event, void*) {
  static float now = 0;
  *static_cast<float*>(event) = ++now;
  return Called("cuEventRecord");
}

int cuEventSynchronize(void*) { return Called("cuEventSynchronize"); }

int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
  *milliseconds = *static_cast<float*>(end) - *static_cast<float*>(start);
  return Called("cuEventElapsedTime");
}

int cuStreamBeginCapture_v2(void*, int mode) {
  return Called("cuStreamBeginCapture", std::to_string(mode));
}

int cuStreamEndCapture(void*, void** graph) {
  static char handle;
  *graph = &handle;
  return Called("cuStreamEndCapture");
}

int cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long) {
  *made = graph;
  return Called("cuGraphInstantiateWithFlags");
}

int cuGraphLaunch(void*, void*) { return Called("cuGraphLaunch"); }

int cuGraphDestroy(void*) { return Called("cuGraphDestroy"); }

int cuGraphExecDestroy(void*) { return Called("cuGraphExecDestroy"); }

int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void*) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return Called("cuMemcpyDtoDAsync", std::to_string(bytes));
}

int cuFuncGetAttribute(int* value, int attribute, void* function) {
  *value = attribute == 4 ? 40 : attribute == 6 ? 90 : 0;
  return Called("cuFuncGetAttribute",
                std::to_string(attribute) + ", " + static_cast<Kernel*>(function)->name);
}

int cuGetErrorName(int error, const char** name) {
  *name = error == 719   ? "CUDA_ERROR_LAUNCH_FAILED"
          : error == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
                         : nullptr;
  return *name != nullptr ? 0 : 1;
}

// NVRTC asks for a table of the driver's own, and does without.
int cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return 500;  // CUDA_ERROR_NOT_FOUND
}

int cuGetErrorString(int error, const char** text) {
  *text = error == 719 ? "unspecified launch failure" : nullptr;
  return error == 719 ? 0 : 1;
}

int cuStreamGetCtx(void* stream, void** context) {
  *context = reinterpret_cast<void*>(0xc0 + (uintptr_t(stream) & 0xf));
  return Called("cuStreamGetCtx", Hex(stream));
}

int cuCtxGetCurrent(void** context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return Called("cuCtxGetCurrent");
}

int cuCtxPushCurrent_v2(void* context) {
  const int result = Called("cuCtxPushCurrent", Hex(context));
  if (result == 0) contexts.push_back(context);
  return result;
}

int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return 201;
  *context = contexts.back();
  contexts.pop_back();
  return Called("cuCtxPopCurrent");
}

int cuLibraryLoadData(void** library, const void* code, int*, void**, unsigned jit_options, int*,
                      void**, unsigned options) {
  static char library_handle;
  *library = &library_handle;
  // The "cubin" of a test is text, here "bytes_<n>" before a NUL: log n bytes in all.
  std::string text = static_cast<const char*>(code);
  if (text.rfind("bytes_", 0) == 0) {
    const int count = std::atoi(text.c_str() + 6);
    text.clear();
    for (int i = 0; i < count; ++i) {
      char byte[3];
      std::snprintf(byte, sizeof(byte), "%02x", static_cast<const unsigned char*>(code)[i]);
      text += byte;
    }
  }
  return Called("cuLibraryLoadData",
                text + ", " + std::to_string(jit_options) + ", " + std::to_string(options));
}

int cuLibraryUnload(void*) { return Called("cuLibraryUnload"); }

int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  *kernel = new Kernel{name};
  return Called("cuLibraryGetKernel", name);
}

int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return Called("cuKernelGetFunction",
                "context " + (contexts.empty() ? "none" : Hex(contexts.back())));
}

int cuFuncSetAttribute(void*, int attribute, int value) {
  return Called("cuFuncSetAttribute", std::to_string(attribute) + ", " + std::to_string(value));
}

int cuMemsetD8Async(unsigned long long data, unsigned char value, size_t bytes, void* stream) {
  const int result =
      Called("cuMemsetD8Async", Hex(reinterpret_cast<void*>(data)) + ", " + std::to_string(value) +
                                    ", " + std::to_string(bytes) + ", " + Hex(stream));
  if (result == 0) std::memset(reinterpret_cast<void*>(data), value, bytes);
  return result;
}

// Kernel record_<n> logs its n arguments, axpy computes.
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared_bytes, void* stream, void** arguments,
                   void** extra) {
  const std::string& name = static_cast<Kernel*>(function)->name;
  std::string text = name;
  for (unsigned size : {gx, gy, gz, bx, by, bz, shared_bytes}) text += ", " + std::to_string(size);
  text += ", " + Hex(stream) + ", context " + (contexts.empty() ? "none" : Hex(contexts.back()));
  if (extra != nullptr) text += ", extra";
  if (name.rfind("record_", 0) == 0) {
    const int count = std::atoi(name.c_str() + 7);
    for (int i = 0; i < count; ++i) text += "; " + Hex(*static_cast<void**>(arguments[i]));
  }
  const int result = Called("cuLaunchKernel", text);
  if (Names("SGAP_STANDIN_ENDS", name)) std::abort();
  if (Names("SGAP_STANDIN_HANGS", name)) pause();
  if (result == 0 && name == "axpy") Axpy(arguments);
  if (result == 0) Answer(name, arguments);
  return result;
}

// What a test's own stream has made current before.
void standin_set_current(void* context) {
  contexts.clear();
  if (context != nullptr) contexts.push_back(context);
}
}
