"""vmap over any subset of the operands; vmap of grad and grad of vmap."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import from_row_lengths
from conftest import row_schedule
from differentiable_ops import CASES, close, function_of, normal, scalar

from sgap_jax import BCSR, CVS, SparseArray, gspmm, row_max, row_sum, sddmm, sparse_softmax, spmm

SIZE = 3


def batched(x, axis):
    return jnp.stack([x * (1 + 0.1 * i) + 0.01 * i for i in range(SIZE)], axis=axis)


# The rules do not look at the schedule.
@pytest.fixture(params=[case for case in CASES if "-" not in case])
def op(request):
    return function_of(request.param)


def subsets(operands):
    count = len(operands)
    # With many operands only each one and all of them: the rules distinguish no more.
    sizes = range(1, count + 1) if count <= 2 else (1, count)
    for mapped in itertools.product([None, 0], repeat=count):
        if sum(a is not None for a in mapped) in sizes:
            yield mapped
    yield tuple(x.ndim for x in operands)  # all, along the last axis


def mapped(operands):
    """(axes, operands of which some are batched) for each subset: a test's programs of all of them
    are compiled as one."""
    for axes in subsets(operands):
        pairs = zip(operands, axes, strict=True)
        yield axes, [x if a is None else batched(x, a) for x, a in pairs]


@pytest.mark.seconds(check=8, test=30)
def test_vmap(op):
    function, twin, operands = op
    cases = list(mapped(operands))
    along = lambda f, out: jax.jit(
        lambda args: [jax.vmap(f, axes, out)(*x) for (axes, _), x in zip(cases, args, strict=True)]
    )([args for _, args in cases])
    expected = along(twin, 0)
    close(along(function, 0), expected)
    close(along(function, 1), [np.moveaxis(np.asarray(x), 0, 1) for x in expected])


@pytest.mark.seconds(check=2, test=8)
def test_vmap_of_grad_and_grad_of_vmap(op):
    function, twin, operands = op
    cases = list(mapped(operands))
    every = tuple(range(len(operands)))

    def of_each(f, args):
        pairs = zip(cases, args, strict=True)
        return [jax.vmap(jax.grad(scalar(f), every), axes)(*x) for (axes, _), x in pairs]

    def of_sum(f, args):
        total = lambda axes: lambda *x: jnp.sum(jax.vmap(scalar(f), axes)(*x))
        pairs = zip(cases, args, strict=True)
        return [jax.grad(total(axes), every)(*x) for (axes, _), x in pairs]

    args = [args for _, args in cases]
    expected = jax.jit(lambda args: of_each(twin, args))(args)
    of_parts, of_total = jax.jit(lambda x: (of_each(function, x), of_sum(function, x)))(args)
    close(of_parts, expected)
    # The gradient of the sum: of what is shared, the sum; of what is mapped, each its own.
    for (axes, _), grads, found in zip(cases, expected, of_total, strict=True):
        pairs = zip(map(np.asarray, grads), axes, strict=True)
        close(found, tuple(np.sum(g, 0) if a is None else np.moveaxis(g, 0, a) for g, a in pairs))


def test_nested_vmap(op):
    function, twin, operands = op
    first = (0,) + (None,) * (len(operands) - 1)
    rest = (None,) + (0,) * (len(operands) - 1) if len(operands) > 1 else (0,)
    nest = lambda f: jax.vmap(jax.vmap(f, first), rest)
    args = [batched(x, 0) for x in operands]
    if len(operands) == 1:
        args = [batched(args[0], 0)]
    close(jax.jit(nest(function))(*args), jax.jit(nest(twin))(*args))
    every = tuple(range(len(args)))
    grads = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(nest(f)(*x))), every))
    close(grads(function)(*args), grads(twin)(*args))


def structures():
    """Three structures of equal capacity: the shorter ones are padded."""
    cases = [
        from_row_lengths(f"s{i}", 6, lengths, seed=i, padding=pad)
        for i, (lengths, pad) in enumerate(
            [([3, 0, 2, 6], 0), ([1, 1, 1, 1], 7), ([0, 6, 4, 0], 1)]
        )
    ]
    arrays = [
        SparseArray.from_arrays(
            jnp.asarray(np.nan_to_num(c.values)), c.row_offsets, c.column_indices, shape=c.shape
        )
        for c in cases
    ]
    return arrays, jax.tree.map(lambda *x: jnp.stack(x), *arrays)


STRUCTURE_OPS = {
    "spmm": lambda A, x, s: spmm(A, x, schedule=s),
    "spmm_transpose": lambda A, x, s: spmm(A, x[:4], transpose=True, schedule=s),
    "gspmm_max": lambda A, x, s: gspmm(A, x, reduce="max", schedule=row_schedule(s)),
    "sddmm": lambda A, x, s: sddmm(A, x[:4], x, schedule=row_schedule(s)).values,
    "sparse_softmax": lambda A, x, s: sparse_softmax(A, schedule=row_schedule(s)).values,
    "row_sum": lambda A, x, s: row_sum(A, schedule=row_schedule(s)),
    "row_max": lambda A, x, s: jnp.maximum(row_max(A, schedule=row_schedule(s)), -9),
}


@pytest.mark.parametrize("name", STRUCTURE_OPS)
def test_vmap_over_the_structure(name, backend):
    f = lambda A, x: STRUCTURE_OPS[name](A, x, backend)
    arrays, stacked = structures()
    xs = normal(len(arrays), 6, 5)
    for axes, x_of in (((0, None), lambda i: xs[0]), ((0, 0), lambda i: xs[i])):
        x = xs[0] if axes[1] is None else xs
        expected = jnp.stack([f(A, x_of(i)) for i, A in enumerate(arrays)])
        close(jax.jit(jax.vmap(f, axes))(stacked, x), expected)
        grads = jax.jit(
            jax.vmap(jax.grad(lambda v, A, x: jnp.sum(jnp.sin(f(A.with_values(v), x)))), (0, *axes))
        )(stacked.values, stacked, x)
        for i, A in enumerate(arrays):
            one = jax.grad(lambda v: jnp.sum(jnp.sin(f(A.with_values(v), x_of(i)))))(A.values)  # noqa: B023
            close(grads[i], one)


def structures_of(format):
    """Three patterns of one shape in this format, each with a capacity for the largest."""
    rng, shape = np.random.default_rng(5), (5, 7)
    arrays = [
        SparseArray.from_dense(rng.standard_normal(shape) * (rng.random(shape) < d), format=format)
        for d in (0.1, 0.6, 0.3)
    ]
    capacity = max(len(A.values) for A in arrays)

    def padded(A):
        beyond = capacity - len(A.values)
        offsets, indices = A.index_arrays[1]
        return SparseArray.from_arrays(
            jnp.pad(A.values, [(0, beyond), *[(0, 0)] * (A.values.ndim - 1)]),
            offsets,
            jnp.pad(indices, (0, beyond)),
            shape=shape,
            format=format,
        )

    arrays = [padded(A) for A in arrays]
    return arrays, jax.tree.map(lambda *x: jnp.stack(x), *arrays)


@pytest.mark.parametrize("format", [CVS(2), BCSR(2, 3), BCSR(3, 2).transposed], ids=str)
def test_vmap_over_patterns_of_vectors_and_blocks(format):
    arrays, stacked = structures_of(format)
    assert len({int(A.index_arrays[1][0][-1]) for A in arrays}) == 3

    def heads(A, Q, K, V):
        P = sparse_softmax(sddmm(A, Q, K), scale=0.5)
        return spmm(P, V), spmm(A, V), spmm(A, Q, transpose=True), row_sum(A)

    Q, K, V = normal(3, 5, 4), normal(3, 7, 4), normal(3, 7, 2)
    total = lambda v, A, *x: sum(jnp.sum(jnp.sin(y)) for y in heads(A.with_values(v), *x))
    both = lambda v, A, *x: (heads(A.with_values(v), *x), jax.grad(total, (0, 2))(v, A, *x))
    got = jax.jit(jax.vmap(both))(stacked.values, stacked, Q, K, V)
    one = jax.jit(both)
    each = [one(A.values, A, Q[i], K[i], V[i]) for i, A in enumerate(arrays)]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *each))
    for i, A in enumerate(arrays):
        close(got[0][1][i], A.todense() @ V[i])


def test_vmap_over_nothing():
    arrays, _ = structures()
    A, x = arrays[0], normal(6, 20)
    none = jnp.zeros((0, *x.shape))
    assert jax.vmap(lambda x: spmm(A, x))(none).shape == (0, 4, 20)
    assert jax.vmap(lambda x: spmm(A, x))(none[:, :, :2]).shape == (0, 4, 2)
    assert jax.vmap(lambda x: sddmm(A, x[:4], x).values)(none).shape == (0, A.nnz)
    assert jax.vmap(lambda x: gspmm(A, x, reduce="max"))(none).shape == (0, 4, 20)
    narrow = SparseArray.from_dense(np.zeros((3, 0)))
    for B, transpose, rows in ((jnp.ones((2, 0, 4)), False, 3), (jnp.ones((2, 3, 4)), True, 0)):
        C = jax.vmap(lambda B, t=transpose: spmm(narrow, B, transpose=t))(B)
        np.testing.assert_array_equal(C, jnp.zeros((2, rows, 4)))
    assert jax.vmap(lambda v: spmm(A.with_values(v), x))(jnp.zeros((0, A.nnz))).shape == (0, 4, 20)
    grads = jax.grad(lambda v: jnp.sum(jax.vmap(lambda x: spmm(A.with_values(v), x))(none)))(
        A.values
    )
    assert grads.shape == A.values.shape and not grads.any()
