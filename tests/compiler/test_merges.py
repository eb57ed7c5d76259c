"""Merge loops: expressions of several sparse operands and of sums, their lattices, their schedules,
and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_loops import call
from compiled_operands import own_cache  # noqa: F401
from cuda_sources import require_nvrtc
from emulated_launch import emulate, starts
from loop_interpreter import interp
from merged_operands import Merged

from sgap_jax import COO, CSC, CSR, ScheduleError
from sgap_jax.compiler import presets
from sgap_jax.compiler.cuda.print_cuda import launch_plan, padded_sizes, print_cuda
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.loopir import For, Store, While
from sgap_jax.compiler.loop_ir.patterns import statements
from sgap_jax.compiler.loop_ir.print_c import print_c
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.notation import nest
from sgap_jax.compiler.notation.derivatives import gradient, same
from sgap_jax.compiler.notation.expr import Assign, Tensor, index_vars
from sgap_jax.compiler.notation.parse import parse
from sgap_jax.compiler.notation.spaces import space_of
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import CSF, Compressed, Dense, Format

i, j, k = index_vars("i j k")
VECTOR = Format((Compressed,))
A, B, P = Tensor("A", CSR), Tensor("B", CSR), Tensor("P", CSR)
D, E, F = (Tensor(name, CSF(2)) for name in "DEF")
a, b, c = (Tensor(name, VECTOR) for name in "abc")
x, y, s, C, X = (Tensor(name) for name in "xysCX")
T, U = Tensor("T", CSF(3)), Tensor("U", CSF(3))
EXPRESSIONS = {
    "residual": Assign(y[i], x[i] - A[i, j] * s[j]),
    "residual of sparse": Assign(y[i], a[i] - D[i, j] * b[j]),
    "sum": Assign(C[i, j], A[i, j] + B[i, j]),
    "sum of three": Assign(C[i, j], D[i, j] + E[i, j] - F[i, j]),
    "difference from dense": Assign(C[i, j], X[i, j] - A[i, j]),
    "elementwise": Assign(C[i, j], A[i, j] * D[i, j]),
    "weighted": Assign(C[i, j], s[()] * A[i, j] + B[i, j] * x[j]),
    "broadcast": Assign(C[i, j], a[i] + A[i, j]),
    "distributed": Assign(C[i, j], A[i, j] * (B[i, j] - X[i, j])),
    "an operand twice": Assign(y[i], a[i] * b[i] + a[i] - a[i] * c[i]),
    "square": Assign(y[i], a[i] * a[i] - b[i]),
    "square alone": Assign(C[i, j], D[i, j] * D[i, j]),
    "dot": Assign(s[()], a[i] * b[i]),
    "largest product": Assign(y[i], A[i, j] * b[j], "max"),
    "SpMSpV": Assign(y[i], A[i, j] * b[j]),
    "sum of products": Assign(y[i], A[i, j] * b[j] + B[i, j] * x[j]),
    "SpGEMM": Assign(C[i, k], A[i, j] * B[j, k]),
    "SpGEMM of rows": Assign(C[i, k], D[i, j] * E[j, k]),
    "inner products": Assign(C[i, k], A[i, j] * Tensor("Q", CSC)[j, k]),
    "masked": Assign(C[i, k], P[i, k] * A[i, j] * Tensor("Q", CSC)[j, k]),
    "tensors": Assign(Tensor("R")[i, j, k], T[i, j, k] + U[i, j, k] * a[k]),
    "sampled product": Assign(Tensor("R", CSR)[i, k], P[i, k] * A[i, j] * B[j, k]),
    "scaled in place": Assign(Tensor("R", CSF(2))[i, j], D[i, j] * a[i] - D[i, j] * A[i, j]),
    "two sums": Assign(y[i], A[i, j] * x[j] + B[i, k] * X[k, i]),
    "integers": Assign(C[i, j], X[i, j] - A[i, j] * B[i, j] - D[i, j]),
    "negative": Assign(y[i], -D[i, j]),
}
SIZES = {"i": 13, "j": 9, "k": 7}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name):
    """In the interpreter and as machine code, at several densities and dtypes."""
    schedule, threads = Schedule(EXPRESSIONS[name]), presets.cpu(EXPRESSIONS[name], rows=4)
    for density, spare, dtype in ((0.4, 5, "float32"), (0.1, 0, "float64"), (1, 2, "int32")):
        problem = Merged(EXPRESSIONS[name], SIZES, density, spare, dtype, seed=spare)
        problem.check(schedule, dtype)
    problem.check(threads, "int32")
    nothing = Merged(EXPRESSIONS[name], SIZES | {"i": 1}, 0, 3)
    nothing.check(schedule)
    pytest.importorskip("llvmlite")
    for problem in (Merged(EXPRESSIONS[name], SIZES, 0.4, 5), nothing):
        function = problem.function(threads)
        (found,) = call(function, *problem.given(function).values())
        np.testing.assert_array_equal(np.float64(found), problem.want)


def test_golden(golden):
    found = ""
    for name, expression in EXPRESSIONS.items():
        function = Merged(expression, SIZES).function(Schedule(expression))
        found += f"# {name}: {expression}\n{print_c(function)}\n"
    golden.text("merges.txt", found)


def test_arithmetic_is_multiplied_out():
    found = Assign(y[i], -(a[i] - b[i]) * (c[i] + x[i]))
    assert str(found) == "y(i) = -a(i) * c(i) - a(i) * x(i) + b(i) * c(i) + b(i) * x(i)"
    assert [access.tensor for access in found.accesses] == ["a", "c", "x", "b"]
    assert Assign(y[i], A[i, j] * x[j]) == Assign(y[i], (A[i, j], x[j])) and not found.reduced
    assert Assign(y[i], a[i]) == Assign(y[i], (a[i],)) and Assign(y[i], a[i]).sparse == a[i]
    assert Assign(y[i], -a[i]).merges and Assign(y[i], -a[i]).sparse is None
    assert hash(Assign(y[i], a[i] + b[i])) == hash(Assign(y[i], a[i] + b[i]))
    assert Assign(y[i], a[i] + b[i]) != Assign(y[i], a[i] - b[i])
    assert not same(Assign(y[i], a[i] + b[i]), Assign(y[i], a[i] - b[i]))
    assert not same(Assign(y[i], a[i] + b[i]), Assign(y[i], a[i] * b[i]))
    assert same(Assign(y[i], a[i] + b[i]), Assign(x[j], b[j] + c[j]))
    pair, wrong = (
        a[i] * b[i],
        [lambda: a[i] + 1, lambda: 2 * a[i], lambda: 1 - a[i], lambda: a[i] - "c"],
    )
    wrong += [lambda: pair * 2, lambda: 2 * pair, lambda: pair + (1,), lambda: -pair * 3]
    for each in wrong:
        with pytest.raises(TypeError):
            each()


def test_iteration_spaces():
    """The lattice of a union of intersections: all unions of its parts, each before those inside
    it."""
    said = Assign(C[i, j], A[i, j] * D[i, j] + B[i, j]).products
    assert str(space_of(said, i)) == "D ∪ all" and str(space_of(said, j)) == "A ∩ D ∪ B"
    points = [sorted(x.tensor for x in point) for point in space_of(said, j).points()]
    assert points == [["A", "B", "D"], ["A", "D"], ["B"]]
    three = space_of(EXPRESSIONS["sum of three"].products, j)
    assert len(three.points()) == 7 and not three.whole
    whole = space_of(EXPRESSIONS["difference from dense"].products, j)
    assert whole.whole and [len(point) for point in whole.points()] == [1, 0]


def test_a_level_that_stores_all_is_located():
    """Of a product with CSR, whose rows are all stored, the rows of the other operand remain."""
    loops = Schedule(Assign(C[i, j], A[i, j] * D[i, j])).loops()
    assert "D1_p < D1_end" in loops and "A2_pos[i]" in loops and "A1" not in loops
    dense = Schedule(Assign(y[i], a[i] * x[i] * s[()])).loops()
    assert "while" not in dense


@pytest.mark.parametrize("name", ["sum", "residual of sparse", "tensors", "SpGEMM", "weighted"])
def test_schedules(name):
    """Tiles of coordinates, which threads take, and vectors over an index without merges."""
    expression = EXPRESSIONS[name]
    tiles = Schedule(expression).split("i", "i0", "i1", 4)
    problem = Merged(expression, SIZES, 0.5, 3)
    threads = tiles.parallelize("i0", "CPUThread", "NoRaces")
    function = problem.check(threads)
    assert function.body[-1].unit == "CPUThread"
    if "j" in (v.name for v in expression.output.indices):
        problem.check(threads.split("j", "j0", "j1", 3))
        problem.check(threads.split("j", "j0", "j1", 3).reorder("j0", "i1"))
    for parts in (3, 50):  # more than there are coordinates, too
        divided = Schedule(expression).divide("i", "i0", "i1", parts)
        problem.check(divided.parallelize("i0", "CPUThread", "NoRaces"))
    gpu = tiles.split("i0", "block", "thread", 2).reorder("block", "thread", "i1")
    gpu = gpu.parallelize("block", "GPUBlock", "NoRaces").parallelize(
        "thread", "GPUThread", "NoRaces"
    )
    function = problem.check(gpu)
    assert "blockIdx.x" in print_cuda(function)
    require_nvrtc()
    (out,) = function.outputs
    result = [((out.size,), np.dtype(out.dtype))]
    (found,) = emulate(
        launch_plan(function), [*problem.given(function).values(), *starts(function)], result
    )
    np.testing.assert_array_equal(np.float64(found), problem.want)


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_integers_wrap(dtype):
    """As NumPy's, in differences too, of all that runs loops."""
    most, expression = np.iinfo(dtype).max, EXPRESSIONS["integers"]
    problem = Merged(expression, SIZES, 0.5, dtype=dtype, most=most)
    tiles = Schedule(expression).split("i", "i0", "i1", 4)
    gpu = tiles.split("i0", "block", "thread", 2).reorder("block", "thread", "i1")
    gpu = gpu.parallelize("block", "GPUBlock", "NoRaces")
    function = problem.function(gpu.parallelize("thread", "GPUThread", "NoRaces"), dtype)
    want = problem.expected().astype(dtype).reshape(-1)
    assert (want != problem.want).any()
    given = problem.given(function)
    np.testing.assert_array_equal(interp.run(function, given)["C"], want)
    if llvm.available():
        threads = problem.function(presets.cpu(expression), dtype)
        np.testing.assert_array_equal(call(threads, *given.values())[0], want)
    require_nvrtc()
    assert "sgap::WrappedDifference" in print_cuda(function)
    result = [((padded_sizes(function)[0],), np.dtype(dtype))]
    (found,) = emulate(launch_plan(function), [*given.values(), *starts(function)], result)
    np.testing.assert_array_equal(found[: want.size], want)


