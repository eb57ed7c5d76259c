"""A matrix in parts: the plan against loops in NumPy for many parts, products on two devices."""

import copy
import pickle
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from jax.sharding import AxisType

import sgap_jax
from sgap_jax import BCSR, CSR, CVS, SparseArray, parallel
from sgap_jax.parallel.cover import CoverPlan, cover, out_of, padded_cover, smallest_vertex_cover
from sgap_jax.parallel.exchange import Exchange
from sgap_jax.parallel.global_columns import to_all
from sgap_jax.parallel.metis import by_metis
from sgap_jax.parallel.plan import (
    Compressed,
    Sizes,
    bounds_of,
    explanation,
    padded,
    piece,
    sent_rows,
)
from sgap_jax.parallel.second_axis import Shared

NAMES = ("skewed", "empty_rows_at_both_ends", "no_entries", "no_rows", "one_row", "wide")


def dense(case):
    return np.asarray(array(case, jnp.float64).todense())


def loops(D, B):
    out = np.zeros((D.shape[0], B.shape[1]))
    for i, j in zip(*np.nonzero(D), strict=True):
        out[i] += D[i, j] * B[j]
    return out


def cut(D, parts, rows):
    """The parts of a dense array, and what they exchange."""
    offsets, indices, values = array_of(D)
    row_bounds = bounds_of(rows, np.diff(offsets), parts)
    column_bounds = bounds_of("even", np.zeros(D.shape[1]), parts)
    found = cut_arrays(offsets, indices, values, row_bounds, column_bounds)
    return *found[:-1], row_bounds, column_bounds


def cut_arrays(offsets, indices, values, row_bounds, column_bounds):
    pieces, parts = [], len(row_bounds) - 1
    for p in range(parts):
        a, b = row_bounds[p : p + 2]
        span = slice(offsets[a], offsets[b])
        own = Compressed(values[span], offsets[a : b + 1] - offsets[a], indices[span])
        pieces.append(piece(p, own, column_bounds))
    counts = np.stack([each.counts(column_bounds) for each in pieces])
    sizes, exchange = Sizes.of(counts, column_bounds), Exchange.of(counts[:, 4:])
    arrays = [padded(each, sizes, exchange, column_bounds) for each in pieces]
    covers = [cover(each, column_bounds) for each in pieces]
    plan = CoverPlan.of(np.stack([each.counts() for each in covers]), counts[:, 1])
    halves = [
        padded_cover(found, x, each, plan, sizes, column_bounds)
        for found, x, each in zip(pieces, arrays, covers, strict=True)
    ]
    return arrays, sizes, exchange, halves, plan, pieces


def swapped(exchange, sent):
    """What each part receives, in loops, of what each sends along the first axis."""
    received = [np.zeros_like(x) for x in sent]
    for p in range(exchange.parts):
        for q in range(exchange.parts):
            a, b = (slice(x * exchange.width, (x + 1) * exchange.width) for x in (p, q))
            received[p][b] = sent[q][a]
    begin = 0
    for rows, pairs in exchange.rounds:
        assert len({q for q, _ in pairs}) == len({p for _, p in pairs}) == len(pairs)
        span = slice(begin, begin + rows)
        for q, p in pairs:
            received[p][span] = sent[q][span]
        begin += rows
    return received


