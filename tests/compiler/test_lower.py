"""Lowered expressions, run by the interpreter (which finds races, faults and broken collectives),
equal the dense einsum: for the conformance list and every format."""

import compiler_chains as chains
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_chains import MTTKRP, SDDMM_SPARSE, SPMM, SPMV, TTV, positions
from compiler_tensors import Problem
from loop_interpreter import interp
from lowered_chains import (
    COORDINATES,
    LISTED_SIZES,
    POSITIONS,
    ROWS,
    SMALL,
    check,
    over,
    result,
)

from sgap_jax import BCSR, COO, CSC, CSR, CVS, AtomicParallelism, ScheduleError
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.lowering import (
    derived_variables,
    loop_nest,
    parent_positions,
    segment_loops,
)
from sgap_jax.compiler.lowering.context import Context
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.lowering.output_loops import OutputLoops
from sgap_jax.compiler.lowering.relations import Relations
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.expr import assign
from sgap_jax.compiler.presets import cpu, cpu_entries, cpu_fibers, spmm_point
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import CSF, Compressed, Dense, Format

DCC, CDC = (
    Format((first, second, Compressed))
    for first, second in [(Dense, Compressed), (Compressed, Dense)]
)
TRANSPOSED = Format((Compressed, Compressed), order=(1, 0))


@pytest.mark.parametrize("name", ROWS)
def test_conformance_list(name):
    schedule, sizes = ROWS[name], LISTED_SIZES[name]
    check(schedule, sizes, density=0.2)
    check(schedule, sizes, density=0, spare=3)  # only unused capacity


@pytest.mark.parametrize("name", ["2", "4", "6", "11", "12", "15 MTTKRP", "S3", "S4"])
def test_room_is_not_read(name):
    check(ROWS[name], LISTED_SIZES[name], density=0.2, spare=70)


MATRIX = {
    "spmv": ("ij,j->i", ()),
    "spmm": ("ij,jk->ik", ()),
    "transposed": ("ij,ik->jk", ()),
    "sddmm": ("ij,ik,kj->ij", ()),
    "sampled": ("ij,ik,kj->ij", "D"),
    "scaled": ("ij,i->ij", "C"),
    "sum": ("ij->", ()),
}
MATRICES = [CSR, CSC, COO, CSF(2), TRANSPOSED, CVS(4), CVS(4).transposed, BCSR(4, 2)]
MATRICES += [BCSR(4, 2).transposed]


@pytest.mark.parametrize("format", MATRICES, ids=str)
def test_matrices_unscheduled(format):
    for subscripts, sparse in MATRIX.values():
        expression = assign(subscripts, dict.fromkeys(["A", *sparse], format))
        check(Schedule(expression), SMALL, spare=2)


BEYOND = [CVS(4), CVS(3).transposed, BCSR(4, 3), BCSR(3, 5).transposed]


@pytest.mark.parametrize("format", BEYOND, ids=str)
def test_blocks_that_go_beyond_the_matrix(format):
    """Elements of the last blocks outside the matrix are NaN in these tests."""
    sizes = {"i": 11, "j": 7, "k": 3}
    for subscripts, sparse in MATRIX.values():
        expression = assign(subscripts, dict.fromkeys(["A", *sparse], format))
        check(Schedule(expression), sizes, spare=2)
        check(cpu(expression), sizes, density=1)


def test_block_rows_that_only_a_guard_needs():
    """The walk over entries does not need the row, but entries past the matrix are still left
    out."""
    needed = parent_positions._with_blocks
    for reduction in ("+", "max"):
        expression = assign("ij,j->j", {"A": CVS(4)}, reduction=reduction)
        walk = Schedule(expression).split("i", "i0", "i1", 4).reorder("i0", "j", "i1")
        walk = over(walk, "i0", "j")
        check(walk, SMALL | {"i": 11}, density=0.5, spare=3)
        tiles = walk.split("fpos", "p0", "p1", 8).parallelize("p0", loopir.CPU_THREAD, cin.ATOMICS)
        check(tiles, SMALL | {"i": 11}, density=0.5, spare=3)
        with pytest.MonkeyPatch.context() as patch:
            dense = lambda ctx, used: needed(ctx, tuple(v for v in used if v.name != "i0"))
            patch.setattr(parent_positions, "_with_blocks", dense)
            with pytest.raises(AssertionError):
                check(walk, SMALL | {"i": 11}, density=0.5, spare=3)


