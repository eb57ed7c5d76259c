// The kernels of one instruction set.
#include "cpu/common/isa.h"
#include "cpu/simd/simd.h"

#define SGAP_STRINGIFY(name) #name
#define SGAP_NAME(name) SGAP_STRINGIFY(name)

#if defined(SGAP_BASE_ISA)
#include "cpu/sddmm/sddmm.h"
#include "cpu/sparse_softmax/sparse_softmax.h"
#include "cpu/spmm/spmm.h"

// An instruction set that differs from SGAP_BASE_ISA in the kernels of tiles and of integers, and
// in those of bfloat16 in pairs, which SGAP_PAIR_ISA has, itself or another one.
namespace sgap::SGAP_BASE_ISA {
#define SGAP_KERNEL(Name, Args) void Name(const Args& args, int64_t task);
#include "cpu/kernels.def"
}  // namespace sgap::SGAP_BASE_ISA

namespace sgap::SGAP_PAIR_ISA {
#define SGAP_KERNEL(Name, Args)
#define SGAP_PAIR_KERNEL(Name, Args) void Name(const Args& args, int64_t task);
#define SGAP_ROUND_KERNEL(Name, Args) void Name(const Args& args, int64_t task);
#include "cpu/kernels.def"
}  // namespace sgap::SGAP_PAIR_ISA
#endif

namespace sgap::SGAP_ISA {

#if defined(SGAP_BASE_ISA)

#define SGAP_KERNEL(Name, Args) using SGAP_BASE_ISA::Name;
#define SGAP_INTEGER_KERNEL(Name, Args) void Name(const Args& args, int64_t task);
#define SGAP_ROUND_KERNEL(Name, Args)                                \
  static void Name##OfAny(const Args& args, int64_t task) {          \
    const bool pairs = args.dtype == Dtype::kBFloat16;               \
    (pairs ? SGAP_PAIR_ISA::Name : SGAP_BASE_ISA::Name)(args, task); \
  }
// Where there are matrix tiles, one product of pairs takes as long as four multiply-adds of
// float32 (0.53 ns and 0.13, measured on an Intel Xeon of the Granite Rapids class), on Zen 4 as
// long as one.
#if defined(SGAP_AMX)
#define SGAP_PAIR_KERNEL(Name, Args) constexpr Kernel<Args> Name##OfAny = SGAP_BASE_ISA::Name;
#else
#define SGAP_PAIR_KERNEL(Name, Args) SGAP_ROUND_KERNEL(Name, Args)
#endif
#define SGAP_TILE_KERNEL(Name, Args) void Name(const Args& args, int64_t task);
#include "cpu/kernels.def"

#else

#define SGAP_KERNEL(Name, Args) void Name(const Args& args, int64_t task);
#include "cpu/kernels.def"

#endif

// Whether every index is in 0 .. size - 1. Read as unsigned, negative ones are the greatest, so one
// maximum per vector finds both kinds of wrong ones, at the speed at which the array is read.
bool IndicesHold(const int32_t* indices, int64_t count, int64_t size) {
  uint32_t greatest = 0;
#pragma GCC unroll 4
  for (int64_t p = 0; p < count; ++p) {
    const auto index = uint32_t(indices[p]);
    greatest = index > greatest ? index : greatest;
  }
  constexpr int64_t kMost = INT64_C(1) << 31;  // more than any index
  return count == 0 || greatest < uint32_t(size < kMost ? size : kMost);
}

// Whether offsets rise from 0 to at most nnz and never fall.
bool OffsetsHold(const int32_t* offsets, int64_t rows, int64_t nnz) {
  uint32_t wrong = offsets[0] != 0 || offsets[rows] > nnz;
  for (int64_t r = 0; r < rows; ++r) wrong |= offsets[r + 1] < offsets[r];
  return wrong == 0;
}

extern const KernelTable kKernelTable;
const KernelTable kKernelTable = {
    SGAP_NAME(SGAP_ISA),
    kVectorBytes,
#if defined(__AVX512VNNI__) || defined(SGAP_BASE_ISA)
    true,
#else
    false,
#endif
    IndicesHold,
    OffsetsHold,
#define SGAP_KERNEL(Name, Args) Name,
#if defined(SGAP_BASE_ISA)
#define SGAP_PAIR_KERNEL(Name, Args) Name##OfAny,
#define SGAP_ROUND_KERNEL(Name, Args) Name##OfAny,
#endif
#include "cpu/kernels.def"
};

}  // namespace sgap::SGAP_ISA
