"""Operations on a matrix in parts on eight devices, against those of the whole matrix on one.

Run as a script it runs every case below, forward and backward, for each way to cut the matrix, and
prints a line of JSON: how far results and gradients are from those of the whole matrix and, of
attention, what the compiled program sends and whether it has an array of the whole sequence.
tests/grad/test_parts_of_eight.py holds them against bounds.
"""

import functools
import json
import os
import re
import sys
from dataclasses import replace

if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import sgap_jax as sj
from sgap_jax import BCSR, CVS, SparseArray, masks, parallel

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)


def graph(m, k, share=0.1):
    """Rows without entries, one that is full, and a band."""
    rng = np.random.default_rng(0)
    D = np.where(rng.random((m, k)) < share, rng.standard_normal((m, k)), 0)
    D += np.eye(m, k, 1) + 2 * np.eye(m, k, -1)
    D[3] = rng.standard_normal(k)
    D[[0, 7, m - 1]] = 0
    return SparseArray.from_dense(D)


def filled(A, format):
    """A in vectors or blocks, without zeros in them."""
    A = A.asformat(format)
    return A.with_values(np.random.default_rng(4).standard_normal(A.values.shape))


# name: (what makes a matrix, how it is cut)
CUTS = {
    # Four parts, each on two devices, which divide columns or share the messages of one.
    "second axis": (lambda: graph(29, 29, 0.4), dict(second="y")),
    "reordered": (
        lambda: graph(29, 29),
        dict(
            order=lambda A: np.random.default_rng(3).permutation(29),
            rows=[2, 9, 0, 4, 4, 4, 4, 2],
        ),
    ),
    "rectangular": (lambda: graph(11, 26), dict(rows="even")),
    "vectors": (lambda: filled(graph(32, 32), CVS(2)), dict(rows=[4, 6, 0, 2, 8, 8, 2, 2])),
    "blocks": (lambda: filled(graph(24, 36), BCSR(2, 3)), {}),
}


def scores_softmax_sum(ops, A, X, Y):
    """Scores, their softmax and a sum, as attention of one head or a layer of GAT has them."""
    return ops.spmm(ops.sparse_softmax(ops.sddmm(A, X, Y), scale=jnp.sum(X[:2])), Y)


def cases():
    """name: function(ops, A, X, Y) with ops = sgap_jax or sgap_jax.parallel, X [m, 4], Y [k, 4]."""
    found = {
        # Of so many columns the smallest cover travels; of those of gspmm rows of B alone.
        "spmm": lambda ops, A, X, Y: ops.spmm(A, jnp.tile(Y, (1, 5))[:, :19]),
        "spmm, transposed": lambda ops, A, X, Y: ops.spmm(
            A, jnp.tile(X, (1, 5))[:, :19], transpose=True
        ),
        "spmm of a column, both ways": lambda ops, A, X, Y: ops.spmm(
            A, jnp.tanh(ops.spmm(A, Y[:, :1])), transpose=True
        ),
        "sddmm": lambda ops, A, X, Y: ops.sddmm(A, X, Y),
        "sddmm, weighted": lambda ops, A, X, Y: ops.sddmm(
            A, jnp.tile(X, (1, 8)), jnp.tile(Y, (1, 8)), weighted=True, scale=jnp.mean(X)
        ),
        "gsddmm, sub": lambda ops, A, X, Y: ops.gsddmm(A, X, Y, op="sub"),
        "sparse_softmax": lambda ops, A, X, Y: ops.sparse_softmax(A, scale=0.5),
        "row_sum": lambda ops, A, X, Y: ops.row_sum(A),
        "row_max": lambda ops, A, X, Y: ops.row_max(A),
        "scores, softmax, sum": scores_softmax_sum,
    }
    for op, reduce in (("add", "sum"), ("copy", "sum"), ("div", "mean"), ("mul", "max")):
        found[f"gspmm, {op}, {reduce}"] = lambda ops, A, X, Y, op=op, reduce=reduce: ops.gspmm(
            A, Y, op=op, reduce=reduce
        )
    for op, reduce in (("sub", "mean"), ("mul", "sum"), ("add", "max"), ("mul", "min")):
        found[f"gspmm, transposed, {op}, {reduce}"] = lambda ops, A, X, Y, op=op, reduce=reduce: (
            ops.gspmm(A, X, op=op, reduce=reduce, transpose=True)
        )
    return found


def cuts_of(name):
    """Each case runs twice: on one of the other cuts, and with derivatives of order 2 reordered or
    in vectors."""
    n = list(cases()).index(name)
    return ("second axis", "blocks", "rectangular")[n % 3], ("reordered", "vectors")[n % 2]


