// A libcuda.so.1 without a GPU. Each call is a line in the file SGAP_STANDIN_LOG, and the call that
// SGAP_STANDIN_FAIL names ("cuLaunchKernel=719") fails. A stream's last hex digit is its device;
// device d has the one context 0xc0 + d. Device memory is host memory.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
  const size_t split = wanted.find('=');
  return wanted.substr(0, split) == call ? std::atoi(wanted.c_str() + split + 1) : 0;
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

int cuGetErrorName(int error, const char** name) {
  *name = error == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr;
  return error == 719 ? 0 : 1;
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
  if (result == 0 && name == "axpy") Axpy(arguments);
  return result;
}

// What a test's own stream has made current before.
void standin_set_current(void* context) {
  contexts.clear();
  if (context != nullptr) contexts.push_back(context);
}
}
