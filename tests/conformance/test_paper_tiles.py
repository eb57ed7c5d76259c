"""vectorSparse's own tiles: the kernels compile for every architecture without spills; tile
values."""

import dataclasses
import itertools

import pytest
from cuda_sources import INCLUDE, require_nvrtc, resources

from sgap_jax import PaperOctetTile, Problem, Schedule, ScheduleError, WarpTile
from sgap_jax.launch import nvrtc
from sgap_jax.launch import sddmm as sddmm_cuda
from sgap_jax.launch import spmm as spmm_cuda
from sgap_jax.launch.sddmm_operands import OperandShapes

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
PLANS = {"spmm": spmm_cuda.launch_plan, "sddmm": sddmm_cuda.launch_plan}
SPMM = [WarpTile(V, tile_k) for V, tile_k in ((8, 16), (4, 48), (2, 64))]
SPMM += [PaperOctetTile(V, tile_k) for V, tile_k in ((8, 32), (8, 64), (4, 4), (2, 64))]
SDDMM = [WarpTile(8), WarpTile(2), PaperOctetTile(8), PaperOctetTile(4)]
SDDMM += [PaperOctetTile(V, partials="shuffle") for V in (8, 2)]


def problem_of(op, tile, dtype="float16", n=128, **more):
    vectors, name = 20_000, f"CVS({tile.vector_length})"
    nnz = vectors * tile.vector_length
    return Problem(op, (1001, 900), nnz, n, dtype=dtype, format=name, platform="cuda", **more)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", PLANS)
def test_every_kernel_compiles_without_spills_or_local_memory(op, arch):
    require_nvrtc()
    for i, (tile, n) in enumerate(itertools.product(SPMM if op == "spmm" else SDDMM, (128, 127))):
        dtype = tile.dtypes[i % len(tile.dtypes)]
        plans = [PLANS[op](problem_of(op, tile, dtype, n), tile)]
        if op == "sddmm" and n == 128:
            factors = OperandShapes(weights=(1, 20_000, tile.vector_length), scale=(1, 1))
            plans.append(PLANS[op](problem_of(op, tile, dtype, n), tile, factors))
        for plan in plans:
            registers, stack, spills = resources(plan.source, arch)
            assert (stack, spills) == (0, 0), f"{tile} for {op}, n = {n}"
            # A block is one warp, and a multiprocessor has at most 32 blocks: 64 registers would
            # do.
            assert registers <= (128 if isinstance(tile, WarpTile) else 200), f"{tile} for {op}"


def test_the_kernels_have_the_instructions_and_the_loads_of_the_paper():
    require_nvrtc()

    def ptx(op, tile, n):
        source = PLANS[op](problem_of(op, tile, n=n), tile).source
        return nvrtc.ptx(source, "compute_90", INCLUDE)

    for n, wide in ((128, True), (127, False)):
        # 16 bytes of 8 rows, besides the indices; two mma for each.
        octets = ptx("spmm", PaperOctetTile(8), n)
        assert octets.count("mma.sync.aligned.m8n8k4.col.row") == 2 * (8 + 1)
        assert octets.count("ld.global.nc.v4.u32") == (8 + 1 if wide else 0) + 1
        sampled = ptx("sddmm", PaperOctetTile(8), n)
        assert sampled.count("mma.sync.aligned.m8n8k4.row.col") == 4 * 4
        assert sampled.count("ld.global.nc.v4.u32") == (2 + 4 * 2 if wide else 0)
        for source in (octets, ptx("spmm", WarpTile(8), n)):
            assert ("st.global.v4.b32" in source) == wide
        assert "st.global.v4.b32" in sampled and "st.global.v4.b32" in ptx("sddmm", WarpTile(8), n)
        assert ptx("spmm", WarpTile(8), n).count("wmma.mma.sync.aligned.col.row.m8n32k16") == 2
        assert ptx("sddmm", WarpTile(8), n).count("wmma.mma.sync.aligned.row.col.m8n32k16") == 4
    # Shuffled operands: 4 registers of X, 4 for each of 4 sub-tiles; otherwise 8 sums for each at
    # the end.
    shuffles = [
        ptx("sddmm", PaperOctetTile(8, partials=partials), 128).count("shfl.sync.bfly.b32")
        for partials in ("registers", "shuffle")
    ]
    assert shuffles == [4 * 8 + 24 + 4, 4 + 4 * 4 + 24 + 4]