def test_positions_of_one_operand():
    """An intersection as a loop over one operand that searches in the others."""
    expression = Assign(y[i], A[i, j] * b[j] + A[i, j] * c[j] * x[j])
    over = Schedule(expression).pos("j", "p", "A")
    assert "pos(j, p, A(i,j))" in str(over)
    assert "while" not in over.loops() and over.loops().count("search(b1_crd") == 1
    for density in (0, 0.3, 1):
        problem = Merged(expression, SIZES, density, 3)
        function = problem.check(
            over.split("i", "i0", "i1", 4).parallelize("i0", "CPUThread", "NoRaces")
        )
    pytest.importorskip("llvmlite")
    (found,) = call(function, *problem.given(function).values())
    np.testing.assert_array_equal(np.float64(found), problem.want)
    Merged(EXPRESSIONS["masked"], SIZES, 0.5).check(
        Schedule(EXPRESSIONS["masked"]).pos("j", "p", "Q")
    )
    with pytest.raises(NotImplementedError, match="p is a tile of merged .*, or their positions"):
        over.split("p", "p0", "p1", 4)


def test_coordinates_again():
    """coord after pos: the same merge, whose coordinates can be tiled."""
    for expression, operand in (
        (EXPRESSIONS["SpMSpV"], "A"),
        (EXPRESSIONS["sampled product"], "P"),
    ):
        index = "j" if operand == "A" else "k"
        plain = Schedule(expression)
        again = plain.pos(index, "p", operand).coord("p", "c")
        assert f"pos({index}, p, {operand}" in str(again) and "coord(p, c)" in str(again)
        assert again.loops() == plain.loops() != plain.pos(index, "p", operand).loops()
        problem = Merged(expression, SIZES, 0.4, 3)
        for tiled in (again, again.split("c", "c0", "c1", 4), again.divide("c", "c0", "c1", 3)):
            problem.check(tiled)
        threads = again.split("i", "i0", "i1", 4).parallelize("i0", "CPUThread", "NoRaces")
        function = problem.check(threads)
        if llvm.available():
            (found,) = call(function, *problem.given(function).values())
            np.testing.assert_array_equal(np.float64(found), problem.want)
        with pytest.raises(ScheduleError, match="merged one after the other"):
            again.parallelize("c", "CPUThread", "NoRaces")
    with pytest.raises(ScheduleError, match="in coordinate space already"):
        again.coord("c", "c2")
    tile = plain.split("k", "k0", "k1", 4)
    with pytest.raises(NotImplementedError, match="tile of merged coordinates"):
        tile.pos("k1", "p", "P")


