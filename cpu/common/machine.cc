#include "cpu/common/machine.h"

#include <unistd.h>

#include <thread>

namespace sgap {
namespace {

// `name` of sysconf; `typical` where the system does not say (0 or -1: containers, many an ARM).
int64_t Configured(int name, int64_t typical) {
  const long value = sysconf(name);
  return value > 0 ? int64_t(value) : typical;
}

bool IsIntel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

Machine Read() {
  constexpr int64_t kTypicalL1 = 48 << 10, kTypicalL2 = 1 << 20;
  Machine machine{kTypicalL1, kTypicalL2, 0, 1, IsIntel()};
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)
  machine.l1_bytes = Configured(_SC_LEVEL1_DCACHE_SIZE, kTypicalL1);
  machine.l2_bytes = Configured(_SC_LEVEL2_CACHE_SIZE, kTypicalL2);
  machine.l3_bytes = Configured(_SC_LEVEL3_CACHE_SIZE, 0);
#endif
  const int64_t cores = std::thread::hardware_concurrency();
  machine.cores = cores > 0 ? cores : 1;
  return machine;
}

}  // namespace

const Machine& ThisMachine() {
  static const Machine machine = Read();
  return machine;
}

}  // namespace sgap
