"""select.top_k of scores that are computed in tiles; select.top_p and select.threshold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from sgap_jax import (
    BCSR,
    COO,
    CSR,
    CVS,
    Reference,
    SparseArray,
    masks,
    reference,
    sddmm,
    select,
    sparse_softmax,
    spmm,
)
from sgap_jax.formats import vectors
from sgap_jax.runtime.native import info
from sgap_jax.select import scores as tiles

INF, NAN = np.inf, np.nan
M, N = 21, 17


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 3 rows in the matrices of these tests."""
    monkeypatch.setattr(tiles, "_TILE_SCORES", 60)
    monkeypatch.setattr(tiles, "_LEAST_ROWS", 2)


def integers(*shape, high=3):
    """Floats whose products are exact, with many ties."""
    return np.random.default_rng(shape).integers(-high, high + 1, shape).astype(np.float64)


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape)


def stored(A):
    """The row offsets, and the columns and values of the entries before the padding."""
    used = int(A.row_offsets[-1])
    assert not np.asarray(A.column_indices)[used:].any() and not np.asarray(A.values)[used:].any()
    return [np.asarray(x) for x in (A.row_offsets, A.column_indices[:used], A.values[:used])]


def expect(A, structure, scores):
    offsets, columns = structure
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    for got, want in zip(stored(A), (offsets, columns, scores[rows, columns]), strict=True):
        np.testing.assert_array_equal(got, want)
    A.checked()


def near(rows, columns):
    return abs(rows - columns) < 2


BAND = masks.band(M, 3, N)
KEEPS = {
    "nothing": None,
    "function": near,
    "pattern": BAND,
    "array": near(np.arange(M)[:, None], np.arange(N)[None]),
    "rows": np.arange(M)[:, None] % 5 == 0,
    "function of columns": lambda rows, columns: columns < 1,
}


def kept_entries(keep):
    if isinstance(keep, SparseArray):
        return np.asarray(keep.todense()) != 0
    kept = keep(np.arange(M)[:, None], np.arange(N)[None]) if callable(keep) else keep
    return np.broadcast_to(False if kept is None else kept, (M, N))


@pytest.mark.seconds(check=2, test=5)
@pytest.mark.parametrize(("causal", "keep"), [(i % 2 == 1, name) for i, name in enumerate(KEEPS)])
def test_tiles_select_what_the_whole_does(keep, causal):
    q, k, keep = integers(M, 2), integers(N, 2), KEEPS[keep]
    masked = integers(M, N) > 2
    exact, hidden = q @ k.T, np.where(masked, -INF, q @ k.T)
    lengths = np.arange(M) * 7 % (N + 5) - 2
    limits = np.clip(lengths, 0, N)
    if causal:
        limits = np.minimum(limits, np.clip(np.arange(M) + 1 + N - M, 0, N))
    options = dict(causal=causal, lengths=lengths, keep=keep)
    function = dict(shape=(M, N), **options)

    @jax.jit
    def run(q, k, masked):
        scores = lambda rows, columns: jnp.where(
            masked[rows][:, columns], -jnp.inf, q[rows] @ k[columns].T
        )
        return (
            select.top_k(scores, 4, **function),
            select.top_p(scores, 0.6, most=6, **function),
            select.threshold(scores, 1.5, nse=300, **function),
            select.top_k((q, k), 4, **options),
            select.top_p((q, k), 0.6, most=6, **options),
            select.threshold((q, k), 1.5, nse=300, **options),
            select.top_p(q @ k.T, 0.6, most=6, **options),
            select.threshold(q @ k.T, 1.5, nse=300, **options),
        )

    found = run(q, k, masked)
    kept = kept_entries(keep)
    for scores, sources in ((hidden, [found[:3]]), (exact, [found[3:6], (found[3], *found[6:])])):
        ranked = np.where(kept, INF, scores)
        for greatest, nucleus, reached in sources:
            expect(greatest, reference.top_k(ranked, 4, limits), scores)
            expect(nucleus, reference.top_p(scores, 0.6, 6, limits, kept), scores)
            expect(reached, reference.threshold(scores, 1.5, limits, kept), scores)
            assert greatest.is_checked and nucleus.is_checked and not reached.is_checked