@pytest.mark.parametrize(
    "format", [CSF(3), DCC, CDC, COO, Format((Compressed,) * 3, (1, 2, 0))], ids=str
)
def test_tensors_unscheduled(format):
    for subscripts in ["ijk,k->ij", "ijk,kl->ijl", "ijk,kl,jl->il", "ijk,il->jkl", "ijk->j"]:
        check(Schedule(assign(subscripts, {"A": format})), SMALL, spare=2)
    check(Schedule(assign("ijk,jk->ijk", {"A": format, "C": format})), SMALL)


def test_dense():
    product = Schedule(assign("ij,jk->ik"))
    check(product, SMALL)
    check(product.fuse("i", "k", "f").split("f", "f0", "f1", 7), SMALL)
    check(
        product.split("i", "i0", "i1", 5)
        .split("k", "k0", "k1", 2)
        .reorder("i0", "k0", "j", "i1", "k1"),
        SMALL,
    )


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_other_reductions(reduction):
    expression = assign("ij,jk->ik", {"A": CSR}, reduction=reduction)
    check(Schedule(expression), SMALL)
    tracked = positions(assign("ij,j->i", {"A": CSR}, reduction=reduction), "A", "i", "j")
    check(
        tracked.split("fpos", "p0", "p1", 4).parallelize("p0", loopir.CPU_THREAD, cin.ATOMICS),
        SMALL,
    )
    grouped = tracked.split("fpos", "p0", "p1", 8).parallelize("p0", loopir.GPU_BLOCK, cin.ATOMICS)
    grouped = grouped.parallelize("p1", loopir.GPU_THREAD, cin.ATOMICS).group("p1", 8, cin.SEGMENT)
    check(grouped, SMALL, spare=3)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_dtypes(dtype):
    """A narrow output is stored once; sums in memory are returned in the accumulator's dtype."""
    wide = "float64" if dtype == "float64" else "float32"
    for schedule, outer in [(Schedule(SPMV), dtype), (ROWS["2"], wide)]:
        problem = Problem(SPMV, SMALL, dtype=dtype)
        function = lower(schedule, SMALL, problem.positions, dtype)
        assert (function.accumulator, function.outputs[0].dtype) == (wide, outer)
        want = problem.want.astype(jnp.dtype(outer)).astype(np.float64)
        np.testing.assert_array_equal(result(schedule, problem, dtype), want)


