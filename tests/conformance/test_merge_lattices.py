"""Merges as the papers have them: the lattices of TACO's own tests, the iteration spaces of Figures
4, 5 and 8 of Senanayake et al. (OOPSLA 2020) and their loops, and sums and products of all pairs of
formats; exact on the battery."""

import itertools
import zlib

import numpy as np
import pytest
from battery import BATTERY
from compiled_loops import call
from compiled_operands import own_cache  # noqa: F401
from merged_operands import Merged

from sgap_jax import CSR, SparseArray, evaluate
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.notation.expr import Assign, Tensor, index_vars
from sgap_jax.compiler.notation.spaces import space_of
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import CSF, Compressed, Dense, Format

i, j, k = index_vars("i j k")
SPARSE, DENSE = Format((Compressed,)), None
y, C = Tensor("y"), Tensor("C")

# Formats of b, c, d; how they are combined; for each point of the lattice the terms that are left.
LATTICES = {
    "dense * dense": ((DENSE, DENSE), "*", ["b * c"]),
    "sparse * sparse": ((SPARSE, SPARSE), "*", ["b * c"]),
    "dense * sparse": ((DENSE, SPARSE), "*", ["b * c"]),
    "dense + dense": ((DENSE, DENSE), "+", ["b + c"]),
    "dense + sparse": ((DENSE, SPARSE), "+", ["b + c", "b"]),
    "sparse + sparse": ((SPARSE, SPARSE), "+", ["b + c", "b", "c"]),
    "dense + dense + dense": ((DENSE,) * 3, "+", ["b + c + d"]),
    "dense + dense + sparse": ((DENSE, DENSE, SPARSE), "+", ["b + c + d", "b + c"]),
    "dense + sparse + sparse": (
        (DENSE, SPARSE, SPARSE),
        "+",
        ["b + c + d", "b + c", "b + d", "b"],
    ),
    "sparse + sparse + sparse": (
        (SPARSE,) * 3,
        "+",
        ["b + c + d", "b + c", "b + d", "c + d", "b", "c", "d"],
    ),
}


def combined(operands, op):
    total, *others = operands
    for other in others:
        total = total * other if op == "*" else total + other if op == "+" else total - other
    return total


@pytest.mark.parametrize("name", LATTICES)
def test_lattices(name):
    formats, op, points = LATTICES[name]
    operands = [Tensor(n, f)[i] for n, f in zip("bcd", formats, strict=False)]
    expression = Assign(y[i], combined(operands, op))
    space = space_of(expression.products, i)
    found = []
    for point in space.points():
        parts = zip(expression.products, space.parts, strict=True)
        left = [term for term, part in parts if part <= point]
        found.append(" + ".join(" * ".join(x.tensor for x in term.factors) for term in left))
    assert found == points
    assert space.whole == (DENSE in formats if op == "+" else set(formats) == {DENSE})
    if expression.merges:
        Merged(expression, {"i": 23}, 0.5, 3).check(Schedule(expression))
    evaluated(expression, {"i": 23})


def evaluated(expression, sizes):
    """`evaluate` of the expression as it prints, with a dense result, and with a sparse one."""
    problem = Merged(expression, sizes, 0.5)
    given = {
        x.tensor: tensor.astype("float32")
        if x.format is None
        else SparseArray.from_dense(tensor.astype("float32"), format=x.format)
        for x, tensor in problem.dense.items()
    }
    want = problem.expected()
    np.testing.assert_array_equal(evaluate(str(expression), **given), want)
    if any(x.format is not None for x in expression.accesses):
        found = evaluate(str(expression), **given, format=CSF(want.ndim))
        np.testing.assert_array_equal(found.todense(), want)


LEVELS = (Dense(), Compressed())
MATRICES = [
    Format(levels) for levels in itertools.product(LEVELS, LEVELS) if Compressed() in levels
]
TENSORS = [Format(x) for x in itertools.product(LEVELS, repeat=3) if Compressed() in x]


@pytest.mark.parametrize("op", ["+", "-", "*"])
def test_pairs_of_formats(op):
    """Matrices and tensors with every combination of levels, and with dense ones."""
    tensors = [] if op == "-" else TENSORS  # the loops of a sum
    for formats, indices in ((MATRICES, (i, j)), (tensors, (i, j, k))):
        for one, other in itertools.product([*formats, None], formats):
            pair = Tensor("A", one)[indices], Tensor("B", other)[indices]
            expression = Assign(C[indices], combined(pair, op))
            if expression.merges:
                problem = Merged(expression, {"i": 7, "j": 5, "k": 4}, 0.4, 2)
                problem.check(Schedule(expression))