def test_patterns_that_are_not_checked_keep_what_takes_part():
    scores = normal(M, N)
    offsets, columns = (np.asarray(x) for x in BAND.index_arrays[1])
    columns = np.where(np.arange(len(columns)) % 4 == 0, N + 3, columns)  # no column
    kept = kept_entries(BAND)
    rows = np.repeat(np.arange(M), np.diff(offsets))
    kept[rows[::4], np.asarray(BAND.column_indices)[::4]] = False

    @jax.jit
    def run(scores, offsets, columns):
        keep = SparseArray.from_arrays(BAND.values, offsets, columns, shape=(M, N))
        scores_of = lambda r, c: scores[r][:, c]
        whole = select.top_k(scores, 3, keep=keep)
        return whole, select.top_k(scores_of, 3, keep=keep, shape=(M, N))

    for A in run(scores, offsets, columns):
        expect(A, reference.top_k(np.where(kept, INF, scores), 3), scores)


def scores_of(kind):
    x, few = normal(M, N), np.random.default_rng(0).random((M, N))
    return {
        "normal": x,
        "ties": np.round(x),
        "nan": np.where(few < 0.3, NAN, x),
        "nothing": np.where(np.arange(M)[:, None] % 2, -INF, x),
        "infinite": np.where(
            few < 0.1, INF, np.where(few < 0.2, NAN, np.where(few < 0.3, -INF, x))
        ),
        "large": x * 1000,
        "tiny": x * 1e-310,
        "zeros": np.where(few < 0.5, 0.0, -0.0),
    }[kind]


KINDS = ["normal", "ties", "nan", "nothing", "infinite", "large", "tiny", "zeros"]


@functools.cache
def by_probability_and_threshold(most, schedule):
    def run(x, p, at):
        nucleus = select.top_p(x, p, most=most, schedule=schedule)
        return nucleus, select.threshold(x, at, nse=M * N)

    return jax.jit(run)


