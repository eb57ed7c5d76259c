// One table of kernels per instruction set; the best one that the processor has is chosen when the
// module loads.
//
// Kernel sources are compiled once per instruction set, inside namespace sgap::SGAP_ISA. Whatever
// is not in that namespace (the standard library's templates above all) would be merged by the
// linker across instruction sets and could run AVX-512 code on a processor without it: kernels use
// plain language and the headers of cpu/ only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sgap {

#define SGAP_KERNEL(Name, Args) struct Args;
#include "cpu/kernels.def"

// A kernel runs one task of its operation; tasks are independent and may run in any order on any
// thread.
template <typename Args>
using Kernel = void (*)(const Args& args, int64_t task);

// Beside two checks of index arrays (cpu/common/structure.h), every kernel of the list by its name.
struct KernelTable {
  const char* isa;
  int64_t vector_bytes;     // of a register
  bool adds_integer_pairs;  // of products, in one instruction (VNNI)
  bool (*indices_hold)(const int32_t* indices, int64_t count, int64_t size);
  bool (*offsets_hold)(const int32_t* offsets, int64_t rows, int64_t nnz);
#define SGAP_KERNEL(Name, Args) Kernel<Args> Name;
#include "cpu/kernels.def"
};

// The table in use. SelectIsa must have succeeded.
const KernelTable& Kernels();

// What this processor can run of what was built, worst first.
std::vector<std::string> SupportedIsas();

// Chooses `name`, or the best where it is empty. Throws std::invalid_argument for one that cannot
// run here.
void SelectIsa(const std::string& name);

}  // namespace sgap
