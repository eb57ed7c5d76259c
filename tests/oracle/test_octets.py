"""Products of column vectors of bfloat16 on matrix tiles of the CPU and, in vectors, in pairs, on
every instruction set, against float64 loops."""

from typing import NamedTuple

import numpy as np
import pytest
from battery import BATTERY, cast, from_row_lengths
from native_call import run, typed_isas
from sddmm_oracle import check_factors, operands, vector_oracle
from spmm_oracle import dense_operand, oracle
from tolerance import assert_within
from vector_cases import encoded

from sgap_jax.runtime.native import native

NONE = np.zeros(0, np.int32)


class Kernels(NamedTuple):
    """Those of an instruction set, on tiles or in vectors."""

    isa: str
    tiles: bool = True

    @property
    def spmm(self):
        if self.tiles:
            return "sgap_spmm_octet_v1", dict(step=32)
        return "sgap_spmm_cvs_v1", dict(pack=False, transpose=False)

    @property
    def transposed(self):
        return f"sgap_spmm_{'octet' if self.tiles else 'cvs'}_scatter_v1"

    @property
    def sddmm(self):
        return f"sgap_sddmm_{'octet' if self.tiles else 'cvs'}_v1"


ON_TILES = {isa: Kernels(isa) for isa in native.supported_isas()}
IN_VECTORS = {f"{isa}_vectors": Kernels(isa, tiles=False) for _, isa in typed_isas(["bfloat16"])}
BOTH = ON_TILES | IN_VECTORS
kernels = pytest.mark.parametrize("on", BOTH.values(), ids=BOTH)
on_tiles = pytest.mark.parametrize("on", ON_TILES.values(), ids=ON_TILES)
in_vectors = pytest.mark.parametrize("on", IN_VECTORS.values(), ids=IN_VECTORS)
LENGTHS = (2, 4, 8, 16, 32)
# Two lengths for each matrix.
CASES = [(name, LENGTHS[(i + j) % 5]) for i, name in enumerate(BATTERY) for j in (0, 2)]


def spmm(arrays, case, B, on, threads=1, **changes):
    offsets, indices, values = arrays
    x = cast(B if B.ndim == 3 else B[None], "bfloat16")
    given = (cast(values, "bfloat16")[None], offsets, indices, NONE, x)
    target, own = on.spmm
    attributes = dict(tile_columns=128, chunk_nonzeros=64) | own | changes
    results = [((len(x), case.shape[0], x.shape[2]), x.dtype)]
    return run(target, given, results, attributes, on.isa, threads)[0]


def transposed(arrays, case, B, on, threads=1, **changes):
    offsets, indices, values = arrays
    x = cast(B if B.ndim == 3 else B[None], "bfloat16")
    given = (cast(values, "bfloat16")[None], offsets, indices, x)
    attributes = dict(tile_columns=64, pieces=3) | changes
    results = [((len(x), case.shape[1], x.shape[2]), x.dtype)]
    return run(on.transposed, given, results, attributes, on.isa, threads)[0]


def sddmm(arrays, X, Y, on, threads=1, weights=None, scale=None, chunk=64):
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
    return run(on.sddmm, given, results, attributes, on.isa, threads)[0]


@kernels
@pytest.mark.parametrize(("name", "length"), CASES)
def test_battery(name, length, on):
    """Widths below, at and above those of a tile, a panel and a pass; rows of the last block row
    past the end, whose values are NaN."""
    arrays, case, place = encoded(BATTERY[name], length)
    for n in (1, 32, 50, 64, 200):
        B = dense_operand(case, n)
        expected = oracle(case, "bfloat16", B)
        assert_within(spmm(arrays, case, B, on)[0], *expected)
        fewer = dict(step=16) if on.tiles else dict(chunk_nonzeros=1 << 30)
        assert_within(spmm(arrays, case, B, on, tile_columns=0, **fewer)[0], *expected)
        B = dense_operand(case, n, transpose=True)
        expected = oracle(case, "bfloat16", B, transpose=True)
        assert_within(transposed(arrays, case, B, on)[0], *expected)
        if length >= 4 or not on.tiles:
            X, Y = operands(case, n)
            expected = vector_oracle(case, place, arrays[2].size, "bfloat16", X, Y)
            assert_within(sddmm(arrays, X, Y, on)[0].reshape(-1), *expected)


