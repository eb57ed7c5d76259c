"""Short fibers, whose coordinates are listed: the loop nest over them becomes one loop."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_operands import own_cache  # noqa: F401
from tolerance import assert_within, sum_bound

from sgap_jax import CSF, Format, SparseArray, einsum
from sgap_jax.compiler import assign
from sgap_jax.compiler.llvm import fiber_nest, flatten_fibers
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.llvm.print_llvm import print_llvm
from sgap_jax.compiler.loop_ir.loopir import CPU_THREAD, For, If
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.presets import cpu
from sgap_jax.formats.levels import Compressed, Dense

pytest.importorskip("llvmlite")


@pytest.fixture(autouse=True)
def however_few(monkeypatch):
    monkeypatch.setattr(flatten_fibers, "_PREDICTED_FIBERS", 0)


MTTKRP = "ijk,jr,kr->ir"
MTTKRP4 = "ijkl,jr,kr,lr->ir"
SHAPE = (70, 40, 100)
CHUNK = 16  # rows of a task


def tensor(format, dtype="float32", shape=SHAPE, seed=0):
    """Rows of short fibers and one long one, of long fibers, of more entries than a list holds, and
    empty rows."""
    rng = np.random.default_rng(seed)
    few = rng.random(shape) < 0.01
    few[2, 1] = True
    few[CHUNK : 2 * CHUNK] = rng.random((CHUNK, *shape[1:])) < 0.3
    few[2 * CHUNK : 3 * CHUNK] = rng.random((CHUNK, *shape[1:])) < 0.05
    few[5] = few[50:53] = few[:, 3] = False
    x = rng.standard_normal(shape) * few
    A = SparseArray.from_dense(x.astype(jnp.dtype(dtype)), format=format)
    return A, np.asarray(A.todense()).astype(np.float64)


def check(subscripts, format, rank, dtype="float32", shape=SHAPE):
    A, dense = tensor(format, dtype, shape)
    rng = np.random.default_rng(1)
    given = [jnp.asarray(rng.standard_normal((n, rank))).astype(dtype) for n in shape[1:]]
    found = jax.jit(lambda A, *x: einsum(subscripts, A, *x))(A, *given)
    wide = [np.asarray(x).astype(np.float64) for x in given]
    want = np.einsum(subscripts, dense, *wide, optimize=True)
    size = np.einsum(subscripts, *map(np.abs, (dense, *wide)), optimize=True)
    terms = (dense != 0).reshape(len(dense), -1).sum(1)[:, None] + 2 * len(wide)
    assert_within(found, want, sum_bound(want, size, terms, dtype))


@pytest.mark.parametrize(
    "rank, dtype", [(1, "float32"), (16, "float64"), (37, "float32"), (130, "bfloat16")]
)
def test_mttkrp(rank, dtype):
    check(MTTKRP, CSF(3), rank, dtype)


def test_other_levels():
    check(MTTKRP, Format((Dense, Compressed, Compressed)), 16)
    check(MTTKRP4, CSF(4), 16, shape=(70, 9, 6, 30))


def lowered(schedule, shape, nodes, rank=16):
    sizes = dict(zip("ijkl", shape, strict=False)) | {"r": rank}
    return lower(schedule, sizes, nodes, "float32")


def rows_of(function):
    """The loop over the rows of a task."""
    (chunk,) = [s for s in function.body if isinstance(s, For) and s.unit == CPU_THREAD]
    return next(s for s in chunk.body if isinstance(s, For))


def test_what_is_flat(monkeypatch):
    """Three levels become one loop: the factor of a fiber's sum is distributed over its entries."""
    function = lowered(cpu(assign(MTTKRP4, {"A": CSF(4)})), (70, 9, 6, 50), (70, 80, 90, 99))
    found = fiber_nest.fiber_nest(rows_of(function))
    assert [level.scalar for level in found.levels] == ["j", "k"]
    (guard,) = [s for s in found.loop.body if isinstance(s, If)]
    _, lanes = [s for s in guard.then if isinstance(s, For)]  # the gap before the row, then the row
    (run,) = [s for s in lanes.body if isinstance(s, For)]
    assert run.var == "l_pos" and not any(isinstance(s, For) for s in run.body)
    text = str(run.body[-1])
    assert all(f"array='{name}'" in text for name in ("A_vals", "B", "C", "D"))
    assert "flat" in print_llvm(function).text
    monkeypatch.setattr(flatten_fibers, "_PREDICTED_FIBERS", 99)
    assert "flat" not in print_llvm(function).text


