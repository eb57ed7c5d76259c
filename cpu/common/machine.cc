#include "cpu/common/machine.h"

#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace sgap {
namespace {

// `name` of sysconf; `typical` where the system does not say (0 or -1: containers, many an ARM).
int64_t Configured(int name, int64_t typical) {
  const long value = sysconf(name);
  return value > 0 ? int64_t(value) : typical;
}

// The last-level cache that the first processor shares, as Linux lists it, or as sysconf says,
// which on AMD adds up those of the whole package; 0 where neither knows.
int64_t LastLevel() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
  int64_t kilobytes = 0;
  char unit = 0;
  if (file >> kilobytes >> unit && unit == 'K' && kilobytes > 0) return kilobytes << 10;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  return Configured(_SC_LEVEL3_CACHE_SIZE, 0);
#else
  return 0;
#endif
}

bool IsIntel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

// AVX512-FP16 came with Sapphire Rapids.
bool HasFloat16() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 23 & 1);
#else
  return false;
#endif
}

bool HasRegistersOf64() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

// Of AMD's of family 25 those that have registers of 64 bytes are Zen 4.
bool HasWholeRegisters() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!HasRegistersOf64() || !__get_cpuid(1, &a, &b, &c, &d)) return false;
  return !__builtin_cpu_is("amd") || (a >> 8 & 15) + (a >> 20 & 255) != 25;
#else
  return false;
#endif
}

// Takes the choices of another processor: tests run all loops so, on whatever they find.
void ActLike(const std::string& processor, Machine* machine) {
  if (processor.empty()) return;
  if (processor != "intel" && processor != "zen4" && processor != "zen5") {
    throw std::invalid_argument("SGAP_CPU_LIKE: expected intel, zen4 or zen5, got " + processor);
  }
  machine->intel = machine->gathers = processor == "intel";
  machine->whole = processor != "zen4" && HasRegistersOf64();
}

Machine Read() {
  constexpr int64_t kTypicalL1 = 48 << 10, kTypicalL2 = 1 << 20;
  Machine machine{kTypicalL1,         kTypicalL2, 0, 1, IsIntel(), IsIntel() && HasFloat16(),
                  HasWholeRegisters()};
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)
  machine.l1_bytes = Configured(_SC_LEVEL1_DCACHE_SIZE, kTypicalL1);
  machine.l2_bytes = Configured(_SC_LEVEL2_CACHE_SIZE, kTypicalL2);
#endif
  machine.l3_bytes = LastLevel();
  const char* like = std::getenv("SGAP_CPU_LIKE");
  ActLike(like ? like : "", &machine);
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
