"""Every mask is its definition, evaluated densely; a vector is what any of its rows has."""

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgap_jax import COO, CSC, CSR, CVS, SparseArray, masks
from sgap_jax.masks import build

settings.register_profile("masks", max_examples=12, deadline=None, derandomize=True)
QUICK = settings.get_profile("masks")
sizes = st.integers(0, 40)
positive = st.integers(1, 12)
formats = st.sampled_from([CSR, CVS(1), CVS(3), CVS(8)])


def dense(pattern):
    """bool [L, S] by NumPy alone: JAX would compile for each shape."""
    assert pattern.dtype == np.float32 and (np.asarray(pattern.values) == 1).all()
    V = pattern.format.vector_length or 1
    offsets, indices = (np.asarray(x) for x in pattern.index_arrays[1])
    blocks = np.zeros((len(offsets) - 1, pattern.shape[1]), bool)
    blocks[np.repeat(np.arange(len(blocks)), np.diff(offsets)), indices] = True
    return blocks.repeat(V, axis=0)[: pattern.shape[0]]


def is_defined_by(pattern, f, shape, format):
    """f(i, j) at each entry; a row of CVS(V) sees what any row of its vector does."""
    assert pattern.shape == shape and pattern.format == format
    i, j = np.indices(shape)
    expected = np.broadcast_to(f(i, j), shape)
    V = format.vector_length or 1
    for first in range(0, shape[0], V):
        vector = expected[first : first + V].any(0)
        np.testing.assert_array_equal(
            dense(pattern)[first : first + V], vector[None].repeat(min(V, shape[0] - first), 0)
        )