@kernels
def test_long_rows(on):
    """More vectors than are transposed at once, and features than are kept as tiles."""
    case = from_row_lengths("long", 3000, [2600, 0, 1100, 7, 2100])
    arrays, case, place = encoded(case, 4)
    B = dense_operand(case, 70)
    assert_within(spmm(arrays, case, B, on)[0], *oracle(case, "bfloat16", B))
    whole = spmm(arrays, case, B, on, chunk_nonzeros=1 << 30)
    assert_within(whole[0], *oracle(case, "bfloat16", B))
    X, Y = operands(case, 600)
    expected = vector_oracle(case, place, arrays[2].size, "bfloat16", X, Y)
    assert_within(sddmm(arrays, X, Y, on)[0].reshape(-1), *expected)


@kernels
@pytest.mark.parametrize("length", [16, 32])
def test_long_rows_in_half_steps(length, on):
    """Half steps, whose rows of values take as much room as those of whole steps: there are two
    arrays of them, in turn, and the second is the last of what the kernel holds."""
    lengths = [n for n in (5, 900, 3, 1100) for n in (n, *[0] * (length - 1))]
    arrays, case, _ = encoded(from_row_lengths("long", 1200, lengths), length)
    B = dense_operand(case, 33)
    half = dict(step=16) if on.tiles else {}
    found = spmm(arrays, case, B, on, chunk_nonzeros=1 << 30, **half)
    assert_within(found[0], *oracle(case, "bfloat16", B))


@kernels
@pytest.mark.parametrize("length", [4, 32])
def test_batches_weights_and_scales(length, on):
    arrays, case, place = encoded(BATTERY["every_length"], length)
    rng = np.random.default_rng(0)
    B = np.stack([dense_operand(case, 40, seed=s) for s in (1, 2)])
    for one, x in zip(spmm(arrays, case, B, on), B, strict=True):
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
        lambda X, Y, weights, scale: sddmm(arrays, X, Y, on, weights=weights, scale=scale),
    )


@kernels
def test_threads_change_no_bits(on):
    arrays, case, _ = encoded(from_row_lengths("large", 500, [40, 3, 500, 0, 17] * 60), 8)
    B, C = dense_operand(case, 96), dense_operand(case, 96, transpose=True)
    X, Y = operands(case, 96)
    for result in (
        lambda threads: spmm(arrays, case, B, on, threads),
        lambda threads: transposed(arrays, case, C, on, threads),
        lambda threads: sddmm(arrays, X, Y, on, threads),
    ):
        first = result(1).view(np.uint16)
        for threads in (2, 5):
            np.testing.assert_array_equal(first, result(threads).view(np.uint16))


@kernels
def test_what_is_not_finite_reaches_only_what_stores_it(on):
    """Steps are padded with rows of zeros, not with rows of B or values that are there."""
    arrays, case, _ = encoded(from_row_lengths("sparse", 64, [1, 5, 0, 33, 2, 17, 9, 40]), 8)
    offsets, indices, values = arrays
    stored = indices[: offsets[-1]]
    unused = np.setdiff1d(np.arange(64), stored)
    B = dense_operand(case, 48)
    clean = spmm(arrays, case, B, on)
    B[unused] = np.inf
    np.testing.assert_array_equal(clean.view(np.uint16), spmm(arrays, case, B, on).view(np.uint16))
    values = values.copy()
    values[offsets[-1] :] = np.inf
    again = spmm((offsets, indices, values), case, np.nan_to_num(B, posinf=0), on)
    assert np.isfinite(again.astype(np.float32)).all()


