"""value_and_grad of sum((A B)^2) with respect to A's values and B.

Each callable returns (value, gradient in A, gradient in B); the gradient in A is [nnz], or dense
[m, k] if the peer has no sparse one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from jax.experimental import sparse as jsparse

from benchmarks.peers import common


def sum_of_squares(a, b):
    return jnp.sum((a @ b) ** 2)


@jax.jit
def bcsr_gradient(values, indices, offsets, B):
    def loss(values, B):
        shape = (offsets.shape[0] - 1, B.shape[0])
        flags = dict(indices_sorted=True, unique_indices=True)
        return sum_of_squares(jsparse.BCSR((values, indices, offsets), shape=shape, **flags), B)

    return jax.value_and_grad(loss, (0, 1))(values, B)


def bcoo_gradient(rows):
    @jax.jit
    def gradient(values, indices, B):
        def loss(values, B):
            flags = dict(indices_sorted=True, unique_indices=True)
            matrix = jsparse.BCOO((values, indices), shape=(rows, B.shape[0]), **flags)
            return sum_of_squares(matrix, B)

        return jax.value_and_grad(loss, (0, 1))(values, B)

    return gradient


dense_gradient = jax.jit(jax.value_and_grad(sum_of_squares, (0, 1)))


def flat(call):
    """(value, (dA, dB)) -> (value, dA, dB)."""

    def flattened():
        value, (in_A, in_B) = call()
        return value, in_A, in_B

    return flattened


def with_jax_bcsr(A, B):
    common.limit(8 * A.nnz * B.shape[1], "its nnz x n intermediates")
    return flat(common.ready(bcsr_gradient, *map(jnp.asarray, (A.data, A.indices, A.indptr, B))))


def with_jax_bcoo(A, B):
    common.limit(8 * A.nnz * B.shape[1], "its nnz x n intermediates")
    operands = (jnp.asarray(A.data), common.bcoo_indices(A), jnp.asarray(B))
    return flat(common.ready(bcoo_gradient(A.shape[0]), *operands))


def with_jax_dense(A, B):
    return flat(common.ready(dense_gradient, common.dense_of(A), jnp.asarray(B)))


def torch_step(product, leaf, B, in_A):
    """One forward and backward pass; `in_A` extracts the gradient from that of the leaf that
    represents A."""

    def call():
        leaf.grad = B.grad = None
        C = product(leaf, B)
        value = (C * C).sum()
        value.backward()
        return value.detach(), in_A(leaf.grad), B.grad

    return call


def with_torch_reduce(A, B):
    """torch.sparse.mm(A, B, "sum"): the product for which torch has backward kernels."""
    torch = common.torch_module()
    leaves = (common.torch_csr(A).requires_grad_(), torch.from_numpy(B).requires_grad_())
    return torch_step(lambda a, b: torch.sparse.mm(a, b, "sum"), *leaves, lambda g: g.values())


def with_torch_coo(A, B):
    """Plain autograd through a COO tensor (through CSR torch 2.13 refuses); its backward pass forms
    the dense [m, k] gradient first."""
    nbytes = 4 * A.shape[0] * A.shape[1]
    common.limit(nbytes, "the dense gradient", common.MAX_DENSE_BYTES)
    torch = common.torch_module()
    leaf = common.torch_csr(A).to_sparse_coo().coalesce().requires_grad_()
    return torch_step(
        torch.sparse.mm, leaf, torch.from_numpy(B).requires_grad_(), lambda g: g.coalesce().values()
    )


def with_torch_function(A, B):
    """An expert's implementation: a torch.autograd.Function of MKL products and sampled_addmm, with
    the transposed pattern made beforehand."""
    torch, pattern = common.torch_module(), common.torch_csr(A)
    positions = sp.csr_matrix((np.arange(A.nnz), A.indices, A.indptr), A.shape).T.tocsr()
    permutation = torch.from_numpy(positions.data.astype(np.int64))
    structure = (pattern.crow_indices(), pattern.col_indices())
    transposed = tuple(
        torch.from_numpy(x.astype(np.int32)) for x in (positions.indptr, positions.indices)
    )

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(context, values, B):
            context.save_for_backward(values, B)
            return torch.sparse_csr_tensor(*structure, values, A.shape) @ B

        @staticmethod
        def backward(context, gradient):
            values, B = context.saved_tensors
            in_A = torch.sparse.sampled_addmm(pattern, gradient, B.t(), beta=0).values()
            swapped = A.shape[::-1]
            At = torch.sparse_csr_tensor(*transposed, values[permutation], swapped)
            return in_A, At @ gradient

    leaf = torch.from_numpy(A.data.copy()).requires_grad_()
    return torch_step(Product.apply, leaf, torch.from_numpy(B).requires_grad_(), lambda g: g)


PEERS = {
    "jax_bcsr": with_jax_bcsr,
    "jax_bcoo": with_jax_bcoo,
    "jax_dense": with_jax_dense,
    "torch_reduce": with_torch_reduce,
    "torch_coo": with_torch_coo,
    "torch_function": with_torch_function,
}
GOAL = ("torch_reduce", "torch_coo", "torch_function")