@pytest.mark.parametrize(
    "name,operand,index,part", [("SpMSpV", "b", "j", "A"), ("sampled product", "P", "k", "A B")]
)
def test_coordinates_again_are_those_of_the_index(name, operand, index, part):
    """What can be done with the index can be done with its coordinates after pos and coord: their
    tiles go outside of the loops above, have a bound, and a workspace is over them."""
    plain, problem = Schedule(EXPRESSIONS[name]), Merged(EXPRESSIONS[name], SIZES, 0.4, 3)
    again = plain.pos(index, "p", operand).coord("p", "c").pos("c", "q", part[-1]).coord("q", "d")
    above = str(nest.loops(plain.statement.body)[-2].var)

    def lowered(schedule, var):
        tiles = schedule.split(var, "t", "within", 4)
        rows = schedule.precompute(part, var, "fresh", "w")
        return tiles.bound("t", "u", 2).loops(), *map(
            problem.check, (tiles.reorder("t", above), rows)
        )

    assert lowered(again, "d") == lowered(plain, index)


def test_the_preset():
    """Threads where the outermost index is one of the output; vectors where nothing is merged."""
    said = str(presets.cpu(Assign(C[i, k], A[i, j] * b[j] * X[j, k])))
    assert "CPUThread, NoRaces" in said and "split(i, chunk, row, 16)" in said
    assert "CPUVector" in str(presets.cpu(Assign(C[i, k], X[i, k] + a[i] * x[k] * s[()])))
    assert "CPU" not in str(presets.cpu(EXPRESSIONS["dot"]))
    for name in ("sum", "SpGEMM", "two sums"):
        assert "CPUVector" not in str(presets.cpu(EXPRESSIONS[name]))


