"""Products of column vectors of bfloat16 on matrix tiles of the CPU: every instruction set, against
float64 loops."""

import numpy as np
import pytest
from battery import BATTERY, cast, from_row_lengths
from native_call import run
from sddmm_oracle import check_factors, operands, vector_oracle
from spmm_oracle import dense_operand, oracle
from tolerance import assert_within
from vector_cases import encoded

from sgap_jax.runtime.native import native

NONE = np.zeros(0, np.int32)
isas = pytest.mark.parametrize("isa", native.supported_isas())
LENGTHS = (2, 4, 8, 16, 32)
# Two lengths for each matrix.
CASES = [(name, LENGTHS[(i + j) % 5]) for i, name in enumerate(BATTERY) for j in (0, 2)]


def spmm(arrays, case, B, isa, threads=1, **changes):
    offsets, indices, values = arrays
    x = cast(B if B.ndim == 3 else B[None], "bfloat16")
    given = (cast(values, "bfloat16")[None], offsets, indices, NONE, x)
    attributes = dict(tile_columns=128, chunk_nonzeros=64, step=32) | changes
    results = [((len(x), case.shape[0], x.shape[2]), x.dtype)]
    return run("sgap_spmm_octet_v1", given, results, attributes, isa, threads)[0]


def transposed(arrays, case, B, isa, threads=1, **changes):
    offsets, indices, values = arrays
    x = cast(B if B.ndim == 3 else B[None], "bfloat16")
    given = (cast(values, "bfloat16")[None], offsets, indices, x)
    attributes = dict(tile_columns=64, pieces=3) | changes
    results = [((len(x), case.shape[1], x.shape[2]), x.dtype)]
    return run("sgap_spmm_octet_scatter_v1", given, results, attributes, isa, threads)[0]


def sddmm(arrays, X, Y, isa, threads=1, weights=None, scale=None, chunk=64):
    offsets, indices, values = arrays
    absent = np.zeros((1, 0))
    X, Y, weights = (
        cast(absent if x is None else x if x.ndim == 3 else x[None], "bfloat16")
        for x in (X, Y, weights)
    )
    scale = np.float32(absent if scale is None else scale)
    batch = max(len(X), len(weights), len(scale))
    results = [((batch, *values.shape), X.dtype)]
    given = (offsets, indices, X, Y, weights, scale)
    attributes = dict(chunk_nonzeros=chunk)
    return run("sgap_sddmm_octet_v1", given, results, attributes, isa, threads)[0]


@isas
@pytest.mark.parametrize(("name", "length"), CASES)
def test_battery(name, length, isa):
    """Widths below, at and above those of a tile, a panel and a pass; rows of the last block row
    past the end, whose values are NaN."""
    arrays, case, place = encoded(BATTERY[name], length)
    for n in (1, 32, 50, 64, 200):
        B = dense_operand(case, n)
        expected = oracle(case, "bfloat16", B)
        assert_within(spmm(arrays, case, B, isa)[0], *expected)
        assert_within(spmm(arrays, case, B, isa, step=16, tile_columns=0)[0], *expected)
        B = dense_operand(case, n, transpose=True)
        expected = oracle(case, "bfloat16", B, transpose=True)
        assert_within(transposed(arrays, case, B, isa)[0], *expected)
        if length >= 4:
            X, Y = operands(case, n)
            expected = vector_oracle(case, place, arrays[2].size, "bfloat16", X, Y)
            assert_within(sddmm(arrays, X, Y, isa)[0].reshape(-1), *expected)


@isas
def test_long_rows(isa):
    """More vectors than are transposed at once, and features than are kept as tiles."""
    case = from_row_lengths("long", 3000, [2600, 0, 1100, 7, 2100])
    arrays, case, place = encoded(case, 4)
    B = dense_operand(case, 70)
    assert_within(spmm(arrays, case, B, isa)[0], *oracle(case, "bfloat16", B))
    whole = spmm(arrays, case, B, isa, chunk_nonzeros=1 << 30)
    assert_within(whole[0], *oracle(case, "bfloat16", B))
    X, Y = operands(case, 600)
    expected = vector_oracle(case, place, arrays[2].size, "bfloat16", X, Y)
    assert_within(sddmm(arrays, X, Y, isa)[0].reshape(-1), *expected)


@isas
@pytest.mark.parametrize("length", [4, 32])
def test_batches_weights_and_scales(length, isa):
    arrays, case, place = encoded(BATTERY["every_length"], length)
    rng = np.random.default_rng(0)
    B = np.stack([dense_operand(case, 40, seed=s) for s in (1, 2)])
    for one, x in zip(spmm(arrays, case, B, isa), B, strict=True):
        assert_within(one, *oracle(case, "bfloat16", x))
    X, Y = operands(case, 40)
    weights = np.full(arrays[2].shape, np.nan)
    weights.reshape(-1)[place] = rng.choice([0.25, -0.5, 1.5], len(place))
    check_factors(
        case,
        place,
        weights,
        "bfloat16",
        X,
        Y,
        lambda X, Y, weights, scale: sddmm(arrays, X, Y, isa, weights=weights, scale=scale),
    )


