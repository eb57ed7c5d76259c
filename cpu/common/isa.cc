#include "cpu/common/isa.h"

#include <stdexcept>

namespace sgap {

namespace baseline {
extern const KernelTable kKernelTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kKernelTable;
}
namespace avx512 {
extern const KernelTable kKernelTable;
}
#endif

namespace {

std::vector<const KernelTable*> SupportedTables() {
  std::vector<const KernelTable*> tables = {&baseline::kKernelTable};
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Every x86-64 processor with AVX2 also converts half precision (F16C, for which GCC 11 has
  // no test).
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    tables.push_back(&avx2::kKernelTable);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      tables.push_back(&avx512::kKernelTable);
    }
  }
#endif
  return tables;
}

const KernelTable* selected = nullptr;

}  // namespace

const KernelTable& Kernels() { return *selected; }

std::vector<std::string> SupportedIsas() {
  std::vector<std::string> names;
  for (const KernelTable* table : SupportedTables()) names.push_back(table->isa);
  return names;
}

void SelectIsa(const std::string& name) {
  const std::vector<const KernelTable*> tables = SupportedTables();
  if (name.empty()) {
    selected = tables.back();
    return;
  }
  std::string supported;
  for (const KernelTable* table : tables) {
    if (name == table->isa) {
      selected = table;
      return;
    }
    supported += supported.empty() ? table->isa : std::string(", ") + table->isa;
  }
  throw std::invalid_argument("SGAP_CPU_ISA=" + name + ": this build on this processor supports " +
                              supported);
}

}  // namespace sgap
