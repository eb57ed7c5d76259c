"""Every public operation on the device against reference.py, within the bound of its rounding."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, rounded
from gpu_session import on_gpu, some
from gspmm_oracle import away_from_zero
from gspmm_oracle import oracle as gspmm_oracle
from nucleus_oracle import probabilities
from octet_oracle import octet_oracle
from sddmm_oracle import operands, vector_oracle
from sddmm_oracle import oracle as sampled_oracle
from selection_oracle import KINDS, expected, same, scores_of
from spmm_oracle import dense_operand, oracle
from tolerance import DTYPES, accumulator_roundoff, assert_within, sum_bound, unit_roundoff
from unchecked_structures import anything
from vector_cases import encoded, vectors

from sgap_jax import (
    OctetTile,
    Problem,
    SubwarpTile,
    gspmm,
    legal_points,
    reference,
    row_max,
    row_sum,
    sddmm,
    select,
    sparse_softmax,
    spgemm,
)
from sgap_jax import spmm as product
from sgap_jax import spmv as vector_product
from sgap_jax.formats.structure import transpose_by_comparing
from sgap_jax.primitives.bitmap import bitmap, entries
from sgap_jax.primitives.structures import transposed
from sgap_jax.schedules.point import algorithm
from sgap_jax.schedules.subwarp import LENGTHS

POINTS = list(legal_points(Problem("spmm", (100, 90), 1000, n=128)))
TUNED = list(legal_points(Problem("spmm", (100, 90), 1000, n=13), tunables=True))
FAMILIES = ("row", "row_group", "nnz", "nnz_group")
SETTINGS = list(itertools.product(DTYPES, (1, 4, 7, 12, 17, 33), (False, True)))


def check_spmm(name, point, dtype, n, transpose):
    case = BATTERY[name]
    B = dense_operand(case, n, transpose)
    C = product(array(case, dtype), cast(B, dtype), transpose=transpose, schedule=on_gpu(point))
    assert C.dtype == dtype
    assert_within(C, *oracle(case, dtype, B, transpose))


@pytest.mark.parametrize("col", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_point_of_spmm(family, col):
    points = [p for p in POINTS if algorithm(p, "spmm") == family and p.col == col]
    for point in some(points, 1):
        i = POINTS.index(point)
        for step in (0, 1):  # two settings and matrices for each point; the next has others
            setting = SETTINGS[(2 * i + 23 * step) % len(SETTINGS)]
            check_spmm(list(BATTERY)[(i + 7 * step) % len(BATTERY)], point, *setting)


@pytest.mark.parametrize("part", range(8))
def test_the_tuned_space_of_spmm(part):
    for i in some(range(part, 64, 8), 1):
        point = TUNED[(i * 1031) % len(TUNED)]
        check_spmm("every_length", point, DTYPES[i % 4], 13 if i % 3 else 12, bool(i % 2))


@pytest.mark.parametrize("name", BATTERY)
def test_the_default_of_spmm(name):
    settings = list(itertools.product(DTYPES, (1, 8, 33, 64), (False, True)))
    for dtype, n, transpose in some(settings, 1):
        check_spmm(name, None, dtype, n, transpose)


OCTETS = [
    None,
    OctetTile(8, tf32=True),
    OctetTile(8, tile_n=128, row_warps=2, tf32=True),
    OctetTile(8, tile_k=32, stages=2, row_warps=4),
    OctetTile(4, stages=4, row_warps=8, swizzle=True),
    OctetTile(2, stages=2, tf32=True),
    OctetTile(16, stages=3, row_warps=4),
    OctetTile(32, stages=2),
]
OCTET_CASES = [(tile, dtype) for tile in OCTETS for dtype in ("float16", "bfloat16")]
OCTET_CASES += [(tile, "float32") for tile in OCTETS if tile is not None and tile.tf32]


@pytest.mark.parametrize(("tile", "dtype"), OCTET_CASES, ids=str)
def test_spmm_of_vectors_by_octet_tiles(tile, dtype):
    for name, n in some(itertools.product(BATTERY, (1, 8, 67, 256)), 1):
        arrays, case, _ = encoded(BATTERY[name], 8 if tile is None else tile.vector_length)
        B = dense_operand(case, n)
        C = product(vectors(arrays, case, dtype), cast(B, dtype), schedule=on_gpu(tile))
        assert C.dtype == dtype
        expected, bound = octet_oracle(case, dtype, B)
        # A tensor core cuts off what an addition does not keep: twice the error of rounding it.
        assert_within(C, expected, 2 * bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_spmv(dtype):
    for name in some(BATTERY):
        case, x = BATTERY[name], dense_operand(BATTERY[name], 1)
        y = vector_product(array(case, dtype), cast(x[:, 0], dtype), schedule=on_gpu())
        expected, bound = oracle(case, dtype, x)
        assert_within(y, expected[:, 0], bound[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sddmm(dtype):
    for name, d in some(itertools.product(BATTERY, (1, 8, 33))):
        case, rng = BATTERY[name], np.random.default_rng(5)
        X, Y = (rng.standard_normal((size, d)) for size in case.shape)
        C = sddmm(array(case, dtype), cast(X, dtype), cast(Y, dtype), schedule=on_gpu())
        X, Y = rounded(X, dtype), rounded(Y, dtype)
        arrays = (case.row_offsets, case.column_indices)
        expected, magnitude = (reference.sddmm(*arrays, f(X), f(Y)) for f in (np.array, np.abs))
        assert_within(C.values, expected, sum_bound(expected, magnitude, d, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_octet_tiles_of_sddmm(dtype):
    settings = list(itertools.product(BATTERY, range(3)))
    for name, j in some(settings):
        i = settings.index((name, j))
        length, d = (2, 4, 8, 16, 32)[i % 5], (8, 33, 64, 100)[i // 2 % 4]
        tile = OctetTile(length, 16 * (1 + i % 2), 32, 1 + i % 3 // 2, tf32=dtype == "float32")
        arrays, case, place = encoded(BATTERY[name], length)
        A, (X, Y) = vectors(arrays, case, dtype), operands(case, d)
        default = dtype != "float32" and length > 2 and i % 2
        C = sddmm(A, cast(X, dtype), cast(Y, dtype), schedule=on_gpu(None if default else tile))
        expected, bound = vector_oracle(case, place, A.nnz, dtype, X, Y)
        # A tensor core rounds its sums toward zero: twice the error of each.
        assert_within(C.values.reshape(-1), expected, 2 * bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_softmax(dtype):
    for name in some(BATTERY):
        case, values = BATTERY[name], rounded(BATTERY[name].values, dtype)
        P = sparse_softmax(array(case, dtype), scale=0.5, schedule=on_gpu())
        expected = reference.sparse_softmax(values, case.row_offsets, 0.5)
        exponent = np.abs(values[: case.stored]).max(initial=0)
        terms = np.diff(case.row_offsets).max(initial=0)
        relative = (2 * exponent + terms + 16) * (
            accumulator_roundoff(dtype) + unit_roundoff("float64")
        )
        tiny = float(np.finfo(np.float16).smallest_normal) if dtype == "float16" else 1e-37
        assert_within(
            P.values, expected, (relative + 1.01 * unit_roundoff(dtype)) * expected + tiny
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_reductions(dtype):
    for name in some(BATTERY):
        case, values = BATTERY[name], rounded(BATTERY[name].values, dtype)
        A, offsets = array(case, dtype), case.row_offsets
        expected = reference.row_sum(values, offsets)
        bound = sum_bound(
            expected, reference.row_sum(np.abs(values), offsets), np.diff(offsets), dtype
        )
        assert_within(row_sum(A, schedule=on_gpu()), expected, bound)
        largest = np.asarray(row_max(A, schedule=on_gpu())).astype(np.float64)
        np.testing.assert_array_equal(largest, reference.row_max(values, offsets))


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k(dtype):
    for kind, (m, n, k) in some(
        itertools.product(KINDS, ((3, 300, 7), (70, 5000, 600), (4, 40, 40)))
    ):
        scores = cast(scores_of(kind, m, n), dtype)
        A = select.top_k(scores, k, schedule=on_gpu())
        same([A.values, A.row_offsets, A.column_indices], expected(scores, k), f"{kind}, {m} x {n}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_p(dtype):
    """Rows of a warp and of a block, some of which do not fit into its registers."""
    for kind, (m, n, most) in some(
        itertools.product(KINDS, ((3, 300, 7), (70, 5000, 600), (4, 40, 40), (3, 9000, 4000)))
    ):
        scores = cast(scores_of(kind, m, n), dtype)
        p = probabilities(scores, [n] * m)
        A = select.top_p(scores, p, most=most, schedule=on_gpu())
        offsets, columns = reference.top_p(scores, p, most)
        np.testing.assert_array_equal(A.row_offsets, offsets, f"{kind}, {m} x {n}")
        np.testing.assert_array_equal(A.column_indices[: len(columns)], columns)


@pytest.mark.parametrize("size", [1, 255, 256, 70_000, 20_000_000])
def test_transposed_structure(size):
    """As the CPU has it, whatever the arrays hold."""
    rng = np.random.default_rng(size)
    for rows, nnz in some(((1, 1), (30, 2048), (700, 100_000)), 1):
        for arrays in (anything(rng, rows, nnz, size), anything(rng, rows, nnz, 3)):
            found = transposed(*arrays, size, on_gpu())
            expected = transpose_by_comparing(*arrays, size)
            for one, right in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, right)


@pytest.mark.parametrize("density", [0, 0.01, 0.4, 1])
def test_bitmaps(density):
    """The words and entries that the CPU's kernels give, and fewer places than bits."""
    for m, n in some(((1, 1), (30, 70), (700, 1000), (3, 100_000)), 2):
        mask = jnp.asarray(np.random.default_rng(n).random((m, n)) < density)
        words = bitmap(mask, on_gpu())
        np.testing.assert_array_equal(words, bitmap(mask))
        for nse in (1, m * n // 5 + 1, m * n):
            for one, right in zip(entries(words, nse, on_gpu()), entries(words, nse), strict=True):
                np.testing.assert_array_equal(one, right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_spgemm(dtype):
    """The bits of the CPU's kernel, at a plan and at a mask."""
    for name in some(BATTERY):
        A = array(BATTERY[name], dtype)
        C = A @ A.T
        for how in ({"plan": C}, {"mask": A[:, : A.shape[0]]} if A.shape[0] <= A.shape[1] else {}):
            found = spgemm(A, A.T, **how, schedule=on_gpu())
            np.testing.assert_array_equal(found.values, spgemm(A, A.T, **how).values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gspmm(dtype):
    pairs = (("mul", "max"), ("add", "min"), ("sub", "mean"), ("div", "max"), ("copy", "min"))
    for i, (name, (op, reduce)) in enumerate(some(itertools.product(BATTERY, pairs), 2)):
        case, transpose = BATTERY[name], bool(i % 2)
        A = array(case, dtype).with_values(cast(away_from_zero(case.values), dtype))
        X = dense_operand(case, (1, 8, 33)[i % 3], transpose)
        C = gspmm(A, cast(X, dtype), op=op, reduce=reduce, transpose=transpose, schedule=on_gpu())
        assert_within(C, *gspmm_oracle(case, dtype, X, op, reduce, transpose))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_spmm_of_vectors(length, transpose):
    tiles = (None, SubwarpTile(length), SubwarpTile(length, subwarp=16, split=4))
    settings = itertools.product(BATTERY, tiles, (1, 8, 33, 64))
    for i, (name, tile, n) in enumerate(some(settings, 1)):
        arrays, case, _ = encoded(BATTERY[name], length)
        dtype, B = DTYPES[(i + length) % 4], dense_operand(case, n, transpose)
        A = vectors(arrays, case, dtype)
        C = product(A, cast(B, dtype), transpose=transpose, schedule=on_gpu(tile))
        assert_within(C, *oracle(case, dtype, B, transpose))


@pytest.mark.parametrize("length", LENGTHS)
def test_sddmm_at_vectors(length):
    tiles = (None, SubwarpTile(length, tile_n=4), SubwarpTile(length, subwarp=2))
    for i, (name, tile, d) in enumerate(some(itertools.product(BATTERY, tiles, (1, 8, 33)), 1)):
        arrays, case, place = encoded(BATTERY[name], length)
        dtype, (X, Y) = DTYPES[(i + length) % 4], operands(case, d)
        A = vectors(arrays, case, dtype)
        C = sddmm(A, cast(X, dtype), cast(Y, dtype), schedule=on_gpu(tile))
        expected, bound = np.zeros(A.nnz), np.zeros(A.nnz)
        expected[place], bound[place] = sampled_oracle(case, dtype, X, Y)
        assert_within(C.values.reshape(-1), expected, bound)
