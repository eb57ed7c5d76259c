"""Every CPU instruction set in one process: matrix x dtype x instruction set, on the handlers."""

import dataclasses
import itertools

import numpy as np
import pytest
from battery import BATTERY, cast, from_row_lengths
from native_call import at_the_end_of_memory, kernel_isas, run, typed_isas
from row_oracle import row_sum_oracle, softmax_oracle
from sddmm_oracle import operands
from sddmm_oracle import oracle as sddmm_oracle
from spmm_oracle import dense_operand
from spmm_oracle import oracle as spmm_oracle
from tolerance import DTYPES, assert_within, sum_bound
from unchecked_structures import anything
from vector_cases import encoded

from sgap_jax.runtime.native import native
from sgap_jax.schedules.machine import this_machine

NONE = np.zeros(0, np.int32)
TILES = dict(tile_columns=0, chunk_nonzeros=64, pack=False)

isas = pytest.mark.parametrize("isa", kernel_isas())
dtypes = pytest.mark.parametrize("dtype", DTYPES)
typed = pytest.mark.parametrize(
    ("dtype", "isa"), [pytest.param(*pair, id="-".join(pair)) for pair in typed_isas(DTYPES)]
)


def spmm(case, dtype, n, isa, **changes):
    B = dense_operand(case, n)
    values, x = cast(case.values, dtype)[None], cast(B, dtype)[None]
    arrays = (values, case.row_offsets, case.column_indices, NONE, x)
    threads = changes.pop("threads", 1)
    result = ((1, case.shape[0], n), x.dtype)
    (y,) = run("sgap_spmm_csr_v1", arrays, [result], TILES | changes, isa, threads)
    return y[0], *spmm_oracle(case, dtype, B)


def sddmm(case, dtype, d, isa, target="sgap_sddmm_csr_v1"):
    X, Y = operands(case, d)
    x, y = cast(X, dtype)[None], cast(Y, dtype)[None]
    absent = cast(np.zeros((1, 0)), dtype)
    scale = absent.astype("float64" if dtype == "float64" else "float32")
    arrays = (case.row_offsets, case.column_indices, x, y, absent, scale)
    result = ((1, case.nnz), x.dtype)
    (values,) = run(target, arrays, [result], dict(chunk_nonzeros=64), isa)
    return values[0], *sddmm_oracle(case, dtype, X, Y)


@typed
@pytest.mark.parametrize("lengths", [(3, 0, 40, 17, 5, 1, 9), (40, 17, 33, 20)], ids=str)
def test_products_read_nothing_behind_their_operands(lengths, dtype, isa):
    case = from_row_lengths("rows", 50, lengths * 12)
    case.column_indices[-9:] = range(41, 50)  # the last row of B among them
    for n in (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 33):
        values, B = cast(case.values, dtype)[None], cast(dense_operand(case, n), dtype)[None]
        X = cast(np.random.default_rng(n).standard_normal((1, case.shape[0], n)), dtype)
        products = [("sgap_spmm_csr_v1", [NONE, B], case.shape[0], TILES)]
        products += [("sgap_spmm_csr_scatter_v1", [X], 50, dict(tile_columns=n, pieces=2))]
        for target, dense, rows, attributes in products:
            operands = [values, case.row_offsets, case.column_indices, *dense]
            result = [((1, rows, n), B.dtype)]
            ended = [at_the_end_of_memory(x) for x in operands]
            y, again = (run(target, x, result, attributes, isa)[0] for x in (operands, ended))
            np.testing.assert_array_equal(y.astype(float), again.astype(float))