@kernels
def test_a_vector_without_a_partner_meets_zeros(on):
    """Block rows of one and of three vectors; all other rows of B are infinite."""
    arrays, case, _ = encoded(from_row_lengths("odd", 6, [1] * 16), 8)
    arrays = np.int32([0, 1, 4]), np.int32([3, 1, 3, 5]), arrays[2][:4]
    B = np.full((6, 40), np.inf)
    B[1::2] = 1
    assert np.isfinite(spmm(arrays, case, B, on).astype(np.float32)).all()


@on_tiles
def test_a_malformed_structure_reads_nothing_else(on):
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
    (plain,) = run("sgap_spmm_cvs_v1", (*given, NONE, x), results, tiles | more, on.isa)
    wild = (offsets, indices, values)
    close(spmm(wild, case, B, on), plain)
    x, results = cast(C, "bfloat16")[None], [((1, case.shape[1], 40), x.dtype)]
    pieces = dict(tile_columns=32, pieces=3)
    (plain,) = run("sgap_spmm_cvs_scatter_v1", (*given, x), results, pieces, on.isa)
    close(transposed(wild, case, C, on), plain)
    X, Y = operands(case, 40)
    absent = np.zeros((1, 0))
    factors = cast(absent, "bfloat16"), np.float32(absent)
    given = (offsets, indices, cast(X, "bfloat16")[None], cast(Y, "bfloat16")[None], *factors)
    results = [((1, *values.shape), x.dtype)]
    (plain,) = run("sgap_sddmm_cvs_v1", given, results, dict(chunk_nonzeros=64), on.isa)
    close(sddmm(wild, X, Y, on), plain)


def by_columns(arrays, case, B, on):
    """The product with the transpose, for each column of A through the permutation."""
    offsets, indices, values = arrays
    stored, x = offsets[-1], cast(B[None], "bfloat16")
    order = np.argsort(indices[:stored], kind="stable")
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[order]
    ends = np.cumsum(np.bincount(indices[:stored], minlength=case.shape[1]))
    padded = (np.resize(x, len(indices)).astype(np.int32) for x in (rows, order))
    given = (cast(values, "bfloat16")[None], np.int32([0, *ends]), *padded, x)
    attributes = dict(tile_columns=0, chunk_nonzeros=64, pack=False, transpose=True)
    results = [((1, case.shape[1], x.shape[2]), x.dtype)]
    return run("sgap_spmm_cvs_v1", given, results, attributes, on.isa)[0]


@in_vectors
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 24])
def test_vectors_of_any_length(length, on):
    """Odd lengths, whose last row has no partner, and block rows with an odd number of vectors;
    rows in part of a register, in whole ones and past them."""
    arrays, case, place = encoded(BATTERY["every_length"], length)
    for n in (5, 16, 33, 130):
        B, C = dense_operand(case, n), dense_operand(case, n, transpose=True)
        assert_within(spmm(arrays, case, B, on)[0], *oracle(case, "bfloat16", B))
        expected = oracle(case, "bfloat16", C, transpose=True)
        assert_within(transposed(arrays, case, C, on)[0], *expected)
        assert_within(by_columns(arrays, case, C, on)[0], *expected)
        X, Y = operands(case, n)
        expected = vector_oracle(case, place, arrays[2].size, "bfloat16", X, Y)
        assert_within(sddmm(arrays, X, Y, on)[0].reshape(-1), *expected)


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
        spmm(arrays, case, dense_operand(case, 4), Kernels(native.isa()), **changes)


def test_the_handlers_refuse_other_vectors():
    for length, words in ((3, "2, 4, 8, 16 or 32 bfloat16"), (64, "2, 4, 8, 16 or 32 bfloat16")):
        arrays, case, _ = encoded(BATTERY["full"], length)
        B, C = dense_operand(case, 4), dense_operand(case, 4, transpose=True)
        with pytest.raises(ValueError, match=words):
            spmm(arrays, case, B, Kernels(native.isa()))
        with pytest.raises(ValueError, match=words):
            transposed(arrays, case, C, Kernels(native.isa()))
    arrays, case, _ = encoded(BATTERY["full"], 2)
    with pytest.raises(ValueError, match="4, 8, 16 or 32 bfloat16"):
        sddmm(arrays, *operands(case, 4), Kernels(native.isa()))
