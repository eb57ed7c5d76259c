"""One process of several: reads its rows of a matrix, computes with it, and prints how far results
and gradients are from those of the whole matrix on one device. tests/grad/test_processes.py starts
them.

    one_of_processes.py PORT PROCESSES RANK FILE
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.sharding import AxisType, NamedSharding

import sgap_jax as sj
from sgap_jax import parallel


def gcn(spmm, A, H, weights):
    for W in weights:
        H = jnp.tanh(spmm(A, H @ W))
    return H


def main(port, processes, rank, file):
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    mesh = jax.make_mesh((2 * processes,), ("x",), axis_types=(AxisType.Auto,))
    A = parallel.read(file, mesh, "x", rows="even")
    whole = scipy.sparse.load_npz(file)
    assert A.parts == 2 * processes and sum(A.entries) == whole.nnz
    rng = np.random.default_rng(0)
    X = rng.standard_normal((A.shape[1], 6))
    weights = [0.3 * rng.standard_normal((6, 6)) for _ in range(3)]

    # Of the features each process has the rows of its devices alone.
    rows = A.own.shape[0]
    mine = np.zeros((2, rows, 6))
    for i in range(2):
        begin, end = A.row_bounds[2 * rank + i], A.row_bounds[2 * rank + i + 1]
        mine[i, : end - begin] = X[begin:end]
    over = NamedSharding(mesh, jax.P("x"))
    H = jax.make_array_from_process_local_data(over, mine, (A.parts, rows, 6))

    def loss(ops, A, H, weights):
        P = ops.sparse_softmax(ops.sddmm(A, H, H))
        return jnp.sum(jnp.sin(gcn(ops.spmm, A, H, weights))) + jnp.sum(ops.spmm(P, H) ** 2)

    step = jax.jit(jax.value_and_grad(lambda A, H, w: loss(parallel, A, H, w), (1, 2)))
    found, (dH, dW) = step(A, H, weights)
    local = [np.asarray(x.data)[0] for x in dH.addressable_shards]

    # The whole matrix on one device of this process, for the comparison.
    one = sj.SparseArray.from_scipy(whole)
    with jax.default_device(jax.local_devices()[0]):
        twin = jax.value_and_grad(lambda H, w: loss(sj, one, H, w), (0, 1))
        expected, (eH, eW) = jax.jit(twin)(jnp.asarray(X), weights)
    difference = [abs(float(found) - float(expected))]
    for i, shard in enumerate(local):
        begin, end = A.row_bounds[2 * rank + i], A.row_bounds[2 * rank + i + 1]
        difference.append(np.abs(shard[: end - begin] - np.asarray(eH)[begin:end]).max(initial=0))
    difference += [np.abs(np.asarray(x) - np.asarray(y)).max() for x, y in zip(dW, eW, strict=True)]
    # An operand that every process has whole, and one sequence over all devices.
    product = jax.jit(lambda A, X: A @ X)(A, X)
    difference.append(np.abs(np.asarray(product.addressable_data(0)) - whole @ X).max())
    q = rng.standard_normal((A.shape[0], 2, 4))
    attended = jax.jit(lambda A, q: parallel.sparse_attention(q, q, q, A))(A, q)
    expected = jax.jit(sj.sparse_attention)(q, q, q, one)
    for shard in attended.addressable_shards:
        difference.append(np.abs(np.asarray(shard.data) - np.asarray(expected)[shard.index]).max())

    # Tokens that see all and are seen by all: the plan is that of one process.
    D = np.abs(np.subtract.outer(np.arange(64), np.arange(64))) <= 2.0
    D[5] = D[:, 5] = 1
    tokens = scipy.sparse.csr_array(D.astype(float))
    S = parallel.from_parts(lambda p: tokens[16 * p : 16 * p + 16], mesh, "x")
    q = rng.standard_normal((64, 2, 4))
    attend = jax.grad(lambda q, attention, A: jnp.sum(jnp.sin(attention(q, q, q, A))))
    attend = jax.jit(attend, static_argnums=1)
    attended = attend(q, parallel.sparse_attention, S)
    expected = attend(q, sj.sparse_attention, sj.SparseArray.from_scipy(tokens))
    for shard in attended.addressable_shards:
        difference.append(np.abs(np.asarray(shard.data) - np.asarray(expected)[shard.index]).max())
    some = S.global_rows
    plan = dict(to_all=[S.exchange.to_all, some.exchange.to_all, some.queries.to_all])
    plan |= dict(sent=some.exchange.sent_by)

    # A process without its part: it says so, and the others do not wait for it.
    try:
        parallel.from_parts(lambda p: None if p == 0 else whole[:1], mesh, "x")
        message = ""
    except ValueError as error:
        message = str(error)
    here = sum(shard.data.size for shard in A.own.values.addressable_shards)
    row = dict(rank=rank, difference=float(max(difference)), message=message, here=here)
    print(json.dumps(row | plan | dict(all=A.own.values.size)), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
