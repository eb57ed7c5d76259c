"""Calls of every operation on eight devices: which collectives XLA's partitioner puts in.

Run as a script it compiles every case below, forward and backward, with operands split as the case
says, and prints for each one line of JSON: the collectives in the compiled program, whether the
results are split, and how far they are from those of one device. tests/grad/test_partitioned.py
holds them against the table.
"""

import json
import os
import re
import sys
from typing import NamedTuple

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sgap_jax as sj
from sgap_jax import CVS, SparseArray, nn, select

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
M, K = 24, 16
NOTHING: dict = {}
SUM = {"all-reduce": 1}


def pattern(seed, format=sj.CSR):
    rng = np.random.default_rng(seed)
    kept = rng.random((M, K)) < 0.3
    return SparseArray.from_dense(np.where(kept, rng.standard_normal((M, K)), 0), format=format)


class Case(NamedTuple):
    """A function of split arrays, and the collectives of its value and of its gradients (at most
    as many); None where it is the values alone that matter."""

    function: object
    shapes: tuple
    specs: tuple
    forward: dict
    gradient: dict
    split: bool = True  # whether the result is
    kinds: tuple = ("Auto", "Explicit")  # of mesh axes
    mesh: tuple = (4, 2)  # x, y
    out: P | None = None  # how the value is asked for; as it comes


def layer_case(made, shape, call):
    """Of a layer and a split batch: nothing but the sums of the parameters' gradients."""
    definition, parameters = nnx.split(nnx.eval_shape(made))
    leaves, names = jax.tree.flatten(parameters)

    def function(x, *weights):
        return call(nnx.merge(definition, jax.tree.unflatten(names, weights)), x)

    shapes = (shape, *(x.shape for x in leaves))
    specs = (P("x"), *[P()] * len(leaves))
    return Case(function, shapes, specs, NOTHING, {"all-reduce": len(leaves)})


def within(axis, function, specs, out):
    """The function inside shard_map over one axis of the mesh, which leaves the other to XLA."""

    def run(*arrays):
        if jax.sharding.get_abstract_mesh().empty:  # on one device
            return function(*arrays)
        return jax.shard_map(function, in_specs=specs, out_specs=out, axis_names={axis})(*arrays)

    return run


