"""Index arrays made inside jit that are wrong: each in a process of its own, which a signal would
end. What the entries that count give is compared with a loop over them."""

import os
import subprocess
import sys

import pytest

SETUP = """
import jax, jax.numpy as jnp, numpy as np
from sgap_jax import SparseArray, sddmm, sparse_attention, sparse_softmax, spgemm, spmm

B = jnp.arange(12.0).reshape(4, 3) + 1
values, offsets, columns = np.float32([2, 3, 5]), np.int32([0, 1, 3]), np.int32([1, 0, 2])


def made(offsets, columns, values=values):
    offsets, columns, values = jnp.asarray(offsets), jnp.asarray(columns), jnp.asarray(values)
    return SparseArray.from_arrays(values, offsets, columns, shape=(2, 4))


def run(f, offsets=offsets, columns=columns):
    offsets, columns = np.int32(offsets), np.int32(columns)
    return jax.tree.map(np.asarray, jax.jit(lambda o, c: f(made(o, c)))(offsets, columns))


product = lambda A: spmm(A, B)
FAR = [1, 2**30, 2]  # the second entry of three, of row 1, takes no part
without = np.stack([2 * B[1], 5 * B[2]])
"""

CASES = {
    "an offset beyond the entries": """
got = run(product, offsets=[0, 1, 2**30])
np.testing.assert_allclose(got, np.stack([2 * B[1], 3 * B[0] + 5 * B[2]]))
""",
    "a column index of 2^30": "np.testing.assert_allclose(run(product, columns=FAR), without)",
    "a negative column index": """
np.testing.assert_allclose(run(product, columns=[1, -7, 2]), without)
""",
    "sddmm": """
X = jnp.ones((2, 3))
got = run(lambda A: sddmm(A, X, B).values, columns=FAR)
np.testing.assert_allclose(got, [B[1].sum(), 0, B[2].sum()])
""",
    "attention": """
q, k = jnp.ones((2, 1, 3)) * 0.1, B[:, None]
out = run(lambda A: sparse_attention(q, k, k, A), columns=FAR)
np.testing.assert_allclose(out[:, 0], B[1:3], rtol=1e-6)
""",
    "a product of two sparse matrices": """
S = SparseArray.from_dense(np.eye(4, 3, dtype=np.float32))
got = run(lambda A: spgemm(A, S, nse=6).todense(), columns=FAR)
np.testing.assert_allclose(got, [[0, 2, 0], [0, 0, 5]])
""",
    "softmax": """
got = run(lambda A: sparse_softmax(A).values, columns=FAR)
np.testing.assert_allclose(got, [1, 0, 1])
got = run(lambda A: sparse_softmax(A).values, offsets=[-5, 2**31 - 1, 3])
np.testing.assert_allclose(got, np.exp(values) / np.exp(values).sum(), rtol=1e-6)
""",
    "a gradient": """
total = lambda A: lambda v, B: jnp.sum(spmm(A.with_values(v), B) ** 2)
dv, dB = run(lambda A: jax.grad(total(A), argnums=(0, 1))(A.values, B), columns=FAR)
np.testing.assert_allclose(dv, [4 * (B[1] ** 2).sum(), 0, 10 * (B[2] ** 2).sum()])
np.testing.assert_allclose(dB, [0 * B[0], 8 * B[1], 50 * B[2], 0 * B[3]])
""",
    "index arrays that were changed after they were checked": """
A = SparseArray.from_arrays(values, offsets, columns, shape=(2, 4))
doubled = jax.tree.map(lambda x: x * 2, A)
assert jax.jit(product)(doubled).shape == (2, 3) and spmm(doubled, B).shape == (2, 3)
far = jax.tree.map(lambda x: jnp.full_like(x, 2**30) if x is A.column_indices else x, A)
for convert in (lambda A: A[0:1], lambda A: A + doubled, lambda A: A.to_scipy()):
    try:
        convert(far)
    except ValueError as error:
        assert "expected" in str(error), error
    else:
        raise AssertionError("SciPy was given an index out of range")
""",
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_index_arrays_end_no_process(case):
    done = subprocess.run(
        [sys.executable, "-c", SETUP + CASES[case]],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-3000:]}"