def product_by_plan(D, B, parts, rows):
    """What the devices do, in loops: gathers, messages, and the products of own and foreign
    columns, which must be that of all columns in order, and that of the covers."""
    arrays, sizes, exchange, halves, plan, row_bounds, column_bounds = cut(D, parts, rows)
    mine = np.zeros((parts, sizes.columns, B.shape[1]))
    for p in range(parts):
        a, b = column_bounds[p : p + 2]
        mine[p, : b - a] = B[a:b]
    sends = swapped(exchange.back, [part.requests for part in arrays])
    buffers = swapped(exchange, [mine[p][sends[p]] for p in range(parts)])
    told = swapped(plan.entries, [half.entries.T for half in halves])
    outs = [out_of(p, plan, told[p].T) for p in range(parts)]
    far = [np.append(part.foreign.values, [np.nan]) for part in arrays]
    sent = [x[np.minimum(h.value_sends, len(x) - 1)] for x, h in zip(far, halves, strict=True)]
    values = [np.append(x, 1) for x in swapped(plan.values, sent)]
    values = [x[np.minimum(out.values, len(x) - 1)] for x, out in zip(values, outs, strict=True)]
    partial = [rows_times(*x) for x in zip(outs, values, mine, strict=True)]
    covered = swapped(plan.exchange, [x[: plan.exchange.received] for x in partial])
    out = []
    for p, part in enumerate(arrays):
        received = buffers[p]
        assert len(received) == exchange.received
        table = np.concatenate([mine[p], received])[part.table]
        values = np.concatenate([part.own.values, part.foreign.values, [np.nan]])
        in_order = values[np.minimum(part.merged.values, len(values) - 1)]
        into = np.append(part.foreign.values, 1)
        into = into[np.minimum(halves[p].into.values, len(into) - 1)]
        results = [
            rows_times(part.own, part.own.values, mine[p])
            + rows_times(part.foreign, part.foreign.values, received),
            rows_times(part.merged, in_order, table),
            rows_times(part.own, part.own.values, mine[p])
            + rows_times(halves[p].into, into, covered[p]),
        ]
        np.testing.assert_allclose(*results[:2], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(*results[1:], rtol=1e-12, atol=1e-12)
        names = part.names[part.names < np.iinfo(np.int32).max].astype(np.int64)
        assert (np.diff(names) > 0).all()
        out.append(results[0][: row_bounds[p + 1] - row_bounds[p]])
    assert (plan.exchange.needed <= exchange.needed).all()
    return np.concatenate(out), exchange, sizes


def rows_times(matrix, values, source):
    C = np.zeros((len(matrix.offsets) - 1, source.shape[1]))
    for i in range(len(C)):
        for e in range(matrix.offsets[i], matrix.offsets[i + 1]):
            C[i] += values[e] * source[matrix.indices[e]]
    return C


def array_of(D):
    A = SparseArray.from_dense(D)
    return tuple(np.asarray(x) for x in (A.row_offsets, A.column_indices, A.values))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_the_plan_moves_what_is_needed(name, parts):
    D = dense(BATTERY[name])
    B = np.random.default_rng(0).standard_normal((D.shape[1], 3))
    for rows in ("balanced", "even"):
        got, exchange, sizes = product_by_plan(D, B, parts, rows)
        np.testing.assert_allclose(got, loops(D, B), rtol=1e-12, atol=1e-12)
        # Each row travels once to each part that needs it, and padding never exceeds all rows.
        assert exchange.sent <= (parts - 1) * sizes.columns


def test_a_band_sends_the_rows_at_its_edges_alone():
    D = np.eye(64) + np.eye(64, k=1) + np.eye(64, k=-1)
    _, exchange, _ = product_by_plan(D, np.ones((64, 1)), 8, "even")
    assert exchange.sent_by == [1, 2, 2, 2, 2, 2, 2, 1] and len(exchange.rounds) <= 3
    assert all(rows == 1 for rows, _ in exchange.rounds)


def test_a_cover_is_a_smallest_one():
    """Against all sets of vertices; and of a row and a column that are full, two rows travel
    instead of six."""
    rng = np.random.default_rng(0)
    for lefts, rights in [(1, 1), (4, 3), (3, 5), (5, 5)] * 5:
        edges = rng.random((lefts, rights)) < 0.4
        edges[:, edges.sum(0) == 0] = True
        by_left, by_right = smallest_vertex_cover(*np.nonzero(edges), lefts, rights)
        assert (by_left[:, None] | by_right)[edges].all()
        subsets = (np.arange(2**lefts)[:, None] >> np.arange(lefts)) & 1 > 0
        # With these on the left, the right needs the neighbours of all others.
        sizes = subsets.sum(1) + (~subsets[:, :, None] & edges).any(1).sum(1)
        assert by_left.sum() + by_right.sum() == sizes.min()
        best = subsets[sizes == sizes.min()]
        assert by_left.sum() == best.sum(1).min()
    D = np.zeros((12, 12))
    D[1] = D[:, 10] = 1
    *_, exchange, halves, plan, _, _ = cut(D, 2, "even")
    assert exchange.needed.tolist() == [[0, 6], [0, 0]]
    assert plan.exchange.needed.tolist() == [[0, 2], [0, 0]]
    assert plan.partial_rows.tolist() == [[0, 1], [0, 0]] and plan.values.needed[1, 0] == 5


def test_rounds_of_uneven_pairs_have_little_padding():
    """In at most four rounds for each part; each pair has one message, and pairs of one size need
    no more rounds than one part has partners."""
    rng = np.random.default_rng(0)
    for parts, spread in ((1, 3), (2, 3), (9, 0), (16, 3), (24, 2)):
        needed = rng.lognormal(2, spread, (parts, parts)).astype(int) % 1000
        needed[rng.random(needed.shape) < 0.2] = 0
        np.fill_diagonal(needed, 0)
        if spread == 0:  # one size: the rounds of Koenig's theorem
            needed = np.where(needed > 0, 7, 0)
        exchange = Exchange.of(needed, 3)
        got = np.zeros_like(needed)
        for rows, pairs in exchange.rounds:
            assert len({q for q, _ in pairs}) == len({p for _, p in pairs}) == len(pairs)
            for q, p in pairs:
                assert got[p, q] == 0 and rows % 3 == 0
                got[p, q] = rows
        assert ((got >= 3 * needed) & ((got > 0) == (needed > 0))).all()
        assert exchange.total == got.sum() <= 1.15 * 3 * needed.sum()
        degree = max(np.count_nonzero(needed, axis).max() for axis in (0, 1))
        assert len(exchange.rounds) <= (degree if spread == 0 else 4 * (parts - 1))


@pytest.mark.parametrize("width", [1, 2])
def test_columns_that_all_need_go_to_all_at_once(width):
    """The buffer has the rows that the plan says, of parts that need not all of them too."""
    parts, each = 6, 5
    bounds = np.arange(parts + 1) * each
    D = np.kron(np.eye(parts), np.ones((each, each)))
    D[:, 7] = D[:-8, 2] = 1  # columns of parts 1 and 0
    D[3, 12] = 1  # from part 2 to part 0 alone
    offsets, indices, values = array_of(D)
    pieces = {}
    for p, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        span = slice(offsets[a], offsets[b])
        own = Compressed(values[span], offsets[a : b + 1] - offsets[a], indices[span])
        pieces[p] = piece(p, own, bounds)
    needed = np.stack([x.counts(bounds) for x in pieces.values()])[:, 4:]

    def told(exchange, mine):
        return dict(enumerate(swapped(exchange, [mine[p] for p in range(parts)])))

    def from_all(mine, parts):
        return np.stack([mine[p] for p in range(parts)])

    exchange, shared = to_all(pieces, needed, bounds, width, told, from_all)
    assert shared.tolist() == [2, 7] and exchange.to_all == (width, width, 0, 0, 0, 0)
    assert exchange.needed.sum() == width and exchange.sent == -(-2 * 2 * width * 5 // 6) + width
    before = Exchange.of(needed, width)
    assert (exchange.sent, exchange.received) < (before.sent, before.received)
    assert f"one all-reduce of {2 * width} rows" in exchange.how
    sizes = Sizes.of(np.stack([x.counts(bounds) for x in pieces.values()]), bounds, (1, width))
    B = np.random.default_rng(0).standard_normal((parts, each * width))
    arrays = {p: padded(x, sizes, exchange, bounds, (1, width), shared) for p, x in pieces.items()}
    asked = told(exchange.back, {p: x.requests for p, x in arrays.items()})
    sent = [B[p][sent_rows(p, asked[p], shared, exchange, bounds, width)] for p in range(parts)]
    of_two = swapped(replace(exchange, to_all=()), [x[: exchange.between_two] for x in sent])
    owner = np.repeat(np.arange(parts), exchange.to_all)
    everywhere = np.array([sent[q][exchange.between_two + i] for i, q in enumerate(owner)])
    for p, x in arrays.items():
        received = np.concatenate([B[p], of_two[p], everywhere])
        assert len(received) == each * width + exchange.received
        real = x.names < np.iinfo(np.int32).max
        np.testing.assert_array_equal(received[x.table[real]], B.reshape(-1)[x.names[real]])


def test_all_to_all_where_every_pair_exchanges_as_much():
    _, exchange, _ = product_by_plan(np.ones((12, 12)), np.ones((12, 1)), 4, "even")
    assert exchange.width == 3 and exchange.sent == 9


@pytest.mark.parametrize("parts, copies", [(2, 3), (8, 2)])
def test_copies_share_messages_and_entries(parts, copies):
    """In loops: each copy receives its share of every message, and the results add up."""
    D = graph(40, 40, seed=3)
    D[:, 7] = D[9] = 1
    offsets, indices, values = array_of(D)
    bounds, B = bounds_of("balanced", np.diff(offsets), parts), np.ones((40, 1)).cumsum(0)
    arrays, sizes, exchange, *_, pieces = cut_arrays(offsets, indices, values, bounds, bounds)
    of_copy = Exchange.of(-(-exchange.needed // copies))
    each = [Shared(*x, exchange, of_copy, copies) for x in zip(pieces, arrays, strict=True)]
    entries = max(x.counts().max() for x in each)
    shares = [x.padded(sizes, entries) for x in each]
    assert sum(x.counts().sum() for x in each) == sum((~x.near).sum() for x in pieces)
    mine = [np.zeros((sizes.columns, 1)) for _ in range(parts)]
    for p, x in enumerate(mine):
        x[: bounds[p + 1] - bounds[p]] = B[bounds[p] : bounds[p + 1]]
    total = [0.0] * parts
    for j in range(copies):
        sends = swapped(of_copy.back, [x.requests[:, j] for x in shares])
        received = swapped(of_copy, [x[rows] for x, rows in zip(mine, sends, strict=True)])
        for p, (x, whole) in enumerate(zip(shares, arrays, strict=True)):
            for part, of, source in (
                (x.own[j], whole.own, mine[p]),
                (x.foreign[j], whole.foreign, received[p]),
            ):
                known = np.append(of.values, 0.0)[np.minimum(part.values, len(of.values))]
                total[p] += rows_times(part, known, source)
    got = np.concatenate([x[:n] for x, n in zip(total, np.diff(bounds), strict=True)])
    np.testing.assert_allclose(got, D @ B, rtol=1e-12)
    assert of_copy.sent <= exchange.sent / copies + 2 * parts


@pytest.mark.parametrize("parts", [2, 8])
def test_explain_counts_the_bytes(parts):
    """Against loops over the entries: a row travels once to each part that has an entry in its
    column and does not own it; the rest of what is sent is padding."""
    D = graph(40, 40, seed=parts)
    _, sizes, exchange, _, _, row_bounds, column_bounds = cut(D, parts, "balanced")
    part_of = lambda bounds, i: int(np.searchsorted(bounds, i, side="right")) - 1
    rows = {(part_of(row_bounds, i), j) for i, j in zip(*np.nonzero(D), strict=True)}
    owner = [part_of(column_bounds, j) for j in range(40)]
    needed = [sum(owner[j] == q != p for p, j in rows) for q in range(parts)]
    if exchange.width:
        sent = [exchange.width * (parts - 1)] * parts
    else:
        sent = [sum(rows for rows, to in exchange.rounds if q in dict(to)) for q in range(parts)]
    assert all(x <= y for x, y in zip(needed, sent, strict=True)) and sum(sent) < 2 * sum(needed)
    entries = np.add.reduceat(np.count_nonzero(D, 1), row_bounds[:-1]).tolist()
    text = explanation(exchange, entries, 40, 10, 4).splitlines()
    number = lambda line: int(line.replace(",", "").split()[-2])
    assert number(text[1]) == 40 * max(sent) and number(text[2]) == 40 * sum(sent) // parts
    assert f"{1 - sum(needed) / sum(sent):.0%}" in text[3]
    assert number(text[4]) == (parts - 1) * 40 // parts * 40
    assert f"{max(entries) / np.mean(entries):.2f} times" in text[5]
    for q, line in enumerate(text[-parts:]):
        found = [int(x) for x in line.replace(",", "").replace("bytes", "").split()]
        assert found == [q, entries[q], 40 * needed[q], 40 * sent[q]]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


def graph(m=23, k=23, seed=0):
    rng = np.random.default_rng(seed)
    return np.where(rng.random((m, k)) < 0.15, rng.standard_normal((m, k)), 0)


@pytest.mark.parametrize(
    "shape, options",
    [
        ((23, 23), {}),
        ((23, 23), dict(rows=[23, 0])),
        ((9, 14), dict(rows="even")),
    ],
    ids=["balanced", "a part without rows", "rectangular"],
)
def test_products_of_parts(mesh, shape, options):
    D = graph(*shape)
    A = parallel.partition(SparseArray.from_dense(D), mesh, "x", **options)
    rng = np.random.default_rng(1)
    B, X = rng.standard_normal((shape[1], 4)), rng.standard_normal((shape[0], 4))
    both = jax.jit(lambda A, B, X: (A @ B, parallel.spmm(A, X, transpose=True)))
    for got, expected in zip(both(A, B, X), (loops(D, B), loops(D.T, X)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(A.from_parts(A.to_parts(X, transpose=True)), X)
    assert sum(A.entries) == np.count_nonzero(D)
    assert A.own.values.sharding.shard_shape(A.own.values.shape)[0] == 1


@pytest.mark.tier("test")
def test_operators(mesh):
    """Vectors, products from the left, also of NumPy's arrays, scalars and dtypes."""
    D, rng = graph(9, 14), np.random.default_rng(1)
    A = parallel.partition(SparseArray.from_dense(D), mesh, "x")
    x, y = rng.standard_normal((14, 24)), rng.standard_normal((3, 9))
    assert A._covered(24, x.dtype)  # others multiply, too

    @jax.jit
    def several(A, x):
        return (
            -(2 * A * 3 / 12) @ x,
            A @ x[:, 0],
            y @ A,
            y[0] @ A,
            (sum([A, A]) - A / 4) @ x,
            (0.0 - A) @ x,
        )

    expected = -0.5 * D @ x, D @ x[:, 0], y @ D, y[0] @ D, 1.75 * D @ x, -D @ x
    for got, want in zip(several(A, x), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    assert all(x is A for x in (A + 0.0, 0 + A, A - np.float32(0), 0j + A))
    narrow = A.astype(jnp.float32)
    assert (narrow.dtype, narrow.nnz, narrow.ndim) == (jnp.float32, np.count_nonzero(D), 2)
    assert narrow.cover.out.values.dtype == jnp.float32
    restored = pickle.loads(pickle.dumps(A))
    assert jax.tree.structure(restored) == jax.tree.structure(A) and copy.deepcopy(A) is A
    for mine, theirs in zip(*map(jax.tree.leaves, (A, restored)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.sharding == theirs.sharding
    nothing = parallel.partition(SparseArray.from_dense(np.zeros((0, 0))), mesh, "x")
    assert nothing.row_bounds == (0, 0, 0) and nothing.entries == (0, 0)


def test_only_needed_rows_are_in_the_program(mesh):
    """A path in two halves: one row each way, and no gather of the operand. The product with own
    columns does not wait for it, nor it for that product, so that a compiler may run both at once
    (XLA's for GPUs does: tests/xla_gpu)."""
    D = np.eye(32) + np.eye(32, k=1) + np.eye(32, k=-1)
    A = parallel.partition(SparseArray.from_dense(D), mesh, "x", rows="even")
    B = A.to_parts(np.random.default_rng(0).standard_normal((32, 5)))
    run = jax.jit(lambda A, B: A @ (A @ B))
    expected = D @ D @ np.asarray(A.from_parts(B))
    np.testing.assert_allclose(A.from_parts(run(A, B)), expected, rtol=1e-12, atol=1e-12)
    text = run.lower(A, B).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    assert A.exchange.sent == 1 and "at most             40 bytes" in A.explain(5, jnp.float64)
    needs = ancestors(jax.jit(lambda A, B: A @ B).lower(A, B).compile().as_text())
    products = [name for name in needs if name.startswith("spmm")]
    (exchange,) = (name for name in needs if name.startswith("all-to-all"))
    assert sorted(exchange in needs[name] for name in products) == [False, True]
    assert needs[exchange].isdisjoint(products)


def ancestors(text):
    """{instruction: those that it depends on} of the entry computation of a compiled program."""
    found = {}
    for name, rest in re.findall(
        r"^  (?:ROOT )?%([\w.-]+) = (.*)", text[text.index("ENTRY") :], re.M
    ):
        direct = [x for x in re.findall(r"%([\w.-]+)", rest) if x in found]
        found[name] = set(direct).union(*(found[x] for x in direct))
    return found


@pytest.mark.tier("all")
@pytest.mark.parametrize("format, unit", [(CVS(4), 4), (BCSR(2, 4), 4)], ids=str)
def test_vectors_and_blocks_stay_together(mesh, format, unit):
    """Also by METIS and where parts come alone; what does not divide is of single entries."""
    pytest.importorskip("pymetis", reason="METIS is an extra, sgap_jax[metis]")
    D, B = graph(24, 24), np.random.default_rng(1).standard_normal((24, 2))
    whole = SparseArray.from_dense(D, format=format)
    units = np.random.default_rng(3).permutation(24 // unit)
    apart = lambda **options: parallel.partition(whole, mesh, "x", **options)
    A = apart(order=lambda A: (units[:, None] * unit + np.arange(unit)).reshape(-1), rows=[8, 16])
    assert A.format == format and sum(A.entries) == whole.nnz
    assert A.own.values.shape[2:] == A.foreign.values.shape[2:] == format.block_shape
    both = jax.jit(lambda A, B: (A, A @ B))(A, B)  # a pytree that jit takes and gives back
    np.testing.assert_allclose(both[1], loops(D, B), rtol=1e-12, atol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, both[0], A)
    by_metis = apart(order="metis")
    assert by_metis.format == format and not (np.array(by_metis.row_bounds) % unit).any()
    np.testing.assert_allclose(by_metis @ B, loops(D, B), rtol=1e-12, atol=1e-12)
    given = apart(rows="even")
    parts = {p: SparseArray.from_dense(D[12 * p : 12 * p + 12], format=format) for p in range(2)}
    jax.tree.map(np.testing.assert_array_equal, parallel.from_parts(parts, mesh, "x"), given)
    with pytest.raises(ValueError, match=f"expected multiples of {unit}, which .* keeps together"):
        apart(rows=[7, 17])
    assert apart(order=lambda A: np.arange(24)[::-1]).format == CSR
    parts[1] = parts[1].asformat(CSR)
    assert parallel.from_parts(parts, mesh, "x").format == CSR
    ragged = SparseArray.from_dense(graph(), format=format)
    assert parallel.partition(ragged, mesh, "x").format == CSR


@pytest.mark.tier("all")
@pytest.mark.parametrize("format, rows", [(CVS(8), 4), (BCSR(8, 3), 4), (BCSR(3, 8), 3)], ids=str)
def test_even_parts_have_shorter_vectors(mesh, format, rows):
    """Twelve rows each, so that arrays that are split evenly stay where they are."""
    D, B = graph(24, 24), np.random.default_rng(1).standard_normal((24, 2))
    A = parallel.partition(SparseArray.from_dense(D, format=format), mesh, "x", rows="even")
    assert A.format == CVS(rows) and A.row_bounds == (0, 12, 24)
    np.testing.assert_allclose(A @ B, loops(D, B), rtol=1e-12, atol=1e-12)


def test_parts_of_their_own(mesh):
    """from_parts gives what partition does, from rows that nobody has together."""
    D = graph().astype(np.float32)
    bounds = [0, 9, 23]
    rows = {p: SparseArray.from_dense(D[bounds[p] : bounds[p + 1]]) for p in range(2)}
    asked = []

    def part(p):
        asked.append(p)
        return rows[p].to_scipy()

    whole = parallel.partition(SparseArray.from_dense(D), mesh, "x", rows=[9, 14])
    for A in (parallel.from_parts(rows, mesh, "x"), parallel.from_parts(part, mesh, "x")):
        assert jax.tree.structure(A) == jax.tree.structure(whole)
        jax.tree.map(np.testing.assert_array_equal, A, whole)
    assert asked == [0, 1] and A.dtype == jnp.float32
    narrow = {p: A.astype(jnp.bfloat16) for p, A in rows.items()}
    assert parallel.from_parts(narrow, mesh, "x").dtype == jnp.bfloat16
    # Of another shape the columns are spread evenly, and a part may have no rows.
    A = parallel.from_parts({0: rows[0][:0], 1: rows[1]}, mesh, "x")
    np.testing.assert_allclose(A @ np.eye(23, dtype=np.float32), D[9:], rtol=1e-6)


@pytest.mark.parametrize("dtype, format", [(jnp.bfloat16, CVS(2)), (jnp.float32, CSR)])
def test_operations_on_rows_have_the_bits_of_one_device(mesh, dtype, format):
    """Also: of entries that tie the first has the gradient, and the dtype stays."""
    A = SparseArray.from_dense(graph(24, 24), format=format)
    A = A.with_values(jnp.where(A.values == 0, 0.5, A.values)).astype(dtype)
    apart, X = parallel.partition(A, mesh, "x"), jnp.ones((24, 2), dtype)
    of_parts = lambda P: parallel.partition(P, mesh, "x").values

    def every(ops, A, X, **in_order):
        messages = ops.gspmm(A, X, op="copy", reduce="max")
        means = ops.gspmm(A, X, op="div", reduce="mean")
        product = ops.spmm(A, jnp.cumsum(X, 0) / 3, **in_order)
        back = ops.gspmm(A, X, op="sub", reduce="min", transpose=True)
        found = ops.sparse_softmax(A).values, messages, means, back, product
        return *found, ops.row_max(A), ops.row_sum(A)

    (softmax, *others, top, total) = jax.jit(partial(every, parallel, in_order=True))(apart, X)
    expected = jax.jit(partial(every, sgap_jax))(A, X)
    jax.tree.map(np.testing.assert_array_equal, softmax, of_parts(A.with_values(expected[0])))
    rows = (*others, apart.from_parts(top), apart.from_parts(total))
    for got, want in zip(rows, expected[1:], strict=True):
        assert got.dtype == want.dtype == dtype
        np.testing.assert_array_equal(got, want)
    ways = (False, True)
    most = lambda ops, A: (
        lambda X: sum(
            jnp.sum((2 + way) * ops.gspmm(A, X, op="copy", reduce="max", transpose=way))
            for way in ways
        )
    )
    tie = lambda ops, A: jax.jit(jax.grad(most(ops, A)))(X)
    np.testing.assert_array_equal(tie(parallel, apart), tie(sgap_jax, A))


def test_a_new_mesh_compiles_one_program_and_new_values_none(mesh):
    """Parts are cut and planned without the compiler, and a plan of the same contents finds the
    program of the one before."""
    D, B = graph(), np.random.default_rng(1).standard_normal((23, 4))
    alone = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    step = jax.jit(jax.grad(lambda v, A, B: jnp.sum((A.with_values(v) @ B) ** 2)))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    for over, scale, programs in (
        (alone, 1, 1),
        (mesh, 1, 1),
        (mesh, 2, 0),
        (alone, 3, 0),
    ):
        A = parallel.partition(SparseArray.from_dense(scale * D), over, "x")
        assert not compiled, "partition compiled something"
        gradient = step(A.values, A, B)
        assert len(compiled) == programs
        compiled.clear()
        slope = SparseArray.from_dense(np.where(D, 2 * scale * D @ B @ B.T, 0))
        expected = parallel.partition(slope, over, "x").values
        close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, gradient, expected)
        compiled.clear()


@pytest.mark.parametrize("name", ["a.npz", "a.mtx"])
@pytest.mark.parametrize("rows", ["balanced", "even", [4, 19]])
def test_a_matrix_from_a_file(mesh, tmp_path, name, rows):
    A = SparseArray.from_dense(graph())
    sgap_jax.write(tmp_path / name, A)
    expected = parallel.partition(A, mesh, "x", rows=rows)
    got = parallel.read(tmp_path / name, mesh, "x", rows=rows)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.tier("all")
def test_metis_finds_the_parts_of_a_graph(mesh):
    """Two cliques whose vertices alternate, and one edge between them."""
    pytest.importorskip("pymetis", reason="METIS is an extra, sgap_jax[metis]")
    side = np.arange(24) % 2
    D = (side[:, None] == side[None, :]).astype(float)
    D[2, 5] = D[5, 2] = 1
    A = parallel.partition(SparseArray.from_dense(D), mesh, "x", order="metis")
    assert A.exchange.needed.tolist() == [[0, 1], [1, 0]] and set(A.entries) == {145}
    B = np.random.default_rng(0).standard_normal((24, 3))
    np.testing.assert_allclose(A @ B, D @ B, rtol=1e-12, atol=1e-12)
    for D in (np.zeros((5, 5)), np.eye(5), np.ones((1, 1)), np.zeros((0, 0))):  # nothing to cut
        A = parallel.partition(SparseArray.from_dense(D), mesh, "x", order="metis")
        assert A.row_bounds[-1] == len(D) and A.exchange.sent == 0


@pytest.mark.parametrize("order", ["given", "metis"])
@pytest.mark.parametrize("name, most", [("delaunay_n15", 0.003), ("coauthor_cs", 0.04)])
def test_what_graphs_send(data_dir, name, most, order):
    """Never more than an all-gather of evenly split rows; with METIS little of it. With its
    padding at most 1.15 times the smallest covers."""
    A = sgap_jax.read(data_dir / "graphs" / f"{name}.npz").to_scipy().tocsr()
    A, parts, rows = (A + A.T).tocsr(), 64, "balanced"
    if order == "metis":
        pytest.importorskip("pymetis", reason="METIS is an extra, sgap_jax[metis]")
        permutation, counts = by_metis(A, parts, rows)
        A, rows = A[permutation][:, permutation].tocsr(), counts.tolist()
    A.sum_duplicates()
    bounds = bounds_of(rows, np.diff(A.indptr), parts)
    _, _, exchange, _, plan, _ = cut_arrays(A.indptr, A.indices, A.data, bounds, bounds)
    everything = (parts - 1) * -(-A.shape[0] // parts)
    assert plan.exchange.sent / everything <= (most if order == "metis" else 1)
    assert plan.exchange.sent <= min(exchange.sent, 1.15 * max(plan.exchange.needed.sum(0)))


def test_a_picture_of_what_travels(mesh):
    """Rows 0 to 2 are of part 0, which needs rows 3 and 5 of B; part 1 needs row 1."""
    pytest.importorskip("matplotlib")
    D = np.eye(6)
    D[0, 3] = D[1, 3] = D[2, 5] = D[4, 1] = 1
    A = parallel.partition(SparseArray.from_dense(D), mesh, "x", rows="even")
    ax = A.plot(10, jnp.float32)
    np.testing.assert_array_equal(ax.images[0].get_array(), [[0, 1 * 40], [2 * 40, 0]])
    assert ax is A.plot(ax=ax) and ax.get_xlabel() == "to device"
