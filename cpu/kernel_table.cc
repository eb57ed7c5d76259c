// The kernels of one instruction set.
#include "isa.h"
#include "spmm.h"

#define SGAP_STRINGIFY(name) #name
#define SGAP_NAME(name) SGAP_STRINGIFY(name)

namespace sgap::SGAP_ISA {

extern const KernelTable kKernelTable;
const KernelTable kKernelTable = {
    SGAP_NAME(SGAP_ISA),
    Spmm,
};

}  // namespace sgap::SGAP_ISA
