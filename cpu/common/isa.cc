#include "cpu/common/isa.h"

#include <stdexcept>

#include "cpu/common/parallel.h"

#if SGAP_SEVERAL_ISAS  // of CMake: those of x86-64 that are named below
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sgap {

// Of CMake: baseline, or the only one of the build.
namespace SGAP_FIRST_ISA {
extern const KernelTable kKernelTable;
}
#if SGAP_SEVERAL_ISAS
namespace avx2 {
extern const KernelTable kKernelTable;
}
namespace avx512 {
extern const KernelTable kKernelTable;
}
namespace avx512_bf16 {
extern const KernelTable kKernelTable;
}
namespace amx {
extern const KernelTable kKernelTable;
}
#endif

namespace {

#if SGAP_SEVERAL_ISAS

// Whether the processor has dot products of bfloat16 pairs in vectors (AVX512-BF16), and of
// integers (AVX512-VNNI), BMI2 and AVX512-VBMI2, as all have that have the former but Cooper Lake.
bool HasPairDots() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool integers = c >> 11 & 1, packs = (b >> 8 & 1) && (c >> 6 & 1);
  return integers && packs && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

// Whether this process may use matrix tiles. Linux saves their state for a process only from when
// it has asked; one that may not, on a system that refuses, has no use of them.
bool HasTiles() {
#if defined(__linux__)
  constexpr unsigned kBfloat16 = 22, kTiles = 24, kBytes = 25;
  constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> kBfloat16 & 1) || !(d >> kTiles & 1) || !(d >> kBytes & 1)) return false;
  static const bool granted = syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

#endif

std::vector<const KernelTable*> SupportedTables() {
  std::vector<const KernelTable*> tables = {&SGAP_FIRST_ISA::kKernelTable};
#if SGAP_SEVERAL_ISAS
  __builtin_cpu_init();
  // Every x86-64 processor with AVX2 also converts half precision (F16C, for which GCC 11 has
  // no test).
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    tables.push_back(&avx2::kKernelTable);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      tables.push_back(&avx512::kKernelTable);
      if (HasPairDots()) {
        tables.push_back(&avx512_bf16::kKernelTable);
        if (HasTiles()) tables.push_back(&amx::kKernelTable);
      }
    }
  }
#endif
  return tables;
}

const KernelTable* selected = nullptr;

}  // namespace

// Handlers ask for these before they read what another call, or a test, has written.
const KernelTable& Kernels() {
  AfterXla(&finished_calls);
  return *selected;
}

std::vector<std::string> SupportedIsas() {
  std::vector<std::string> names;
  for (const KernelTable* table : SupportedTables()) names.push_back(table->isa);
  return names;
}

void SelectIsa(const std::string& name) {
  const std::vector<const KernelTable*> tables = SupportedTables();
  if (name.empty()) {
    selected = tables.back();
    BeforeXla(&finished_calls);
    return;
  }
  std::string supported;
  for (const KernelTable* table : tables) {
    if (name == table->isa) {
      selected = table;
      BeforeXla(&finished_calls);
      return;
    }
    supported += supported.empty() ? table->isa : std::string(", ") + table->isa;
  }
  throw std::invalid_argument("SGAP_CPU_ISA=" + name + ": this build on this processor supports " +
                              supported);
}

}  // namespace sgap
