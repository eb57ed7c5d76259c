"""What users write, for type checkers: `tests/packaging/test_typing.py` runs them on this file.

A line that ends in `# error` must be refused, all others must pass.
"""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sgap_jax as sg
from sgap_jax import CSR, SparseArray, linalg, nn

places = np.array([[0, 1], [2, 2]])
A = SparseArray.from_coordinates(places, jnp.ones(2), (3, 3), duplicates="error")
B = jnp.ones((3, 4))
assert_type(sg.spmm(A, B, schedule="CpuTile(columns=0, nonzeros=8192)"), jax.Array)
assert_type(sg.sddmm(A, B, B), SparseArray)
assert_type(A.asformat("CSC").asformat(CSR), SparseArray)
assert_type(A.sum(axis=1), jax.Array)
sg.einsum("ij,jk->ik", A, B, reduction="max")
assert_type(sg.explain(sg.spmm, A, B, platform="cpu"), str)
assert_type(linalg.triangular_solve(A, B, lower=False, trans="T"), jax.Array)
assert_type(linalg.cg(A, B, M=linalg.ichol(A)), tuple[jax.Array, None])
linalg.norm(A, "fro")
layer = nn.SparseLinear(3, 4, sparsity=0.5, format="CVS(8)", rngs=nnx.Rngs(0))
layer.set_weight(A)
assert_type(layer.weight, SparseArray)
nn.sparsify(layer, 0.9, scope="global")

SparseArray.from_coordinates(places, duplicates="first")  # error
sg.einsum("ij,jk->ik", A, B, reduction="mean")  # error
sg.explain(sg.spmm, A, B, platform="tpu")  # error
linalg.triangular_solve(A, B, trans="H")  # error
linalg.norm(A, "nuclear")  # error
linalg.gmres(A, B, solve_method="full")  # error
nn.sparsify(layer, 0.9, scope="all")  # error
layer.set_weight(B)  # error
sg.spmm(A, B, schedule=3)  # error