@pytest.mark.parametrize("kind", KINDS)
def test_nucleus_and_threshold(kind):
    scores = scores_of(kind)
    for most, schedule, p, at in (
        (5, None, 0.5, 0.25),
        (5, None, np.linspace(-0.1, 1.1, M), np.linspace(-2, 2, M)),
        (N, None, 0.93, 0.0),
        (N, None, 1.0, -INF),
        (N, Reference(), 0.0, INF),
        (N, None, 0.3, NAN),
    ):
        p, at = np.broadcast_to(p, M), np.broadcast_to(at, M)
        nucleus, reached = by_probability_and_threshold(most, schedule)(scores, p, at)
        expect(nucleus, reference.top_p(scores, p, most), scores)
        expect(reached, reference.threshold(scores, at), scores)
        assert nucleus.nnz == M * most and reached.is_checked  # everything fits


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.seconds(check=3)
def test_what_a_threshold_keeps_is_stored_within_the_lengths(tiles):
    """Whatever its score is, of scores given whole and of those that a function computes in tiles;
    a bound and a mask for each element of a batch."""
    rng = np.random.default_rng(0)
    scores, keep = integers(9, 14), rng.random((2, 9, 14)) < 0.3
    lengths, at = rng.integers(0, 15, 9), rng.integers(-2, 4, (2, 9)).astype(np.float32)
    of = lambda rows, columns: jnp.asarray(scores)[rows[:, None], columns[None]]
    given = dict(shape=scores.shape) if tiles else {}

    def one(keep, at):
        A = select.threshold(
            of if tiles else scores, at, nse=80, keep=keep, lengths=lengths, causal=True, **given
        )
        return A.row_offsets, A.column_indices

    columns = np.arange(14)
    exists = (columns < lengths[:, None]) & (columns <= np.arange(9)[:, None] + 5)
    for offsets, indices, own, bounds in zip(*jax.vmap(one)(keep, at), keep, at, strict=True):
        rows, right = np.nonzero(((scores >= bounds[:, None]) | own) & exists)
        np.testing.assert_array_equal(offsets, np.searchsorted(rows, np.arange(10)))
        np.testing.assert_array_equal(indices[: len(right)], right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_scores(dtype):
    scores, q, k = (jnp.asarray(x, dtype) for x in (integers(M, N), integers(M, 2), integers(N, 2)))
    f = lambda x, q, k: (
        select.top_p(x, 0.5, most=4),
        select.threshold(x, 1, nse=N * M),
        select.top_k((q, k), 3),
        select.top_k(lambda r, c: q[r] @ k[c].T, 3, shape=(M, N)),
    )
    nucleus, reached, product, function = jax.jit(f)(scores, q, k)
    assert {A.dtype.name for A in (nucleus, reached, product, function)} == {dtype}
    wide, exact = (np.asarray(x, np.float64) for x in (scores, q.astype(float) @ k.astype(float).T))
    expect(nucleus, reference.top_p(wide, 0.5, 4), wide)
    expect(reached, reference.threshold(wide, 1), wide)
    for A in (product, function):
        expect(A, reference.top_k(exact, 3), exact)


def test_what_does_not_fit_is_counted():
    scores = normal(M, N)
    every = jax.jit(lambda x: select.threshold(x, 0.0, nse=40))
    A, (offsets, columns) = every(scores), reference.threshold(scores, 0.0)
    missing = int(A.row_offsets[-1]) - A.nnz
    assert missing == len(columns) - 40 > 0
    np.testing.assert_array_equal(A.row_offsets, offsets)
    np.testing.assert_array_equal(A.column_indices, columns[:40])
    with pytest.raises(ValueError, match=f"offsets.*{M}.*at most nnz = 40, got {len(columns)}"):
        A.checked()
    with pytest.raises(Exception, match=f"row_offsets.*at most nnz=40, got {len(columns)}"):
        jax.block_until_ready(jax.jit(lambda x: every(x).checked().row_offsets)(scores))
    # Every operation has the entries that did fit.
    dense = np.zeros((M, N))
    rows = np.repeat(np.arange(M), np.diff(offsets))[:40]
    dense[rows, columns[:40]] = scores[rows, columns[:40]]
    B = normal(N, 3)
    np.testing.assert_allclose(spmm(A, jnp.asarray(B)), dense @ B, atol=1e-12)
    np.testing.assert_allclose(
        spmm(A, jnp.asarray(normal(M, 3)), transpose=True), dense.T @ normal(M, 3), atol=1e-12
    )


@pytest.mark.tier("test")
@pytest.mark.parametrize(("format", "height", "width"), [(CVS(4), 4, 1), (BCSR(2, 3), 2, 3)])
def test_vectors_and_blocks(format, height, width):
    shape = (M * height - 1, N * width)
    q, k = integers(M, 2), integers(N, 2)
    scores, whole = q @ k.T, lambda x: np.kron(x, np.ones((height, width)))[: shape[0]]
    # A pattern in the same format keeps its vectors or blocks.
    corner = np.zeros(shape)
    corner[-1, :width] = 1
    keep = SparseArray.from_dense(corner, format=format)
    options = dict(format=format, shape=shape, keep=keep)

    def run(q, k):
        function = lambda r, c: q[r] @ k[c].T
        for source in (function, (q, k), q @ k.T):
            yield select.top_k(source, 3, **options)
            yield select.top_p(source, 0.5, most=3, **options)
            yield select.threshold(source, 2.0, nse=200, **options)

    first = np.zeros((M, N), bool)
    first[-1, 0] = True
    structures = [
        reference.top_k(np.where(first, INF, scores), 3),
        reference.top_p(scores, 0.5, 3, None, first),
        reference.threshold(scores, 2.0, None, first),
    ]
    for i, A in enumerate(jax.jit(lambda q, k: list(run(q, k)))(q, k)):
        offsets, columns = structures[i % 3]
        rows = np.repeat(np.arange(M), np.diff(offsets))
        dense = np.zeros((M, N))
        dense[rows, columns] = scores[rows, columns]
        assert A.format == format and A.shape == shape
        np.testing.assert_array_equal(A.todense(), whole(dense))


@pytest.mark.parametrize("shift", [-19, 0, 5])
@pytest.mark.parametrize("format", [CVS(4), BCSR(2, 3), BCSR(1, 4), BCSR(4, 4)], ids=str)
def test_causal_vectors_and_blocks_have_an_entry_on_or_below_the_diagonal(format, shift):
    shape = (42, 42 + shift)  # not whole vectors and blocks
    below = np.tri(*shape, shift)
    seen = SparseArray.from_dense(below, format=format).index_arrays[1]
    m, n = vectors.grid(shape, format)
    q, k = integers(m, 2), integers(n, 2)
    options = dict(format=format, shape=shape, causal=True)

    def run(q, k):
        for source in ((q, k), lambda r, c: q[r] @ k[c].T, q @ k.T):
            yield select.top_k(source, n, **options)
            yield select.threshold(source, -INF, nse=m * n, **options)

    for A in jax.jit(lambda q, k: list(run(q, k)))(q, k):
        offsets, columns = A.index_arrays[1]
        np.testing.assert_array_equal(offsets, seen[0])
        np.testing.assert_array_equal(columns[: offsets[-1]], seen[1])


def attention(pattern, v):
    return spmm(sparse_softmax(pattern), v)


SOURCES = {
    "whole": lambda q, k: (q @ k.T,),
    "product": lambda q, k: ((q, k),),
    "function": lambda q, k: (lambda rows, columns: q[rows] @ k[columns].T,),
}
SELECTIONS = {
    "top_k": lambda x, **of: select.top_k(x, 4, causal=True, keep=near, **of),
    "top_p": lambda x, **of: select.top_p(x, 0.6, most=5, causal=True, **of),
    "threshold": lambda x, **of: select.threshold(x, 0.2, nse=200, causal=True, **of),
}


@pytest.mark.seconds(check=3, test=5)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_derivatives_are_those_of_the_dense_mask(selection):
    q, k, v = (jnp.asarray(normal(*shape)) for shape in ((M, 3), (N, 3), (N, 2)))

    def sparse(source, q, k, v):
        of = dict(shape=(M, N)) if source == "function" else {}
        return attention(SELECTIONS[selection](*SOURCES[source](q, k), **of), v)

    chosen = SELECTIONS[selection](q @ k.T).with_values
    mask = np.asarray(chosen(jnp.ones(chosen.__self__.nnz)).todense()) != 0

    def dense(q, k, v):
        weights = jax.nn.softmax(jnp.where(mask, q @ k.T, -jnp.inf), axis=1, where=mask)
        return jnp.where(mask.any(1)[:, None], weights, 0) @ v

    def of(function):
        def loss(*x):
            out = function(*x)
            return jnp.sum(jnp.sin(out)), out

        gradient = jax.grad(loss, (0, 1, 2), has_aux=True)
        # (gradients, their directional derivatives, result): traced once, as one program.
        return jax.jit(lambda *x: jax.jvp(gradient, x, x, has_aux=True))(q, k, v)

    right = of(dense)
    for source in SOURCES:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11),
            of(functools.partial(sparse, source)),
            right,
        )