def window(size, around):
    """Each query sees its neighbours on both sides."""
    band = np.abs(np.subtract.outer(np.arange(size), np.arange(size))) <= around
    return SparseArray.from_dense(band.astype(float))


def with_global_tokens(size, around):
    """All queries but one see keys 2 and 40."""
    D = np.array(window(size, around).todense())
    D[:, [2, 40]], D[9] = 1, 0
    return SparseArray.from_dense(D)


def seen_by_all(A, rows):
    """Queries of these rows see all keys."""
    D = np.array(A.todense())
    D[rows] = 1
    return SparseArray.from_dense(D)


# name: (what makes a pattern, how it is cut, heads of queries and of keys, options)
ATTENTION = {
    "attention, band, everything": (
        lambda: window(64, 3),
        dict(rows="even"),
        (4, 2),
        dict(is_causal=True, lengths=[30, 64], bias=(4,), sinks=True, scale=0.3),
    ),
    "attention, band, batch and heads over other axes": (
        lambda: window(64, 3),
        dict(rows="even", second="heads"),
        (4, 2),
        dict(lengths=[30, 64], bias=(2, 4), sinks=True, mesh=(2, 2, 2)),
    ),
    "attention, a causal mask": (
        lambda: masks.causal(window(32, 31)),
        dict(rows="even"),
        (2, 1),
        dict(scale="array"),
    ),
    "attention, vectors": (
        lambda: window(32, 3).asformat(CVS(4)),
        dict(rows="even"),
        (2, 1),
        dict(is_causal=True, bias=(2,), lengths=[13, 32]),
    ),
    "attention, blocks": (
        lambda: window(32, 3).asformat(BCSR(2, 4)),
        dict(rows="even"),
        (2, 1),
        dict(is_causal=True),
    ),
    "attention, global tokens": (
        lambda: with_global_tokens(64, 2),
        dict(rows="even"),
        (4, 2),
        dict(bias=(2, 1), scale="array"),
    ),
    "attention, queries that see all keys": (
        lambda: seen_by_all(with_global_tokens(64, 2), [2, 40]),
        dict(rows="even"),
        (4, 2),
        dict(bias=(2, 1), scale="array", sinks=True, is_causal=True, lengths=[30, 64]),
    ),
    "attention, vectors that see all keys": (
        lambda: seen_by_all(window(64, 3), [18, 19, 60, 61]).asformat(CVS(2)),
        dict(rows="even"),
        (2, 2),
        dict(bias=(2,)),
    ),
    "attention, blocks that see all keys, reordered": (
        lambda: seen_by_all(window(64, 3), [18, 19]).asformat(BCSR(2, 4)),
        dict(order=lambda A: np.arange(64)[::-1].reshape(16, 4)[:, ::-1].reshape(-1)),
        (2, 1),
        dict(is_causal=True, lengths=[13, 64]),
    ),
    "attention, reordered": (
        lambda: graph(29, 29),
        dict(order=lambda A: np.random.default_rng(3).permutation(29)),
        (2, 1),
        dict(bias=(2, 2), sinks=True, is_causal=True, lengths=[20, 29]),
    ),
    "attention, other keys": (lambda: graph(11, 26), {}, (2, 2), dict(lengths=19, is_causal=True)),
}


