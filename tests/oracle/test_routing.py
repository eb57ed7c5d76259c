"""select.route: rows of tokens in the order of their experts, and what is computed by them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from sgap_jax import BCSR, reference, sddmm, select, spmm

TOKENS, EXPERTS, D, COLUMNS = 23, 5, 6, 4


def choices_of(kind):
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, EXPERTS, (TOKENS, 2))
    if kind == "out of range":
        chosen[::3, 0] = -1
        chosen[1::4, 1] = EXPERTS
        chosen[2] = 2**31 - 1
    elif kind == "one expert":
        chosen[:] = 3
    elif kind == "none":
        chosen[:] = -7
    elif kind == "uneven":
        chosen = np.minimum(rng.geometric(0.7, (TOKENS, 2)) - 1, EXPERTS - 1)
    return chosen.astype(np.int32)


KINDS = ["random", "out of range", "one expert", "none", "uneven"]


@partial(jax.jit, static_argnames=("experts", "block", "capacity"))
def routed(chosen, *, experts=EXPERTS, block=4, capacity=None):
    return select.route(chosen, experts, block=block, capacity=capacity)


def same(routing, chosen, block, capacity):
    """Every array is that of plain loops, and the structures pass the checks of concrete ones."""
    rows, starts, dropped = reference.route(chosen, EXPERTS, block, capacity)
    assert routing.dispatch.shape[0] % block == 0 and routing.dispatch.shape[0] >= len(rows)
    np.testing.assert_array_equal(routing.starts, starts)
    assert routing.dropped == dropped
    per_token = chosen.size // max(len(chosen), 1)
    dispatch = np.zeros(routing.dispatch.shape)
    kept = [(r, p) for r, p in enumerate(rows) if p >= 0]
    for r, p in kept:
        dispatch[r, p // per_token] = 1
    np.testing.assert_array_equal(routing.dispatch.todense(), dispatch)
    np.testing.assert_array_equal(routing.assignment[: len(kept)], [p for _, p in kept])
    np.testing.assert_array_equal(
        np.diff(routing.offsets),
        [sum(chosen.flat[p] == e for _, p in kept) for e in range(EXPERTS)],
    )
    assert routing.dispatch.is_checked and routing.dispatch.checked() is routing.dispatch
    for width in (1, 2):
        topology = routing.topology(COLUMNS, width=width)
        assert topology.format == BCSR(block, width) and topology.checked() is topology
        expected = np.zeros((routing.dispatch.shape[0], EXPERTS * COLUMNS))
        for e in range(EXPERTS):
            expected[starts[e] : starts[e + 1], e * COLUMNS : (e + 1) * COLUMNS] = 1
        np.testing.assert_array_equal(topology.todense(), expected)


@pytest.mark.parametrize("block", [4, 1])
@pytest.mark.parametrize("capacity", [None, 5, 0, 100])
def test_rows_and_blocks(block, capacity):
    for kind in KINDS:
        chosen = choices_of(kind)
        same(routed(chosen, block=block, capacity=capacity), chosen, block, capacity)


def test_one_expert_per_token_and_few_tokens():
    chosen = choices_of("random")[:, 0]
    same(routed(chosen), chosen, 4, None)
    # No more experts have tokens than there are choices.
    few = routed(chosen[:2], experts=EXPERTS, block=8)
    assert few.dispatch.shape == (16, 2)
    same(few, chosen[:2], 8, None)
    same(routed(chosen[:0]), chosen[:0], 4, None)
    wide = jax.jit(lambda x: select.route(x, EXPERTS, block=4).offsets)
    with jax.enable_x64():
        np.testing.assert_array_equal(wide(np.array([2**32 + 1, 1, -(2**40)])), [0, 0, 1, 1, 1, 1])


def tensors(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def experts_apply(x, weights, W1, W2, chosen, capacity=None):
    routing = select.route(chosen, EXPERTS, block=4, capacity=capacity)
    hidden = sddmm(routing.topology(COLUMNS), routing.gather(x), W1.reshape(-1, D))
    y = spmm(hidden.with_values(jnp.tanh(hidden.values)), W2.reshape(-1, D))
    return routing.combine(y, weights)


def loop_over_experts(x, weights, W1, W2, chosen, kept):
    out = jnp.zeros_like(x)
    for e in range(EXPERTS):
        own = jnp.sum(jnp.where((chosen == e) & kept, weights, 0), axis=1, keepdims=True)
        out += own * (jnp.tanh(x @ W1[e].T) @ W2[e])
    return out


@pytest.mark.parametrize("capacity", [None, 6])
def test_a_layer_is_a_loop_over_experts(capacity):
    shapes = (TOKENS, D), (TOKENS, 2), (EXPERTS, COLUMNS, D), (EXPERTS, COLUMNS, D)
    given = tensors(*shapes)
    ours = jax.jit(
        jax.value_and_grad(lambda *a: jnp.sum(experts_apply(*a, capacity) ** 2), (0, 1, 2, 3))
    )
    loop = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(loop_over_experts(*a) ** 2), (0, 1, 2, 3)))
    for kind in KINDS:
        chosen = choices_of(kind)
        rows, *_ = reference.route(chosen, EXPERTS, 4, capacity)
        kept = np.isin(np.arange(chosen.size), rows).reshape(chosen.shape)
        found, right = ours(*given, chosen), loop(*given, chosen, kept)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, right)


def test_derivatives_and_batches():
    shapes = (TOKENS, D), (TOKENS, 2), (EXPERTS, COLUMNS, D), (EXPERTS, COLUMNS, D)
    x, weights, W1, W2 = tensors(*shapes, dtype=jnp.float64)
    chosen = choices_of("out of range")
    apply = jax.jit(lambda *a: experts_apply(*a, chosen))
    check_grads(apply, (x, weights, W1, W2), order=2, atol=1e-5, rtol=1e-5)
    stack = jnp.stack([choices_of(kind) for kind in KINDS])
    batch = jax.jit(jax.vmap(experts_apply, (None, None, None, None, 0)))(x, weights, W1, W2, stack)
    one = jax.jit(experts_apply)
    for out, of in zip(batch, stack, strict=True):
        np.testing.assert_allclose(out, one(x, weights, W1, W2, of), rtol=1e-4, atol=1e-5)


def test_gather_and_combine():
    x, y = tensors((TOKENS, D), (TOKENS * 2 + EXPERTS * 3, D))
    chosen = choices_of("out of range")
    routing = routed(chosen)
    rows, *_ = reference.route(chosen, EXPERTS, 4)
    y = y[: routing.dispatch.shape[0]]
    gathered, combined = np.zeros(y.shape, np.float32), np.zeros(x.shape)
    for r, p in enumerate(rows):
        if p >= 0:
            gathered[r] = x[p // 2]
            combined[p // 2] += np.asarray(y[r])
    np.testing.assert_array_equal(routing.gather(x), gathered)
    np.testing.assert_allclose(routing.combine(y), combined, rtol=1e-5, atol=1e-6)
    assert routing.gather(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    # NaN in one token stays in its rows.
    spoilt = np.asarray(routing.gather(x.at[0].set(jnp.nan)))
    own = [r for r, p in enumerate(rows) if p >= 0 and p // 2 == 0]
    assert np.isnan(spoilt[own]).all() and np.isfinite(np.delete(spoilt, own, 0)).all()


def test_nothing_is_sorted_by_comparing():
    given = tensors((TOKENS, D), (TOKENS, 2), (EXPERTS, COLUMNS, D), (EXPERTS, COLUMNS, D))
    loss = jax.grad(lambda *a: jnp.sum(experts_apply(*a, capacity=3)))
    text = jax.jit(loss).lower(*given, choices_of("random")).as_text()
    assert "sgap_transpose_structure_v1" in text and "stablehlo.sort" not in text


def test_errors():
    chosen = jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(TypeError, match="select.route: expert_of_token must be integers, got"):
        select.route(chosen.astype(jnp.float32), 3)
    with pytest.raises(
        ValueError, match=r"shape \[tokens\] or \[tokens, choices\], got \[1, 4, 2\]"
    ):
        select.route(chosen[None], 3)
    with pytest.raises(ValueError, match="experts must be at least 1, got 0"):
        select.route(chosen, 0)
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        select.route(chosen, 3, block=0)
    with pytest.raises(ValueError, match="capacity must not be negative, got -1"):
        select.route(chosen, 3, capacity=-1)
    with pytest.raises(TypeError, match="experts must be an integer, got 2.5"):
        select.route(chosen, 2.5)
    with pytest.raises(ValueError, match="experts: expected a concrete value"):
        jax.jit(select.route)(chosen, 3)
    routing = select.route(chosen, 3, block=4)
    with pytest.raises(ValueError, match="width must divide 6 columns, got 4"):
        routing.topology(6, width=4)
    with pytest.raises(ValueError, match=r"weights must have shape \[4, 2\], got \[4\]"):
        routing.combine(jnp.zeros((routing.dispatch.shape[0], 3)), jnp.ones(4))
    with pytest.raises(ValueError, match="spmm: B must have shape"):
        routing.gather(jnp.zeros((5, 3)))