@typed
@pytest.mark.parametrize("name", BATTERY)
def test_entries(name, dtype, isa):
    case = BATTERY[name]
    for n in (1, 3, 8, 33, 130):
        assert_within(*spmm(case, dtype, n, isa))
        assert_within(*spmm(case, dtype, n, isa, tile_columns=16, pack=True))
        assert_within(*sddmm(case, dtype, n, isa))
    values, chunk = cast(case.values, dtype)[None], dict(chunk_nonzeros=64)
    arrays, rows = (values, case.row_offsets), (values.shape[:1] + case.shape[:1], values.dtype)
    (sums,) = run("sgap_row_sum_csr_v1", arrays, [rows], chunk, isa)
    assert_within(sums[0], *row_sum_oracle(case, dtype))
    like = (values.shape, values.dtype)
    attributes = chunk | dict(scale=0.5)
    (softmax,) = run("sgap_sparse_softmax_csr_v1", arrays, [like], attributes, isa)
    assert_within(softmax[0], *softmax_oracle(case, dtype, 0.5))


@isas
@dtypes
@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("name", BATTERY)
def test_vectors(name, length, dtype, isa):
    (offsets, indices, values), case, place = encoded(BATTERY[name], length)
    tiles, absent = TILES | dict(transpose=False), cast(np.zeros((1, 0)), dtype)
    scale = absent.astype("float64" if dtype == "float64" else "float32")
    for n in (1, 3, 40):
        B = dense_operand(case, n)
        x = cast(B, dtype)[None]
        arrays = (cast(values, dtype)[None], offsets, indices, NONE, x)
        result = ((1, case.shape[0], n), x.dtype)
        (y,) = run("sgap_spmm_cvs_v1", arrays, [result], tiles, isa)
        assert_within(y[0], *spmm_oracle(case, dtype, B))
        X, Y = operands(case, n)
        arrays = (offsets, indices, cast(X, dtype)[None], cast(Y, dtype)[None], absent, scale)
        result = ((1, *values.shape), x.dtype)
        (sampled,) = run("sgap_sddmm_cvs_v1", arrays, [result], dict(chunk_nonzeros=64), isa)
        expected, bound = np.zeros((2, values.size))
        expected[place], bound[place] = sddmm_oracle(case, dtype, X, Y)
        assert_within(sampled.reshape(-1), expected, bound)  # what is no entry is exactly zero


@pytest.mark.parametrize("isa", [isa for _, isa in typed_isas(["bfloat16"])])
def test_entries_in_pairs(isa):
    """Rows of an odd number of entries: the last one meets neither the next row's value nor a row
    of B; all widths of rows that are held in registers."""
    case = from_row_lengths("odd", 200, [3, 1, 0, 65, 2, 17, 1] * 9)
    for n in (9, 16, 32, 64, 96, 128, 160, 192, 256, 270):
        y, expected, bound = spmm(case, "bfloat16", n, isa)
        assert_within(y, expected, bound)
        assert_within(*sddmm(case, "bfloat16", n, isa))
    last = case.row_offsets[1]  # the first entry of the second row
    case.values[last] = np.inf
    y, expected, bound = spmm(case, "bfloat16", 40, isa)
    rest = np.arange(case.shape[0]) != 1
    assert not np.isfinite(y[1].astype(float)).all()
    assert_within(y[rest], expected[rest], bound[rest])


@isas
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_around_what_is_widened_at_once(dtype, isa):
    """Values of 256 entries, or of a longer row up to 1024."""
    lengths = [3, 250, 6, 257, 1, 1025, 0, 1024, 40, 256, 200, 57]
    case = from_row_lengths("around", 2000, lengths)
    assert_within(*spmm(case, dtype, 33, isa, chunk_nonzeros=8192))