def cases():
    A = pattern(0)
    V = pattern(1, CVS(4))
    of, W = A.with_values, SparseArray.from_dense(np.tri(K))
    plan = sj.spgemm_plan(A, W)
    columns, batch, heads = P(None, "x"), P("x"), P(None, None, "x")
    values = lambda A: (A.nnz,) if A.values.ndim == 1 else A.values.shape

    def attend(q, k, v, **options):
        return sj.sparse_attention(q, k, v, A, **options)

    def of_best(s):
        return select.top_k(jax.lax.stop_gradient(s), 3)

    def features_of_values(q, k, v):
        out, lse = attend(q, k, v, return_lse=True)
        return out * jnp.sin(lse)[..., None]

    def everything(q, k, v, bias, sinks):
        options = dict(bias=bias, sinks=sinks, return_lse=True, is_causal=True)
        out, lse = attend(q, k, v, key_value_seq_lengths=jnp.array([9, 16]), **options)
        return out + lse[..., None]

    def own_patterns(q, k, v, scores):
        chosen = jax.vmap(lambda s: select.top_k(s, 3))(jax.lax.stop_gradient(scores))
        return sj.sparse_attention(q, k, v, chosen)

    def selected(q, k, scores):
        own = select.top_k((q, k), 3, causal=True, keep=A)
        experts = jnp.argmax(scores, 1)
        routing = select.route(experts, K, block=4, capacity=2)
        best = select.threshold(scores, 0.5, nse=200).values
        return jnp.concatenate([own.values, best, jnp.ravel(routing.gather(q))])

    def made(x, B):
        dense = SparseArray.from_dense(jnp.where(x > 1, x, 0), nse=M * K // 2)
        where = jnp.clip(jnp.abs(x[:, :2] * 5).astype(jnp.int32), 0, K - 1)
        return (dense + SparseArray.from_coordinates(where, x[:, 2], (M, K), nse=M)) @ B

    each = lambda f: jax.vmap(f)
    qkv = lambda b, h, g: ((b, M, h, 4), (b, K, g, 4), (b, K, g, 6))
    return {
        "spmm, columns": Case(
            lambda v, B: sj.spmm(of(v), B), ((A.nnz,), (K, 16)), (P(), columns), NOTHING, SUM
        ),
        "spmm, columns over both axes": Case(
            lambda v, B: sj.spmm(of(v), B, schedule=sj.CpuTile(columns=16)),
            ((A.nnz,), (K, 64)),
            (P(), P(None, ("x", "y"))),
            NOTHING,
            SUM,
        ),
        "spmm, columns over the inner axis of 2 x 3": Case(
            lambda v, B: sj.spmm(of(v), B),
            ((A.nnz,), (K, 12)),
            (P(), P(None, "y")),
            NOTHING,
            SUM,
            mesh=(2, 3),
        ),
        "spmm, columns that do not divide": Case(
            lambda v, B: sj.spmm(of(v), jnp.pad(B, ((0, 0), (0, 2)))),
            ((A.nnz,), (K, 8)),
            (P(), columns),
            None,
            None,
            split=False,
            kinds=("Auto",),
        ),
        "spmm, rows of B": Case(
            lambda v, B: sj.spmm(of(v), B),
            ((A.nnz,), (K, 16)),
            (P(), P("x")),
            {"all-gather": 1},
            {"all-gather": 1, "all-reduce": 1},
            split=False,
        ),
        "spmm of vectors, transposed, columns": Case(
            lambda v, B: sj.spmm(V.with_values(v), B, transpose=True),
            (values(V), (M, 8)),
            (P(), columns),
            NOTHING,
            SUM,
        ),
        "spmm, in plain JAX, columns": Case(
            lambda v, B: sj.spmm(of(v), B, schedule=sj.Reference()),
            ((A.nnz,), (K, 8)),
            (P(), columns),
            NOTHING,
            SUM,
        ),
        "spmm, batch of narrow operands": Case(
            lambda v, B: each(lambda b: sj.spmm(of(v), b))(B),
            ((A.nnz,), (8, K, 3)),
            (P(), batch),
            NOTHING,
            SUM,
        ),
        "spmm, batch of values and wide operands": Case(
            each(lambda v, B: sj.spmm(of(v), B)),
            ((8, A.nnz), (8, K, 16)),
            (batch, batch),
            NOTHING,
            NOTHING,
        ),
        "spmm within shard_map over another axis, columns": Case(
            within("y", lambda v, B: each(lambda b: sj.spmm(of(v), b))(B), (P(), P("y")), P("y")),
            ((A.nnz,), (2, K, 16)),
            (P(), P("y", None, "x")),
            NOTHING,
            {"all-reduce": 2},  # over both axes
            kinds=("Auto",),
        ),
        "sddmm within shard_map over another axis, summed features": Case(
            within("x", each(lambda X, Y: sj.sddmm(A, X, Y).values), (P("x"), P("x")), P("x")),
            ((4, M, 8), (4, K, 8)),
            (P("x", None, "y"),) * 2,
            SUM,
            SUM,
            kinds=("Auto",),
        ),
        "attention within shard_map over another axis, heads": Case(
            within("x", attend, (P("x"),) * 3, P("x")),
            qkv(4, 4, 2),
            (P("x", None, "y"),) * 3,
            NOTHING,
            NOTHING,
            kinds=("Auto",),
        ),
        "spmm, batch of structures": Case(
            each(lambda s, B: sj.spmm(select.top_k(s, 3), B)),
            ((8, M, K), (8, K, 4)),
            (batch, batch),
            NOTHING,
            NOTHING,
        ),
        "products of a batch of structures, their columns": Case(
            each(
                lambda s, B: sj.spmm(select.top_k(s, 3), B) + sj.gspmm(of_best(s), B, reduce="max")
            ),
            ((8, M, K), (8, K, 8)),
            (P("y"), P("y", None, "x")),
            NOTHING,
            SUM,
        ),
        "spmm, inner of two batches": Case(
            each(each(lambda v, B: sj.spmm(of(v), B))),
            ((2, 4, A.nnz), (2, 4, K, 16)),
            (P(None, "x"), P(None, "x")),
            None,  # they become one axis, which has no such split
            None,
        ),
        "sddmm, summed features": Case(
            lambda X, Y: sj.sddmm(A, X, Y).values,
            ((M, 8), (K, 8)),
            (columns, columns),
            SUM,
            SUM,
            split=False,
        ),
        "sddmm, summed features of one operand": Case(
            lambda v, X, Y, c: sj.sddmm(of(v), X, Y, scale=c, weighted=True).values,
            ((A.nnz,), (M, 8), (K, 8), ()),
            (P(), columns, P(), P()),
            SUM,
            {"all-reduce": 2, "all-gather": 1},  # dY is wanted whole
            split=False,
        ),
        "sddmm, batch": Case(
            each(lambda X, Y: sj.sddmm(A, X, Y).values),
            ((8, M, 4), (8, K, 4)),
            (batch, batch),
            NOTHING,
            NOTHING,
        ),
        "gsddmm, summed features": Case(
            lambda X, Y: sj.gsddmm(A, X, Y, op="mul").values,
            ((M, 8), (K, 8)),
            (columns, columns),
            SUM,
            SUM,
            split=False,
        ),
        "sparse_softmax, batch": Case(
            each(lambda v, c: sj.sparse_softmax(of(v), scale=c).values),
            ((8, A.nnz), (8,)),
            (batch, batch),
            NOTHING,
            NOTHING,
        ),
        "gspmm maximum, batch": Case(
            each(lambda v, X: sj.gspmm(of(v), X, op="add", reduce="max")),
            ((8, A.nnz), (8, K, 3)),
            (batch, batch),
            NOTHING,
            NOTHING,
        ),
        "gspmm mean of sums, columns": Case(
            lambda v, X: sj.gspmm(of(v), X, op="add", reduce="mean"),
            ((A.nnz,), (K, 8)),
            (P(), columns),
            NOTHING,
            SUM,
        ),
        "gspmm maximum, columns": Case(
            lambda v, X: sj.gspmm(of(v), X, reduce="max"),
            ((A.nnz,), (K, 8)),
            (P(), columns),
            NOTHING,
            SUM,
        ),
        "gspmm of vectors of entries, their features": Case(
            lambda v, X: sj.gspmm(A, X, values=v) + sj.gspmm(A, X, values=v, op="add"),
            ((A.nnz, 8), (K, 8)),
            (columns, columns),
            NOTHING,
            NOTHING,
        ),
        "gspmm maximum of vectors of entries, their features": Case(
            lambda v, X: sj.gspmm(A, X, values=v, op="add", reduce="max"),
            ((A.nnz, 8), (K, 8)),
            (columns, columns),
            NOTHING,
            NOTHING,
        ),
        "gsddmm, vectors of entries, their features": Case(
            lambda X, Y: sj.gsddmm(A, X, Y, op="mul", reduce=None),
            ((M, 8), (K, 8)),
            (columns, columns),
            NOTHING,
            NOTHING,
        ),
        "row sums of vectors of entries, their features": Case(
            lambda v: sj.row_sum(A, values=v),
            ((A.nnz, 8),),
            (columns,),
            NOTHING,
            NOTHING,
        ),
        "row maxima of vectors of entries, their features": Case(
            lambda v: sj.row_max(A, values=v),
            ((A.nnz, 8),),
            (columns,),
            NOTHING,
            NOTHING,
        ),
        "aggregate maximum, features": Case(
            lambda v: sj.aggregate(A, v, "max"), ((A.nnz, 8),), (columns,), NOTHING, NOTHING
        ),
        "sparse_softmax of vectors of entries, heads": Case(
            lambda v: sj.sparse_softmax(A, values=v),
            ((A.nnz, 8),),
            (columns,),
            NOTHING,
            NOTHING,
        ),
        "gsddmm, softmax and gspmm (GAT), heads": Case(
            each(
                lambda left, right, X: sj.gspmm(
                    sj.sparse_softmax(sj.gsddmm(A, left, right, op="add")), X, reduce="sum"
                )
            ),
            ((8, M), (8, K), (8, K, 3)),
            (batch, batch, batch),
            NOTHING,
            NOTHING,
        ),
        "row sums and maxima, batch": Case(
            each(lambda v: sj.row_sum(of(v)) + sj.row_max(A.with_values(v.at[0].set(1)))),
            ((8, A.nnz),),
            (batch,),
            NOTHING,
            NOTHING,
        ),
        "spgemm, batch of values": Case(
            each(lambda v, w: sj.spgemm(of(v), W.with_values(w), plan=plan).values),
            ((8, A.nnz), (8, W.nnz)),
            (batch, batch),
            NOTHING,
            NOTHING,
        ),
        "attention, batch": Case(attend, qkv(4, 2, 2), (batch,) * 3, NOTHING, NOTHING),
        "attention, heads": Case(attend, qkv(2, 4, 4), (heads,) * 3, NOTHING, NOTHING),
        "attention, batch and heads": Case(
            attend, qkv(2, 4, 4), (P("y", None, "x"),) * 3, NOTHING, NOTHING
        ),
        "attention, features of values": Case(
            features_of_values,
            ((2, M, 4, 4), (2, K, 4, 4), (2, K, 4, 8)),
            (P("y"), P("y"), P("y", None, None, "x")),
            NOTHING,
            {"all-reduce": 2},  # dq and dk in one, and what lse gets: sums over the features
        ),
        "attention, heads that share two of keys": Case(
            attend,
            qkv(2, 8, 2),
            (heads, P(), P()),
            NOTHING,
            {"all-reduce": 1, "all-gather": 2},  # dk and dv are wanted whole
        ),
        "attention with a bias, sinks, lengths, heads": Case(
            everything,
            (*qkv(2, 4, 4), (4, A.nnz), (4,)),
            (heads, heads, heads, P("x"), P("x")),
            NOTHING,
            NOTHING,
        ),
        "attention, a pattern for each head": Case(
            own_patterns,
            (*qkv(1, 4, 4), (4, M, K)),
            (heads, heads, heads, P("x")),
            NOTHING,
            NOTHING,
        ),
        "einsum, an index of the result": Case(
            lambda v, X: sj.einsum("ij,rjs->irs", of(v), X),
            ((A.nnz,), (4, K, 2)),
            (P(), P("x")),
            NOTHING,
            SUM,
        ),
        "einsum, a summed index": Case(
            lambda v, X, y: sj.einsum("ij,irj,r->ij", of(v), X, y).values,
            ((A.nnz,), (M, 8, K), (8,)),
            (P(), columns, P("x")),
            SUM,
            {"all-reduce": 2},
            split=False,
        ),
        "einsum, a summed index, its result asked for split": Case(
            lambda v, X: sj.einsum("ij,rjs->is", of(v), X),
            ((A.nnz,), (8, K, 4)),
            (P(), P(("x", "y"))),
            {"reduce-scatter": 2},
            {"all-reduce": 2, "all-gather": 1},  # dX is wanted whole
            kinds=("Auto",),
            out=P("y", "x"),
        ),
        "einsum maximum, an index of the result": Case(
            lambda v, X: sj.einsum("ij,jr->ir", of(v), X, reduction="max"),
            ((A.nnz,), (K, 4)),
            (P(), columns),
            NOTHING,
            SUM,
            kinds=("Auto",),
        ),
        "structures of dense arrays and of coordinates, batch": Case(
            each(made),
            ((8, M, K), (8, K, 3)),
            (batch, batch),
            NOTHING,
            NOTHING,
        ),
        "attention over chosen blocks, batch": layer_case(
            lambda: nn.BlockSparseAttention(
                2, 8, num_blocks=2, block_size=4, decode=False, use_bias=False, rngs=nnx.Rngs(0)
            ),
            (8, 16, 8),
            lambda layer, x: layer(x),
        ),
        "mixture of experts, its tokens in groups": layer_case(
            lambda: nn.MoE(6, 4, num_experts=3, block=4, rngs=nnx.Rngs(0)),
            (8, 12, 6),
            lambda layer, x: jax.vmap(layer)(x),
        ),
        "selections, batch": Case(
            each(selected),
            ((8, M, 4), (8, K, 4), (8, M, K)),
            (batch,) * 3,
            NOTHING,
            NOTHING,
        ),
    }


def arrays_of(case):
    rng = np.random.default_rng(7)
    return [jnp.asarray(rng.standard_normal(shape)) for shape in case.shapes]


def collectives(text):
    found = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in found.items() if count}