@pytest.mark.tier("all")
def test_derivatives_of_a_function_that_is_not_linear():
    q, k, w = jnp.asarray(normal(6, 2, 3)), jnp.asarray(normal(9, 3)), jnp.asarray(normal(6, 2))

    def indexer(q, k, w):  # of DeepSeek-V3.2: heads [m, h, d], weights [m, h]
        scores = lambda rows, columns: jnp.einsum(
            "rh,rhc->rc", w[rows], jnp.tanh(jnp.einsum("rhd,cd->rhc", q[rows], k[columns]))
        )
        A = select.top_k(scores, 3, shape=(6, 9))
        B = select.threshold(scores, 0.1, nse=30, shape=(6, 9))
        return jnp.sum(A.values**2) + jnp.sum(jnp.sin(B.values))

    check_grads(jax.jit(indexer), (q, k, w), order=2, eps=1e-5)


@pytest.mark.tier("test")
def test_batches():
    q, k = jnp.asarray(integers(3, M, 2)), jnp.asarray(integers(N, 2))

    def of_tiles(q, k):
        scores = lambda rows, columns: q[rows] @ k[columns].T
        found = [select(scores, shape=(M, N)) for select in SELECTIONS.values()]
        return *found, SELECTIONS["top_k"]((q, k))

    def whole(q, k):
        found = [select(q @ k.T) for select in SELECTIONS.values()]
        return *found, found[0]

    def both(of):
        loss = lambda q, k: sum(jnp.sum(jnp.sin(A.values)) for A in of(q, k)[::3])  # of top_k
        return lambda q, k: (of(q, k), jax.grad(loss, (0, 1))(q, k))

    many, one = jax.jit(jax.vmap(both(of_tiles), (0, None)))(q, k), jax.jit(both(whole))
    for b in range(3):
        jax.tree.map(
            lambda x, y, b=b: np.testing.assert_allclose(x[b], y, atol=1e-12), many, one(q[b], k)
        )