@typed
def test_transposed_entries_of_few_columns(dtype, isa):
    """By rows, with a piece that begins inside a row, for index arrays of any contents; any number
    of threads."""
    rng, size = np.random.default_rng(3), 50
    lengths = np.r_[0, 3, 4000, 0, rng.integers(0, 12, 40)]
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    indices = rng.integers(0, size, offsets[-1] + 5).astype(np.int32)  # 5 of padding
    nnz, rows = len(indices), len(lengths)
    cases = [(offsets, indices), *(anything(rng, rows, nnz, size) for _ in range(3))]
    values = cast(rng.standard_normal(nnz), dtype)
    for case, n in zip(cases * 3, (*range(1, 9), 4, 1, 1, 1), strict=True):
        x = cast(rng.standard_normal((rows, n)), dtype)
        expected, magnitude, terms = (np.zeros((size, n)) for _ in range(3))
        ends = np.maximum.accumulate(np.clip(case[0].astype(np.int64), 0, nnz))
        row = np.repeat(np.arange(rows), np.diff(ends))
        column, value = case[1][ends[0] : ends[-1]], values[ends[0] : ends[-1]].astype(float)
        takes_part = (column >= 0) & (column < size)
        product = (value[:, None] * x[row].astype(float))[takes_part]
        for total, of in ((expected, product), (magnitude, abs(product)), (terms, 1)):
            np.add.at(total, column[takes_part], of)
        results = [
            run(
                "sgap_spmm_csr_scatter_v1",
                (values[None], *case, x[None]),
                [((1, size, n), x.dtype)],
                dict(tile_columns=n, pieces=3),
                isa,
                threads,
            )[0][0]
            for threads in (1, 2)
        ]
        np.testing.assert_array_equal(*results)
        assert_within(results[0], expected, sum_bound(expected, magnitude, terms + 3, dtype))


@typed
def test_softmax_of_rows_of_every_length(dtype, isa):
    """Rows of one to a few registers, and longer ones. A NaN of either sign fills its row, and no
    other one changes; -inf is a zero."""
    case = from_row_lengths("rows", 300, (*range(1, 140), 300), padding=3)
    first, values = case.row_offsets[:-1], cast(case.values, dtype)[None]

    def softmax(values, scale):
        arrays, like = (values, case.row_offsets), (values.shape, values.dtype)
        attributes = dict(chunk_nonzeros=256, scale=scale)
        return run("sgap_sparse_softmax_csr_v1", arrays, [like], attributes, isa)[0][0]

    far = dataclasses.replace(case, values=300 * case.values - 1000)  # of one sign, or nearly
    for scale in (0.5, -0.5):
        found = softmax(values, scale)
        assert_within(found, *softmax_oracle(case, dtype, scale))
        expected, bound = softmax_oracle(far, dtype, scale)
        assert_within(softmax(cast(far.values, dtype)[None], scale), expected, bound + 1e-30)
        for nan in (np.nan, -np.nan):
            changed = values.copy()
            changed[0, first[::3]] = nan
            of_nan = np.isin(case.rows, np.arange(len(first))[::3])
            results = softmax(changed, scale)[: case.stored]
            assert np.isnan(results[of_nan].astype(float)).all()
            np.testing.assert_array_equal(results[~of_nan], found[: case.stored][~of_nan])
        changed = values.copy()
        changed[0, first] = -np.inf if scale > 0 else np.inf
        results = softmax(changed, scale)[: case.stored].astype(float)
        assert (results[first] == 0).all()
        sums = np.add.reduceat(results, first)
        np.testing.assert_allclose(sums, case.row_offsets[1:] > first + 1, rtol=0.02)


def used_often(rows):
    """So many entries use these rows of a dense operand so often that each core widens them first
    (WideningPays of cpu/common/slab_memory.h)."""
    return 8 * rows * this_machine().cores


