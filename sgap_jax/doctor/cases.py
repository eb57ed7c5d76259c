"""The calls with known answers that the doctor makes: one or more for each family of CUDA kernels,
small enough to be checked by plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax import reference
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, CVS, Format
from sgap_jax.primitives.attention import sparse_attention
from sgap_jax.primitives.bitmap import bitmap, entries
from sgap_jax.primitives.gsddmm import gsddmm
from sgap_jax.primitives.gspmm import gspmm
from sgap_jax.primitives.nucleus import bind_nucleus, bind_totals
from sgap_jax.primitives.row_reduce import row_max, row_sum
from sgap_jax.primitives.sddmm import sddmm
from sgap_jax.primitives.sparse_softmax import sparse_softmax
from sgap_jax.primitives.spgemm import spgemm
from sgap_jax.primitives.spmm import spmm
from sgap_jax.primitives.structures import transposed
from sgap_jax.schedules import (
    AtomicParallelism,
    AttentionTile,
    OctetTile,
    Problem,
    Schedule,
    SubwarpTile,
    choose_schedule,
)
from sgap_jax.schedules.families import family
from sgap_jax.select import top_k

ROWS, COLUMNS = 40, 48


@dataclass(frozen=True)
class Case:
    """A call of an operation with a schedule.

    Attributes:
      family: the kernels that run it, as `schedules.families.family` names them.
      about: dtype, format and width, to tell cases of one family from each other.
      schedule: the schedule, None for an operation that has no choice.
      run: (schedule) -> the results, as a tuple of JAX arrays.
      expected: () -> the results by plain loops, in float64.
      tolerance: the greatest difference, relative to the greatest result; 0 where values are small
        integers, whose sums have no rounding.
    """

    family: str
    about: str
    schedule: Schedule | None
    run: Callable[[Schedule | None], tuple]
    expected: Callable[[], tuple]
    tolerance: float

    def choose(self, problem: Problem) -> Schedule:
        """The schedule of an operation that derivatives of `run` call: this one for its family."""
        if self.schedule is not None and family(problem.op, self.schedule) == self.family:
            return self.schedule
        return choose_schedule(problem)

    def wrong(self, results: tuple) -> str:
        """How the results differ from the expected ones; empty if they are right."""
        for found, right in zip(results, self.expected(), strict=True):
            got, want = np.asarray(found, np.float64), np.asarray(right, np.float64)
            if got.shape != want.shape:
                return f"it gives shape {list(got.shape)} where {list(want.shape)} is right"
            finite = np.where(np.isfinite(want), want, 0)
            error = np.where(np.isfinite(want), np.abs(got - finite), np.inf)
            error = np.where(got == want, 0, error)
            if got.size and not error.max() <= self.tolerance * max(np.abs(finite).max(), 1):
                at = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
                return f"it gives {got[at]:.6g} where {want[at]:.6g} is right, at {list(at)}"
        return ""


@cache
def _matrix(format: Format) -> np.ndarray:
    """A matrix of small integers with an empty row (or block row), a full one and others, of whole
    vectors for CVS(V)."""
    rng, length = np.random.default_rng(0), format.vector_length or 1
    stored = rng.random((ROWS // length, COLUMNS)) < 0.25
    stored[1], stored[2] = False, True
    values = rng.choice([-2.0, -1.0, 1.0, 2.0], (ROWS, COLUMNS))
    return np.where(np.repeat(stored, length, axis=0), values, 0)


@cache
def _array(dtype: str, format: Format) -> SparseArray:
    return SparseArray.from_dense(_matrix(format).astype(np.float32), format=format).astype(dtype)


def _dense(rows: int, n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, (rows, n)).astype(np.float32)


def _entries(format: Format) -> tuple[np.ndarray, np.ndarray]:
    """(row_offsets, column_indices) of the single entries, by rows."""
    rows, columns = np.nonzero(_matrix(format))
    return np.searchsorted(rows, np.arange(ROWS + 1)), columns


def _stored(dense: np.ndarray, format: Format) -> np.ndarray:
    """Elements of a dense matrix at the stored places, in the shape of the values."""
    length = format.vector_length
    if length is None:
        return dense[np.nonzero(_matrix(format))]
    blocks, columns = np.nonzero(_matrix(format)[::length])
    return np.stack([dense[blocks * length + v, columns] for v in range(length)], axis=1)


def _named(op: str, schedule: Schedule) -> str:
    found = family(op, schedule)
    assert found is not None
    return found


def _spmm(
    schedule: Schedule, dtype: str, n: int, format: Format = CSR, transpose: bool = False
) -> Case:
    B = _dense(ROWS if transpose else COLUMNS, n, 1)

    def run(schedule: Schedule | None) -> tuple:
        A = _array(dtype, format)
        return (spmm(A, jnp.asarray(B, dtype), transpose=transpose, schedule=schedule),)

    def expected() -> tuple:
        A = _matrix(format)
        return ((A.T if transpose else A) @ B,)

    about = f"{dtype}, {format}, n = {n}{', A^T' if transpose else ''}"
    return Case(_named("spmm", schedule), about, schedule, run, expected, 0)


def _sddmm(schedule: Schedule, dtype: str, d: int, format: Format = CSR) -> Case:
    X, Y = _dense(ROWS, d, 2), _dense(COLUMNS, d, 3)

    def run(schedule: Schedule | None) -> tuple:
        dense = (jnp.asarray(x, dtype) for x in (X, Y))
        return (sddmm(_array(dtype, format), *dense, schedule=schedule).values,)

    about = f"{dtype}, {format}, d = {d}"
    expected = lambda: (_stored(X @ Y.T, format),)  # noqa: E731
    return Case(_named("sddmm", schedule), about, schedule, run, expected, 0)


def _extremum(schedule: Schedule, n: int) -> Case:
    X = _dense(COLUMNS, n, 4)

    def run(schedule: Schedule | None) -> tuple:
        A = _array("float32", CSR)
        return (gspmm(A, jnp.asarray(X), op="add", reduce="max", schedule=schedule),)

    def expected() -> tuple:
        offsets, columns = _entries(CSR)
        values = _stored(_matrix(CSR), CSR)
        return (reference.gspmm(values, offsets, columns, (ROWS, COLUMNS), X, "add", "max"),)

    return Case(_named("gspmm", schedule), f"float32, max, n = {n}", schedule, run, expected, 0)


def _edge_vectors(schedule: Schedule, n: int, reduce: str) -> Case:
    """Messages with a vector of each edge."""
    X, (offsets, columns) = _dense(COLUMNS, n, 12), _entries(CSR)
    V = _dense(len(columns), n, 13)

    def run(schedule: Schedule | None) -> tuple:
        A = _array("float32", CSR)
        of: dict = dict(values=jnp.asarray(V), reduce=reduce, schedule=schedule)
        return (gspmm(A, jnp.asarray(X), **of),)

    def expected() -> tuple:
        of = (offsets, columns, (ROWS, COLUMNS))
        own = (reference.gspmm(V[:, c], *of, X[:, c : c + 1], "mul", reduce) for c in range(n))
        return (np.hstack([*own]),)

    about = f"float32, {reduce} of edge vectors, n = {n}"
    return Case(_named("gspmm", schedule), about, schedule, run, expected, 0)


def _ends(schedule: Schedule, n: int) -> Case:
    """A vector of each edge from those of its ends."""
    X, Y = _dense(ROWS, n, 14), _dense(COLUMNS, n, 15)

    def run(schedule: Schedule | None) -> tuple:
        A = _array("float32", CSR)
        of: dict = dict(op="add", reduce=None, schedule=schedule)
        return (gsddmm(A, jnp.asarray(X), jnp.asarray(Y), **of),)

    def expected() -> tuple:
        rows, columns = np.nonzero(_matrix(CSR))
        return (X[rows] + Y[columns],)

    about = f"float32, vectors of entries, n = {n}"
    return Case(_named("sddmm", schedule), about, schedule, run, expected, 0)


def _on_rows(op: str, schedule: Schedule, dtype: str = "float32") -> Case:
    """A reduction of rows, or the softmax with its derivative."""
    oracle = {"row_sum": reference.row_sum, "row_max": reference.row_max}
    operation = {"row_sum": row_sum, "row_max": row_max}
    t = _dense(1, int(np.count_nonzero(_matrix(CSR))), 5)[0]

    def softmax(schedule: Schedule | None) -> tuple:
        A = _array(dtype, CSR)
        function = lambda v: sparse_softmax(A.with_values(v), schedule=schedule).values  # noqa: E731
        return jax.jvp(function, (A.values,), (jnp.asarray(t, dtype),))

    def run(schedule: Schedule | None) -> tuple:
        if op == "sparse_softmax":
            return softmax(schedule)
        return (operation[op](_array(dtype, CSR), schedule=schedule),)

    def expected() -> tuple:
        values, offsets = _stored(_matrix(CSR), CSR), _entries(CSR)[0]
        if op != "sparse_softmax":
            return (oracle[op](values, offsets),)
        p = reference.sparse_softmax(values, offsets)
        return p, reference.sparse_softmax_jacobian(p, t, offsets)

    exact = 0 if op != "sparse_softmax" else 1e-5
    return Case(_named(op, schedule), dtype, schedule, run, expected, exact)


def _broadcast(schedule: Schedule) -> Case:
    """The step that spreads a number of each row over its entries: the gradient of `row_sum`."""
    g = _dense(1, ROWS, 6)[0]

    def run(schedule: Schedule | None) -> tuple:
        A = _array("float32", CSR)
        sums = lambda v: row_sum(A.with_values(v), schedule=schedule)  # noqa: E731
        return tuple(jax.linear_transpose(sums, A.values)(jnp.asarray(g)))

    expected = lambda: (_stored(np.repeat(g[:, None], COLUMNS, 1), CSR),)  # noqa: E731
    return Case(_named("row_broadcast", schedule), "float32", schedule, run, expected, 0)


def _attention(
    schedule: Schedule, dtype: str, format: Format, depth: int = 16, gradients: bool = True
) -> Case:
    """One head, with its gradients, which are launches of their own."""
    q, do = (_dense(ROWS, depth, seed) for seed in (7, 10))
    k, v = (_dense(COLUMNS, depth, seed) for seed in (8, 9))
    scale = 0.25

    def run(schedule: Schedule | None) -> tuple:
        pattern = _array(dtype, format)
        attend = partial(sparse_attention, pattern=pattern, scale=scale, schedule=schedule)
        given = [jnp.asarray(x, dtype)[:, None] for x in (q, k, v)]
        if not gradients:
            return (attend(*given)[:, 0],)
        out, back = jax.vjp(lambda q, k, v: attend(q, k, v), *given)
        return tuple(x[:, 0] for x in (out, *back(jnp.asarray(do, dtype)[:, None])))

    def expected() -> tuple:
        seen = _matrix(format) != 0
        out, lse = reference.attention(*_entries(format), q, k, v, scale)
        if not gradients:
            return (out,)
        scores = np.where(seen, scale * (q @ k.T), -np.inf)
        p = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[:, None])
        ds = scale * p * (do @ v.T - np.sum(do * out, axis=1, keepdims=True))
        return out, ds @ k, ds.T @ q, p.T @ do

    tolerance = 1e-5 if dtype == "float32" else 3e-2
    about = f"{dtype}, {format}{', with gradients' if gradients else ''}"
    return Case(_named("attention", schedule), about, schedule, run, expected, tolerance)


def _greatest() -> Case:
    scores, most = _dense(12, 90, 11), 7

    def run(schedule: Schedule | None) -> tuple:
        A = top_k(jnp.asarray(scores), most, schedule=schedule)
        return A.values, A.row_offsets, A.column_indices

    def expected() -> tuple:
        offsets, columns = reference.top_k(scores, most)
        rows = np.repeat(np.arange(len(scores)), np.diff(offsets))
        return scores[rows, columns], offsets, columns

    return Case("top_k", "float32", None, run, expected, 0)


def _transposed() -> Case:
    """The structure of the transpose, of entries in two tiles; the last ones are padding."""
    rows, columns, padding = 12, 200, 100  # so few columns that they have one digit
    indices = np.random.default_rng(12).integers(0, columns, 2500).astype(np.int32)
    stored = len(indices) - padding
    offsets = (np.arange(rows + 1) * (stored // rows)).astype(np.int32)

    def run(schedule: Schedule | None) -> tuple:
        given = jnp.asarray(offsets), jnp.asarray(indices)
        return tuple(transposed(*given, columns, schedule))

    def expected() -> tuple:
        order = np.argsort(np.append(indices[:stored], [columns] * padding), kind="stable")
        ends = np.append(0, np.cumsum(np.bincount(indices[:stored], minlength=columns)))
        return ends, np.minimum(order // (stored // rows), rows - 1), order

    return Case("transpose_structure", "int32", None, run, expected, 0)


def _bits() -> Case:
    """The bitmap of a mask and the entries of its bits; the last ones are padding."""
    mask = np.random.default_rng(16).random((12, 90)) < 0.3
    nse = int(np.count_nonzero(mask)) + 20

    def run(schedule: Schedule | None) -> tuple:
        words = bitmap(jnp.asarray(mask), schedule)
        return words, *entries(words, nse, schedule)

    def expected() -> tuple:
        whole = np.pad(mask, ((0, 0), (0, -mask.shape[1] % 32)))
        words = np.packbits(whole, axis=1, bitorder="little").view("<u4")
        offsets = np.append(0, np.cumsum(mask.sum(1)))
        return words, offsets, *(np.pad(x, (0, nse - len(x))) for x in np.nonzero(mask))

    return Case("bitmap", "bool", None, run, expected, 0)


def _probable(columns: int) -> Case:
    """The totals of rows, and of all their entries those that reach a probability; the last row has
    none. About half of a row's scores are its greatest, and the others weigh nothing beside
    these."""
    rows = 12
    greatest = np.random.default_rng(columns).random((rows, columns)) < 0.5
    counts = np.repeat([columns, columns // 2, 0], [6, 5, 1])
    stored, offsets = np.arange(columns) < counts[:, None], np.append(0, np.cumsum(counts))
    scores = np.where(greatest, 0, -200).astype(np.float32)
    p = np.resize([0.25, 0.5, 0.75, 1], rows).astype(np.float32)

    def padded(x: np.ndarray) -> np.ndarray:
        return np.pad(x, (0, scores.size - len(x))).astype(x.dtype)

    def run(schedule: Schedule | None) -> tuple:
        one = lambda x, dtype: jnp.asarray(x, dtype)[None]  # noqa: E731
        sums = bind_totals(one(scores, "float32"), one(counts, "int32"), schedule)
        values = one(padded(scores[stored]), "float32")
        indices = padded(np.nonzero(stored)[1])
        given = (values, values, *sums, one(p, "float32"), one(offsets, "int32"))
        found = bind_nucleus(
            *given, one(indices, "int32"), k=columns, n=columns, kept=False, schedule=schedule
        )
        return tuple(x[0] for x in (*sums, *found))

    def expected() -> tuple:
        weights = stored & greatest
        total = np.sum(weights, axis=1)
        before: np.ndarray = np.cumsum(weights, axis=1) - weights
        part = stored & ((weights & (before < (p * total)[:, None])) | (p[:, None] == 1))
        of_rows, of_columns = np.nonzero(part)
        ends, places = np.searchsorted(of_rows, np.arange(rows + 1)), offsets[of_rows] + of_columns
        return np.where(counts, 0, -np.inf), total, ends, padded(of_columns), padded(places)

    return Case("nucleus", f"float32, {columns} columns", None, run, expected, 0)


def _product_at_mask() -> Case:
    """A A^T at the places of a mask."""

    def run(schedule: Schedule | None) -> tuple:
        A = _array("bfloat16", CSR)
        return (spgemm(A, A.T, mask=_array("bfloat16", CSR)[:, :ROWS], schedule=schedule).values,)

    def expected() -> tuple:
        dense = _matrix(CSR)
        return ((dense @ dense.T)[np.nonzero(dense[:, :ROWS])],)

    return Case("spgemm", "bfloat16", None, run, expected, 0)


def _product_in_capacity() -> Case:
    """A A^T, whose structure is found by launches too."""

    def run(schedule: Schedule | None) -> tuple:
        product = jax.jit(lambda A: spgemm(A, A.T, nse=ROWS * ROWS, schedule=schedule))
        C = product(_array("float32", CSR))
        return C.values, C.row_offsets, C.column_indices

    def expected() -> tuple:
        dense = _matrix(CSR)
        rows, columns = np.nonzero((dense != 0) @ (dense != 0).T)
        padding = (0, ROWS * ROWS - len(rows))
        values = (dense @ dense.T)[rows, columns]
        offsets = np.searchsorted(rows, np.arange(ROWS + 1))
        return np.pad(values, padding), offsets, np.pad(columns, padding)

    return Case("spgemm", "float32", None, run, expected, 0)


def cases() -> Iterator[Case]:
    """All calls, those of the most used families first."""
    row = AtomicParallelism(row=1, col=4)
    group = AtomicParallelism(row=Fraction(1, 8), col=4, group=8)
    for dtype in ("float32", "bfloat16", "float16"):
        yield _spmm(group, dtype, 4)
        yield _spmm(row, dtype, 64)
        yield _sddmm(AtomicParallelism(nnz=4, col=4, group=8), dtype, 64)
    yield _spmm(row, "float32", 64, transpose=True)
    yield _spmm(AtomicParallelism(nnz=1, col=4, group=32), "float32", 4)
    yield _spmm(AtomicParallelism(nnz=32, col=4), "float32", 64)
    yield _spmm(AtomicParallelism(row=1, col=4, chunk=4), "float32", 64)
    yield _sddmm(AtomicParallelism(row=1, col=4, group=8), "float32", 64)
    yield _spmm(SubwarpTile(4, subwarp=8), "float32", 32, CVS(4))
    yield _spmm(SubwarpTile(4, subwarp=8), "float32", 32, CVS(4), transpose=True)
    yield _sddmm(SubwarpTile(4, subwarp=8), "float32", 32, CVS(4))
    for dtype in ("float16", "bfloat16"):
        yield _spmm(OctetTile(8, stages=2), dtype, 64, CVS(8))
        yield _spmm(OctetTile(8, stages=2, chunk=4), dtype, 64, CVS(8))
        yield _sddmm(OctetTile(8, tile_n=16, tile_k=64), dtype, 64, CVS(8))
        yield _attention(AttentionTile(8, octet=True), dtype, CVS(8))
    yield _attention(AttentionTile(8), "float32", CSR)
    yield _attention(AttentionTile(8), "float32", CVS(8))
    # The gradients of pieces are added by the kernel that spmm has for it.
    yield _attention(AttentionTile(8, chunk=4), "float32", CSR, gradients=False)
    octets = AttentionTile(8, octet=True, chunk=4)
    yield _attention(octets, "bfloat16", CVS(8), gradients=False)
    one = AtomicParallelism(row=1)
    several = AtomicParallelism(row=Fraction(1, 8), group=8)
    yield _extremum(AtomicParallelism(nnz=4, col=4), 4)
    # Other columns, so that the kernel that merges is another one as well.
    yield _extremum(AtomicParallelism(nnz=1, col=2, group=8), 2)
    # Eight columns, so that the kernels that merge are others as well.
    nonzeros = AtomicParallelism(nnz=4, col=8)
    for reduce in ("max", "sum"):
        yield _edge_vectors(nonzeros, 8, reduce)
        yield _edge_vectors(one, 4, reduce)
    yield _ends(AtomicParallelism(nnz=4, col=4, group=8), 8)
    for schedule in (several, one):
        yield _extremum(schedule, 4)
        for op in ("row_sum", "row_max", "sparse_softmax"):
            yield _on_rows(op, schedule)
        yield _broadcast(schedule)
    yield _greatest()
    yield _transposed()
    yield _bits()
    yield _probable(90)  # a warp has a row
    yield _probable(1100)  # a block has
    yield _product_in_capacity()
    yield _product_at_mask()