@pytest.mark.parametrize("formats", [(CSR, CSR, CSR), (CSF(2), CSR, CSF(2)), (CSR, CSF(2), None)])
def test_workspaces(formats):
    """Gustavson's product by a workspace for each row, with a sparse result at a pattern, or dense;
    the rows of a pattern that the product does not reach, and the reverse."""
    product = parse("C(i,k) = A(i,j) * B(j,k)", dict(zip("ABC", formats, strict=True)))
    rows = Schedule(product).precompute("A B", "k", "k2", "w")
    if formats[2] == CSR:
        assert "float w[1000];" in rows.loops() and "w[k] = 0.0f;" in rows.loops()
        assert "w[k_2] += A_vals[A2_p] * B_vals[B2_p];" in rows.loops()
        assert "C[C_2_p_2] = w[k_3];" in rows.loops()
    elif formats[2] is None:  # all of it is read
        assert "float w[1000] = {0};" in rows.loops()
        with pytest.raises(NotImplementedError, match="k2 is a tile of merged"):
            rows.split("k2", "k3", "k4", 2)
        with pytest.raises(ScheduleError, match="merged one after the other"):
            rows.parallelize("k2", "CPUVector", "NoRaces")
    for density in (0, 0.3, 1):
        problem = Merged(product, SIZES, density, 3)
        problem.check(rows)
        function = problem.check(presets.cpu_workspace(product, 4))
    pytest.importorskip("llvmlite")
    (found,) = call(function, *problem.given(function).values())
    np.testing.assert_array_equal(np.float64(found), problem.want)
    with pytest.raises(ScheduleError, match="not one product of merged coordinates"):
        presets.cpu_workspace(EXPRESSIONS["sum"])