@isas
@pytest.mark.parametrize("length", [1, 2, 8, 19])
def test_rows_that_are_widened_first_change_no_bits(length, isa):
    """Dot products in float16 with rows of Y that are used often, beside those with a taller Y,
    whose other rows nothing uses; of a batch, whose elements have a Y each."""
    rng, k = np.random.default_rng(4), 7
    target = "sgap_sddmm_csr_v1" if length == 1 else "sgap_sddmm_cvs_v1"
    lengths = np.resize([40, 0, 3, 17, 1, 90], max(30, used_often(k) // 20))
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    assert offsets[-1] >= used_often(k)
    indices = rng.integers(0, k, offsets[-1] + 5).astype(np.int32)  # 5 of padding
    m, absent = len(lengths) * length - (length > 2), np.zeros((1, 0), np.float16)
    for d in (3, 32, 130):
        x, y, taller = (rng.standard_normal((2, n, d)).astype(np.float16) for n in (m, k, 400))
        taller[:, :k] = y
        result = ((2, len(indices), length)[: 2 + (length > 1)], x.dtype)
        found, expected = (
            run(
                target,
                (offsets, indices, x, rows, absent, absent.astype(np.float32)),
                [result],
                dict(chunk_nonzeros=2048),
                isa,
                threads=2,
            )[0].view(np.uint16)
            for rows in (y, taller)
        )
        np.testing.assert_array_equal(found, expected)


@isas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [(1, 1), (3, 1), (1, 3), (3, 3)], ids=str)
def test_tiles_of_permuted_values_are_products_of_their_own(batch, dtype, isa):
    """Values that several tiles read through a permutation are put in order by the first of them;
    rows that are longer than what is staged, split and empty. The bits of each tile alone."""
    rng, k, n = np.random.default_rng(8), 50, 40
    lengths = np.resize([3, 0, 40, 1100, 7, 0, 1], 31)
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    stored = int(offsets[-1])
    indices = rng.integers(0, k, stored + 3).astype(np.int32)
    permutation = np.r_[rng.permutation(stored), [0, 0, 0]].astype(np.int32)
    values = cast(rng.standard_normal((batch[0], stored + 3)), dtype)
    x = cast(rng.standard_normal((batch[1], k, n)), dtype)

    def product(x, **tiles):
        arrays, size = (values, offsets, indices, permutation, x), (max(batch), 31, x.shape[2])
        attributes = TILES | tiles
        return run("sgap_spmm_csr_v1", arrays, [(size, x.dtype)], attributes, isa, threads=3)[0]

    columns = [np.ascontiguousarray(x[:, :, j : j + 16]) for j in range(0, n, 16)]
    for chunk, pack in ((300, False), (300, True), (5000, True)):
        chunks = dict(chunk_nonzeros=chunk)
        alone = [product(part, **chunks) for part in columns]
        found = product(x, tile_columns=16, pack=pack, **chunks)
        np.testing.assert_array_equal(found, np.concatenate(alone, axis=2))
    dense = np.zeros((batch[0], 31, k))
    rows = np.repeat(np.arange(31), lengths)
    for b in range(batch[0]):
        np.add.at(dense[b], (rows, indices[:stored]), values[b][permutation[:stored]])
    np.testing.assert_allclose(found, dense @ x.astype(np.float64), rtol=1e-3, atol=1e-3)


def test_values_in_order_are_read_by_other_threads_once_they_are_written():
    """Each thread has a tile, all of the same values; to put these in order takes longer than to
    read them then, so that who reads too early comes upon those of the call before."""
    rng, count, rows, k = np.random.default_rng(9), 1 << 20, 64, 16
    offsets = (np.arange(rows + 1) * (count // rows)).astype(np.int32)
    indices = rng.integers(0, k, count).astype(np.int32)
    permutation = rng.permutation(count).astype(np.int32)
    x = rng.standard_normal((1, k, 2)).astype(np.float32)
    attributes = dict(tile_columns=1, chunk_nonzeros=2**31 - 1, pack=False)
    for number in range(3):
        values = np.full((1, count), number, np.float32)
        arrays = (values, offsets, indices, permutation, x)
        result = ((1, rows, 2), x.dtype)
        (y,) = run("sgap_spmm_csr_v1", arrays, [result], attributes, native.isa(), threads=2)
        sums = np.add.reduceat(x[0, indices].astype(float), offsets[:-1])
        # One value that is read too early changes sums of thousands by an element of x.
        np.testing.assert_allclose(y[0], number * sums, rtol=0, atol=5e-2)


@typed
def test_blocks_of_rows_change_no_bits(dtype, isa):
    """Dot products by blocks of rows of Y: columns in any order, rows that are empty, split and
    within one block, a batch whose elements have a Y each, and a capacity of many chunks, of which
    few are stored."""
    rng, k = np.random.default_rng(3), 61
    lengths = np.resize([0, 3, 90, 0, 17, 1, 200], 23)
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    scale = cast(np.full((2, 1), 0.5), "float64" if dtype == "float64" else "float32")
    for d, padding in ((3, 5), (4, 20_000), (64, 20_000), (130, 5)):
        indices = rng.integers(0, k, offsets[-1] + padding).astype(np.int32)
        weights = cast(rng.standard_normal((2, len(indices))), dtype)
        x, y = (cast(rng.standard_normal((2, n, d)), dtype) for n in (len(lengths), k))
        arrays, result = (offsets, indices, x, y, weights, scale), ((2, len(indices)), x.dtype)
        plain, *blocks = (
            run("sgap_sddmm_csr_v1", arrays, [result], attributes, isa, threads=3)[0]
            for attributes in (
                dict(chunk_nonzeros=64),
                dict(chunk_nonzeros=5, block_rows=0),
                dict(chunk_nonzeros=97, block_rows=7),
                dict(chunk_nonzeros=10_000, block_rows=1),
                dict(chunk_nonzeros=10_000, block_rows=60),
                dict(chunk_nonzeros=500, block_rows=2**31 - 1),
            )
        )
        for found in blocks:
            np.testing.assert_array_equal(found.view(np.uint8), plain.view(np.uint8))
    with pytest.raises(ValueError, match="block_rows: expected 0 or more"):
        run("sgap_sddmm_csr_v1", arrays, [result], dict(chunk_nonzeros=9, block_rows=-1), isa)


@pytest.mark.parametrize(("dtype", "isa"), typed_isas(["float16", "bfloat16"]))
def test_structures_that_share_threads_unequally(dtype, isa):
    """A call on two structures has one slab for each, and all its threads take tasks of the one
    that has entries: those that find no slab read the operands as they are, or wait for one where
    that would change last bits. The same bits."""
    rng, m, k, n = np.random.default_rng(6), 300, 7, 33
    each = max(90, used_often(k) // m + 1)
    offsets = np.stack([np.arange(m + 1) * each, np.zeros(m + 1)]).astype(np.int32)
    indices = rng.integers(0, k, (2, m * each)).astype(np.int32)
    x, y, values = (
        cast(rng.standard_normal(shape), dtype) for shape in ((2, m, n), (2, k, n), (2, m * each))
    )
    absent = cast(np.zeros((1, 0)), dtype)
    of_dots = (offsets, indices, x, y, absent, absent.astype(np.float32))
    of_rows = (values, offsets, indices, NONE, y)
    extrema, positions = ((2, m, n), x.dtype), ((2, m, n), np.int32)
    tiles = TILES | dict(tile_columns=16, pack=True)
    for target, arrays, results, attributes in (
        ("sgap_spmm_csr_v1", of_rows, [extrema], tiles),
        ("sgap_sddmm_csr_v1", of_dots, [(values.shape, x.dtype)], {}),
        ("sgap_gspmm_csr_v1", of_rows, [extrema, positions], dict(add=False, minimum=False)),
    ):
        attributes = attributes | dict(chunk_nonzeros=64)
        one, *more = (run(target, arrays, results, attributes, isa, t) for t in (1, 2, 5))
        for found in more:
            for a, b in zip(one, found, strict=True):
                np.testing.assert_array_equal(a.view(np.int16), b.view(np.int16))


@typed
def test_extrema_where_columns_are_used_often(dtype, isa):
    """Tasks whose 16-bit operands are looked at before, for messages that may be NaN: of NaN and of
    infinity times zero, in any place."""
    rng, m, k, n = np.random.default_rng(5), 5, 6, 37
    each = max(60, used_often(k) // m + 1)
    offsets = (np.arange(m + 1) * each).astype(np.int32)
    indices = rng.integers(0, k, offsets[-1]).astype(np.int32)
    values, x = rng.integers(1, 9, len(indices)) / 4, rng.standard_normal((k, n))
    special = [(values, x)]
    for bad in (np.nan, -np.nan, np.inf):
        for at in (0, k * n - 1):  # of x, whose other factor is zero
            changed, zeros = x.copy(), values.copy()
            changed.flat[at] = bad
            zeros[::7] = 0
            special.append((zeros, changed))
        special.append((np.where(np.arange(len(values)) == 5 * each - 1, bad, values), x * 0))
    for given, dense in special:  # beside a batch element of numbers
        a, b = cast(np.stack([values, given]), dtype), cast(np.stack([x, dense]), dtype)
        results = [((2, m, n), b.dtype), ((2, m, n), np.int32)]
        arrays = (a, offsets, indices, NONE, b)
        attributes = dict(add=False, minimum=False, chunk_nonzeros=64)
        y, arg = run("sgap_gspmm_csr_v1", arrays, results, attributes, isa)
        results[1] = ((0,), np.int32)  # not wanted
        without, _ = run("sgap_gspmm_csr_v1", arrays, results, attributes, isa)
        wide = "float64" if dtype == "float64" else "float32"
        with np.errstate(invalid="ignore"):
            messages = a.astype(wide)[:, :, None] * b.astype(wide)[:, indices]
        messages = messages.reshape(2, m, -1, n)
        nan = np.isnan(messages)
        first = np.where(nan, np.inf, messages).argmax(2)
        first = np.where(nan.any(2), nan.argmax(2), first)
        expected = np.take_along_axis(messages, first[:, :, None], 2)[:, :, 0].astype(b.dtype)
        np.testing.assert_array_equal(arg, first + offsets[:-1, None])
        for found in (y, without):
            np.testing.assert_array_equal(found.astype(float), expected.astype(float))


@typed
def test_transposed_short_rows_of_one_column(dtype, isa):
    """The kernel stages x, or 16-bit products, for their entries, in blocks that end inside a row;
    beside wrong indices the others count."""
    rng, size, rows = np.random.default_rng(5), 500, 6_000
    lengths = rng.integers(0, 4, rows)
    lengths[[7, 100, 101, rows - 1]] = 300, 0, 17, 40
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    indices = rng.integers(0, size, offsets[-1] + 3).astype(np.int32)  # 3 of padding
    indices[-3:] = 2**30
    indices[[0, 255, 256, 3_000, offsets[-1] - 1]] = -1, size, 2**31 - 1, -(2**31), size
    values, x = cast(rng.standard_normal(len(indices)), dtype), cast(rng.random(rows), dtype)
    row, column = np.repeat(np.arange(rows), lengths), indices[:-3]
    takes_part = (column >= 0) & (column < size)
    product = (values[:-3].astype(float) * x[row].astype(float))[takes_part]
    expected, magnitude, terms = (
        np.bincount(column[takes_part], of, size) for of in (product, abs(product), None)
    )
    arrays, result = (values[None], offsets, indices, x[None, :, None]), ((1, size, 1), x.dtype)
    attributes = dict(tile_columns=1, pieces=3)
    ys = [
        run("sgap_spmm_csr_scatter_v1", arrays, [result], attributes, isa, threads)[0]
        for threads in (1, 2)
    ]
    np.testing.assert_array_equal(*ys)
    assert_within(ys[0][0, :, 0], expected, sum_bound(expected, magnitude, terms + 3, dtype))


@isas
@pytest.mark.parametrize(
    ("lengths", "times"),
    # Long rows of a few lengths, and many rows: on Intel.
    [((2, 7, 0, 5), 30), ((48, 77, 50), 30), ((16, 31, 18), 30), ((16, 31, 18), 1366)],
    ids=["short", "long", "less_long", "many"],
)
def test_a_wrong_index_of_a_product_with_one_column(lengths, times, isa):
    """Its kernels look at indices as they go, some together: wherever the wrong one is, it is not
    followed, and the others count."""
    check_wrong_indices(lengths * times, 1, isa)


@typed
def test_rows_of_one_column_have_the_same_bits_among_shorter_ones(dtype, isa):
    """On Intel the mean length and the number of rows choose the loop, with 16 bits also whether x
    was widened before."""
    case = from_row_lengths("rows", 300, (*range(48, 112), *(16,) * 4100))
    case.values[:] = np.ldexp(
        case.values, np.random.default_rng(5).integers(0, 12, len(case.values))
    )
    for begin, end in itertools.pairwise(case.row_offsets[:65]):
        # Their sums are 0 but for rounding, so that 16 bits show each order of additions.
        half = (end - begin) // 2
        case.values[begin + half : begin + 2 * half] = -case.values[begin : begin + half]
        indices = case.column_indices[begin : begin + half]
        case.column_indices[begin + half : begin + 2 * half] = indices
    values, x = cast(case.values, dtype), cast(dense_operand(case, 1), dtype)
    results = []
    for rows, pack in itertools.product((64, 300, case.shape[0]), (False, True)):
        offsets = case.row_offsets[: rows + 1]
        entries = slice(offsets[-1])
        arrays = (values[None, entries], offsets, case.column_indices[entries], NONE, x[None])
        result = ((1, rows, 1), x.dtype)
        attributes = dict(tile_columns=0, chunk_nonzeros=8192, pack=pack)
        (y,) = run("sgap_spmm_csr_v1", arrays, [result], attributes, isa)
        results.append(y[0, :64].tobytes())
    assert len(set(results)) == 1


@isas
@pytest.mark.parametrize("n", [3, 4])
def test_a_wrong_index_of_a_product_with_few_columns(n, isa):
    """So on Intel, of long rows that are beyond the second-level cache, and of one that is cut into
    pieces."""
    for lengths in ((17, 77, 50, 1), (400,)):
        check_wrong_indices(lengths * 5, n, isa, padding=this_machine().l2_bytes // 5)


def check_wrong_indices(lengths, n, isa, padding=9):
    many, rng = len(lengths) > 4096, np.random.default_rng(7)
    k = 900 if many else 40_000  # of so many columns that few rows are looked at on the way
    case = from_row_lengths("rows", k, lengths, padding=padding)
    case.column_indices[-padding:] = 2**30
    nnz = case.row_offsets[-1]
    places = [0, 3, 15, 16, lengths[0] - 1, lengths[0] + 1, *rng.integers(0, nnz, 5), nnz - 1]
    if many:  # all four in whole steps, and the last
        places = [20, 20, 20, 20, nnz - 1]
    for i, place in enumerate(places):
        column, value = case.column_indices[place], case.values[place]
        case.values[place] = 0
        x = dense_operand(case, n)
        dtypes = ("float32", "float64", "packed bfloat16", "bfloat16")[: 3 if many else 4]
        for packed, dtype in (("packed" in name, name.split()[-1]) for name in dtypes):
            expected, bound = spmm_oracle(case, dtype, x)
            values = cast(np.where(np.arange(nnz + padding) == place, 1e3, case.values), dtype)
            indices = case.column_indices.copy()
            indices[place] = (-1, k, 2**31 - 1, -(2**31))[i % 4]
            around = cast(np.pad(x, ((1, 1), (0, 0)), constant_values=np.nan), dtype)
            arrays = (values[None], case.row_offsets, indices, NONE, around[None, 1:-1])
            result = ((1, case.shape[0], n), around.dtype)
            (y,) = run("sgap_spmm_csr_v1", arrays, [result], TILES | dict(pack=packed), isa)
            assert_within(y[0], expected, bound)
        case.column_indices[place], case.values[place] = column, value


FEW_COLUMNS = [  # dtype, columns, those of a tile, how often the rows come, entries more in each
    *(
        (dtype, 1, 4, times, least)
        for dtype in ("float32", "float64")
        for times, least in ((1, 0), (25, 14))
    ),
    *(
        (dtype, n, 4, 25, 0) for dtype in ("float32", "float64") for n in (3, 4, 8)
    ),  # many rows: on Intel
    *((dtype, 8, 4, 119, 0) for dtype in ("float32", "float64", "float16")),  # 24,700: on Zen 5
    *((dtype, 8, 8, 119, 0) for dtype in ("float32", "float64", "float16")),
    *((dtype, 7, 8, 119, 0) for dtype in ("float32", "bfloat16")),
    *((dtype, 13, 16, 119, 0) for dtype in ("bfloat16", "float16")),
    ("float32", 16, 16, 119, 0),
]


@pytest.mark.parametrize(
    ("dtype", "n", "tile", "times", "least", "isa"),
    [(*case, isa) for case in FEW_COLUMNS for name, isa in typed_isas(case[:1]) if name == case[0]],
)
def test_short_rows_of_few_columns_beside_nan(dtype, n, tile, times, least, isa):
    """Vectors of entries that reach into the next row leave its NaN there; rows of every length,
    which a task may end after, and some long ones among them. Many rows have the bits of a few."""
    rng, k = np.random.default_rng(11), 320
    lengths = rng.permutation([*range(20)] * 8 + [0] * 40 + [63, 64, 65, 68, 69, 84, 85, 300])
    # Groups of the last rows but one, and of an empty one before, would end behind the last entry.
    lengths = np.r_[np.tile(lengths + least, times), 0, 0, 5, 2]
    case = from_row_lengths("rows", k, lengths, padding=3)
    case.column_indices[-3:] = 2**30
    x = dense_operand(case, n)
    expected, bound = spmm_oracle(case, dtype, x)
    values = np.where(
        np.repeat(np.arange(len(lengths)) % 2, lengths) == 1, np.nan, case.values[:-3]
    )
    values, x = cast(np.r_[values, np.nan], dtype)[None], cast(x, dtype)[None]
    for chunk in (64, 500, 8192):
        attributes = TILES | dict(chunk_nonzeros=chunk, tile_columns=tile)

        def product(rows, attributes=attributes, values=values, order=NONE):
            arrays = (values, case.row_offsets[: rows + 1], case.column_indices[:-2], order, x)
            (y,) = run("sgap_spmm_csr_v1", arrays, [((1, rows, n), x.dtype)], attributes, isa)
            return y[0].astype(float)

        y = product(len(lengths))
        assert_within(y[::2], expected[::2], bound[::2])
        assert (np.isnan(y[1::2]) == (lengths[1::2, None] > 0)).all()
        order = rng.permutation(values.shape[1]).astype(np.int32)
        permuted = np.empty_like(values)
        permuted[:, order] = values
        assert_within(
            product(len(lengths), attributes, permuted, order)[::2], *(expected[::2], bound[::2])
        )
        few = len(lengths) // times
        if few > chunk:
            np.testing.assert_array_equal(y[: few - chunk], product(few)[:-chunk])


@isas
def test_threads_change_no_bits(isa):
    case = from_row_lengths("large", 500, [40, 3, 500, 0, 17] * 60)
    results = [spmm(case, "float32", 64, isa, threads=threads)[0] for threads in (1, 2, 5)]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_targets_of_one_handler_are_aliases():
    case, isa = BATTERY["every_length"], native.isa()
    entries, vectors = (
        sddmm(case, "float32", 16, isa, f"sgap_sddmm_{kind}_v1")[0] for kind in ("csr", "cvs")
    )
    np.testing.assert_array_equal(entries, vectors)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(chunk_nonzeros=0), "spmm: chunk_nonzeros: expected 1 to 2147483647, got 0"),
        (dict(tile_columns=-1), "spmm: tile_columns: expected >= 0, got -1"),
        (dict(pack=1), "expected PRED but got S64"),  # an int, not a bool
        (dict(pieces=1), "Wrong number of attributes"),
        (dict(transpose=False), "spmm: values: expected type"),  # of vectors, but rank 2
    ],
)
def test_the_handler_refuses_attributes(changes, words):
    with pytest.raises(ValueError, match=words):
        spmm(BATTERY["full"], "float32", 4, native.isa(), **changes)
    assert native.isa() in native.supported_isas()


def test_an_instruction_set_that_cannot_run_here_is_refused():
    with pytest.raises(ValueError, match="this build on this processor supports"):
        spmm(BATTERY["full"], "float32", 4, "sse9")