@pytest.mark.parametrize(
    "subscripts, format",
    [
        ("ijk,kr->ijr", CSF(3)),  # an output element for each fiber
        ("ijk,jr->ikr", CSF(3)),  # an output element for each entry
        ("ij,jr->ir", CSF(2)),  # one level
        (MTTKRP, Format((Compressed, Dense, Compressed))),  # a dense level: all coordinates
    ],
)
def test_what_is_not(subscripts, format):
    nodes = (70, 80, 99)[: format.ndim]
    if Dense() in format.levels[1:]:
        nodes = (70, 70 * 9, 700)
    function = lowered(cpu(assign(subscripts, {"A": format})), SHAPE, nodes)
    assert fiber_nest.fiber_nest(rows_of(function)) is None
    assert "flat" not in print_llvm(function).text


def test_max_is_not_distributed():
    """The largest of w * x over w is not x times the largest w."""
    e = assign(MTTKRP, {"A": CSF(3)}, reduction="max")
    assert "where" not in str(cpu(e)) and "where" in str(cpu(dataclasses.replace(e, reduction="+")))
    function = lowered(cpu(e), SHAPE, (70, 80, 99))
    found = fiber_nest.fiber_nest(rows_of(function))
    assert found is not None and "max" in str(found.loop)


def wrong_text(text):
    text, count = re.subn(r"store <(\d+) x i32> %v\d+", r"store <\1 x i32> zeroinitializer", text)
    assert count == 2  # for the first vector of a fiber, and for the others
    return text


@pytest.mark.parametrize("where", ["a list", "a factor of the fiber"])
def test_planted_bugs_are_caught(where, monkeypatch):
    if where == "a list":
        right = llvm.print_llvm

        def wrong(*given):
            module = right(*given)
            return dataclasses.replace(module, text=wrong_text(module.text))

        monkeypatch.setattr(llvm, "print_llvm", wrong)
    else:
        distributed = fiber_nest._distributed

        def without_factor(*given):
            *body, total = distributed(*given)
            term = dataclasses.replace(total.value, right=total.value.right.left)
            return *body, dataclasses.replace(total, value=term)

        monkeypatch.setattr(fiber_nest, "_distributed", without_factor)
    llvm._keys.clear()
    with pytest.raises(AssertionError, match="out of bound"):
        check(MTTKRP, CSF(3), 11)
    llvm._keys.clear()


def test_lanes_idle_rather_than_walk_again():
    """40 columns take one walk of 64 lanes, as 64 columns do; not one of 32 and one of 8."""
    e = assign("ijk,kr->ijr", {"A": CSF(3)})
    one, other = (
        print_llvm(lowered(cpu(e), SHAPE, (70, 80, 99), rank)).text.count('ptr %"A3_crd", ')
        for rank in (40, 64)
    )
    assert one == other > 0


@pytest.mark.parametrize("rank, short, asks", [(32, 0, 0), (64, 0, 1), (32, 8, 1)])
def test_what_a_fiber_asks_for_ahead(rank, short, asks, monkeypatch):
    """Prefetches rows of a table larger than a cache: rows of four vectors, or where fibers are
    flattened."""
    function = lowered(cpu(assign(MTTKRP, {"A": CSF(3)})), (70, 9, 20_000), (70, 80, 99), rank)
    monkeypatch.setattr(flatten_fibers, "_PREDICTED_FIBERS", 0 if short else 99)
    assert ("llvm.prefetch" in print_llvm(function).text) == asks


@pytest.mark.parametrize(
    "rows, kinds", [((9, 20_000), "C"), ((20_000, 9), "B"), ((5000,) * 2, "BC")]
)
def test_fibers_ask_ahead_for_rows_of_their_own(rows, kinds, monkeypatch):
    """Each row spans four cache lines; no prefetch reads beyond the coordinates."""
    monkeypatch.setattr(flatten_fibers, "_PREDICTED_FIBERS", 99)
    function = lowered(cpu(assign(MTTKRP, {"A": CSF(3)})), (70, *rows), (70, 80, 99), 64)
    lines = print_llvm(function).text.splitlines()
    calls = [n for n, line in enumerate(lines) if "call void @llvm.prefetch" in line]
    assert len(calls) % 4 == 0
    before = ["\n".join(lines[n - 9 : n]) for n in calls[::4]]
    pattern = re.compile(r'icmp slt i32 %\w+, (\d+)\n.*ptr %"(\w)"', re.DOTALL)
    asked = {pattern.search(text).groups() for text in before}
    assert asked == {(str({"B": 80, "C": 99}[kind] - 1), kind) for kind in kinds}
