// The kernels of one instruction set.
#include "attention.h"
#include "check_levels.h"
#include "gspmm.h"
#include "gspmm_pick.h"
#include "index_check.h"
#include "isa.h"
#include "row_reduce.h"
#include "sddmm.h"
#include "sddmm_cvs.h"
#include "sparse_softmax.h"
#include "spmm.h"
#include "spmm_cvs.h"
#include "spmm_scatter.h"

#define SGAP_STRINGIFY(name) #name
#define SGAP_NAME(name) SGAP_STRINGIFY(name)

namespace sgap::SGAP_ISA {

extern const KernelTable kKernelTable;
const KernelTable kKernelTable = {
    SGAP_NAME(SGAP_ISA),
    IndicesHold,
    OffsetsHold,
    Attention,
    AttentionBackward,
    Spmm,
    SpmmCvs,
    SpmmScatter,
    Gspmm,
    GspmmPick,
    GspmmPickToValues,
    Sddmm,
    SddmmCvs,
    RowReduce,
    RowBroadcast,
    SparseSoftmax,
    SparseSoftmaxJacobian,
    CheckLevels,
};

}  // namespace sgap::SGAP_ISA
