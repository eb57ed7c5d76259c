"""Statistics of row lengths: when a pattern has them, what keeps and what drops them, what they
cost in programs, and what is chosen by them on CUDA."""

import dataclasses
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import (
    COO,
    CSC,
    CSR,
    CVS,
    AtomicParallelism,
    Problem,
    RowStatistics,
    SparseArray,
    candidate_schedules,
    choose_schedule,
    gspmm,
    reference,
    spmm,
)
from sgap_jax.formats.row_statistics import of_offsets
from sgap_jax.primitives import _define
from sgap_jax.schedules.emulated import Emulated
from sgap_jax.schedules.families import with_failing
from sgap_jax.schedules.point import chunk_of

M, K, LONGEST = 400, 1024, 1000


def heavy(rows=M, seed=0):
    """A SciPy matrix with two entries in each row and one row with a thousand."""
    rng = np.random.default_rng(seed)
    row = np.concatenate([np.repeat(np.arange(rows), 2), np.full(LONGEST, 3)])
    column = np.concatenate([rng.integers(0, K, 2 * rows), rng.permutation(K)[:LONGEST]])
    pattern = scipy.sparse.csr_array((np.ones(len(row)), (row, column)), shape=(rows, K))
    pattern.data = rng.integers(1, 4, pattern.nnz).astype(np.float32)
    return pattern


SKEWED = SparseArray.from_scipy(heavy())


def test_the_statistics_are_those_of_the_lengths_rounded():
    """By plain loops: each is the nearest power of 2 in ratio."""
    offsets = heavy().indptr
    lengths = [int(offsets[i + 1] - offsets[i]) for i in range(M)]
    mean = sum(lengths) / M
    deviation = (sum((length - mean) ** 2 for length in lengths) / M) ** 0.5
    found = SKEWED.row_statistics
    for value, rounded in ((mean, found.mean), (deviation, found.deviation)):
        assert 0.7 <= rounded / value <= 1.42 and rounded in [2.0**i for i in range(10)]
    assert found.longest == 1024
    assert SKEWED.T.row_statistics is None and SKEWED.T.T.row_statistics == found


@pytest.mark.parametrize(
    ("lengths", "skewed"),
    [
        ([], False),
        ([0, 0], False),
        ([255, *[1] * 99], False),  # no long row
        ([256, *[1] * 99], True),
        ([300, *[30] * 99], True),
        ([300, *[60] * 99], False),  # less than 8 times the mean
        ([1000], False),
    ],
)
def test_which_patterns_count_as_skewed(lengths, skewed):
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)
    assert (of_offsets(offsets) is not None) == skewed


def test_every_constructor_and_format_has_them():
    A = heavy()
    coordinates = np.stack(A.tocoo().coords if hasattr(A.tocoo(), "coords") else A.nonzero(), 1)
    values = A.tocoo().data
    arrays = (A.data, A.indptr, A.indices)
    made = {
        "dense": SparseArray.from_dense(A.toarray()),
        "coordinates": SparseArray.from_coordinates(coordinates, values, A.shape),
        "arrays": SparseArray.from_arrays(*arrays, shape=A.shape),
        "COO": SparseArray.from_scipy(A, format=COO),
        "CSC": SparseArray.from_scipy(A, format=CSC),
        "CSC arrays": SparseArray.from_arrays(*arrays, shape=A.shape[::-1], format=CSC).T,
        "values": SKEWED.with_values(SKEWED.values * 2),
        "to CSC": SKEWED.asformat(CSC),
        "to COO and back": SKEWED.asformat(COO).asformat(CSR),
        "dtype": SKEWED.astype("float16"),
        "sum": SKEWED + SKEWED,
        "pickle": pickle.loads(pickle.dumps(SKEWED)),
    }
    for name, array in made.items():
        assert array.row_statistics == SKEWED.row_statistics, name
        assert array.T.row_statistics is None, name
    assert SparseArray.from_scipy(A.T, format=CVS(2)).T.row_statistics is not None
    # A slice without the long row, and a capacity of which a part is used.
    assert SKEWED[100:].row_statistics is None
    capacity = SparseArray.from_coordinates(coordinates, values, A.shape, nse=5000)
    assert capacity.row_statistics == SKEWED.row_statistics


