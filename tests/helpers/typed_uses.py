"""What users write, for type checkers: `tests/packaging/test_typing.py` runs them on this file.

A line that ends in `# error` must be refused, all others must pass.
"""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import sgap_jax as sg
from sgap_jax import CSR, SparseArray, graphs, linalg, nn

places = np.array([[0, 1], [2, 2]])
A = SparseArray.from_coordinates(places, jnp.ones(2), (3, 3), duplicates="error")
B = jnp.ones((3, 4))
assert_type(sg.spmm(A, B, schedule="CpuTile(columns=0, nonzeros=8192)"), jax.Array)
assert_type(sg.sddmm(A, B, B), SparseArray)
assert_type(A.asformat("CSC").asformat(CSR), SparseArray)
assert_type(A.sum(axis=1), jax.Array)
sg.einsum("ij,jk->ik", A, B, reduction="max")
assert_type(sg.explain(sg.spmm, A, B, platform="cpu"), str)
assert_type(A @ B, jax.Array)
assert_type(A @ A, SparseArray)
assert_type(sg.gspmm(A, B, op="copy", reduce="mean"), jax.Array)
assert_type(sg.aggregate(A, A.values, "max"), jax.Array)
assert_type(sg.gsddmm(A, B, B, op="add"), SparseArray)
assert_type(sg.gsddmm(A, B, B, op="sub", reduce=None), jax.Array)
assert_type(sg.gsddmm(A, None, B, values=B[:2], reduce=None), jax.Array)
assert_type(sg.gsddmm(A, B, B, reduce="last"), jax.Array)
assert_type(sg.sparse_softmax(A, scale=0.5), SparseArray)
assert_type(sg.sparse_softmax(A, values=A.values), jax.Array)
assert_type(sg.sparse_attention(B, B, B, A, is_causal=True, softcap=30.0), jax.Array)
assert_type(sg.sparse_attention(B, B, B, [A, A], return_lse=True), tuple[jax.Array, jax.Array])
sg.sparse_attention(B, B, B, A, score_mod=lambda s, b, h, i, j: s - abs(i - j))
assert_type(graphs.from_edges(places, duplicates="keep"), SparseArray)
assert_type(graphs.from_edges(places, return_perm=True), tuple[SparseArray, np.ndarray])
nn.SAGEConv(3, 4, reduce="max", rngs=nnx.Rngs(0))
assert_type(linalg.triangular_solve(A, B, lower=False, trans="T"), jax.Array)
assert_type(linalg.cg(A, B, M=linalg.ichol(A)), tuple[jax.Array, jax.Array])
linalg.norm(A, "fro")
layer = nn.SparseLinear(3, 4, sparsity=0.5, format="CVS(8)", rngs=nnx.Rngs(0))
layer.set_weight(A)
assert_type(layer.weight, SparseArray)
nn.sparsify(layer, 0.9, scope="global")

SparseArray.from_coordinates(places, duplicates="first")  # error
sg.einsum("ij,jk->ik", A, B, reduction="mean")  # error
sg.explain(sg.spmm, A, B, platform="tpu")  # error
sg.gspmm(A, B, op="dot")  # error
sg.gspmm(A, B, reduce="add")  # error
sg.aggregate(A, A.values, "prod")  # error
sg.gsddmm(A, B, B, reduce="mean")  # error
sg.sparse_attention(B, B, B, A, causal=True)  # error
sg.sparse_attention(B, B, B, A, dropout_rate="half")  # error
sg.sparse_attention(B, B, B, A, schedule=3)  # error
graphs.from_edges(places, duplicates="drop")  # error
nn.SAGEConv(3, 4, reduce="median", rngs=nnx.Rngs(0))  # error
linalg.triangular_solve(A, B, trans="H")  # error
linalg.norm(A, "nuclear")  # error
linalg.gmres(A, B, solve_method="full")  # error
nn.sparsify(layer, 0.9, scope="all")  # error
layer.set_weight(B)  # error
sg.spmm(A, B, schedule=3)  # error