@pytest.mark.parametrize("of", ["product", "function"])
def test_no_array_of_all_scores(of, monkeypatch):
    monkeypatch.undo()  # tiles as they are
    m, n, d = 4096, 4096, 8
    q, k = jax.ShapeDtypeStruct((m, d), jnp.float32), jax.ShapeDtypeStruct((n, d), jnp.float32)

    def loss(q, k):
        more = dict(shape=(m, n)) if of == "function" else {}
        A = select.top_k(*SOURCES[of](q, k), 16, causal=True, keep=near, **more)
        return jnp.sum(A.values**2)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(q, k).compile()
    text = compiled.as_text()
    assert "while" in text
    assert f"[{m},{n}]" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * m * n // 2
    # Tiles under the diagonal leave out columns of the upper rows.
    assert f"f32[256,{n}]" in text and "f32[256,1024]" in text


def test_lengths_of_64_bits_do_not_wrap():
    x, huge = jnp.ones((2, 3)), np.int64([2**32, 2 - 2**32])
    for A in (select.top_k(x, 2, lengths=huge), select.threshold(x, 0.0, nse=6, lengths=huge)):
        np.testing.assert_array_equal(np.diff(A.row_offsets) > 0, [True, False])


@pytest.mark.parametrize("kind", ["top_k", "top_p"])
def test_exported_for_any_number_of_rows(kind):
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in info()["ffi_targets"]]
    (m,) = jax.export.symbolic_shape("m")
    keys = np.random.default_rng(5).standard_normal((40, 8)).astype(np.float32)
    of = {
        "top_k": lambda q: select.top_k((q, keys), 6, causal=True),
        "top_p": lambda q: select.top_p((q, keys), 0.6, most=6),
    }[kind]
    f = jax.jit(lambda q: of(q).todense())
    any_rows = jax.ShapeDtypeStruct((m, 8), "float32")
    exported = jax.export.export(f, disabled_checks=allowed)(any_rows)
    for rows in (1, 7, 60):
        q = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
        np.testing.assert_allclose(exported.call(q), f(q), rtol=1e-5)


def test_a_threshold_is_not_exported_for_any_number_of_rows():
    (m,) = jax.export.symbolic_shape("m")
    keys = np.ones((40, 8), np.float32)
    f = jax.jit(lambda q: select.threshold((q, keys), 2.0, nse=200).values)
    with pytest.raises(NotImplementedError, match="symbolic number of rows; the nearest is"):
        jax.export.export(f)(jax.ShapeDtypeStruct((m, 8), "float32"))


@pytest.mark.tier("all")
def test_in_shard_map():
    q, k = jnp.asarray(integers(2 * M, 2)), jnp.asarray(integers(N, 2))

    def of(q, k):
        function = lambda rows, columns: q[rows] @ k[columns].T
        found = (
            select.top_k(function, 4, keep=near, causal=True, shape=(M, N)),
            select.top_p((q, k), 0.6, most=5, keep=BAND),
            select.threshold((q, k), 1.0, nse=200),
        )
        return sum(jnp.sum(jnp.sin(A.values)) for A in found)[None], [A.values for A in found]

    def differentiated(f):
        def loss(q, k):
            sums, values = f(q, k)
            return jnp.sum(sums), values

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))

    def halves(q, k):
        return jax.tree.map(lambda *x: jnp.concatenate(x), of(q[:M], k), of(q[M:], k))

    rows, whole = jax.P("rows"), jax.P()
    with jax.set_mesh(jax.make_mesh((2,), ("rows",), (jax.sharding.AxisType.Auto,))):
        sharded = jax.shard_map(of, in_specs=(rows, whole), out_specs=rows)
        found = jax.device_get(differentiated(sharded)(q, k))
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-10)
    jax.tree.map(close, found, jax.device_get(differentiated(halves)(q, k)))


