// The kernels of one instruction set.
#include "cpu/attention/attention.h"
#include "cpu/check_levels/check_levels.h"
#include "cpu/common/index_check.h"
#include "cpu/common/isa.h"
#include "cpu/gspmm/gspmm.h"
#include "cpu/gspmm/gspmm_pick.h"
#include "cpu/row_reduce/row_reduce.h"
#include "cpu/sddmm/sddmm.h"
#include "cpu/sddmm/sddmm_cvs.h"
#include "cpu/sparse_softmax/sparse_softmax.h"
#include "cpu/spmm/spmm.h"
#include "cpu/spmm/spmm_cvs.h"
#include "cpu/spmm/spmm_scatter.h"

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
