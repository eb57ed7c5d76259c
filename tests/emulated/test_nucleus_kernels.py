"""The kernels of select.top_p, run by the emulator, and their lowering for CUDA: the entries that
plain loops store, and where operands hold anything, those that plain JAX does."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import cast
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from nucleus_oracle import check, operands_of, probabilities, wide_of
from selection_oracle import INF, KINDS, NAN, normal, scores_of
from tolerance import DTYPES

from sgap_jax import Reference, reference, select
from sgap_jax.launch.nucleus import select_plan, totals_plan, write_plan
from sgap_jax.primitives.nucleus import nucleus_p
from sgap_jax.schedules.emulated import Emulated

EMULATED = Emulated(emulate)
# Rows of a warp, whose last block has fewer, and of a block, which holds a part of the last one.
SIZES = [(3, 1, 1), (9, 30, 7), (9, 300, 100), (2, 700, 600), (2, 2500, 2300)]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def at_most(call, most):
    """The launch with so many blocks in z, each of which has several members of a batch."""
    return replace(call, grid=(*call.grid[:2], min(call.grid[2], most)))


def totals(scores, limits, most=65535, **run):
    """The greatest scores and the sums, by one launch."""
    dtype = str(scores.dtype)
    call = totals_plan(dtype, scores.shape, shared_limits=len(limits) == 1)
    results = [(scores.shape[:2], wide_of(dtype))] * 2
    return emulate(at_most(call, most), (scores, limits), results, **run)


def launched(operands, k, n, kept=False, most=65535, **run):
    """The primitive's results: two launches, with the prefix sum between them."""
    values, *_, offsets, indices = operands
    batch, m = operands[2].shape
    call = select_plan(str(values.dtype), (batch, m), k, n, kept=kept)
    made = [((batch, m), np.int32), ((batch, m, k), np.int32)]
    counts, entries = emulate(at_most(call, most), operands, made, **run)
    offsets = np.pad(np.cumsum(counts, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
    call, made = write_plan((batch, m), k), [(indices.shape, np.int32)] * 2
    return offsets, *emulate(at_most(call, most), (indices, entries, offsets), made, **run)


def check_kind(kind, dtype, sizes=SIZES):
    for m, n, k in sizes:
        scores = cast(scores_of(kind, m, n), dtype)
        limits = np.clip(np.int32(n - np.arange(m) * n // 4), 0, n)
        p = probabilities(scores, limits)
        operands = operands_of(scores, p, k, limits)
        found = launched([x[None] for x in operands], k, n)
        check(found, operands, reference.top_p(scores, p, k, limits), f"{m} x {n}, k = {k}")


def check_kept(kind, dtype, sizes=((12, 90, 40), (5, 400, 300))):
    for m, n, k in sizes:
        scores = cast(scores_of(kind, m, n), dtype)
        keep = np.random.default_rng(3).random((m, n)) < np.linspace(0, 1, m)[:, None] ** 2
        limits, p = np.full(m, n, np.int32), np.linspace(-0.1, 1.2, m) + 0.000123
        operands = operands_of(scores, p, k, limits, keep)
        found = launched([x[None] for x in operands], k, n, kept=True)
        check(found, operands, reference.top_p(scores, p, k, limits, keep), f"k = {k}")


def check_totals(kind, dtype, sizes=((4, 1), (9, 300), (4, 2500)), most=65535):
    """Of two matrices, with limits of each and of both."""
    for m, n in sizes:
        scores = cast(np.stack([scores_of(kind, m, n), scores_of(kind, m, n)[::-1]]), dtype)
        limits = np.resize(np.int32([n, n // 2, -3, n + 9, n // 3, 2**31 - 1, -(2**31)]), (2, m))
        for own_limits in (limits, limits[:1]):
            greatest, total = totals(scores, own_limits, most)
            for b, i in np.ndindex(2, m):
                row = np.float64(scores[b, i])[: max(own_limits[b % len(own_limits), i], 0)]
                row = row[row > -INF]
                peak = row.max(initial=-INF)
                assert greatest[b, i] == peak
                weights = np.exp(row - peak) if peak < INF else row == INF
                np.testing.assert_allclose(total[b, i], weights.sum(), rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scores(kind):
    check_kind(kind, DTYPES[KINDS.index(kind) % 4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    """Here the last row of float64 does not fit into registers either."""
    check_kind("normal", dtype, [(9, 300, 100), (2, 1500, 1300)])
    check_kind("infinite", dtype, [(9, 300, 100)])
    check_kept("infinite", dtype)
    check_totals("infinite", dtype)


@pytest.mark.parametrize("kind", ["normal", "ties", "infinite", "masked", "tiny"])
def test_kept_entries_come_first(kind):
    check_kept(kind, "float64" if kind == "tiny" else "float32")
    check_kept(kind, "float32", [(3, 2500, 2300)])


@pytest.mark.parametrize("kind", KINDS)
def test_totals(kind):
    check_totals(kind, DTYPES[KINDS.index(kind) % 4])


def test_totals_of_large_and_small_scores():
    """Sums are scaled down where a row's later scores are greater, to 0 where they are far so."""
    for n in (40, 3000):
        row = np.float32(normal(n))
        scores = np.stack([row + np.linspace(-200, 200, n), np.sort(row) * 1e30, row * 1e-40])
        check_against = np.float64(scores.astype(np.float32))
        greatest, total = totals(np.float32(scores)[None], np.full((1, 3), n, np.int32))
        np.testing.assert_array_equal(greatest[0], check_against.max(1))
        weights = np.exp(check_against - check_against.max(1, keepdims=True))
        np.testing.assert_allclose(total[0], weights.sum(1), rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_that_reach_p_exactly(dtype):
    """Half of them; those before the last one weigh less than p, and with it not."""
    for n in (1, 4, 64, 256, 512):
        scores, limits = np.zeros((2, n), dtype), np.full(2, n, np.int32)
        operands = operands_of(scores, np.full(2, 0.5), n, limits)
        offsets, *_ = launched([x[None] for x in operands], n, n)
        np.testing.assert_array_equal(offsets[0], np.arange(3) * max(n // 2, 1))
        keep = np.arange(n)[None] == np.array([[0], [n - 1]])
        operands = operands_of(scores, np.full(2, 0.5), n, limits, keep)
        offsets, *_ = launched([x[None] for x in operands], n, n, kept=True)
        np.testing.assert_array_equal(offsets[0], np.arange(3) * max(n // 2, 1))
        _, total = totals(scores[None], limits[None])
        np.testing.assert_array_equal(total, n)


@pytest.mark.parametrize("kind", ["nan", "infinite", "masked"])
def test_one_stores_all(kind):
    """What weighs nothing too; and no number and 0 store none."""
    for m, n, k in SIZES[2:4]:
        scores, limits = np.float32(scores_of(kind, m, n)), np.full(m, n, np.int32)
        for p in (1.0, 2.0, 0.0, -1.0, NAN):
            operands = operands_of(scores, np.full(m, p), k, limits)
            offsets, indices, _ = launched([x[None] for x in operands], k, n)
            found = operands[5:] if p >= 1 else [x * 0 for x in operands[5:]]
            np.testing.assert_array_equal(offsets[0], found[0])
            np.testing.assert_array_equal(indices[0], found[1])


@pytest.mark.tier("test")
def test_batches():
    """A block has two members of the batch; the same bits as each alone, in any order of blocks."""
    m, n = 9, 400
    for k in (50, 300):
        scores, limits = np.float32(normal(4, m, n)), np.int32(np.arange(m) * n // 8)
        p = np.linspace(0, 1.01, m)
        each = [operands_of(x, p, k, limits) for x in scores]
        operands = [np.stack(x) for x in zip(*each, strict=True)]
        together = launched(operands, k, n)
        for other in (launched(operands, k, n, most=2), launched(operands, k, n, most=3)):
            jax.tree.map(np.testing.assert_array_equal, together, other)
        for b in range(4):
            alone = launched([x[None] for x in each[b]], k, n)
            jax.tree.map(
                np.testing.assert_array_equal, [x[b] for x in together], [x[0] for x in alone]
            )
    check_totals("normal", "float32", [(9, 300), (4, 1100)], most=1)


def anything(rng, dtype, m, k, n, batch):
    """Operands that may hold anything."""
    values, ranked = (
        cast(rng.choice([-INF, INF, NAN, 0, 6e4, *rng.standard_normal(4)], (batch, m * k)), dtype)
        for _ in range(2)
    )
    greatest, total, p = (
        rng.choice([-INF, INF, NAN, 0, -1, 0.3, 1e30], (batch, m)).astype(wide_of(dtype))
        for _ in range(3)
    )
    offsets = rng.integers(-99, m * k + 99, (batch, m + 1)).astype(np.int32)
    offsets[0, rng.integers(m)] = rng.choice([-(2**31), 2**31 - 1])
    if rng.random() < 0.5:
        offsets.sort(axis=1)
    indices = rng.integers(-9, n + 9, (batch, m * k)).astype(np.int32)
    indices[0, :2] = -(2**31), 2**31 - 1
    return values, ranked, greatest, total, p, offsets, indices


def as_valid(operands, k):
    """Operands of one matrix with the entries that each row has after its offsets are clamped, and
    where these were."""
    values, ranked, *of_rows, offsets, indices = operands
    begins, ends = np.clip(offsets[:-1], 0, len(values)), np.clip(offsets[1:], 0, len(values))
    counts = np.clip(ends - begins, 0, k)
    at = np.concatenate(
        [np.arange(begin, begin + c) for begin, c in zip(begins, counts, strict=True)]
    )
    where = np.pad(at, (0, len(values) - len(at))).astype(np.int64)
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    return (values[where], ranked[where], *of_rows, offsets, indices[where]), where


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_operands(dtype):
    """What plain JAX stores of the same rows; whatever the operands hold, nothing is read or
    written out of bounds."""
    rng = np.random.default_rng(DTYPES.index(dtype))
    for m, k, n, kept in ((40, 33, 50, False), (20, 50, 9, True), (3, 300, 50, True)):
        for _ in range(3):
            operands = anything(rng, dtype, m, k, n, 2)
            found = launched(operands, k, n, kept)
            valid, where = zip(
                *(as_valid([x[b] for x in operands], k) for b in range(2)), strict=True
            )
            valid = [jnp.asarray(np.stack(x)) for x in zip(*valid, strict=True)]
            plain = partial(nucleus_p.bind, k=k, n=n, kept=kept, schedule=Reference())
            ends, columns, entries = map(np.asarray, jax.jit(plain)(*valid))
            np.testing.assert_array_equal(found[0], ends)
            np.testing.assert_array_equal(found[1], columns)
            for b in range(2):
                stored = ends[b, -1]
                np.testing.assert_array_equal(found[2][b, :stored], where[b][entries[b, :stored]])
                assert not found[2][b, stored:].any()


@pytest.mark.tier("test")
def test_in_jax():
    """Alone, mapped, and with what is empty, which runs in plain JAX."""
    scores, p = jnp.asarray(normal(3, 7, 50)), jnp.linspace(0.2, 1, 7)
    keep = np.arange(50)[None] < 2

    def of(schedule):
        plain = dict(schedule=schedule)
        A = lambda x, p, most=9: select.top_p(x, p, most=most, keep=keep, **plain).index_arrays
        B = lambda x, n: select.top_p(x, 0.5, most=20, lengths=n, **plain)
        lengths = jnp.int32([[50, 7, 0, 99, 20, 1, -5], [3] * 7])
        total = lambda x: jnp.sum(B(x, lengths[0]).values ** 2)
        one = jax.jit(A)(scores[0], p), B(scores[1], lengths[0]), jax.grad(total)(scores[0])
        many = jax.vmap(A, (0, None))(scores, p), jax.vmap(B, (None, 0))(scores[0], lengths)
        tiles = select.top_p((scores[0], scores[1]), p, most=5, causal=True, **plain)
        return one, many, A(scores[0], p, most=0), A(scores[0, :0], p[:0]), tiles.column_indices

    jax.tree.map(np.testing.assert_array_equal, of(EMULATED), of(None))


@pytest.mark.tier("test")
def test_it_lowers_to_launches(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))

    def kernels(schedule):
        f = jax.jit(lambda x: select.top_p(x, 0.5, most=3, schedule=schedule).index_arrays)
        text = f.trace(jnp.ones((4, 60))).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r'kernel = "\w*?((?:TopK|Nucleus)\w+)Kernel', text)

    names = ["TopKSelect", "TopKWrite", "NucleusTotals", "NucleusSelect", "NucleusWrite"]
    assert sorted(kernels(None)) == sorted(names)
    assert kernels(Reference()) == []


# What shows each: kinds of scores, kept entries, totals, or operands that hold anything.
PLANTED = [
    ("if (row >= m) return;\n  for", "for", "totals"),
    ("score > Least<A>() ? weight : A(0)", "weight", "totals"),
    ("score == peak ? A(0) : score - peak", "score - peak", "infinite"),
    ("limit < 0 ? 0 : limit < n ? limit : n", "limit < 0 ? 0 : limit", "totals"),
    ("if (above > peak) sum *= WeightUnder(above, peak);", "", "totals"),
    ("lanes.Reduce(sum * WeightUnder(row_peak, peak))", "lanes.Reduce(sum)", "totals"),
    (
        "unsigned i = kHeld * kLanes + lane; i < count;",
        "unsigned i = kHeld * kLanes; i < count;",
        "kept",
    ),
    ("if (h * kLanes < count) body", "if (h * kLanes + kLanes <= count) body", "normal"),
    ("if (i >= count) return 0;", "", "any"),
    ("key = kKept;", "", "kept"),
    ("if (entries.ranked) reach -=", "if (entries.ranked) reach +=", "kept"),
    ("p >= 1 || ", "", "one"),
    ("key > middle ? weight", "key >= middle ? weight", "normal"),
    ("weight_above = sum;", "", "ties"),
    ("ends[row] < 0 ? 0 : ends[row] < capacity", "ends[row] < capacity", "any"),
    ("end - begin < k ? end - begin : k", "end - begin", "any"),
    ("{key == stored.least}", "{key >= stored.least}", "ties"),
    ("A(rank[0])) < stored.room", "A(rank[0])) <= stored.room", "exact"),
    ("index >= 0 && index < n", "index >= 0 && index <= n", "any"),
    ("out[place[0]] = begin + i;", "out[place[0]] = i;", "normal"),
    ("index[i] = 0;", "", "normal"),
]


@pytest.mark.parametrize(("right", "wrong", "by"), PLANTED)
def test_planted_bugs_are_caught(right, wrong, by, planted):
    checks = {
        "totals": lambda: check_totals("infinite", "float32", [(9, 300), (2, 1100)]),
        "kept": lambda: check_kept("normal", "float32", [(12, 90, 40), (5, 2500, 2300)]),
        "any": lambda: test_any_operands("float32"),
        "one": lambda: test_one_stores_all("nan"),
        "exact": lambda: test_equal_scores_that_reach_p_exactly("float32"),
    }
    planted(
        "nucleus.cuh", right, wrong, checks.get(by, lambda: check_kind(by, "float32", SIZES[1:4]))
    )


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if (w < warp) rank[f] += found;", "if (w <= warp) rank[f] += found;"),
        ("turn ^= 1;", ""),
        ("for (int w = 1; w < kWarps; ++w)", "for (int w = 2; w < kWarps; ++w)"),
    ],
)
def test_planted_bugs_in_shared_rows_are_caught(right, wrong, planted):
    planted("row_lanes.cuh", right, wrong, lambda: check_kind("normal", "float32", [(2, 700, 600)]))
