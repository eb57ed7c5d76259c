"""What the emulator counts of published kernels, against what was profiled of them on a V100 (Chen
et al., SC 2021, section 3.1, Tables 2 and 3, section 7.2.2): matrices of 2048 x 1024 at 90%
sparsity, with 256 dense columns or features."""

import numpy as np
import pytest
from emulator import replay
from published_kernels import (
    K,
    Kernel,
    M,
    blocks,
    of_sputnik,
    of_vectorsparse,
    pattern,
    predicted,
    sddmm,
    spmm,
    spmm_launch,
    sputnik_launch,
    sputnik_spmm,
)

from benchmarks.gpu.model import V100, resident_blocks

MMA_SPMM = {
    8: ("wmmaSpmmKernel8", "float4, int, float4, half, float2, 32, 64, 32, 8"),
    4: ("wmmaSpmmKernel4", "float4, int, float2, half, 32, 64, 32, 4"),
    2: ("wmmaSpmmKernel2", "float4, int, float, half, 32, 64, 32, 2"),
}
CUDA_SPMM = {8: "float4", 4: "float2"}
MMA_SDDMM = {8: "float", 4: "float2"}
STEPS = 4  # HMMA instructions of Volta for one m8n8k4 with float32 sums, of which a warp has four

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
    products = timeline.tensor_operations().get("f16", 0) // (4 * 8 * 8 * 4)
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
        shared = program.program.shared_bytes(program.program.entries[0])
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


def spmm_times(kind, length, densities, folder, made=pattern):
    """[Prediction] of vectorSparse's SpMM on a V100 at these densities; the `MachineCode`."""
    kernel = kernel_of("spmm", kind, length)
    published = of_vectorsparse(kernel, folder)
    code, found = None, []
    for density in densities:
        launch = spmm_launch(kernel, length, made(length, density))
        time, code = predicted(published, launch)
        found.append(time)
        print(f"{kind}, V = {length}, {1 - density:.0%}: {1e6 * time.total:.1f} us, {time.bound}")
    return found, code


# Instructions in machine code (section 7.2.2).
LINES = {("mma", 4): 384, ("mma", 8): 416, ("cuda", 4): 3776, ("cuda", 8): 6968}


@pytest.mark.tier("all")
def test_predicted_speedups_of_published_kernels(tmp_path):
    """Tensor cores over CUDA cores were published as 1.34 to 4.51 (section 7.2.1: geometric means
    over layers, V, widths and sparsities). The model says 2.1 to 2.7 for V = 4 and up to a fifth
    more than 4.51 for V = 8, because CUDA cores' loops do not fit in the instruction cache, and
    those of tensor cores do. The profiler saw CUDA cores wait for instructions 11% and 52% of the
    time, V = 4 and 8, at 90% (Table 2): docs/predicted.md has what the term leaves out."""
    for length in (4, 8):
        times = {}
        for kind in ("mma", "cuda"):
            times[kind], code = spmm_times(kind, length, (0.3, 0.1, 0.05), tmp_path)
            print(f"{code.instructions} instructions, published {LINES[kind, length]}")
            assert code.instructions == pytest.approx(LINES[kind, length], rel=0.2)
            fetched = [time.seconds["fetch"] for time in times[kind]]
            assert all(fetched) == (kind == "cuda") == any(fetched)
        gains = [c.total / m.total for c, m in zip(times["cuda"], times["mma"], strict=True)]
        waits = 1 - times["cuda"][1].seconds["issue"] / times["cuda"][1].total
        print("tensor cores over CUDA cores:", *(f"{gain:.2f}" for gain in gains), end="; ")
        print(f"{waits:.0%} of the time of CUDA cores is not issue at 90%")
        assert all(1.34 < gain < 1.2 * 4.51 for gain in gains)


@pytest.mark.tier("all")
def test_predicted_times_where_sparse_products_were_published_as_fast_as_dense_ones(tmp_path):
    """cuBLAS's half precision was passed beyond 80%, 70% and 50% of zeros for V = 2, 4, 8 (section
    7.2.1). The dense product is one and the same, so the predicted times there are to agree."""
    at = {2: 0.2, 4: 0.3, 8: 0.5}
    times = [spmm_times("mma", length, (at[length],), tmp_path)[0][0].total for length in at]
    print("predicted us:", *(f"{1e6 * time:.1f}" for time in times))
    assert max(times) < 1.5 * min(times)