@QUICK
@given(sizes, positive, sizes, formats)
def test_band(L, width, S, format):
    f = lambda i, j: (j - i >= -(width // 2)) & (j - i < width - width // 2)
    is_defined_by(masks.band(L, width, S, format=format), f, (L, S), format)


@QUICK
@given(sizes, positive, formats)
def test_strided(L, stride, format):
    f = lambda i, j: (j <= i) & ((i - j <= stride) | ((i - j) % stride == 0))
    is_defined_by(masks.strided(L, stride, format=format), f, (L, L), format)


@QUICK
@given(sizes, positive, positive, formats)
def test_fixed(L, stride, c, format):
    c = min(c, stride)
    f = lambda i, j: (j <= i) & ((j // stride == i // stride) | (j % stride >= stride - c))
    is_defined_by(masks.fixed(L, stride, c, format=format), f, (L, L), format)


@QUICK
@given(sizes, positive, st.sets(sizes), st.integers(1, 3), formats)
def test_longformer(L, window, tokens, dilation, format):
    tokens = sorted(t for t in tokens if t < L)

    def f(i, j):
        near = (abs(i - j) <= dilation * (window // 2)) & ((i - j) % dilation == 0)
        return near | np.isin(i, tokens) | np.isin(j, tokens)

    is_defined_by(
        masks.longformer(L, window, tokens, dilation=dilation, format=format), f, (L, L), format
    )


@QUICK
@given(sizes, positive, st.integers(0, 3), st.integers(0, 3))
def test_bigbird(L, block, first, drawn):
    options = dict(window=3, global_blocks=first, random_blocks=drawn, seed=3)
    mask = dense(masks.bigbird(L, block, **options))
    i, j = np.indices((L, L)) // block
    always = (i < first) | (j < first) | (abs(i - j) <= 1)
    assert mask[always].all()
    count = -(-L // block)
    for a in range(count):
        row, own = mask[a * block], ~always[a * block]
        assert (mask[a * block : (a + 1) * block] == row).all()
        some = [row[b * block : (b + 1) * block] for b in range(count) if own[b * block]]
        assert all(x.all() or not x.any() for x in some)
        assert sum(x.any() for x in some) == min(drawn, len(some))
    vectors = masks.bigbird(L, block, **options, format=CVS(block))
    np.testing.assert_array_equal(dense(vectors), mask)


@QUICK
@given(
    st.lists(st.integers(-1, 3), max_size=30), st.lists(st.integers(-1, 3), max_size=30), formats
)
def test_block_diagonal(rows, keys, format):
    rows, keys = np.array(rows, np.int64), np.array(keys, np.int64)
    f = lambda i, j: (rows[i] == keys[j]) & (rows[i] >= 0)
    is_defined_by(
        masks.block_diagonal(rows, keys, format=format), f, (len(rows), len(keys)), format
    )
    is_defined_by(
        masks.block_diagonal(rows, format=format),
        lambda i, j: (rows[i] == rows[j]) & (rows[i] >= 0),
        (len(rows), len(rows)),
        format,
    )


@QUICK
@given(sizes, sizes, formats, st.integers(1, 9), st.integers(2, 5))
def test_from_function(L, S, format, block, by):
    f = lambda i, j: (3 * i + j * j) % by == 0
    is_defined_by(masks.from_function(f, L, S, format=format, block=block), f, (L, S), format)
    whole = masks.from_function(lambda i, j: np.True_, L, S, format=format, block=block)
    assert dense(whole).all()

    def in_place(i, j):
        j -= 1
        i *= by
        return (j + i) % 3 == 0

    shifted = lambda i, j: (j - 1 + by * i) % 3 == 0
    found = masks.from_function(in_place, L, S, format=format, block=block)
    is_defined_by(found, shifted, (L, S), format)


BY_RANGES = {
    "causal": lambda i, j: j <= i,
    "window": lambda i, j: (np.abs(i - j) < 70) & ~(j > i) | (np.minimum(i, 9) >= j * 2),
    "blocks": lambda i, j: (i // 64 == j // 64) | (j % 128 < 3) | (i == 130),
    "moves": lambda i, j: np.logical_or(-i + 7 > -j, 3 * j - i * 2 != 5) ^ (np.maximum(j, i) < 100),
    "products": lambda i, j: np.logical_not(i * (j - 150) >= -40) | False,
    "nothing": lambda i, j: j > i + 1000,
}


@pytest.mark.parametrize("name", BY_RANGES)
@pytest.mark.parametrize(("L", "S", "format"), [(300, 333, CSR), (200, 129, CVS(8)), (70, 0, CSR)])
@pytest.mark.parametrize("of_run", [0, build._PAIRS_OF_RUN])  # with 0 ranges always pay
def test_from_function_of_ranges(name, L, S, format, of_run, monkeypatch):
    monkeypatch.setattr(build, "_PAIRS_OF_RUN", of_run)
    f, calls = BY_RANGES[name], []

    def counted(i, j):
        calls.append(0 if not isinstance(i, np.ndarray) else i.size * j.size)
        return f(i, j)

    is_defined_by(masks.from_function(counted, L, S, format=format), f, (L, S), format)
    if name == "blocks" and S:  # stripes: of so many runs that all pairs are evaluated at once
        assert (sum(calls) == L * S) == (of_run > 0)
    assert calls[0] == 0 and (name not in ("causal", "nothing") or sum(calls) < L * max(S, 1) / 2)


def test_from_function_that_branches_on_what_it_looks_up():
    L = 2048  # of so many pairs that blocks would be looked at
    firsts = np.where(np.arange(L) % 64 == 0, 0, np.arange(L))

    def f(i, j):
        same, near = firsts[i] == firsts[j], abs(i - j) < 65
        return near if same.all() else near & same

    at = np.arange(L)
    expected = f(at[:, None], at)
    np.testing.assert_array_equal(masks.from_function(f, L).todense() != 0, expected)


N = 333
DOCUMENTS = np.arange(N) ** 2 // 5000
SHORT, SEEN = DOCUMENTS.astype(np.int8) * 21, DOCUMENTS % 3 == 1
ENDS = np.random.default_rng(3).normal(150, 90, N).round(1)
UNKNOWN = np.where(ENDS > 100, ENDS, np.nan)
FIRSTS = np.where(np.arange(N) % 64 == 0, 0, np.arange(N))
ON_DEVICE = jnp.asarray(np.arange(N) // 64)


def same_document(i, j, table=DOCUMENTS):
    return table[i] == table[j]


def all_of(*functions):
    return lambda i, j: np.logical_and.reduce(np.broadcast_arrays(*(f(i, j) for f in functions)))


def each_of(first, *others):
    def f(i, j):
        found = first(i, j)
        for other in others:
            found = found & other(i, j)
        return found

    return f


def branches(i, j):
    same, near = FIRSTS[i] == FIRSTS[j], abs(i - j) < 65
    return near if same.all() else near & same


def catches(i, j):
    try:
        return (j <= i) if DOCUMENTS[i].max() >= 0 else j > i
    except Exception:
        return j > i


def looks(at):
    def f(i, j, table=DOCUMENTS):
        return (table[i] == table[j]) & (j <= i if at(table) else j > i)

    return f


def attempt(i, j):
    try:
        return (j <= i) if i.max() >= 0 else j > i
    except Exception:
        return j > i


OF_TABLES = {  # whether fewer than all pairs are evaluated
    "documents": (lambda i, j: DOCUMENTS[i] == DOCUMENTS[j], True),
    "causal": (lambda i, j: (SHORT[i] == SHORT[j]) & (j <= i), True),
    "defaults": (same_document, True),
    "closures": (each_of(same_document, lambda i, j: i - j < 50), True),
    "partial": (functools.partial(same_document, table=SHORT), True),
    "of JAX": (lambda i, j: ON_DEVICE[i] == ON_DEVICE[j], True),
    "sums": (lambda i, j: DOCUMENTS[i] + DOCUMENTS[j] > 33, True),
    "flags": (lambda i, j: SEEN[j] & ~SEEN[i] | (i == j), True),
    "floats": (lambda i, j: (ENDS[j // 64] > i) & (ENDS[i] < 1e3) & (ENDS[j] != 0.5), True),
    "of two": (lambda i, j: DOCUMENTS[abs(i - j)] < 3, True),
    "of what is looked up": (
        lambda i, j: DOCUMENTS[SHORT[i] + 0] == DOCUMENTS[DOCUMENTS[j]],
        False,
    ),
    "not a number": (lambda i, j: UNKNOWN[i] >= UNKNOWN[j], False),
    "wraps": (lambda i, j: SHORT[i] + SHORT[j] > 0, False),
    "rounds": (lambda i, j: ENDS.astype(np.float32)[j] == 0.1 * i, False),
    "from the end": (lambda i, j: DOCUMENTS[i - j] == 0, False),
    "branches": (branches, False),
    "catches": (catches, False),
    "catches errors of arguments": (lambda i, j: attempt(i, j), False),
    "its kind": (looks(lambda x: isinstance(x, np.ndarray)), False),
    "its class": (looks(lambda x: x.__class__ is np.ndarray), False),
    "its type": (looks(lambda x: type(x) is np.ndarray), False),
    "its text": (looks(lambda x: str(x).startswith("[")), False),
    "its names": (looks(lambda x: "sum" in dir(x)), False),
    "its truth": (lambda i, j: j <= i if np.asarray(DOCUMENTS).any() else j > i, None),
    "its sum": (lambda i, j: j < DOCUMENTS.sum() + 0 * i, None),
    "its length": (lambda i, j: (j < len(DOCUMENTS) // 2) & (SEEN[i] | SEEN[j]), True),
    "a list": (lambda i, j: (DOCUMENTS.tolist()[7] < j) & (i > 2), None),
    "two dimensions": (lambda i, j: (np.eye(N) > 0)[i, j] | SEEN[j], False),
    "reduced": (all_of(same_document, lambda i, j: j <= i), False),
}


@pytest.mark.parametrize("name", OF_TABLES)
def test_from_function_of_lookups(name, monkeypatch):
    """What a block's indices find tells whether it is full or empty, and nothing else."""
    monkeypatch.setattr(build, "_PAIRS_OF_RUN", 0)  # ranges always pay
    (f, fewer), sizes, evaluated = OF_TABLES[name], [], build._evaluated

    def counted(f, rows, keys):
        sizes.append(rows.size * keys.size)
        return evaluated(f, rows, keys)

    monkeypatch.setattr(build, "_evaluated", counted)
    for L, S, format in ((N - 40, N, CSR), (200, 129, CVS(8))):
        sizes.clear()
        is_defined_by(masks.from_function(f, L, S, format=format), f, (L, S), format)
        assert fewer is None or (sum(sizes) < L * S) == fewer


BY_DIAGONALS = {
    "window": lambda i, j: (j <= i) & (i - j < 33),
    "dilated": lambda i, j: (abs(i - j) <= 60) & ((j - i) % 4 == 0),
    "sides": lambda i, j: (i + 5 > j) & ~(2 * i - 7 >= 2 * j + 33) | np.equal(i + 40, j),
    "powers": lambda i, j: np.log2(np.maximum(abs(i - j), 1)) % 1 == 0,
    "everything": lambda i, j: i - j == i - j,
    "nothing": lambda i, j: (i - j) ** 2 < -j + i - abs(j - i),
}


@pytest.mark.parametrize("name", BY_DIAGONALS)
@pytest.mark.parametrize(("L", "S", "format"), [(90, 133, CSR), (131, 77, CVS(8)), (9, 0, CSR)])
def test_from_function_of_diagonals(name, L, S, format):
    f, calls = BY_DIAGONALS[name], []

    def counted(i, j):
        calls.append(isinstance(i, np.ndarray))
        return f(i, j)

    is_defined_by(masks.from_function(counted, L, S, format=format), f, (L, S), format)
    assert calls == [False]  # no entry is evaluated


BOUNDS = np.random.default_rng(2).integers(-5, 140, (2, 200)).astype(np.int32)
BY_PIECES = {
    "window and sinks": lambda i, j: (j <= i) & ((i - j < 26) | (j < 4)),
    "lengths": lambda i, j: j < BOUNDS[0][i],
    "bounds": lambda i, j: ((BOUNDS[0][i] <= j) & (j <= BOUNDS[1][i] + i)) | (BOUNDS[0] > 9)[i],
    "blocks": lambda i, j: (j >= i // 16 * 16) & (j < i // 16 * 16 + 16) & (i % 3 != 1),
    "slopes": lambda i, j: np.logical_or(-i + 7 > -j, 3 * j - i * 2 != 5) ^ (2 * j >= 3 * i - 20),
    "folds": lambda i, j: (np.maximum(abs(i - j), abs(j - 60)) > 20) & (np.minimum(i, j) < 50),
    "one point": lambda i, j: (5 * j == 2 * i + 1) | (j == 3) & True,
}


@pytest.mark.parametrize("name", BY_PIECES)
@pytest.mark.parametrize(("L", "S", "format"), [(90, 133, CSR), (131, 117, CVS(8))])
def test_from_function_of_pieces(name, L, S, format):
    f, sizes = BY_PIECES[name], []

    def counted(i, j):
        if isinstance(i, np.ndarray):
            sizes.append(j.size)
        return f(i, j)

    is_defined_by(masks.from_function(counted, L, S, format=format), f, (L, S), format)
    assert len(sizes) == 1 and sizes[0] <= 24 * L  # once for each piece of a row


REFUSED = {  # what looks like a function of pieces and is none
    "columns": lambda i, j: BOUNDS[0][j] < i,
    "products": lambda i, j: i * j < 300,
    "quotients": lambda i, j: (j // 7) * 7 < i,
    "fractions": lambda i, j: 0.5 * j < i - j * 0.25,
    "large": lambda i, j: (j * (1 << 40) * (1 << 24) == 0) | (i < j),
    "given": lambda i, j: (j <= i) & np.eye(30, dtype=bool),
    "no bound": lambda i, j: abs(np.iinfo(np.int64).min + 0 * i - j) < 5,
    "no bounds": lambda i, j: abs(np.full(30, np.iinfo(np.int64).min)[i] - j) < 5,
    "many cuts": lambda i, j: (j == i) ^ (j == i // 2) ^ (j == 4) ^ (abs(i // 3 - j) < 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_of_no_pieces_are_evaluated(name):
    is_defined_by(masks.from_function(REFUSED[name], 30, 30), REFUSED[name], (30, 30), CSR)


def test_products_that_wrap_are_those_of_numpy():
    assert masks.from_function(lambda i, j: j * (1 << 40) >= 0, 1, (1 << 23) + 5).nnz == 1 << 23


def test_few_columns_are_evaluated_in_blocks():
    """Pieces of a row would be more than its columns, and those of all rows at once not bounded."""
    sizes = []

    def counted(i, j):
        if isinstance(j, np.ndarray):
            sizes.append(np.broadcast(i, j).size)
        return (j <= i % 7) & ((i - j < 26) | (j == 3) | (abs(i // 3 - j) < 2))

    want = np.count_nonzero(counted(np.arange(100_000)[:, None], np.arange(8)[None]))
    sizes.clear()
    assert masks.from_function(counted, 100_000, 8).nnz == want
    assert max(sizes) <= 512 * 512


@pytest.mark.parametrize("format", [CSR, CVS(8)])
def test_the_other_fields_of_a_mask_are_those_of_its_arrays(format):
    mask = masks.longformer(3000, 3, [1500], format=format)  # a long row and a long column
    offsets, indices = mask.index_arrays[1]
    same = SparseArray.from_arrays(mask.values, offsets, indices, shape=mask.shape, format=format)
    assert mask.statistics.rows == same.statistics.rows is not None
    assert mask.statistics.columns == same.statistics.columns is not None
    for one, other in zip(mask.transposed, same.transposed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert mask.is_checked and jax.tree.structure(mask) == jax.tree.structure(same)


def test_sets_of_rows_in_any_order():
    arrays = ((), (np.array([0, 2, 2, 4], np.int32), np.array([2, 0, 3, 1], np.int32)))
    a, b = SparseArray(np.ones(4, np.float32), arrays, None, (3, 4), CSR), masks.band(3, 1, 4)
    A = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]], bool)
    np.testing.assert_array_equal(dense(masks.union(b, a)), A | dense(b))
    np.testing.assert_array_equal(dense(masks.intersection(b, a)), A & dense(b))
    np.testing.assert_array_equal(dense(masks.causal(a)), np.tril(A))


def test_lists_of_no_segments():
    assert masks.block_diagonal([]).shape == (0, 0)
    assert masks.block_diagonal([], [1, 2], format=CVS(2)).shape == (0, 2)
    assert masks.block_diagonal([1, 2], []).nnz == 0


def test_positional_habits():
    same = lambda a, b: np.testing.assert_array_equal(dense(a), dense(b))
    same(masks.longformer(64, 8, 3), masks.longformer(64, 8, [0, 1, 2]))
    same(masks.longformer(64, 8, np.arange(64) == 5), masks.longformer(64, 8, [5]))
    same(masks.longformer(64, 8, 0, 2), masks.longformer(64, 8, dilation=2))
    same(
        masks.bigbird(64, 8, 3, 1, 2, 5),
        masks.bigbird(64, 8, window=3, global_blocks=1, random_blocks=2, seed=5),
    )


@pytest.mark.parametrize("format", [CSR, CVS(8)])
def test_from_function_takes_no_memory_of_the_size_of_the_mask(format):
    make = lambda: masks.from_function(
        lambda i, j: abs(i - j) < 4, 2048, 2048, format=format, block=128
    )
    band = make()  # what JAX keeps of a first call is not the mask's
    tracemalloc.start()
    try:
        make()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert band.density < 0.01 and peak < 2048 * 2048 / 2  # a byte for each entry is twice that


@QUICK
@given(sizes, sizes, formats, formats, st.integers(0, 99))
def test_sets(L, S, format, other, seed):
    draws = np.random.default_rng(seed).random((2, L, S)) < 0.3
    a, b = (
        masks.from_function(lambda i, j, some=some: some[i, j], L, S, format=f)
        for some, f in zip(draws, (format, other), strict=True)
    )
    A, B = dense(a), dense(b)
    is_defined_by(masks.union(a, b), lambda i, j: (A | B)[i, j], (L, S), format)
    is_defined_by(masks.intersection(a, b, format=CSR), lambda i, j: (A & B)[i, j], (L, S), CSR)
    is_defined_by(masks.causal(a), lambda i, j: A[i, j] & (j <= i), (L, S), format)
    c = masks.band(L, 3, S)
    either, both = masks.union(a, c, b, format=CSR), masks.intersection(a, c, b, format=CSR)
    np.testing.assert_array_equal(dense(either), A | dense(c) | B)
    np.testing.assert_array_equal(dense(both), A & dense(c) & B)


@pytest.mark.parametrize("length", [256, 1000, 1024, 301])
def test_band_and_random(length):
    band = max(8, length // 16 // 8 * 8)
    array = masks.band_and_random(length, band, 0.9, seed=5)
    assert array.format == CVS(8)
    mask = dense(array)
    assert abs(mask.mean() - 0.1) < 0.002
    assert np.ptp(mask.sum(1)) <= 1  # every row is as long as every other, up to rounding
    for start in range(0, length, 8):
        assert (mask[start : start + 8] == mask[start]).all()
        first = start - (band - 8) // 2
        assert mask[start, max(first, 0) : first + band].all()
    assert (mask.sum(1) - band > 0.02 * length).all()
    again = masks.band_and_random(length, band, 0.9, seed=5, format=CSR)
    np.testing.assert_array_equal(dense(again), mask)
    assert (dense(masks.band_and_random(length, band, 0.9, seed=6)) != mask).any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: masks.band(-1, 3), "band: L must be an integer of at least 0, got -1"),
        (lambda: masks.band(4, 0), "band: width must be an integer of at least 1"),
        (lambda: masks.band(4, 2.5), "width"),
        (lambda: masks.band(4, 2, format=CSC), "format must be CSR or CVS"),
        (
            lambda: masks.band_and_random(256, 128, 0.9),
            "a band of 128 columns is more than 10% of 256",
        ),
        (lambda: masks.band_and_random(256, 4, 0.9), "leaves out the diagonal of 8 x 1"),
        (lambda: masks.band_and_random(256, 16, 1.0), "sparsity"),
        (lambda: masks.fixed(8, 4, 5), "c must be at most the stride of 4, got 5"),
        (lambda: masks.strided(8, 2**70), r"stride must be at most 2\^62"),
        (lambda: masks.band(8, 3, CVS(8)), r"got CVS\(8\); the format is given by name, format="),
        (lambda: masks.bigbird(8, 2, "csr"), "got 'csr'; the format is given by name"),
        (lambda: masks.causal(8), r"got a int; causal\(band\(8, 16\)\) sees all keys before"),
        (lambda: masks.block_diagonal(64), r"for blocks of one size np\.arange\(L\) // size"),
        (
            lambda: masks.from_function(8, lambda i, j: i > j),
            r"f comes first: from_function\(f, 8\)",
        ),
        (lambda: masks.from_function(8, 8), "f: expected a function .*, got a int"),
        (lambda: masks.from_function(lambda b, h, i, j: i > j, 8), r"lambda i, j: f\(0, 0, i, j\)"),
        (lambda: masks.longformer(8, 3, [8]), "global_tokens must be below 8, got 8"),
        (lambda: masks.longformer(8, 3, 9), "global_tokens must be below 8, got 8"),
        (lambda: masks.longformer(8, 3, np.ones(7, bool)), "must be 8 booleans, got"),
        (lambda: masks.block_diagonal([[1]]), "segment_ids must be integers of one dimension"),
        (lambda: masks.from_function(lambda i, j: i + j, 4), "f must give booleans, got int64"),
        (lambda: masks.from_function(lambda i, j: 0 <= i - j < 3, 4), "in place of `a and b`"),
        (lambda: masks.from_function(lambda i, j: i > j or j < 3, 4), "in place of `a and b`"),
        (
            lambda: masks.from_function(lambda i, j: np.ones((3, 2), bool), 4),
            r"f must give booleans that broadcast to \[4, 4\] .*, got \[3, 2\]",
        ),
        (
            lambda: masks.from_function(lambda i, j: np.ones((1, 4, 4), bool), 4),
            r"broadcast to \[4, 4\] .*, got \[1, 4, 4\]",
        ),
        (lambda: masks.union(), "at least one"),
        (lambda: masks.union([masks.band(4, 2)]), r"as in union\(a, b\); got a list"),
        (lambda: masks.intersection(masks.band(4, 2), None), "got a NoneType"),
        (lambda: masks.union(masks.band(4, 2), masks.band(5, 2)), r"\(4, 4\) and \(5, 5\)"),
        (lambda: masks.causal(np.eye(3)), "SparseArray"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_names_of_other_libraries():
    for name, words in {
        "create_block_mask": "from_function",
        "and_masks": "intersection",
        "or_masks": "union",
        "sliding_window": "band",
    }.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': the nearest is {words}"):
            getattr(masks, name)
    with pytest.raises(AttributeError, match="no attribute 'other'$"):
        _ = masks.other


def test_plot():
    pytest.importorskip("matplotlib")
    small = masks.plot(masks.band(20, 3)).images[0].get_array()
    np.testing.assert_array_equal(np.asarray(small) != 0, dense(masks.band(20, 3)))
    large = masks.plot(masks.band(1200, 240, format=CVS(8)), title="band")
    assert large.get_title() == "band" and large.images[0].get_array().shape == (512, 512)
    assert "20 x 20" in masks.plot(masks.band(20, 3)).get_title()


def test_sets_of_other_formats():
    a = masks.band(20, 3)
    for format in (CSC, COO):
        np.testing.assert_array_equal(dense(masks.union(a.asformat(format), format=CSR)), dense(a))