def test_tiles_of_a_producer():
    """The loop that fills a workspace is tiled by itself, and may have a workspace of its own."""
    problem = Merged(EXPRESSIONS["SpMSpV"], SIZES, 0.4, 3)
    rows = Schedule(EXPRESSIONS["SpMSpV"]).precompute("A b", "i", "r", "w")
    for tiled in (rows.split("r", "r0", "r1", 4), rows.divide("r", "r0", "r1", 3)):
        assert "const int i = r0 * " in tiled.loops()
        for both in (tiled, tiled.split("i", "i0", "i1", 5), tiled.reorder("r1", "r0")):
            problem.check(both)
    problem.check(rows.bound("r", "r2", 13))
    problem.check(rows.precompute("A b", "r", "r2", "v").split("r2", "r3", "r4", 3))


def test_a_remainder_in_machine_code():
    """A loop over f with i = f / 4 and j = f % 4, of which LLVM once read X(k,j) as if j were f:
    alone, and around a loop that LLVM unrolls before it vectorizes."""
    H, of_l = Tensor("H", Format((Compressed, Dense))), index_vars("l")[0]
    pytest.importorskip("llvmlite")
    for product in (X[k, j], X[k, j] * y[of_l]):
        expression = Assign(Tensor("R")[k, i, j], product - H[k, i])
        problem = Merged(expression, {"i": 8, "j": 4, "k": 3, "l": 2}, 0.6, 3)
        function = problem.check(Schedule(expression).fuse("i", "j", "f"))
        (found,) = call(function, *problem.given(function).values())
        np.testing.assert_array_equal(np.float64(found), problem.want)


def test_vectors_and_promotion():
    product = Assign(C[i, k], A[i, j] * b[j] * X[j, k])
    vectors = Schedule(product).reorder(i, j, k).parallelize("k", "CPUVector", "NoRaces")
    problem = Merged(product, SIZES, 0.5, 3)
    function = problem.check(vectors.parallelize("i", "CPUThread", "NoRaces"))
    pytest.importorskip("llvmlite")
    (found,) = call(function, *problem.given(function).values())
    np.testing.assert_array_equal(np.float64(found), problem.want)
    total = EXPRESSIONS["sum of products"]
    Merged(total, SIZES, 0.5).check(Schedule(total).scalar_promote("j", "t"))
    assert "where(y(i) += t, forall(j, t += A(i,j) * b(j) + B(i,j) * x(j)))" in str(
        Schedule(total).scalar_promote("j", "t")
    )