@isas
def test_threads_change_no_bits(isa):
    arrays, case, _ = encoded(from_row_lengths("large", 500, [40, 3, 500, 0, 17] * 60), 8)
    B, C = dense_operand(case, 96), dense_operand(case, 96, transpose=True)
    X, Y = operands(case, 96)
    for result in (
        lambda threads: spmm(arrays, case, B, isa, threads),
        lambda threads: transposed(arrays, case, C, isa, threads),
        lambda threads: sddmm(arrays, X, Y, isa, threads),
    ):
        first = result(1).view(np.uint16)
        for threads in (2, 5):
            np.testing.assert_array_equal(first, result(threads).view(np.uint16))


@isas
def test_what_is_not_finite_reaches_only_what_stores_it(isa):
    """Steps are padded with rows of zeros, not with rows of B or values that are there."""
    arrays, case, _ = encoded(from_row_lengths("sparse", 64, [1, 5, 0, 33, 2, 17, 9, 40]), 8)
    offsets, indices, values = arrays
    stored = indices[: offsets[-1]]
    unused = np.setdiff1d(np.arange(64), stored)
    B = dense_operand(case, 48)
    clean = spmm(arrays, case, B, isa)
    B[unused] = np.inf
    np.testing.assert_array_equal(clean.view(np.uint16), spmm(arrays, case, B, isa).view(np.uint16))
    values = values.copy()
    values[offsets[-1] :] = np.inf
    again = spmm((offsets, indices, values), case, np.nan_to_num(B, posinf=0), isa)
    assert np.isfinite(again.astype(np.float32)).all()


@isas
def test_a_malformed_structure_reads_nothing_else(isa):
    """Entries that take no part are left out, as by the other kernels of a structure that nobody
    has checked."""
    arrays, case, _ = encoded(BATTERY["every_length"], 8)
    offsets, indices, values = (x.copy() for x in arrays)
    indices[::3] += np.int32(2**30)
    indices[1::7] = -1
    offsets[2] = offsets[-1] + 9
    wild, values = (offsets, indices, values), np.nan_to_num(values)
    B, C = dense_operand(case, 40), dense_operand(case, 40, transpose=True)
    given = (cast(values, "bfloat16")[None], offsets, indices)
    x, tiles = cast(B, "bfloat16")[None], dict(tile_columns=0, chunk_nonzeros=64)
    results = [((1, case.shape[0], 40), x.dtype)]
    more = dict(pack=False, transpose=False)
    (plain,) = run("sgap_spmm_cvs_v1", (*given, NONE, x), results, tiles | more, isa)
    wild = (offsets, indices, values)
    close(spmm(wild, case, B, isa), plain)
    x, results = cast(C, "bfloat16")[None], [((1, case.shape[1], 40), x.dtype)]
    pieces = dict(tile_columns=32, pieces=3)
    (plain,) = run("sgap_spmm_cvs_scatter_v1", (*given, x), results, pieces, isa)
    close(transposed(wild, case, C, isa), plain)
    X, Y = operands(case, 40)
    absent = np.zeros((1, 0))
    factors = cast(absent, "bfloat16"), np.float32(absent)
    given = (offsets, indices, cast(X, "bfloat16")[None], cast(Y, "bfloat16")[None], *factors)
    results = [((1, *values.shape), x.dtype)]
    (plain,) = run("sgap_sddmm_cvs_v1", given, results, dict(chunk_nonzeros=64), isa)
    close(sddmm(wild, X, Y, isa), plain)


def close(found, expected):
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(step=24), "step: expected 16 or 32, got 24"),
        (dict(chunk_nonzeros=0), "chunk_nonzeros: expected 1 to 2147483647, got 0"),
        (dict(tile_columns=-1), "tile_columns: expected >= 0, got -1"),
    ],
)
def test_the_handler_refuses_attributes(changes, words):
    arrays, case, _ = encoded(BATTERY["full"], 8)
    with pytest.raises(ValueError, match=words):
        spmm(arrays, case, dense_operand(case, 4), native.isa(), **changes)


def test_the_handlers_refuse_other_vectors():
    for length, words in ((3, "2, 4, 8, 16 or 32 bfloat16"), (64, "2, 4, 8, 16 or 32 bfloat16")):
        arrays, case, _ = encoded(BATTERY["full"], length)
        B, C = dense_operand(case, 4), dense_operand(case, 4, transpose=True)
        with pytest.raises(ValueError, match=words):
            spmm(arrays, case, B, native.isa())
        with pytest.raises(ValueError, match=words):
            transposed(arrays, case, C, native.isa())
    arrays, case, _ = encoded(BATTERY["full"], 2)
    with pytest.raises(ValueError, match="4, 8, 16 or 32 bfloat16"):
        sddmm(arrays, *operands(case, 4), native.isa())