POSITIONS_OF_MANY = over(Schedule(assign("ij,jk->i", {"A": CSR})), "i", "j")
UNIT_CASES = {
    "divide by 2": Schedule(SPMV).divide("i", "i0", "i1", 2),
    "divide by 3": Schedule(SPMV).divide("i", "i0", "i1", 3),
    "divide after pos": POSITIONS.divide("fpos", "p0", "p1", 3),
    "divide, parallel": POSITIONS.divide("fpos", "p0", "p1", 3).parallelize(
        "p0", loopir.CPU_THREAD, cin.ATOMICS
    ),
    "divide a segment": Schedule(SPMV).pos("j", "jp", "A").divide("jp", "jp0", "jp1", 2),
    "lanes over runs": POSITIONS.split("fpos", "p0", "p1", 5)
    .precompute("A x", "p1", "q", "products")
    .parallelize("p0", loopir.CPU_THREAD, cin.ATOMICS)
    .parallelize("q", loopir.CPU_VECTOR, cin.IGNORE_RACES)
    .parallelize("p1", loopir.CPU_VECTOR, cin.PARALLEL_REDUCTION),
    "runs of every column": over(
        Schedule(assign("ij,jk->i", {"A": CSR})).reorder("k", "i", "j"), "i", "j"
    ).parallelize("k", loopir.CPU_THREAD, cin.ATOMICS),
    "runs under a parent": over(Schedule(assign("ijk->j", {"A": CSF(3)})), "j", "k")
    .pos("i", "ip", "A")
    .parallelize("ip", loopir.CPU_THREAD, cin.ATOMICS),
    "runs in parts": POSITIONS.divide("fpos", "p0", "p1", 3)
    .parallelize("p0", loopir.CPU_THREAD, cin.ATOMICS)
    .parallelize("p1", loopir.CPU_VECTOR, cin.PARALLEL_REDUCTION),
    "tiles of tiles": POSITIONS.split("fpos", "p0", "p1", 16).split("p1", "p2", "p3", 5),
    "strided": POSITIONS.split("fpos", "p0", "p1", 8).reorder("p1", "p0"),
    "tiles across": Schedule(SPMM)
    .split("i", "i0", "i1", 5)
    .split("k", "k0", "k1", 2)
    .reorder("i0", "k0", "i1", "k1", "j"),
    "coordinate tiles": COORDINATES.reorder("i", "j0", "k", "j1").parallelize(
        "i", loopir.CPU_THREAD, cin.NO_RACES
    ),
    "coordinate tiles of tiles": COORDINATES.split("j1", "j2", "j3", 2).reorder(
        "i", "j0", "j2", "j3", "k"
    ),
    "coordinates, then positions": Schedule(SPMM)
    .split("i", "i0", "i1", 4)
    .pos("j", "jp", "A")
    .split("jp", "jp0", "jp1", 3),
    "lanes over a row": Schedule(SPMV).parallelize("j", loopir.CPU_VECTOR, cin.PARALLEL_REDUCTION),
    "coord": Schedule(SPMV).pos("j", "jp", "A").coord("jp", "jc").split("jc", "jc0", "jc1", 3),
    "coord of a tile": Schedule(SPMV)
    .pos("j", "jp", "A")
    .split("jp", "j0", "j1", 3)
    .coord("j1", "c"),
    "fused without pos": Schedule(SPMV).fuse("i", "j", "f"),
    "rows of DCSR": Schedule(chains.SPMM_DCSR).pos("i", "ip", "A").split("ip", "ip0", "ip1", 3),
    "COO": positions(assign("ij,j->i", {"A": COO}), "A", "i", "j").split("fpos", "p0", "p1", 4),
    "COO, parallel": Schedule(assign("ij,jk->ik", {"A": COO}))
    .reorder("i", "j", "k")
    .fuse("i", "j", "f")
    .pos("f", "fpos", "A")
    .split("fpos", "p0", "p1", 4)
    .parallelize("p0", loopir.CPU_THREAD, cin.ATOMICS),
    "CSC": over(Schedule(assign("ij,j->i", {"A": CSC})), "j", "i").split("fpos", "p0", "p1", 4),
    "blocks": Schedule(assign("ij,jk->ik", {"A": BCSR(4, 2)}))
    .split("i", "i0", "i1", 4)
    .split("j", "j0", "j1", 2)
    .reorder("i0", "j0", "i1", "j1", "k")
    .fuse("i0", "j0", "f")
    .pos("f", "fp", "A"),
    "vectors": over(
        Schedule(assign("ij,jk->ik", {"A": CVS(4)}))
        .split("i", "i0", "i1", 4)
        .reorder("i0", "j", "i1", "k"),
        "i0",
        "j",
    ).split("fpos", "p0", "p1", 3),
    "inner levels": Schedule(TTV)
    .fuse("j", "k", "f")
    .pos("f", "fp", "B")
    .split("fp", "fp0", "fp1", 2),
    "first levels of DCC": over(
        Schedule(assign("ijk,kl->il", {"A": DCC})).reorder("i", "j", "k", "l"), "i", "j"
    ).split("fpos", "a", "b", 3),
    "a dense level between": positions(assign("ijk,k->i", {"A": CDC}), "A", "i", "j", "k").split(
        "fpos", "a", "b", 4
    ),
    "all levels of DCC": positions(assign("ijk,k->i", {"A": DCC}), "A", "i", "j", "k"),
    "vector tails": Schedule(SPMM)
    .reorder("i", "k", "j")
    .split("k", "k0", "k1", 4)
    .reorder("i", "k0", "j", "k1")
    .parallelize("k1", loopir.CPU_VECTOR, cin.NO_RACES),
    "rows that all lanes must know": over(Schedule(assign("ij,ik,kj->ij", {"A": CSR})), "i", "j")
    .split("k", "k0", "k1", 4)
    .reorder("k0", "k1", "fpos")
    .parallelize("k0", loopir.GPU_BLOCK, cin.ATOMICS)
    .parallelize("k1", loopir.GPU_THREAD, cin.PARALLEL_REDUCTION)
    .group("k1", 4, cin.PARALLEL_REDUCTION),
    "a sum of sums": POSITIONS_OF_MANY.scalar_promote("fpos").scalar_promote("k"),
    "sparse output, nonzeros": Schedule(SDDMM_SPARSE)
    .reorder("i", "k", "j")
    .fuse("i", "k", "f")
    .pos("f", "fp", "B")
    .split("fp", "fp0", "fp1", 4)
    .parallelize("fp0", loopir.CPU_THREAD, cin.NO_RACES),
}


def test_threads_of_a_warp_are_not_named_as_an_operand():
    """The loop of a warp and that of its threads become one loop of threads."""

    def source(warp):
        s = (
            Schedule(SPMM)
            .split("i", "block", "row", 64)
            .split("row", warp, "i1", 4)
            .split("k", "k0", "thread", 2)
            .bound("k0", "k1", 2)
            .reorder("block", warp, "i1", "thread", "k1", "j")
        )
        s = chains.blocks(s, *((var, "NoRaces") for var in ("block", warp, "thread")))
        return s.source("cuda", {"i": 128, "j": 9, "k": 4}, nnz=30)

    assert "const int other = " in source("other")
    assert "const int B_2 = " in source("B") and "const int B = " not in source("B")