def memory():
    """Bytes of a device on 2, 4 and 8 devices, of attention over a band, and over a band and tokens
    that see and are seen by all."""
    band = np.abs(np.subtract.outer(np.arange(1024), np.arange(1024))) <= 3
    tokens = band.copy()
    tokens[:, [2, 700]] = tokens[[2, 700]] = True

    def loss(q, k, v, A):
        return jnp.sum(jnp.sin(parallel.sparse_attention(q, k, v, A)))

    for kind, D, each in (("band", band, (2, 8)), ("tokens", tokens, (2, 4, 8))):
        pattern = SparseArray.from_dense(D.astype(np.float32))
        for devices in each:
            kinds = dict(devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
            mesh = jax.make_mesh((devices,), ("x",), **kinds)
            A = parallel.partition(pattern, mesh, "x", rows="even")
            assert (A.global_rows is None) == (kind == "band")
            over = jax.NamedSharding(mesh, jax.P(None, "x"))
            q = jax.ShapeDtypeStruct((1, 1024, 4, 32), jnp.float32, sharding=over)
            row = dict(devices=devices, kind=kind)
            for way, function in (("forward", loss), ("backward", jax.grad(loss, (0, 1, 2)))):
                found = jax.jit(function).lower(q, q, q, A).compile().memory_analysis()
                sizes = ("temp", "argument", "output")
                row[way] = sum(getattr(found, f"{name}_size_in_bytes") for name in sizes)
            yield row


def more_entries_than_int32():
    """A product and its gradients are compiled, and not run, for 2.4e9 + 1.6e9 entries in parts."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    small = parallel.partition(window(64, 3), mesh, "x", rows="even")
    sizes = {small.own.values.shape[1]: 300_000_000, small.foreign.values.shape[1]: 200_000_000}
    sizes[small.merged.values.shape[1]] = 500_000_000
    assert len(sizes) == 3

    def large(x):
        shape = tuple(sizes.get(n, n) if i == 1 else n for i, n in enumerate(x.shape))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    entries = tuple(jax.tree.map(large, getattr(small, x)) for x in ("own", "foreign", "merged"))
    A = replace(small, **dict(zip(("own", "foreign", "merged"), entries, strict=True)), cover=None)
    B = jax.ShapeDtypeStruct((8, 8, 4), jnp.float64)

    def loss(own, foreign, A, B):
        A = replace(A, own=replace(A.own, values=own), foreign=replace(A.foreign, values=foreign))
        return jnp.sum(jnp.sin(A @ B))

    program = jax.jit(jax.grad(loss, (0, 1, 3)))
    found = program.lower(A.own.values, A.foreign.values, A, B).compile().memory_analysis()
    yield dict(entries=8 * 500_000_000, argument=found.argument_size_in_bytes)


def star():
    """A hub goes to all parts, and what a cover would send stays away; new values of such parts."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    D = np.eye(16) + (np.arange(16) == 0)
    apart = parallel.partition(SparseArray.from_dense(D), mesh, "x")
    twice = apart.with_values(tuple(2 * x for x in apart.values))
    difference = np.abs(twice @ np.eye(16) - 2 * D).max()
    yield dict(rows=apart.exchange.to_all, cover=bool(apart.cover), difference=float(difference))


SIZES = {
    "memory": memory,
    "more entries than int32": more_entries_than_int32,
    "star": star,
}


def result(A, out):
    """The values or the array that an operation gave, of parts in the order of the whole."""
    if isinstance(out, SparseArray | parallel.PartitionedArray):
        return out.values
    parts = isinstance(A, parallel.PartitionedArray) and out.ndim == 2 and out.shape[0] == A.parts
    return A.from_parts(out) if parts else out


def run_case(function, ops, A, X, Y, order=1):
    """A program of the gradients of a loss and of the result, of which infinities of empty rows are
    left out; of order 2 also of the gradients of the squares of those gradients."""

    def loss(values, X, Y):
        y = result(A, function(ops, A.with_values(values), X, Y))
        finite = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), y)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(finite)), finite

    first = jax.grad(loss, (0, 1, 2), has_aux=True)

    def squares(*operands):
        found, finite = first(*operands)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(found)), (found, finite)

    def both(*operands):
        second, (found, finite) = jax.grad(squares, (0, 1, 2), has_aux=True)(*operands)
        return found, finite, second

    of = (lambda *x: (*first(*x), ())) if order == 1 else both
    return jax.jit(of).lower(A.values, X, Y).compile()


def sent_by(text):
    """(shape, collective) of those in a compiled program."""
    found = re.findall(r"= (\S.*?) (all-[\w-]+?|collective-permute)(?:-start)?\(", text)
    return [(x, how) for shapes, how in found for x in re.findall(r"\w+\[([\d,]*)\]", shapes)]


def difference(got, expected):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    each = (np.max(np.abs(np.asarray(x) - np.asarray(y)), initial=0) for x, y in pairs)
    return float(max(each, default=0))


def size(found):
    """The largest number of all, at least 1."""
    return max([1, *(float(np.max(np.abs(x), initial=0)) for x in jax.tree.leaves(found))])


def run(names):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    two = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    @functools.cache
    def cut_by(cut):
        """(the whole matrix, in parts)."""
        make, options = CUTS[cut]
        whole = make()
        return whole, parallel.partition(
            whole, two if "second" in options else mesh, "x", **options
        )

    for name in names:
        if name in SIZES:
            rows = SIZES[name]()
        else:
            rows = run_attention(name, mesh) if name in ATTENTION else run_on(name, cut_by)
        for row in rows:
            print(json.dumps(dict(name=name) | row), flush=True)