def test_traced_patterns_have_none():
    def statistics(values, offsets, indices):
        A = SparseArray.from_arrays(values, offsets, indices, shape=(M, K))
        assert A.row_statistics is None
        return A.values

    jax.eval_shape(statistics, SKEWED.values, SKEWED.row_offsets, SKEWED.column_indices)


def test_patterns_of_one_capacity_share_programs_and_structure():
    """One trace for all of one capacity, and trees of one structure."""
    traces = []

    @jax.jit
    def product(A, x):
        traces.append(A.row_statistics)
        return A @ x

    x = jnp.ones(K, jnp.float32)

    def of(pattern, count):
        pattern = pattern.tocoo()
        return SparseArray.from_coordinates(
            np.stack([pattern.row, pattern.col], 1)[:count], pattern.data[:count], (M, K)
        )

    same = [of(heavy(seed=seed), 1500) for seed in (0, 1, 2)]
    assert len({A.row_statistics for A in same}) == 1
    for A in (*same, same[0].with_values(2 * same[0].values)):
        product(A, x)
    assert traces == [same[0].row_statistics]
    even = SparseArray.from_coordinates(
        np.stack([np.arange(1500) % M, np.arange(1500) // 4], 1), np.ones(1500, np.float32), (M, K)
    )
    assert even.row_statistics is None
    product(even, x)
    assert traces == [same[0].row_statistics]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), same[0], even)
    np.testing.assert_array_equal(
        jax.vmap(lambda A, x: A @ x, in_axes=(0, None))(stacked, x),
        [A @ x for A in (same[0], even)],
    )
    chosen = jax.lax.cond(True, lambda: even, lambda: same[0])
    np.testing.assert_array_equal(chosen.values, even.values)


def test_an_exported_program_keeps_them():
    exported = jax.export.export(jax.jit(lambda A: A.values * 2))(SKEWED)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(SKEWED), 2 * np.asarray(SKEWED.values))
    even = SparseArray.from_dense(np.eye(4, dtype=np.float32))
    exported = jax.export.export(jax.jit(lambda A: A.values * 2))(even)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(even), 2.0)


def asked(n, **fields):
    rows = RowStatistics(16.0, 64.0, 16_384)
    known = dict(rows=rows, platform="cuda") | fields
    return Problem("spmm", (131_072, 131_072), 2_000_000, n=n, **known)


@pytest.mark.parametrize(
    ("n", "point"),
    [
        (1, "{<1 nnz, 1 col>, 32}"),
        (4, "{<1 nnz, 4 col>, 32}"),
        (16, "{<1 nnz, 4 col>, 8}"),
        (33, "{<1 row, 1 col>, 1} chunk=128"),
        (64, "{<1 row, 4 col>, 1} chunk=128"),
        (1024, "{<1 row, 4 col>, 1} chunk=128"),
    ],
)
def test_skewed_rows_split_nonzeros_or_are_cut_into_pieces(n, point):
    assert str(choose_schedule(asked(n))) == point
    choose_schedule(asked(n)).check(asked(n))
    assert str(choose_schedule(asked(n, rows=None))).startswith("{<1")
    assert choose_schedule(asked(n, rows=None)).deterministic