def value_of(expression, operands, name, x):
    """The expression of dense arrays, by name, in jax.numpy; `x` is the one of that name."""
    operands = operands | {name: x}
    word = lambda indices: "".join(index.name for index in indices)
    total = 0.0
    for term in expression.products:
        own = {index for x in term.factors for index in x.indices}
        left = [index for index in expression.output.indices if index in own]
        words = ",".join(word(x.indices) for x in term.factors)
        part = jnp.einsum(f"{words}->{word(left)}", *(operands[x.tensor] for x in term.factors))
        each = [SIZES[i.name] if i in left else 1 for i in expression.output.indices]
        total = total + (-1.0 if term.negative else 1.0) * part.reshape(each)
    return jnp.broadcast_to(total, [SIZES[i.name] for i in expression.output.indices])


@pytest.mark.parametrize("name", [n for n, e in EXPRESSIONS.items() if e.reduction == "+"])
def test_gradients(name):
    """The expression of the gradient in each operand is what jax.vjp has of dense arrays, at the
    entries of a sparse one; and its loops compute it."""
    expression = EXPRESSIONS[name]
    for access in expression.accesses:
        of = gradient(expression, access.tensor)
        problem = Merged(of, SIZES, 0.4, 3) if of.merges or of.sparse is None else None
        if problem is None:
            continue  # of one sparse operand: test_derivatives.py
        given = {x.tensor: np.float64(tensor) for x, tensor in problem.dense.items()}
        rest = {x.tensor: np.ones([SIZES[n.name] for n in x.indices]) for x in expression.accesses}
        own, cotangent = rest | given, given[expression.output.tensor]
        value = functools.partial(value_of, expression, own, access.tensor)
        (want,) = jax.vjp(value, jnp.asarray(own[access.tensor]))[1](jnp.asarray(cotangent))
        total = problem.expected()
        for x in of.accesses:
            if x.pattern:
                want = np.where(problem.there[x], want, 0)
        np.testing.assert_array_equal(total, want)
        problem.check(Schedule(of))


REFUSED = [
    (lambda s: s.parallelize("j", "CPUVector", "ParallelReduction"), "merged one after the other"),
    (lambda s: s.unroll("j"), "merged one after the other"),
    (lambda s: s.pos("j", "p", "A"), "B(i,j) needs coordinates of j that A does not store"),
    (lambda s: s.split("j", "j0", "j1", 4).pos("j1", "p", "A"), "j1 is a tile of merged"),
    (lambda s: s.divide("j", "j0", "j1", 2).unroll("j1"), "merged one after the other"),
    (lambda s: s.fuse("i", "j", "f"), "are merged from what A ∪ B stores"),
    (lambda s: s.bound("j", "jb", 9), "are merged from what A ∪ B stores"),
    (lambda s: s.split("j", "j0", "j1", 4).split("j1", "u", "v", 2), "j1 is a tile of merged"),
    (lambda s: s.split("j", "j0", "j1", 4).reorder("j1", "j0"), "must be inside the loop of j0"),
    (lambda s: s.reorder("j", "i"), "must be inside the loop of i, which says where"),
    (lambda s: s.precompute("A", "j", "jw", "w"), "a workspace takes a part of one product that"),
    (lambda s: s.bind("i", "octet_mma"), "octet_mma"),
]