def test_kept_columns_come_before_infinite_scores():
    scores = jnp.asarray([[INF, 0.0, 1.0, INF]])
    keep = jnp.asarray([[False, False, True, False]])
    A = select.top_k(scores, 2, keep=keep)
    assert A.column_indices.tolist() == [0, 2] and A.values.tolist() == [INF, 1]
    assert select.top_k(scores, 1, keep=keep).column_indices.tolist() == [2]
    last = jnp.asarray([[INF, INF, INF, 0.0]])
    keep = jnp.asarray([[False, False, False, True]])
    offsets, indices = reference.top_p(last, 0.3, 4, keep=keep)
    A = select.top_p(last, 0.3, most=4, keep=keep)
    assert A.row_offsets.tolist() == offsets.tolist()
    assert A.column_indices[: offsets[-1]].tolist() == indices.tolist() == [0, 3]
    A = select.threshold(last, INF, nse=4, keep=keep)
    assert A.column_indices.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_of_kept_columns(kind):
    scores, p = scores_of(kind), np.linspace(0, 0.99, M)
    run = jax.jit(lambda x, p, keep: select.top_p(x, p, most=9, keep=keep))
    for kept in (kept_entries(KEEPS["function of columns"]), kept_entries(near)):
        expect(run(scores, p, kept), reference.top_p(scores, p, 9, keep=kept), scores)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_kept_columns_change_no_order(dtype):
    tiny, greatest = (float(x) for x in (jnp.finfo(dtype).tiny, jnp.finfo(dtype).max))
    values = [greatest, INF, 1, tiny / 2, tiny / 4, 0.0, -tiny / 4, -tiny / 2, -1, -greatest, NAN]
    scores = jnp.asarray(np.asarray(values, dtype)[None])  # XLA would take some for 0
    none = jnp.zeros(scores.shape, bool)
    for k in range(1, len(values) + 1):
        found, alike = select.top_k(scores, k), select.top_k(scores, k, keep=none)
        np.testing.assert_array_equal(found.column_indices, alike.column_indices)
    last = none.at[0, -2].set(True)
    assert select.top_k(scores, 3, keep=last).column_indices.tolist() == [0, 1, 9]


def test_a_threshold_computes_only_scores_that_exist():
    q, k = jnp.ones((2, 3)), jnp.ones((5, 3))
    outside = dict(mode="fill", fill_value=jnp.nan)
    of = lambda q: lambda rows, columns: q[rows] @ k.at[columns].get(**outside).T
    total = lambda q: select.threshold(of(q), 40.0, nse=4, shape=(2, 5)).values.sum()
    assert not jax.jit(jax.grad(total))(q).any()


@pytest.mark.tier("test")
def test_degenerate_sizes():
    for m, n in ((0, 5), (5, 0), (0, 0), (1, 1), (7, 1), (1, 70)):
        q, k = jnp.ones((m, 2)), jnp.ones((n, 2))

        def run(q, k, m=m, n=n):
            for source in SOURCES.values():
                of = dict(shape=(m, n), causal=True)
                yield select.top_k(*source(q, k), 3, **of)
                yield select.top_k(*source(q, k), 0, **of)
                yield select.top_p(*source(q, k), 0.5, most=3, **of)
                yield select.threshold(*source(q, k), 0.0, nse=9, **of)

        for i, A in enumerate(jax.jit(lambda q, k, run=run: list(run(q, k)))(q, k)):
            capacity = (m * min(3, n), 0, m * min(3, n), min(9, m * n))[i % 4]
            assert A.shape == (m, n) and A.nnz == capacity
            assert spmm(A, jnp.ones((n, 2))).shape == (m, 2)
    for m, n in ((0, 5), (5, 0), (0, 0)):  # jnp.take fails where a row of none is asked for
        q, k = (functools.partial(jnp.take, jnp.ones((size, 2)), axis=0) for size in (m, n))
        A = select.threshold(lambda i, j, q=q, k=k: q(i) @ k(j).T, 0.0, nse=4, shape=(m, n))
        assert A.shape == (m, n) and A.nnz == 0