@pytest.mark.parametrize("tile", [*SPMM, *SDDMM], ids=str)
def test_tiles_are_values(tile):
    assert Schedule.parse(str(tile)) == tile and hash(Schedule.parse(str(tile))) == hash(tile)
    assert tile.deterministic and tile.transposed() is None and tile.derived() is None


def test_text():
    assert str(WarpTile()) == "WarpTile(vector_length=8)"
    shuffled = PaperOctetTile(4, partials="shuffle")
    assert str(shuffled) == "PaperOctetTile(vector_length=4, partials='shuffle')"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: WarpTile(16), "WarpTile: vector_length must be one of 2, 4, 8, got 16"),
        (lambda: WarpTile(8, tile_k=8), "tile_k must be a multiple of 16 from 16 to 64, got 8"),
        (lambda: WarpTile(8.0), "vector_length must be one of 2, 4, 8, got 8.0"),
        (lambda: PaperOctetTile(1), "PaperOctetTile: vector_length must be one of 2, 4, 8, got 1"),
        (lambda: PaperOctetTile(8, tile_k=6), "tile_k must be a multiple of 4 from 4 to 64, got 6"),
        (lambda: PaperOctetTile(8, partials="arch"), "section 6.3, proposes and nobody built"),
        (lambda: PaperOctetTile(8, partials=1), "one of 'registers', 'shuffle', got 1"),
        (lambda: Schedule.parse("WarpTile(vector_length=3)"), "vector_length must be one of"),
    ],
)
def test_illegal_fields_are_refused_by_name(make, says):
    with pytest.raises(ScheduleError, match=says):
        make()


def test_launches():
    spmm, sddmm = problem_of("spmm", WarpTile(8)), problem_of("sddmm", WarpTile(8))
    for tile in (WarpTile(8), PaperOctetTile(8)):
        plan = spmm_cuda.launch_plan(spmm, tile)
        # section 5.4: ceil(M / V) x ceil(N / 64) blocks of 32 threads
        assert (plan.grid, plan.block, plan.zero) == ((126, 2, 1), (32, 1, 1), ())
        assert plan.scalars == (1001, 128, 0, 0, 1, 20_000, 0)
        plan = sddmm_cuda.launch_plan(sddmm, tile)
        # section 6.4: ceil(M / V) x ceil(N / 32), N the columns of A
        assert (plan.grid, plan.scalars) == ((126, 29, 1), (1001, 160_000, 128, 0, 0, 0, 0, 1, 0))
        # No row has more vectors than there are.
        few = dataclasses.replace(sddmm, nnz=8 * 40)
        assert sddmm_cuda.launch_plan(few, tile).grid == (126, 2, 1)
        many = dataclasses.replace(spmm, batch=70_000, n=2**23)
        plan = spmm_cuda.launch_plan(many, tile, (70_000, 70_000))
        assert plan.grid == (126, 65535, 65535)
        assert plan.scalars[2:] == (160_000, 900 * 2**23, 70_000, 20_000, 0)
        for shape, nnz, n in (((0, 5), 0, 3), ((5, 0), 0, 3), ((5, 5), 0, 0)):
            for op, plan in PLANS.items():
                empty = dataclasses.replace(spmm, op=op, shape=shape, nnz=nnz, n=n)
                assert min(plan(empty, tile).grid) == 1


@pytest.mark.parametrize("tile", [WarpTile(8), PaperOctetTile(8)], ids=str)
def test_explain_says_who_owns_and_who_writes(tile):
    for op in PLANS:
        text = tile.explain(problem_of(op, tile, batch=3))
        for part in (str(tile), "grid:", "warp:", "lane:", "write:", "column_indices", "126 x"):
            assert part in text
        assert ("wmma m8n32k16" in text) == isinstance(tile, WarpTile)
        assert "for each of 3 products" in text
    both = [
        PaperOctetTile(8, partials=partials).explain(problem_of("sddmm", tile))
        for partials in ("registers", "shuffle")
    ]
    assert "at the end" in both[0] and "exchange their features" in both[1]
