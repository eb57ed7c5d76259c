"""A^T B of blocks runs on tensor cores where A B does, with the blocks of A^T (vectorSparse,
section 8)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import BCSR, OctetTile, Reference, SparseArray, SubwarpTile, sddmm, spmm
from sgap_jax.schedules.emulated import Emulated

OCTET, CORES = "SpmmOctetKernel", "SpmmSubwarpTransposedKernel"


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


class Launches:
    """Emulates launches, and keeps the names of their kernels."""

    def __init__(self):
        self.kernels = []

    def __call__(self, call, *given):
        self.kernels.append(call.kernel)
        return emulate(call, *given)


def blocks(rows, columns, shape, dtype="float16", spare=0):
    """A matrix of small integers in BCSR, with an empty row and an empty column of blocks; `spare`
    blocks of padding hold NaN. Also as a dense array."""
    rng = np.random.default_rng(0)
    there = rng.random((-(-shape[0] // rows), -(-shape[1] // columns))) < 0.4
    there[1] = there[:, 2] = False
    there[2, 3] = True
    whole = np.repeat(np.repeat(there, rows, 0), columns, 1)[: shape[0], : shape[1]]
    dense = np.where(whole, rng.integers(1, 4, shape) * rng.choice([-1, 1], shape), 0)
    A = SparseArray.from_dense(dense.astype(dtype), format=BCSR(rows, columns))
    if not spare:
        return A, dense
    far = jnp.concatenate([A.values, jnp.full((spare, rows, columns), jnp.nan, dtype)])
    indices = np.concatenate([A.column_indices, np.zeros(spare, np.int32)])
    return SparseArray.from_arrays(
        far, np.asarray(A.row_offsets), indices, shape=shape, format=A.format
    ), dense


def operand(rows, n, dtype, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, (rows, n)), dtype)


@pytest.mark.parametrize(
    "sides, shape, dtype, spare, kernel",
    [
        ((8, 8), (48, 64), "bfloat16", 0, OCTET),
        ((8, 8), (48, 64), "float16", 3, OCTET),
        ((16, 16), (48, 64), "float16", 0, OCTET),
        ((4, 8), (48, 64), "bfloat16", 2, OCTET),
        ((2, 4), (48, 64), "bfloat16", 0, OCTET),  # A has blocks of 2 rows, A^T of 4
        ((8, 8), (44, 64), "bfloat16", 0, CORES),  # blocks reach past the matrix
        ((8, 8), (48, 60), "bfloat16", 0, CORES),
        ((8, 8), (48, 64), "float32", 0, CORES),  # tensor cores would round to TF32
        ((8, 3), (48, 63), "float16", 0, CORES),  # no octets of 3 rows
    ],
)
def test_products_and_gradients(sides, shape, dtype, spare, kernel):
    A, dense = blocks(*sides, shape, dtype, spare)
    for n in (64, 24):
        X, B = operand(shape[0], n, dtype), operand(shape[1], n, dtype, 2)
        launches = Launches()
        schedule = Emulated(launches)
        want = dense.T @ np.asarray(X, int)
        np.testing.assert_array_equal(spmm(A, X, transpose=True, schedule=schedule), want)
        np.testing.assert_array_equal(spmm(A.T, X, schedule=schedule), want)
        assert launches.kernels == [kernel, kernel]

        def loss(B, schedule, X=X):
            return jnp.sum(spmm(A, B, schedule=schedule) * X)

        launches.kernels.clear()
        found = jax.jit(jax.grad(loss), static_argnums=1)(B, schedule)
        np.testing.assert_array_equal(found, want)
        assert launches.kernels == [kernel]


def test_sampled_products_and_batches():
    A, _ = blocks(8, 8, (48, 64))
    X, Y = operand(48, 64, "float16"), operand(64, 64, "float16", 2)
    launches = Launches()
    schedule = Emulated(launches)
    loss = lambda Y, s: jnp.sum(sddmm(A, X, Y, schedule=s).values)
    found, want = (jax.grad(loss)(Y, s) for s in (schedule, Reference()))
    np.testing.assert_array_equal(found, want)
    many = jnp.stack([A.values, 2 * A.values]), jnp.stack([X, -X])
    product = lambda s: jax.vmap(
        lambda v, x: spmm(A.with_values(v), x, transpose=True, schedule=s)
    )(*many)
    np.testing.assert_array_equal(product(schedule), product(Reference()))
    assert launches.kernels == ["SddmmOctetKernel", OCTET, OCTET]  # outside of jit all of it runs


def test_schedules_that_are_named():
    A, dense = blocks(8, 8, (48, 64))
    X = operand(48, 64, "float16")
    launches = Launches()
    for tile, kernel in ((OctetTile(8, tile_n=128), OCTET), (SubwarpTile(8), CORES)):
        found = spmm(A, X, transpose=True, schedule=Emulated(launches, tile))
        np.testing.assert_array_equal(found, dense.T @ np.asarray(X, int))
        assert launches.kernels.pop() == kernel


def test_arrays_that_nobody_checked_are_not_taken_for_blocks():
    """They are compacted first, which leaves no whole blocks."""
    A, dense = blocks(8, 8, (48, 64))
    X = operand(48, 64, "float16")
    launches = Launches()

    @jax.jit
    def product(values, offsets, indices):
        made = SparseArray.from_arrays(values, offsets, indices, shape=A.shape, format=A.format)
        return spmm(made, X, transpose=True, schedule=Emulated(launches))

    wild = jnp.asarray(A.column_indices).at[0].set(99)  # its block takes no part
    found = product(A.values, A.row_offsets, wild)
    column = int(A.column_indices[0])
    row = int(np.searchsorted(A.row_offsets, 0, "right")) - 1
    dense = dense.copy()
    dense[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 0
    np.testing.assert_array_equal(found, dense.T @ np.asarray(X, int))
    assert launches.kernels == [CORES]