def test_as_in_attention():
    """What an indexer selects is the pattern of the attention of other queries and keys."""
    L = 24
    q, k, v, iq, ik = (jnp.asarray(normal(L, d)) for d in (5, 6, 7, 2, 3))
    iq, ik = iq @ jnp.ones((2, 2)), ik[:, :2]

    def layer(q, k, v, iq, ik):
        pattern = select.top_k((iq, ik), 6, causal=True, keep=masks.band(L, 1))
        return attention(sddmm(pattern, q[:, :5], k[:, :5], scale=0.4), v)

    offsets, columns = reference.top_k(np.where(np.eye(L), INF, iq @ ik.T), 6, np.arange(1, L + 1))
    mask = np.zeros((L, L), bool)
    mask[np.repeat(np.arange(L), np.diff(offsets)), columns] = True
    weights = jax.nn.softmax(jnp.where(mask, q[:, :5] @ k[:, :5].T * 0.4, -jnp.inf))
    np.testing.assert_allclose(jax.jit(layer)(q, k, v, iq, ik), weights @ v, atol=1e-12)


def test_errors():
    x, q, k = jnp.ones((4, 6)), jnp.ones((4, 2)), jnp.ones((6, 2))
    f = lambda rows, columns: q[rows] @ k[columns].T
    with pytest.raises(ValueError, match=r"top_k: shape: scores that a function computes need"):
        select.top_k(f, 2)
    with pytest.raises(ValueError, match=r"top_k: shape: expected \(m, n\), got \[4\]"):
        select.top_k(f, 2, shape=(4,))
    with pytest.raises(ValueError, match=r"must have shape \[r, c\], here \[4, 6\], got \[6, 4\]"):
        select.top_k(lambda r, c: f(r, c).T, 2, shape=(4, 6))
    with pytest.raises(TypeError, match=r"scores\(rows, columns\) must be one of .*got int32"):
        select.threshold(lambda r, c: f(r, c).astype(jnp.int32), 2, nse=4, shape=(4, 6))
    with pytest.raises(ValueError, match=r"\[m, d\] and \[n, d\].*got \[4, 2\] .*\[6, 3\]"):
        select.top_k((q, jnp.ones((6, 3))), 2)
    with pytest.raises(TypeError, match="scores of a product must be one of .*got int32"):
        select.top_k((q.astype(jnp.int32), k), 2)
    with pytest.raises(ValueError, match=r"scores \[4, 6\] in CSR are those of at most \[4, 6\]"):
        select.top_p((q, k), 0.5, most=2, shape=(5, 6))
    with pytest.raises(ValueError, match=r"keep must be a pattern .*\[4, 6\], got \[4, 5\] in CSR"):
        select.top_k(x, 2, keep=masks.band(4, 1, 5))
    with pytest.raises(ValueError, match=r"keep must be a pattern .*\[4, 6\], got \[4, 6\] in COO"):
        select.top_k(x, 2, keep=masks.band(4, 1, 6).asformat(COO))
    with pytest.raises(ValueError, match=r"keep must broadcast to \[4, 6\], got \[3, 6\]"):
        select.top_k(x, 2, keep=jnp.ones((3, 6), bool))
    with pytest.raises(ValueError, match=r"keep\(rows \[r, 1\], columns \[1, c\]\) must broadcast"):
        select.top_k(x, 2, keep=lambda r, c: jnp.ones((3, 6), bool))
    with pytest.raises(TypeError, match=r"keep\(rows, columns\) must be boolean, got int"):
        select.top_k(x, 2, keep=lambda r, c: r + c)
    with pytest.raises(TypeError, match="top_p: most must be an integer, got 0.5"):
        select.top_p(x, 0.5, most=0.5)
    with pytest.raises(ValueError, match="threshold: nse must not be negative, got -1"):
        select.threshold(x, 0.5, nse=-1)
    with pytest.raises(ValueError, match=r"top_p: p must be a real number or \[4\], got \[6\]"):
        select.top_p(x, jnp.ones(6), most=2)
    with pytest.raises(
        ValueError, match=r"threshold: at must be a real number or \[4\], got \[\] of"
    ):
        select.threshold(x, 1j, nse=3)
    with pytest.raises(ValueError, match=r"must be CSR, CVS\(V\) or BCSR\(r, c\), got COO"):
        select.threshold(x, 0.5, nse=3, format=COO)
    assert select.top_k(x, 2, format=CSR).nnz == 8
