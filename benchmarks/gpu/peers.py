"""Peers on a GPU: other libraries that a Python user can call. As in benchmarks/peers, plans are
made before the timing.

A plan takes the device and `Sets`, and gives (call, result): call(i) runs on operand set i,
result() is the first set's result as NumPy. `KERNELS` are enqueued on a stream and timed there;
`PROGRAMS` are jitted JAX functions. All in float32: a dense product in TF32 would fail the check.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import cusparse
from benchmarks.peers import common
from benchmarks.peers.softmax import segment_softmax
from benchmarks.problems import Unavailable
from sgap_jax import SparseArray, sddmm, sparse_softmax, spmm

Plan = tuple[Callable[[int], object], Callable[[], np.ndarray]]
_BLOCK = 4
MOST_BLOCK_FILL = 16  # stored values of a blocked form per nonzero


@dataclasses.dataclass
class Sets:
    """The operands of one case: A in SciPy's CSR, dense arrays, and the number of copies that
    rotate."""

    A: object
    dense: tuple[np.ndarray, ...]
    count: int

    def csr(self) -> tuple[np.ndarray, ...]:
        return self.A.data, self.A.indptr, self.A.indices

    def put(self, device, *arrays: np.ndarray, most: int | None = None) -> list[list]:
        """Copies of arrays on the device, for torch."""
        count = min(self.count, most or self.count)
        return [[device.tensor(x) for x in arrays] for _ in range(count)]


def kept(device, count: int, function: Callable[[int], object]) -> Plan:
    """A plan that keeps one result for each set, so that none is freed within a capture."""
    results: list = [None] * count

    def call(i: int) -> None:
        results[i % count] = function(i % count)

    return call, lambda: device.get(results[0])


def torch_csr(device, sets: Sets) -> Plan:
    torch, (B,) = device.torch, sets.dense
    B = B[:, 0] if B.shape[1] == 1 else B  # matrix-vector products are a separate function
    data = sets.put(device, *sets.csr(), B)
    A = [
        torch.sparse_csr_tensor(offsets, indices, values, sets.A.shape)
        for values, offsets, indices, _ in data
    ]
    return kept(device, sets.count, lambda i: A[i] @ data[i][3])


def torch_bsr(device, sets: Sets) -> Plan:
    torch, (B,), A = device.torch, sets.dense, sets.A
    if A.shape[0] % _BLOCK or A.shape[1] % _BLOCK:
        raise Unavailable(f"shape not in blocks of {_BLOCK}")
    blocked = A.tobsr((_BLOCK, _BLOCK))
    if blocked.data.size > MOST_BLOCK_FILL * A.nnz:
        raise Unavailable(f"{blocked.data.size / A.nnz:.0f} numbers stored for each nonzero")
    data = sets.put(device, blocked.data, blocked.indptr, blocked.indices, B)
    T = [
        torch.sparse_bsr_tensor(offsets, indices, values, A.shape)
        for values, offsets, indices, _ in data
    ]
    return kept(device, sets.count, lambda i: T[i] @ data[i][3])


def torch_dense(device, sets: Sets) -> Plan:
    torch, (B,) = device.torch, sets.dense
    common.limit(4 * np.prod(sets.A.shape), "the dense matrix", common.MAX_DENSE_BYTES)
    most = max(2, (4 << 30) // (4 * int(np.prod(sets.A.shape))))
    data = sets.put(device, sets.A.toarray(), B, most=most)
    torch.backends.cuda.matmul.allow_tf32 = False
    return kept(device, len(data), lambda i: data[i][0] @ data[i][1])


@functools.cache
def _compiled_scatter(torch):
    def product(rows, columns, values, B, m: int):
        C = torch.zeros((m, B.shape[1]), device=B.device)
        return C.index_add_(0, rows, values[:, None] * B[columns])

    return torch.compile(product, dynamic=True)


def torch_compile(device, sets: Sets) -> Plan:
    torch, (B,) = device.torch, sets.dense
    if device.dry:
        raise Unavailable("its compiler takes long; left out of a dry run")
    common.limit(4 * sets.A.nnz * B.shape[1], "its nnz x n intermediate")
    values, _, indices = sets.csr()
    data = sets.put(device, common.rows_of(sets.A), indices, values, B)
    product, m = _compiled_scatter(torch), sets.A.shape[0]
    return kept(device, sets.count, lambda i: product(*data[i], m))


def cusparse_plan(algorithm: str, device, sets: Sets) -> Plan:
    torch, (B,) = device.torch, sets.dense
    m, n = sets.A.shape[0], B.shape[1]
    data = sets.put(device, *sets.csr(), B, np.empty((m, n), np.float32))
    products = [cusparse.Product(torch, algorithm, arrays, dense, C) for *arrays, dense, C in data]
    return lambda i: products[i].enqueue(), lambda: device.get(data[0][4])


def torch_sampled(device, sets: Sets) -> Plan:
    torch, (X, Y) = device.torch, sets.dense
    data = sets.put(device, *sets.csr(), X, Y)
    A = [
        torch.sparse_csr_tensor(offsets, indices, values, sets.A.shape)
        for values, offsets, indices, *_ in data
    ]

    def sampled(i: int):
        return torch.sparse.sampled_addmm(A[i], data[i][3], data[i][4].t(), beta=0).values()

    return kept(device, sets.count, sampled)


def torch_softmax(device, sets: Sets) -> Plan:
    torch, A = device.torch, sets.A
    index = np.stack([common.rows_of(A), A.indices]).astype(np.int64)
    data = sets.put(device, index, A.data)
    T = [torch.sparse_coo_tensor(i, values, A.shape, is_coalesced=True) for i, values in data]
    return kept(device, sets.count, lambda i: torch.sparse.softmax(T[i], 1).values())


def _program(function, operands: tuple, sets: Sets, most: int | None = None) -> Plan:
    """A jitted function on its operands, copied for each set."""
    data = [
        jax.tree.map(lambda x: jnp.array(x, copy=True), operands)
        for _ in range(min(sets.count, most or sets.count))
    ]
    return (lambda i: function(*data[i % len(data)])), (lambda: np.asarray(function(*data[0])))


_spmm = jax.jit(lambda A, B: spmm(A, B))
_sddmm = jax.jit(lambda A, X, Y: sddmm(A, X, Y).values)
_matmul = jax.jit(lambda A, B: A @ B)
_matmul_cusparse = jax.jit(lambda A, B: A @ B)
_dense = jax.jit(lambda A, B: jnp.matmul(A, B, precision="highest"))
_softmax = jax.jit(lambda A: sparse_softmax(A).values)
_gather = jax.jit(lambda rows, columns, X, Y: (X[rows] * Y[columns]).sum(-1))


@functools.partial(jax.jit, static_argnames="m")
def _segment_sum(values, rows, columns, B, m):
    products = values[:, None] * B[columns]
    return jax.ops.segment_sum(products, rows, num_segments=m, indices_are_sorted=True)


def jax_spmm(device, sets: Sets) -> Plan:
    return _program(_spmm, (SparseArray.from_scipy(sets.A), *sets.dense), sets)


def jax_sddmm(device, sets: Sets) -> Plan:
    return _program(_sddmm, (SparseArray.from_scipy(sets.A), *sets.dense), sets)


def jax_bcoo(device, sets: Sets, product=_matmul) -> Plan:
    common.limit(4 * sets.A.nnz * sets.dense[0].shape[1], "its nnz x n intermediate")
    return _program(product, (common.bcoo(sets.A), *sets.dense), sets)


def jax_bcoo_cusparse(device, sets: Sets) -> Plan:
    if not hasattr(jax.config, "jax_bcoo_cusparse_lowering"):
        raise Unavailable("this JAX has no cuSPARSE lowering of BCOO")
    call, result = jax_bcoo(device, sets, _matmul_cusparse)
    before = jax.config.jax_bcoo_cusparse_lowering
    jax.config.update("jax_bcoo_cusparse_lowering", True)
    try:
        jax.block_until_ready(call(0))  # compiles: later calls find this program
    finally:
        jax.config.update("jax_bcoo_cusparse_lowering", before)
    return call, result


def jax_segment_sum(device, sets: Sets) -> Plan:
    (B,), A = sets.dense, sets.A
    common.limit(4 * A.nnz * B.shape[1], "its nnz x n intermediate")
    product = functools.partial(_segment_sum, m=A.shape[0])
    return _program(product, (A.data, common.rows_of(A), A.indices, B), sets)


def jax_dense(device, sets: Sets) -> Plan:
    nbytes = 4 * int(np.prod(sets.A.shape))
    common.limit(nbytes, "the dense matrix", common.MAX_DENSE_BYTES)
    most = max(2, (4 << 30) // nbytes)
    return _program(_dense, (sets.A.toarray(), *sets.dense), sets, most)


def jax_gather(device, sets: Sets) -> Plan:
    common.limit(8 * sets.A.nnz * sets.dense[0].shape[1], "its nnz x d intermediates")
    return _program(_gather, (common.rows_of(sets.A), sets.A.indices, *sets.dense), sets)


def jax_softmax(device, sets: Sets) -> Plan:
    return _program(_softmax, (SparseArray.from_scipy(sets.A),), sets)


def jax_segment_softmax(device, sets: Sets) -> Plan:
    function = functools.partial(segment_softmax, sets.A.shape[0])
    return _program(function, (common.rows_of(sets.A), sets.A.data), sets)


KERNELS = {
    "spmm": {
        **{
            f"cusparse_{name}": functools.partial(cusparse_plan, name)
            for name in cusparse.ALGORITHMS
        },
        "torch_csr": torch_csr,
        "torch_bsr": torch_bsr,
        "torch_dense": torch_dense,
        "torch_compile": torch_compile,
    },
    "sddmm": {"torch_sampled": torch_sampled},
    "softmax": {"torch_softmax": torch_softmax},
}
PROGRAMS = {
    "spmm": {
        "ours_jax": jax_spmm,
        "jax_bcoo": jax_bcoo,
        "jax_bcoo_cusparse": jax_bcoo_cusparse,
        "jax_segment_sum": jax_segment_sum,
        "jax_dense": jax_dense,
    },
    "sddmm": {"ours_jax": jax_sddmm, "jax_gather": jax_gather},
    "softmax": {"ours_jax": jax_softmax, "jax_segment_softmax": jax_segment_softmax},
}
# Except for these two, programs for SpMM are measured at a few widths: XLA compiles each.
EVERY_WIDTH, FEW_WIDTHS = ("ours_jax", "jax_bcoo"), (4, 64)
CUSPARSE = (*(f"cusparse_{name}" for name in cusparse.ALGORITHMS), "torch_csr")