def difference(got, expected):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)), initial=0)) for x, y in pairs)


def run(names):
    every = cases()
    for name in names or every:
        case = every[name]
        arrays = arrays_of(case)
        # Empty rows have infinite maxima.
        f = lambda *x, case=case: jnp.where(jnp.isfinite(y := case.function(*x)), y, 0)
        loss = lambda *x, f=f: jnp.sum(jnp.sin(f(*x)))
        grad = jax.grad(loss, tuple(range(len(arrays))))
        expected = {"forward": jax.jit(f)(*arrays), "gradient": jax.jit(grad)(*arrays)}
        for kind in case.kinds:
            mesh = jax.make_mesh(case.mesh, ("x", "y"), axis_types=(AxisType[kind],) * 2)
            with jax.set_mesh(mesh):
                pairs = zip(arrays, case.specs, strict=True)
                given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
                for way, function in (("forward", f), ("gradient", grad)):
                    asked = {}
                    if case.out is not None and way == "forward":
                        asked["out_shardings"] = NamedSharding(mesh, case.out)
                    compiled = jax.jit(function, **asked).lower(*given).compile()
                    out = compiled(*given)
                    split = [not x.sharding.is_fully_replicated for x in jax.tree.leaves(out)]
                    row = dict(name=name, kind=kind, way=way, split=split)
                    row |= dict(collectives=collectives(compiled.as_text()))
                    row |= dict(difference=difference(out, expected[way]))
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    run(sys.argv[1:])
