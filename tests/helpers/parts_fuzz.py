"""Fuzzes the index arrays of a matrix in parts: columns and offsets of its pieces, which rows a
part sends, and every place, each replaced after the plan was made, as a pytree's leaves can be.

The values and all operands are ones, so that sums count entries: what was read from elsewhere would
be a number that no sum of ones is, if the process lives at all. The tests run a few draws; as a
program it runs every case, and a second axis of the mesh, on eight devices:

    MALLOC_PERTURB_=165 python tests/helpers/parts_fuzz.py --draws 2000 --seed 1
"""

import argparse
import os
import time

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from sgap_jax import BCSR, CSR, CVS, SparseArray, parallel

SIZE, COLUMNS = 24, 3
MATRICES = {"entries": CSR, "vectors": CVS(2), "blocks": BCSR(2, 3), "second axis": CSR}
NEAR = np.array([0, 1, -1, SIZE - 1, SIZE, -SIZE, 2**30, 2**31 - 1, -(2**31)])


def in_parts(name, devices):
    """A graph with a row and a column that are full, so that partial rows and queries travel."""
    dense = np.random.default_rng(0).random((SIZE, SIZE)) < 0.15
    dense[5] = dense[:, 17] = True
    A = SparseArray.from_dense(dense.astype(np.float32), format=MATRICES[name])
    A = A.with_values(jnp.ones_like(A.values))
    shape, second = ((devices,), None) if name != "second axis" else ((devices // 2, 2), "y")
    options = dict(devices=jax.devices()[:devices], axis_types=(AxisType.Auto,) * len(shape))
    mesh = jax.make_mesh(shape, ("x", "y")[: len(shape)], **options)
    return parallel.partition(A, mesh, "x", rows="even", second=second)


def products(A, X):
    """Of many columns by a cover, of few by rows of X; the gradients are those with A^T."""
    return [A @ jnp.tile(X, (1, 6)), A @ X, parallel.spmm(A, X, in_order=True)], [], []


def messages(A, X):
    most = [parallel.gspmm(A, X, op="copy", reduce="max", transpose=t) for t in (False, True)]
    # The lengths of rows, which a mean divides by, may be any number.
    return most, [], [parallel.gspmm(A, X, reduce="mean")]


def scores(A, X):
    sampled = parallel.sddmm(A, X, X, weighted=True)
    found = [*sampled.values, *parallel.gsddmm(A, X, X, op="add").values, parallel.row_sum(sampled)]
    return [*found, parallel.row_max(A)], parallel.sparse_softmax(A).values, []


def attention(A, X):
    x = X[:, None]  # one head
    return [], [parallel.sparse_attention(x, x, x, A, bias=A.values)], []


PROGRAMS = (products, messages, scores, attention)


def gradients(of):
    """A program: gradients in the values and the operand; and of what a function computes sums of
    ones, shares of one, and other numbers."""

    def loss(values, X, A):
        found = of(A.with_values(values), X)
        found = jax.tree.map(lambda x: jnp.where(x == -jnp.inf, 0, x), found)  # of empty rows
        return sum(jnp.sum(x) for x in jax.tree.leaves(found)), found

    # XLA's code is not under test.
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    found = lambda A, X: jax.grad(loss, (0, 1), has_aux=True)(A.values, X, A)
    return jax.jit(found, compiler_options=fast)


def changed(rng, A):
    """A with other numbers in some of its index arrays, in a few places or everywhere."""

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.integer) or x.size == 0 or rng.random() < 0.6:
            return x
        array = np.array(x).reshape(-1)
        some = slice(None) if rng.random() < 0.5 else rng.integers(array.size, size=2)
        kind = rng.integers(3)
        drawn = (
            rng.choice(NEAR, array.shape),
            rng.integers(-(2**31), 2**31, array.shape),
            rng.permutation(array),
        )[kind]
        array[some] = drawn[some]
        return jax.device_put(array.reshape(x.shape), x.sharding)

    return jax.tree.map(leaf, A)


def held(found):
    """Raises an error if a number is none that ones can give."""
    slopes, (sums, shares, others) = found
    for x in map(np.asarray, jax.tree.leaves((slopes, others))):
        assert np.isfinite(x).all() and (np.abs(x) < 1e5).all()
    for x in map(np.asarray, sums):
        assert (x == np.round(x)).all() and (np.abs(x) <= SIZE**2 * COLUMNS).all()
    for x in map(np.asarray, shares):
        assert (x >= 0).all() and (x <= 1 + 1e-4).all()


def run(name, of, draws, seed, devices):
    """Runs one program for so many draws."""
    rng, A, X = (
        np.random.default_rng(seed),
        in_parts(name, devices),
        jnp.ones((SIZE, COLUMNS), jnp.float32),
    )
    program = gradients(of)
    held(program(A, X))
    for _ in range(draws):
        held(program(changed(rng, A), X))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    every, start = [(name, of) for name in MATRICES for of in PROGRAMS], time.time()
    for name, of in every:
        run(name, of, -(-options.draws // len(every)), options.seed, 8)
        print(f"{name}, {of.__name__}: {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