def test_pieces_have_32_to_128_entries_for_each_lane():
    """One and a half times the steps of all the work, in multiples of 16."""
    for steps, lanes, chunk in (
        (3, 1, 32),
        (29.1, 1, 48),
        (60, 1, 96),
        (9e9, 4, 512),
        (64, 8, 768),
    ):
        assert chunk_of(steps, lanes, 2**62) == chunk
    assert chunk_of(3, 1, 128) == 32 and chunk_of(3, 1, 127) is None
    assert chunk_of(80, 1, 256) == 128 and chunk_of(80, 1, 255) is None  # two pieces, and fewer
    assert chunk_of(200, 1, 399) is None  # the longest row takes less than twice these steps


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": RowStatistics(16.0, 64.0, 1024)},  # all of the work takes longer than that row
        {"format": "CVS(4)"},
        {"rows": None},
        {"platform": "cpu"},
    ],
)
def test_other_problems_do_not(fields):
    problem = asked(128, batch=4, **fields)
    assert choose_schedule(problem) == choose_schedule(dataclasses.replace(problem, rows=None))


@pytest.mark.parametrize(
    ("flags", "split"),
    [
        ("--xla_gpu_deterministic_ops=true", False),
        ("--other=1 --xla_gpu_exclude_nondeterministic_ops", False),
        ("--xla_gpu_deterministic_ops=false", True),
        ("--xla_gpu_autotune_level=0", True),
    ],
)
def test_flags_that_ask_for_the_same_bits(monkeypatch, flags, split):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert choose_schedule(asked(16)).deterministic != split
    assert (choose_schedule(asked(16)).chunk is None) == split
    assert choose_schedule(asked(64)).deterministic
    # Only sums of spmm are added across groups.
    features = dataclasses.replace(asked(64), op="sddmm")
    assert choose_schedule(features) == choose_schedule(dataclasses.replace(features, rows=None))


def test_tuning_with_the_same_bits_begins_with_pieces():
    for n in (4, 16, 64):
        first, *_ = candidate_schedules(asked(n), deterministic=True)
        assert first.deterministic and first.chunk is not None
        assert candidate_schedules(asked(n), deterministic=False)[0] == choose_schedule(asked(n))


def test_extrema_of_skewed_rows_split_nonzeros():
    for n, point in ((4, "{<8 nnz, 4 col>, 1}"), (64, "{<32 nnz, 4 col>, 1}")):
        messages = dataclasses.replace(asked(n), op="gspmm")
        assert str(choose_schedule(messages)) == point
        text = choose_schedule(messages).explain(messages)
        assert "partial results, which a second launch combines" in text and "atomic" not in text
        assert candidate_schedules(messages)[0] == choose_schedule(messages)  # the same bits
        with with_failing({"gspmm nnz": "a reason"}), pytest.warns(RuntimeWarning):
            assert choose_schedule(messages).row is not None


def test_where_pieces_fail_nonzeros_are_split():
    with with_failing({"spmm row_pieces": "a reason"}), pytest.warns(RuntimeWarning):
        assert str(choose_schedule(asked(64))) == "{<32 nnz, 4 col>, 1}"


def test_explanations_say_why():
    text = choose_schedule(asked(16)).explain(asked(16))
    assert "skew:  rows of about 16 entries, deviation 64, the longest 16384: lanes have" in text
    text = choose_schedule(asked(64)).explain(asked(64))
    assert "the longest 16384: it is cut into 128 pieces, and no lanes walk more than 128" in text
    assert "spmm of [131072, 131072] with 2000000 nonzeros" in text and "second launch" in text
    row = AtomicParallelism(row=1, col=4)
    assert "its own lanes walk the longest row" in row.explain(asked(64))
    assert "skew:" not in row.explain(asked(64, rows=None))


@pytest.mark.parametrize(
    ("op", "dtype", "format", "stored", "faster"),
    [
        ("spmm", "float32", "CSR", 0.25, True),
        ("spmm", "float32", "CSR", 0.07, False),
        ("spmm", "float16", "CSR", 0.15, True),
        ("spmm", "float16", "CVS(4)", 0.25, True),
        ("spmm", "float16", "CVS(4)", 0.15, False),
        ("spmm", "bfloat16", "CVS(8)", 0.3, False),
        ("spmm", "bfloat16", "CVS(16)", 0.45, False),
        ("spmm", "bfloat16", "CVS(16)", 0.65, True),
        ("sddmm", "float16", "CVS(8)", 0.3, True),
        ("sddmm", "float64", "CSR", 0.9, False),
        ("spmm", "float64", "CSR", 0.9, False),
    ],
)
def test_explanations_say_when_dense_would_be_faster(op, dtype, format, stored, faster):
    about = dict(n=64, dtype=dtype, format=format)
    problem = Problem(op, (1000, 1000), int(stored * 1e6), platform="cuda", **about)
    assert ("dense: " in choose_schedule(problem).explain(problem)) == faster
    empty = Problem(op, (0, 1000), 0, platform="cuda", **about)
    assert "dense: " not in choose_schedule(empty).explain(empty)