def run_on(name, cut_by):
    rng = np.random.default_rng(1)
    for order, cut in enumerate(cuts_of(name), 1):
        (whole, A), options = cut_by(cut), CUTS[cut][1]
        X, Y = (jnp.asarray(rng.standard_normal((size, 4))) for size in whole.shape)

        def spread(v, whole=whole, options=options, A=A):
            return parallel.partition(whole.with_values(v), A.mesh, "x", **options).values

        def of_parts(found, spread=spread):
            return spread(found[0]), *found[1:]

        program = run_case(cases()[name], sj, whole, X, Y, order)
        found, y, second = program(whole.values, X, Y)
        expected = of_parts(found), spread(y) if y.shape == found[0].shape else y
        expected += (of_parts(second) if second else second,)
        program = run_case(cases()[name], parallel, A, X, Y, order)
        got = program(A.values, X, Y)
        row = dict(cut=cut, order=order, difference=difference(got[:2], expected[:2]))
        row |= dict(second=difference(got[2], expected[2]) / size(expected[2]))
        row |= dict(same=difference(got[1], expected[1]) == 0, sent=sent_by(program.as_text()))
        if A.second is None:
            row |= dict(covered=[A._covered(n, jnp.float64) for n in (3, 19)])
        else:
            row |= dict(costs={n: A._costs(n, jnp.float64) for n in (1, 19)})
            exchanges = A.exchange, A.cover.exchange, A.share.exchange
            row |= dict(rows=[*(x.sent for x in exchanges), A.own.shape[1]])
        yield row


def run_attention(name, mesh):
    make, cut, (heads, key_heads), options = ATTENTION[name]
    pattern = make()
    split_axes, over = {}, jax.P(None, "x")
    if "mesh" in options:
        kinds = (AxisType.Auto,) * 3
        mesh = jax.make_mesh(options["mesh"], ("x", "batch", "heads"), axis_types=kinds)
        split_axes = dict(batch_axis="batch")  # and the heads over the second axis of the pattern
        over = jax.P("batch", "x", "heads")
    rng, (L, S) = np.random.default_rng(2), pattern.shape
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    fixed = dict(is_causal=options.get("is_causal", False), return_lse=True)
    if "lengths" in options:
        fixed["key_value_seq_lengths"] = jnp.asarray(options["lengths"])
    if isinstance(options.get("scale"), float):
        fixed["scale"] = options["scale"]
    free = dict(
        q=normal(2, L, heads, 4), k=normal(2, S, key_heads, 4), v=normal(2, S, key_heads, 5)
    )
    if options.get("scale") == "array":
        free["scale"] = jnp.asarray(0.4)
    if "sinks" in options:
        free["sinks"] = normal(heads)
    apart = parallel.partition(pattern, mesh, "x", **cut)

    def spread(bias):
        """[..., nnz] -> that of own and of foreign entries."""
        each = [
            parallel.partition(pattern.with_values(one), mesh, "x", **cut).values
            for one in bias.reshape(-1, *pattern.values.shape)
        ]
        lead = bias.shape[: bias.ndim - pattern.values.ndim]
        return tuple(jnp.stack(x).reshape(*lead, *x[0].shape) for x in zip(*each, strict=True))

    def compiled(ops, A, free, **split_axes):
        def loss(free):
            out, lse = ops.sparse_attention(pattern=A, **free, **fixed, **split_axes)
            lse = jnp.where(jnp.isfinite(lse), lse, 0)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, lse)

        return jax.jit(jax.grad(loss, has_aux=True)).lower(free).compile()

    bias = normal(*options["bias"], *pattern.values.shape) if "bias" in options else None
    one, split = dict(free), dict(free)
    if bias is not None:
        one["bias"], split["bias"] = bias, spread(bias)
    gradient, out = compiled(sj, pattern, one)(one)
    if bias is not None:
        gradient["bias"] = spread(gradient["bias"])
    if cut.get("rows") == "even":
        put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, over))
        split |= {x: put(split[x]) for x in "qkv"}
    program = compiled(parallel, apart, split, **split_axes)
    found = difference(program(split), (gradient, out))
    text = program.as_text()
    sent = sent_by(text)
    shapes = {tuple(map(int, x.split(","))) for x in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)}
    long = sorted(x for x in shapes if len(x) == 4 and x[1] >= S)
    some = apart.global_rows
    row = dict(difference=found, sent=sent, long=long, rows=apart.exchange.sent_by)
    if some is not None:
        row |= dict(queries=sum(some.queries.to_all), rows=some.exchange.sent_by)
    yield row


if __name__ == "__main__":
    run(sys.argv[1:] or [*cases(), *ATTENTION, *SIZES])