@pytest.mark.tier("all")
def test_blocks_bring_no_less_to_l1_than_vectors(tmp_path):
    """Figure 18, by one kernel: bytes from L2 to L1 depend on the length of vectors, not on whether
    they stand in square blocks (section 4: the same reuse)."""
    densities = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
    for length in (4, 8):
        vectors, squares = (
            [found.l2_bytes for found in spmm_times("mma", length, densities, tmp_path, made)[0]]
            for made in (pattern, blocks)
        )
        print("MB, vectors:", *(f"{1e-6 * found:.1f}" for found in vectors))
        print("MB, blocks: ", *(f"{1e-6 * found:.1f}" for found in squares))
        np.testing.assert_allclose(vectors, squares, rtol=0.12)


@pytest.mark.tier("all")
def test_half_precision_gains_as_little_as_published(tmp_path):
    """Figures 4 and 5: Sputnik's product in half precision passes 0.5 of the bytes of L2 at best,
    where a dense product on tensor cores gains 8 times the arithmetic; so it passes the dense one
    only at sparsities where single precision has done so long before."""
    gains = []
    for (config, kernel), types in ((SINGLE, ("float", "int")), (HALF, ("half2", "short2"))):
        dtype, index = (np.float32, np.int32) if types[0] == "float" else (np.float16, np.int16)
        published = of_sputnik(config, kernel, *types, tmp_path)
        found = [
            predicted(published, sputnik_launch(dtype, index, density))[0]
            for density in (0.2, 0.1, 0.02)
        ]
        print(types[0], *(f"{1e6 * x.total:.1f} us ({x.bound})" for x in found))
        gains.append([x.total for x in found])
    single, half = gains
    assert all(1 < s / h < 3 for s, h in zip(single, half, strict=True))


DENSE_MB = {2: 26.2, 4: 52.4}  # from L2, of the dense product in tiles of 128 x 64, by bytes


@pytest.mark.tier("all")
def test_figure_4_as_counts(tmp_path):
    """Sputnik's product against the dense one, in single and half precision: bytes from L2 over
    those of the dense product, and instructions. Half precision halves the dense bytes and divides
    the dense arithmetic by 8. Of Sputnik's it takes away about as many bytes, but no instruction:
    they bound it, and the gain over a dense product that single precision has is lost."""
    found = {}
    for (config, kernel), types in ((SINGLE, ("float", "int")), (HALF, ("half2", "short2"))):
        dtype, index = (np.float32, np.int32) if types[0] == "float" else (np.float16, np.int16)
        published = of_sputnik(config, kernel, *types, tmp_path)
        for density in (0.3, 0.2, 0.1, 0.02):
            counted, _ = predicted(published, sputnik_launch(dtype, index, density))
            megabytes = 1e-6 * counted.l2_bytes
            part = megabytes / DENSE_MB[np.dtype(dtype).itemsize]
            found[types[0], density] = part, counted.instructions
            print(
                f"{types[0]}, {1 - density:.0%}: {megabytes:.1f} MB from L2, {part:.2f} of dense; "
                f"{1e-6 * counted.instructions:.2f} M instructions"
            )
    for density in (0.3, 0.2, 0.1):
        single, half = (found[of, density] for of in ("float", "half2"))
        assert 0.7 * single[0] < half[0] < single[0]
        assert half[1] > single[1]


@pytest.mark.tier("all")
def test_figure_6_as_counts(tmp_path):
    """Products of square blocks by their size, for equally much that is stored: larger blocks take
    fewer instructions, and those of 8 rows leave no part of a tensor core idle. So small blocks are
    slow, as the figure has it of blocked-ELL."""
    for density in (0.5, 0.1):
        found = []
        for length in (2, 4, 8):
            ((counted,), code) = spmm_times("mma", length, (density,), tmp_path, blocks)
            used = M * K * 256 * density
            issued = counted.seconds["tensor"] * V100.clock * V100.tensor["f16"]
            issued *= min(counted.blocks, V100.multiprocessors)
            found.append((counted.instructions, used / issued))
            print(
                f"{length} x {length}, {1 - density:.0%}: {1e-6 * counted.l2_bytes:.1f} MB, "
                f"{1e-6 * counted.instructions:.2f} M instructions, {code.instructions} in the "
                f"kernel, {used / issued:.2f} of the tensor operations used"
            )
        instructions, used = zip(*found, strict=True)
        assert list(instructions) == sorted(instructions, reverse=True)
        assert used == pytest.approx((0.25, 0.5, 1), rel=0.1)