@pytest.mark.parametrize("change,reason", REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused_schedules(change, reason):
    with pytest.raises((ScheduleError, NotImplementedError), match=re.escape(reason)) as refusal:
        change(Schedule(EXPRESSIONS["sum"]))
    message, _ = str(refusal.value).split("\nin ")
    transformation = message[: message.index("(") + 1]
    assert message.count(transformation) == 1, "the call is named once, in front of the reason"


@pytest.mark.parametrize(
    "index,operand,reason",
    [
        ("k", "C_", "over positions of C_(i,k), but B(j,k) has coordinates of k too"),
        ("k2", "B", "k2 is the variable of what fills a workspace"),
    ],
)
def test_refused_positions_beside_a_workspace(index, operand, reason):
    product = parse("C(i,k) = A(i,j) * B(j,k)", dict(A=CSR, B=CSR, C=CSR))
    filled = Schedule(product).precompute("A B", "k", "k2", "w")
    with pytest.raises((ScheduleError, NotImplementedError), match=re.escape(reason)):
        filled.pos(index, "p", operand)


def test_refused_expressions():
    overlapping = Assign(s[()], A[i, j] + a[i])
    with pytest.raises(ScheduleError, match="several loops of i, one for each sum over it"):
        Schedule(overlapping).split("i", "i0", "i1", 2)
    with pytest.raises(ScheduleError, match="convert one to a format in the order of another"):
        Schedule(Assign(C[i, j], A[i, j] + Tensor("Q", CSC)[i, j]))
    with pytest.raises(ScheduleError, match="would be the index of a loop outside of k"):
        Schedule(Assign(C[i, k], X[i, k] - A[i, j] * B[j, k]))
    with pytest.raises(NotImplementedError, match="terms are added up, not reduced by max"):
        Assign(y[i], A[i, j] + B[i, j], "max")
    with pytest.raises(
        NotImplementedError, match=r"Q\(i,j\) in COO may store a coordinate several"
    ):
        Assign(C[i, j], Tensor("Q", COO)[i, j] + X[i, j])
    with pytest.raises(NotImplementedError, match="factor of every term, not R.i,j. in CSR"):
        Assign(Tensor("R", CSR)[i, j], A[i, j] + B[i, j])
    with pytest.raises(NotImplementedError, match="is a sum, not reduced by max"):
        Assign(Tensor("R", CSR)[i, k], P[i, k] * A[i, j] * B[j, k], "max")
    with pytest.raises(NotImplementedError, match="its gradient is several sums"):
        gradient(EXPRESSIONS["largest product"], "A")
    with pytest.raises(ValueError, match="no operand 'Z'; there are A, B"):
        gradient(EXPRESSIONS["SpGEMM"], "Z")
    many = Assign(C[i, j], Tensor("G", CSF(2))[i, j] + D[i, j] + E[i, j] + F[i, j] + A[i, j])
    with pytest.raises(NotImplementedError, match="more than 256 cases"):
        Schedule(many).loops()
    vectors = [Tensor(f"v{n}", VECTOR)[i] for n in range(40)]
    every = Assign(y[i], functools.reduce(lambda one, other: one + other, vectors))
    with pytest.raises(NotImplementedError, match="a lattice of more than 128 points"):
        Schedule(every).loops()
    same = Assign(y[i], a[i] * b[i] * Tensor("a_vals")[i])
    with pytest.raises(ValueError, match="two operands have an array a_vals"):
        Schedule(same).loops()
    whole = Schedule(EXPRESSIONS["sum"])
    for positions, error in (
        ((), "expected those of A, B by name, got ()"),
        ({"A": (13, 4)}, "expected those of A, B by name, got those of A"),
        ({"A": (13, 4), "B": (4,)}, "one capacity for each of the 2 levels of B(i,j)"),
    ):
        with pytest.raises(ValueError, match=re.escape(error)):
            lower(whole, SIZES, positions, "float32")


def test_coordinates_in_no_order_stay_within_the_arrays():
    """Whatever coordinates within the dimensions are stored: the interpreter finds an access out of
    bounds, and a loop that does not end."""
    for name in ("sum", "difference from dense", "an operand twice", "masked", "tensors"):
        problem = Merged(EXPRESSIONS[name], SIZES, 0.5, 2)
        function, random = problem.function(Schedule(EXPRESSIONS[name])), np.random.default_rng(1)
        given = problem.given(function)
        for array in given:
            if array.endswith("_crd"):
                given[array] = random.integers(0, 7, given[array].shape).astype(np.int32)
        interp.run(function, given)


def test_statements_of_the_loops():
    """A merge is one loop while both have entries, and one for what is left of each."""
    function = Merged(EXPRESSIONS["sum"], SIZES).function(Schedule(EXPRESSIONS["sum"]))
    found = list(statements(function.body))
    assert sum(isinstance(s, While) for s in found) == 1
    assert sum(isinstance(s, For) for s in found) == 3
    assert sum(isinstance(s, Store) for s in found) == 5
