"""What the emulator counts of published kernels, against what was profiled of them on a V100 (Chen
et al., SC 2021, section 3.1, Tables 2 and 3, section 7.2.2): matrices of 2048 x 1024 at 90%
sparsity, with 256 dense columns or features."""

import numpy as np
import pytest
from emulator import replay
from published_kernels import Kernel, of_sputnik, of_vectorsparse, sddmm, spmm, sputnik_spmm

from benchmarks.gpu.model import V100, resident_blocks

MMA_SPMM = {
    8: ("wmmaSpmmKernel8", "float4, int, float4, half, float2, 32, 64, 32, 8"),
    4: ("wmmaSpmmKernel4", "float4, int, float2, half, 32, 64, 32, 4"),
}
CUDA_SPMM = {8: "float4", 4: "float2"}
MMA_SDDMM = {8: "float", 4: "float2"}
STEPS = 4  # HMMA instructions of Volta for one m8n8k4 with float32 sums

# {(kernel, V): (sectors of a mean request, HMMA instructions or None)}
PUBLISHED = {
    ("spmm", "mma", 4): (12.56, 429_504),
    ("spmm", "mma", 8): (13.22, 215_104),
    ("spmm", "cuda", 4): (4.04, None),
    ("spmm", "cuda", 8): (4.27, None),
    ("sddmm", "mma", 4): (8.83, None),
    ("sddmm", "mma", 8): (9.25, None),
}


def kernel_of(op, kind, length):
    if op == "sddmm":
        arguments = f"float4, half, {MMA_SDDMM[length]}, false, {length}"
        name = f"mmaSddmmKernel{length}reg"
        return Kernel("wmma_sddmm.cu", "cudaError_t wmmaSddmmEx", name, arguments, 32)
    if kind == "mma":
        name, arguments = MMA_SPMM[length]
        return Kernel("wmma_spmm.cu", "cudaError_t wmmaSpmmEx", name, arguments, 64)
    arguments = f"float, int, {CUDA_SPMM[length]}, half, {length}, 1, 64, 64, 32"
    ends = "cudaError_t cudaSpmmEx"
    return Kernel("cuda_spmm.cu", ends, "cudaSpmmKernel1D", arguments, 64)


@pytest.mark.tier("all")
@pytest.mark.parametrize("op, kind, length", PUBLISHED)
def test_counts_of_published_kernels(op, kind, length, tmp_path):
    kernel = kernel_of(op, kind, length)
    program = of_vectorsparse(kernel, tmp_path)
    traffic, timeline = {"spmm": spmm, "sddmm": sddmm}[op](program, kernel, length)
    sectors, matrix = PUBLISHED[op, kind, length]
    found = traffic.load.per_request()["sectors"]
    products = timeline.tensor_operations().get("f16", 0) // (8 * 8 * 4)
    print(f"{found:.2f} sectors, published {sectors}; {STEPS * products} HMMA, published {matrix}")
    assert found == pytest.approx(sectors, rel=0.01)
    if matrix is not None:
        assert STEPS * products == pytest.approx(matrix, rel=0.005)


# Sputnik's choices for 256 columns: (configuration, kernel, types of values and indices, registers
# of a thread on sm_75).
SINGLE = ("float, float4, float4, 4, 32, 64, 8, 4, false, true, 8", "KernelWithBounds")
HALF = ("half2, half8, half8, 4, 32, 32, 8, 4, false", "Kernel")


@pytest.mark.tier("all")
def test_half_precision_misses_as_much_less_of_l1_as_published(tmp_path):
    """Sectors that Sputnik's SpMM misses in L1 in half precision over those in single precision:
    0.51 measured (48.77% fewer). Replayed it is 0.43: a sixth less, with caches that are fully
    associative and the compiler's choice of registers for sm_75."""
    missed = []
    for (config, kernel), types, registers in (
        (SINGLE, ("float", "int"), 255),
        (HALF, ("half2", "short2"), 116),
    ):
        dtype, index = (np.float32, np.int32) if types[0] == "float" else (np.float16, np.int16)
        program = of_sputnik(config, kernel, *types, tmp_path)
        shared = program.shared_bytes(program.entries[0])
        resident = resident_blocks(V100, registers, 32, shared)
        missed.append(
            replay(
                sputnik_spmm(program, dtype, index),
                multiprocessors=V100.multiprocessors,
                resident=resident,
                l1_bytes=V100.l1_bytes - resident * shared,
                l2_bytes=V100.l2_bytes,
            ).l2_read
        )
    print(f"{missed[1] / missed[0]:.3f} of the sectors, published 0.512")
    assert missed[1] / missed[0] == pytest.approx(1 - 0.4877, rel=0.2)