@pytest.mark.parametrize("name", UNIT_CASES)
def test_unit_cases(name):
    check(UNIT_CASES[name], SMALL, density=0.4, spare=5)
    check(UNIT_CASES[name], SMALL, density=0)
    check(UNIT_CASES[name], SMALL, density=1)


def test_presets():
    names = ["{<4 nnz, 1 col>, 1}", "{<2 row, 2 col>, 1}", "{<1/8 row, 2 col>, 4}"]
    for name in [*names, "{<1 nnz, 2 col>, 32}", "{<4 nnz, 2 col>, 8}"]:
        point = AtomicParallelism.parse(name)
        check(spmm_point(SPMM, point, 10), {"i": 21, "j": 13, "k": 10}, spare=3)
    for expression in [SPMV, SPMM, SDDMM_SPARSE, TTV, MTTKRP, assign("ij,jk->ik", {"A": COO})]:
        check(cpu(expression), SMALL)
    for staged in (False, True):
        for expression in [SPMV, assign("ij,j,i->i", {"A": CSF(2)}), assign("ij->i", {"A": CSR})]:
            check(cpu_entries(expression, 16, staged), SMALL, spare=3)
    four = assign("ijkl,jr,kr,lr->ir", {"A": CSF(4)}, reduction="max")
    for expression in [SPMM, MTTKRP, assign("ijk,jl,kl->il", {"A": DCC}), four]:
        sizes = SMALL | {"r": 5}
        check(cpu_fibers(expression, 7), sizes, spare=3)
        check(cpu_fibers(expression, 7), sizes, density=0, spare=20)


def test_no_elements():
    """Nothing to compute, or nothing to add."""
    for sizes in [{"i": 0, "j": 4, "k": 3}, {"i": 4, "j": 0, "k": 3}, {"i": 4, "j": 4, "k": 0}]:
        for name in ["4", "13", "S2", "S3"]:
            if "bound" not in str(ROWS[name]):
                check(ROWS[name], sizes, density=1)
        check(Schedule(SPMM), sizes, density=1)
        check(UNIT_CASES["runs in parts"], sizes, density=1)  # no positions


def test_wide_indices():
    """Indices are int64 where a product of sizes exceeds int32."""
    sizes = {"i": 1 << 16, "j": 4, "k": 1 << 16}
    assert lower(Schedule(SPMM), sizes, (1 << 16, 8), "float32").index == "int64"
    assert lower(Schedule(SPMM), sizes | {"k": 8}, (1 << 16, 8), "float32").index == "int32"


# Planted bugs of lowering are found by these tests.

PLANTED = {
    "no guards": (derived_variables, "_guard_range", lambda *_: None, "1"),
    "segments that do not end": (
        parent_positions,
        "_advance",
        lambda *_: [],
        "a dense level between",
    ),
    "a sum that is not stored where its segment ends": (
        parent_positions,
        "_ends_sum",
        lambda *_: False,
        "15 MTTKRP",
    ),
    "every store owned": (OutputLoops, "owned", lambda *_: True, "2"),
    "lanes that leave": (Context, "by_lane", lambda *_: False, "S4"),
    "steps of one in strides": (Relations, "unit_steps", lambda _, *ends: [*ends], "strided"),
    "segments that are not cut": (
        segment_loops,
        "store_sum",
        lambda *x, **_: STORE(*x, exclusive=True),
        "2",
    ),
    "segments that all threads own": (
        OutputLoops,
        "owns_segments",
        lambda *_: True,
        "runs of every column",
    ),
    "tiles that are not cut": (loop_nest, "trim", lambda ctx, *x: not_cut(ctx, *x), "4"),
    "all tiles whole": (loop_nest, "opened_tile", lambda ctx, loop: whole_tile(ctx, loop), "4"),
}
TILE, TRIM, STORE = loop_nest.opened_tile, loop_nest.trim, segment_loops.store_sum


def not_cut(ctx, body, parent):
    trimmed = TRIM(ctx, body, parent)
    ctx.scope.ranges.clear()
    return trimmed


def whole_tile(ctx, loop):
    found = TILE(ctx, loop)
    return found and (found[0], loopir.Binary("<", loopir.Int(0), loopir.Int(1)))


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name, monkeypatch):
    owner, method, wrong, row = PLANTED[name]
    schedule = ROWS[row] if row in ROWS else UNIT_CASES[row]
    sizes = LISTED_SIZES.get(row, SMALL)
    check(schedule, sizes, density=0.4, spare=3)
    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises((AssertionError, interp.LoopFault, ScheduleError)):
        check(schedule, sizes, density=0.4, spare=3)