DCSR = CSF(2)
SPMV = Assign(y[i], Tensor("B", DCSR)[i, j] * Tensor("c")[j])
SPMSPV = Assign(y[i], Tensor("B", DCSR)[i, j] * Tensor("c", SPARSE)[j])
SPMSPV_CSR = Assign(y[i], Tensor("B", CSR)[i, j] * Tensor("c", SPARSE)[j])
RESIDUAL = Assign(y[i], Tensor("b")[i] - Tensor("B", CSR)[i, j] * Tensor("c", SPARSE)[j])
UNION = Assign(C[i, j], Tensor("B", CSR)[i, j] + Tensor("D", DCSR)[i, j])
SAMPLED = Assign(C[i, j], Tensor("B", CSR)[i, j] * Tensor("D", DCSR)[i, j] * Tensor("X")[i, j])
ROWS = {
    "SpMSpV": Schedule(SPMSPV),
    "SpMSpV, CSR": Schedule(SPMSPV_CSR),
    "SpMSpV, tiles of rows": Schedule(SPMSPV_CSR)
    .split("i", "i0", "i1", 16)
    .parallelize("i0", "CPUThread", "NoRaces"),
    "SpMSpV, tiles of coordinates": Schedule(SPMSPV_CSR)
    .split("i", "i0", "i1", 16)
    .split("j", "j0", "j1", 8)
    .reorder("i0", "j0", "i1", "j1")
    .parallelize("i0", "CPUThread", "NoRaces"),
    "residual": Schedule(RESIDUAL),
    "union": Schedule(UNION),
    "union, tiles": Schedule(UNION)
    .split("j", "j0", "j1", 8)
    .reorder("j0", "i", "j1")
    .parallelize("j0", "CPUThread", "NoRaces"),
    "sampled": Schedule(SAMPLED),
}


def test_figure_4_and_8_iteration_spaces():
    """Of Bc with a dense c only B is iterated over: an intersection with all is B. With a sparse c
    both are, in the inner loop; and the loops say so."""
    spaces = lambda e: [str(space_of(e.products, index)) for index in (i, j)]
    assert spaces(SPMV) == ["B", "B"] and spaces(SPMSPV) == ["B", "B ∩ c"]
    assert spaces(SPMSPV_CSR) == ["all", "B ∩ c"]
    loops = Schedule(SPMSPV).loops({"i": 4, "j": 4}, nnz=7)
    outer, merge = loops.index("for (int B1_p = 0; B1_p < B1_end"), loops.index("while")
    assert outer < merge and "while (B2_p < B2_end && c1_p < c1_end)" in loops
    assert "sum += B_vals[B2_p] * c_vals[c1_p];" in loops and loops.count("while") == 1
    single = Schedule(SPMV).loops({"i": 4, "j": 4}, nnz=7)
    assert "while" not in single and "c[j]" in single


def test_figure_5_tiles_of_coordinates():
    """Tiles of equal area hold unequal numbers of entries: where each begins is searched for, in
    both operands."""
    tiled = ROWS["SpMSpV, tiles of coordinates"].loops({"i": 64, "j": 16}, nnz=100)
    for array in ("B2_crd", "c1_crd"):
        assert tiled.count(f"search({array}") == 2
    assert "j_begin = j0 * 8" in tiled


@pytest.mark.parametrize("name", ["SPMV", "SPMSPV", "SPMSPV_CSR", "RESIDUAL", "UNION", "SAMPLED"])
def test_figures_through_evaluate(name):
    """Figures 4, 5 and 8, a residual, a union and a sampled product."""
    evaluated(globals()[name], {"i": 9, "j": 7})


CASES = list(BATTERY)


@pytest.mark.parametrize("name", ROWS)
def test_battery(name):
    """A third of the named matrices for each row."""
    schedule, turn = ROWS[name], list(ROWS).index(name) % 3
    expression = schedule.expression
    for case in map(BATTERY.get, CASES[turn::3]):
        sizes = dict(zip("ij", case.shape, strict=True))
        number = zlib.crc32(case.name.encode()) % 9
        patterns = {"B": case.dense() != 0}
        spare = case.nnz - case.stored
        problem = Merged(expression, sizes, 0.3, spare, seed=number, patterns=patterns)
        function = problem.check(schedule)
        if llvm.available():
            (found,) = call(function, *problem.given(function).values(), chunk=1, work=1 << 30)
            np.testing.assert_array_equal(np.float64(found), problem.want)