def test_a_warning_says_once_when_dense_would_be_faster():
    """Of a large matrix, lowered for a GPU without a schedule."""
    lower = lambda A, **named: jax.jit(lambda A, B: spmm(A, B, **named)).lower(
        A, jnp.ones((A.shape[1], 4), jnp.float32)
    )
    fake = lambda schedule=None: Emulated(lambda *_: [], schedule)
    full, small = (SparseArray.from_dense(np.ones((n, n), np.float32)) for n in (512, 64))
    _define._dense_said.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower(small, schedule=fake())
        lower(full, schedule=fake(AtomicParallelism(row=1, col=4)))
        lower(full)  # on the CPU
    with pytest.warns(RuntimeWarning, match="spmm of .512, 512., float32, CSR: 1 of the matrix"):
        lower(full, schedule=fake())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower(full, schedule=fake())


@pytest.mark.parametrize("rows", [3, "skewed", (1, 2, 3)])
def test_a_problem_takes_no_other_statistics(rows):
    with pytest.raises(ValueError, match="Problem: rows: expected RowStatistics or None"):
        Problem("spmm", (1, 1), 1, rows=rows)


@pytest.mark.parametrize("name", ["mean", "deviation", "longest"])
def test_statistics_are_numbers_from_0_on(name):
    fields = dict(mean=1.0, deviation=1.0, longest=1)
    for wrong in (-1, float("nan"), "1", None, True):
        with pytest.raises(ValueError, match=f"RowStatistics: {name}: expected a number"):
            RowStatistics(**fields | {name: wrong})


@pytest.mark.tier("test")
@pytest.mark.parametrize("n", [3, 40])
def test_a_product_with_skewed_rows_is_right(n):
    """By default on CUDA: launched with nonzeros split or the long row in pieces, forward, and for
    the gradients with rows of A^T, whose lengths are even."""
    require_nvrtc()
    A, sources = SKEWED, []
    B = np.random.default_rng(1).integers(-2, 3, (K, n)).astype(np.float32)

    def run(call, inputs, outputs):
        sources.append(call.source)
        return emulate(call, inputs, outputs)

    C, back = jax.vjp(lambda B: spmm(A, B, schedule=Emulated(run)), jnp.asarray(B))
    args = (A.values, A.row_offsets, A.column_indices, A.shape)
    np.testing.assert_array_equal(C, reference.spmm(*args, B))
    np.testing.assert_array_equal(
        back(jnp.ones_like(C))[0], reference.spmm(*args, np.ones(C.shape), transpose=True)
    )
    assert ("SpmmNnz" if n < 32 else "SpmmPieces") in sources[0] and "SpmmRow" in sources[-1]
    assert len(sources) == (2 if n < 32 else 3)
    sources.clear()
    options = dict(reduce="max", schedule=Emulated(run))
    C, back = jax.vjp(lambda B: gspmm(A, B, **options), jnp.asarray(B))
    np.testing.assert_array_equal(C, reference.gspmm(*args, B, "mul", "max"))
    expected = jax.vjp(lambda B: gspmm(A, B, reduce="max"), jnp.asarray(B))[1](C)[0]
    np.testing.assert_array_equal(back(C)[0], expected)
    assert "GspmmNnz" in sources[0] and "GspmmMergeK" in sources[1] and len(sources) == 3
