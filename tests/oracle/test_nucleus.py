"""The kernels of select.top_p, on every instruction set: the totals of rows, and which of the
greatest scores are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import cast
from native_call import described, kernel_isas, run
from nucleus_oracle import check, operands_of, probabilities, wide_of
from selection_oracle import KINDS, normal, scores_of
from tolerance import DTYPES

from sgap_jax import Reference, reference, select
from sgap_jax.runtime.native import native

INF, NAN = np.inf, np.nan


def nucleus(operands, k, columns, isa, *, kept=False, threads=1):
    batch, rows = operands[4].shape
    shapes = (batch, rows + 1), (batch, rows * k), (batch, rows * k)
    return nucleus_into(operands, shapes, k, columns, isa, kept, threads)


def nucleus_into(operands, shapes, k, columns, isa, kept=False, threads=1):
    results = [(shape, np.int32) for shape in shapes]
    attributes = dict(k=k, columns=columns, kept=kept)
    return run("sgap_nucleus_csr_v1", operands, results, attributes, isa, threads)


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scores(kind, dtype, isa):
    for m, n in ((3, 1), (9, 30), (9, 300), (3, 2000)):
        scores = cast(scores_of(kind, m, n), dtype)
        limits = np.clip(np.int32(n - np.arange(m) * n // 4), 0, n)
        p = probabilities(scores, limits)
        for k in sorted({1, min(7, n), n // 3, n} - {0}):
            operands = operands_of(scores, p, k, limits)
            found = nucleus([x[None] for x in operands], k, n, isa)
            want = reference.top_p(scores, p, k, limits)
            check(found, operands, want, f"{m} x {n}, k = {k}")


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "ties", "infinite", "masked"])
def test_kept_entries_come_first(kind, dtype, isa):
    m, n = 12, 90
    scores = cast(scores_of(kind, m, n), dtype)
    keep = np.random.default_rng(3).random((m, n)) < np.linspace(0, 1, m)[:, None] ** 2
    limits = np.full(m, n, np.int32)
    p = np.linspace(-0.1, 1.2, m) + 0.000123
    for k in (1, 5, 40, n):
        operands = operands_of(scores, p, k, limits, keep)
        found = nucleus([x[None] for x in operands], k, n, isa, kept=True)
        check(found, operands, reference.top_p(scores, p, k, limits, keep), f"k = {k}")


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_totals(kind, dtype, isa):
    for m, n in ((4, 1), (4, 37), (4, 300), (4, 0)):
        scores = cast(scores_of(kind, m, n), dtype) if n else np.zeros((m, 0), dtype)
        limits = np.int32([[n, n // 2, -3, n + 9], [n // 3, n, n // 4, 0]])
        results = [((2, m), wide_of(dtype))] * 2
        for own_limits in (limits, limits[:1]):  # of each matrix, and of both
            operands = [np.stack([scores, scores[::-1]]), own_limits]
            greatest, total = run("sgap_nucleus_totals_v1", operands, results, {}, isa)
            for b, i in np.ndindex(2, m):
                row = np.float64(operands[0][b, i])[: max(own_limits[b % len(own_limits), i], 0)]
                row = row[row > -INF]
                peak = row.max(initial=-INF)
                assert greatest[b, i] == peak
                weights = np.exp(row - peak) if peak < INF else row == INF
                np.testing.assert_allclose(total[b, i], weights.sum(), rtol=2e-6)


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_that_reach_p_exactly(dtype, isa):
    """Half of them; those before the last one weigh less than p, and with it not."""
    for n in (1, 4, 16, 64, 256):
        scores, limits = np.zeros((2, n), dtype), np.full(2, n, np.int32)
        operands = operands_of(scores, np.full(2, 0.5), n, limits)
        offsets, *_ = nucleus([x[None] for x in operands], n, n, isa)
        np.testing.assert_array_equal(offsets[0], np.arange(3) * max(n // 2, 1))
        keep = np.arange(n)[None] == np.array([[0], [n - 1]])
        operands = operands_of(scores, np.full(2, 0.5), n, limits, keep)
        offsets, *_ = nucleus([x[None] for x in operands], n, n, isa, kept=True)
        np.testing.assert_array_equal(offsets[0], np.arange(3) * max(n // 2, 1))


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_for_any_number_of_threads_and_batch(dtype, isa):
    k, m, n = 50, 600, 120
    scores = cast(normal(3, m, n), dtype)
    limits = np.int32(np.arange(m) % (n + 1))
    p = np.linspace(0, 1.01, m)
    each = [operands_of(x, p, k, limits) for x in scores]
    operands = [np.stack(x) for x in zip(*each, strict=True)]
    one, *others = (nucleus(operands, k, n, isa, threads=threads) for threads in (1, 4, -1))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, one, other)
    for b in range(3):
        own = nucleus([x[None] for x in each[b]], k, n, isa)
        jax.tree.map(np.testing.assert_array_equal, [x[b] for x in one], [x[0] for x in own])
    results = [((3, m), wide_of(dtype))] * 2
    one, four = (
        run("sgap_nucleus_totals_v1", [scores, limits[None]], results, {}, isa, threads)
        for threads in (1, 4)
    )
    jax.tree.map(np.testing.assert_array_equal, one, four)


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_operands_are_safe(dtype, isa):
    rng = np.random.default_rng(5)
    m, k, n = 40, 33, 50
    wide = wide_of(dtype)
    for kept in (False, True):
        for _ in range(20):
            values, ranked = (
                cast(
                    rng.choice([-INF, INF, NAN, 0, 6e4, *rng.standard_normal(4)], (1, m * k)),
                    dtype,
                )
                for _ in range(2)
            )
            greatest, total, p = (
                rng.choice([-INF, INF, NAN, 0, -1, 0.3, 1e30], (1, m)).astype(wide)
                for _ in range(3)
            )
            offsets = rng.integers(-99, m * k + 99, (1, m + 1)).astype(np.int32)
            offsets[0, rng.integers(m)] = rng.choice([-(2**31), 2**31 - 1])
            if rng.random() < 0.5:
                offsets.sort()
            indices = rng.integers(-9, n + 9, (1, m * k)).astype(np.int32)
            indices[0, :2] = -(2**31), 2**31 - 1
            operands = values, ranked, greatest, total, p, offsets, indices
            ends, columns, entries = nucleus(operands, k, n, isa, kept=kept)
            stored = ends[0, -1]
            assert ends[0, 0] == 0 and (np.diff(ends[0]) >= 0).all() and stored <= m * k
            assert (columns >= 0).all() and (columns < n).all()
            assert (entries >= 0).all() and (entries < m * k).all()
            np.testing.assert_array_equal(indices[0, entries[0, :stored]], columns[0, :stored])


@pytest.mark.parametrize("isa", kernel_isas())
def test_nothing_is_written_behind_the_last_row(isa):
    m, n = 3, 100
    scores, limits = np.float32(normal(m, n)), np.full(m, n, np.int32)
    for k, p in ((17, 1.0), (40, 0.4), (5, 0.0)):
        operands = [x[None] for x in operands_of(scores, np.full(m, p), k, limits)]
        offsets = np.zeros((1, m + 1), np.int32)
        indices, entries = (np.full((1, m * k + 64), 7, np.int32) for _ in range(2))
        results = (offsets, offsets.shape), (indices, (1, m * k)), (entries, (1, m * k))
        native._test_call(
            native.targets()["sgap_nucleus_csr_v1"],
            [described(x) for x in operands],
            [described(x, shape) for x, shape in results],
            dict(k=k, columns=n, kept=False),
            isa,
            1,
        )
        assert (indices[0, m * k :] == 7).all() and (entries[0, m * k :] == 7).all()


def test_errors():
    m, n, k, isa = 3, 20, 4, native.isa()
    scores, limits = np.float32(normal(m, n)), np.full((1, m), n, np.int32)
    right = [x[None] for x in operands_of(scores, np.full(m, 0.5), k, limits[0])]
    for i in range(len(right)):
        for wrong in (right[i][:, :-1], right[i].astype(np.float16), right[i][0]):
            operands = [*right[:i], wrong, *right[i + 1 :]]
            results = [((1, m + 1), np.int32), *[((1, m * k), np.int32)] * 2]
            attributes = dict(k=k, columns=n, kept=True)
            with pytest.raises(ValueError, match="nucleus: "):
                run("sgap_nucleus_csr_v1", operands, results, attributes, isa)
    for i, name in enumerate(("new offsets", "new indices", "entries")):
        shapes = [(1, m + 1), (1, m * k), (1, m * k)]
        shapes[i] = (1, shapes[i][1] - 1)
        with pytest.raises(ValueError, match=f"nucleus: {name}"):
            nucleus_into(right, shapes, k, n, isa)
    for attributes in (dict(k=-1, columns=n), dict(k=k, columns=-1), dict(k=2**31, columns=n)):
        with pytest.raises(ValueError, match="nucleus: k and columns"):
            nucleus_into(right, [(1, m + 1), (1, m * k), (1, m * k)], isa=isa, **attributes)
    totals = [((1, m), np.float32)] * 2
    for operands in (
        [scores[None], limits[:, :-1]],
        [scores, limits],
        [scores[None], scores[None]],
    ):
        with pytest.raises(ValueError, match="nucleus: (limits|scores)"):
            run("sgap_nucleus_totals_v1", operands, totals, {}, isa)
    for i, name in enumerate(("greatest", "total")):
        sizes = list(totals)
        sizes[i] = ((1, m - 1), np.float32)
        with pytest.raises(ValueError, match=f"nucleus: {name}"):
            run("sgap_nucleus_totals_v1", [scores[None], limits], sizes, {}, isa)


@pytest.mark.tier("test")
def test_batches_and_derivatives():
    """Scores, p, or both are mapped; p and the pattern have no derivative."""
    scores, p = jnp.asarray(normal(4, 9, 20)), jnp.linspace(0.2, 0.9, 4)
    for schedule in (None, Reference()):

        def of(x, p, schedule=schedule):
            A = select.top_p(x, p, most=7, causal=True, schedule=schedule)
            return A.row_offsets, A.column_indices, A.values

        lengths = lambda x, n, s=schedule: select.top_p(x, 0.5, most=7, lengths=n, schedule=s)
        mapped = jax.jit(jax.vmap(lengths, (None, 0)))(scores[0], jnp.arange(4))
        for n in range(4):
            np.testing.assert_array_equal(mapped.row_offsets[n], lengths(scores[0], n).row_offsets)
        both, one = (jax.jit(jax.vmap(of, axes)) for axes in ((0, 0), (None, 0)))
        alone = jax.jit(of)
        for i in range(4):
            same = lambda found, right, i=i: np.testing.assert_array_equal(found[i], right)
            jax.tree.map(same, both(scores, p), alone(scores[i], p[i]))
            jax.tree.map(same, one(scores[0], p), alone(scores[0], p[i]))

        total = lambda x, p, of=of: jnp.sum(of(x, p)[2] ** 2)
        by_scores, by_p = jax.jit(jax.grad(total, (0, 1)))(scores[0], p[0])
        offsets, columns, values = of(scores[0], p[0])
        right = np.zeros((9, 20))
        rows = np.repeat(np.arange(9), np.diff(offsets))
        right[rows, columns[: len(rows)]] = 2 * values[: len(rows)]
        np.testing.assert_array_equal(by_scores, right)
        assert by_p == 0
