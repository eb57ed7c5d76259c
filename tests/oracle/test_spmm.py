import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, from_row_lengths, sizes_for
from spmm_oracle import dense_operand, oracle
from tolerance import DTYPES, assert_within, sum_bound

from sgap_jax import COO, CSC, CSR, CpuTile, SparseArray, spmm, spmv

COLUMNS = [0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 100]


@pytest.mark.seconds(check=3, test=12)
@pytest.mark.parametrize("transpose", [False, True], ids=["A", "AT"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATTERY)
def test_spmm(name, dtype, transpose, backend):
    case = BATTERY[name]
    A = array(case, dtype)
    for n in sizes_for(name, COLUMNS, backend):
        B = dense_operand(case, n, transpose)
        C = spmm(A, cast(B, dtype), transpose=transpose, schedule=backend)
        assert C.dtype == dtype
        assert_within(C, *oracle(case, dtype, B, transpose))


@pytest.mark.parametrize("format", [CSC, COO], ids=str)
@pytest.mark.parametrize("name", ["every_length", "one_heavy_row", "no_rows", "no_entries"])
def test_formats_agree(name, format, backend):
    case = BATTERY[name]
    A = array(case, jnp.float32)
    for transpose in (False, True):
        B = jnp.asarray(dense_operand(case, 7, transpose), jnp.float32)
        expected = spmm(A, B, transpose=transpose, schedule=backend)
        other = A.asformat(format)
        C = spmm(other, B, transpose=transpose, schedule=backend)
        assert_within(C, *oracle(case, jnp.float32, B, transpose))
        np.testing.assert_array_equal(C, expected)
        np.testing.assert_array_equal(
            spmm(A.T, B, transpose=not transpose), spmm(A, B, transpose=transpose)
        )


@pytest.mark.parametrize("name", BATTERY)
def test_spmv(name, backend):
    """The product with one column: dtypes take turns."""
    case, dtype = BATTERY[name], DTYPES[sorted(BATTERY).index(name) % len(DTYPES)]
    A = array(case, dtype)
    for transpose in (False, True):
        x = dense_operand(case, 1, transpose)
        y = spmv(A, cast(x[:, 0], dtype), transpose=transpose, schedule=backend)
        expected, bound = oracle(case, dtype, x, transpose)
        assert_within(y, expected[:, 0], bound[:, 0])


@pytest.mark.parametrize("n", [1, 4, 17, 64])
def test_entries_not_stored_do_not_touch_nan(n, backend):
    case = BATTERY["every_length"]
    A = array(case, jnp.float32)
    B = dense_operand(case, n, False).astype(np.float32)
    B[3], B[30] = np.nan, np.inf
    C = np.asarray(spmm(A, jnp.asarray(B), schedule=backend))
    touched = case.dense()[:, [3, 30]].any(axis=1)
    assert touched.any() and not touched.all()
    assert np.isfinite(C[~touched]).all()
    assert not np.isfinite(C[touched]).any()


def test_operators():
    case = BATTERY["skewed"]
    A = array(case, jnp.float32)
    m, k = case.shape
    B, L, x = (
        jnp.asarray(np.random.default_rng(0).standard_normal(s), jnp.float32)
        for s in ((k, 5), (6, m), (k,))
    )
    np.testing.assert_array_equal(A @ B, spmm(A, B))
    np.testing.assert_array_equal(A @ x, spmv(A, x))
    np.testing.assert_array_equal(L @ A, spmm(A, L.T, transpose=True).T)
    np.testing.assert_array_equal(np.asarray(L) @ A, L @ A)


def test_mixed_dtypes_promote():
    case = BATTERY["skewed"]
    with jax.numpy_dtype_promotion("standard"):
        A = array(case, jnp.bfloat16)
        B = jnp.ones((case.shape[1], 3), jnp.float32)
        assert spmm(A, B).dtype == jnp.float32
        np.testing.assert_array_equal(spmm(A, B), spmm(A.astype(jnp.float32), B))


@pytest.mark.parametrize("n", [1, 4, 32, 128])
def test_a_narrow_dtype_accumulates_in_float32(n):
    # 4096 ones: sums in bfloat16 would stop at 256, in float16 at 2048.
    k = 4096
    case = from_row_lengths("counting", k, [k])
    for dtype in (jnp.bfloat16, jnp.float16):
        A = array(case, dtype).with_values(jnp.ones(k, dtype))
        assert (spmm(A, jnp.ones((k, n), dtype)) == k).all()


@pytest.mark.seconds(check=0.9, test=4.1)
def test_ties_are_rounded_to_the_even_number(backend):
    # The sums 1 + (k + 1/2) eps lie halfway between two values of the dtype.
    for dtype in ("bfloat16", "float16"):
        k, eps = np.arange(8), float(jnp.finfo(dtype).eps)
        case = from_row_lengths("ties", 2, [2] * 8)
        values = np.stack([1 + k * eps, np.full(8, eps / 2)], axis=1).reshape(-1)
        A = array(case, dtype).with_values(cast(values, dtype))
        for n in (1, 4, 17):
            C = spmm(A, jnp.ones((2, n), dtype), schedule=backend)
            expected = np.repeat(1 + (k + k % 2)[:, None] * eps, n, axis=1)
            np.testing.assert_array_equal(np.asarray(C).astype(np.float64), expected)


def test_real_matrices(data_dir):
    from sgap_jax import SparseArray, read

    names = [
        "matrices/lp_e226.mtx.gz",
        "matrices/west0479.mtx.gz",
        "graphs/cora.npz",
        "graphs/polblogs.npz",
        "matrices/pyfr_p3_hex_m3-sp.mtx.gz",
    ]
    for name in names:
        A = read(data_dir / name).astype(jnp.float32)
        S = A.to_scipy().astype(np.float64)
        B = np.random.default_rng(0).standard_normal((A.shape[1], 33)).astype(np.float32)
        expected = S @ B
        terms = np.diff(S.indptr)[:, None]
        bound = sum_bound(expected, abs(S) @ np.abs(B), terms, jnp.float32)
        assert_within(spmm(A, jnp.asarray(B)), expected, bound)
        assert isinstance(A, SparseArray) and A.format == CSR


def test_a_corrupted_output_fails_the_oracle():
    case = BATTERY["every_length"]
    B = dense_operand(case, 8, False)
    expected, bound = oracle(case, jnp.float32, B, False)
    C = np.array(spmm(array(case, jnp.float32), jnp.asarray(B, jnp.float32)))
    assert_within(C, expected, bound)
    for wrong in (C[5, 3] * (1 + 1e-4), 0.0, np.nan):
        corrupted = C.copy()
        corrupted[5, 3] = wrong
        with pytest.raises(AssertionError, match=r"first at \(5, 3\)"):
            assert_within(corrupted, expected, bound)


@pytest.mark.parametrize("columns", [1, 4, 16, 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_changes_no_bit(dtype, columns):
    case = BATTERY["every_length"]
    A = array(case, dtype)
    for transpose, n in ((False, 1), (False, 33), (True, 50)):
        B = np.stack([dense_operand(case, n, transpose, seed) for seed in (1, 2, 3)])
        products = [
            jax.jit(jax.vmap(lambda B, tile=tile: spmm(A, B, transpose=transpose, schedule=tile)))  # noqa: B023
            for tile in (CpuTile(columns, 64), CpuTile(columns, 64, packed=True))
        ]
        whole, packed = (product(cast(B, dtype)) for product in products)
        np.testing.assert_array_equal(packed, whole)
        assert_within(packed[2], *oracle(case, dtype, B[2], transpose))


@pytest.mark.parametrize("batched", ["B", "values", "both"])
def test_threads_that_take_slabs_in_any_order_change_no_bit(batched):
    # Large enough for every thread: tiles begin far apart, and threads share the last ones.
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 40, 3000)
    lengths[7] = 300  # a split row, in every tile
    case = from_row_lengths("threads", 300, list(lengths))
    A = array(case, jnp.float32)
    B = cast(rng.standard_normal((3, 300, 100)), jnp.float32)
    values = jnp.outer(jnp.arange(1, 4, dtype=jnp.float32), A.values)
    axes = {"B": (None, 0), "values": (0, None), "both": (0, 0)}[batched]
    operands = (A.values if axes[0] is None else values, B[0] if axes[1] is None else B)

    def product(tile):
        multiply = lambda values, B: spmm(A.with_values(values), B, schedule=tile)
        return jax.jit(jax.vmap(multiply, in_axes=axes))

    expected = product(CpuTile(columns=16, nonzeros=128))(*operands)
    packed = product(CpuTile(columns=16, nonzeros=128, packed=True))
    for _ in range(5):
        np.testing.assert_array_equal(packed(*operands), expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_results_round_to_nearest_even(name):
    """Of subnormal float16 too, though XLA's threads flush those of float32."""
    dtype = jnp.dtype(name)
    bits = np.arange(0, 1 << 16, 7, dtype=np.uint16)
    x = bits.view(dtype).reshape(1, -1)
    least = 0 if name == "float16" else 2.0**-100  # of bfloat16 what stays normal
    keep = np.abs(x.astype(np.float32)) >= least  # not NaN
    x = np.where(keep, x, np.ones_like(x))
    for factor in (1.0, 1.1, 0.37, 2.0**-9):
        A = SparseArray.from_dense(np.full((1, 1), factor, dtype))
        with np.errstate(over="ignore", invalid="ignore"):
            product = np.float32(dtype.type(factor)) * x.astype(np.float32)
            expected = product.astype(dtype)
        found = np.asarray(jax.jit(spmm)(A, jnp.asarray(x)))
        np.testing.assert_array_equal(found, expected)
