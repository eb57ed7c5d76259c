"""The product with a dense weight of zeros, which computes nothing but the gradient in that weight:
what `nn.dense_gradients` adds to the product with each sparse weight.

A primitive, and not `jax.custom_vjp`, so that a loss may take forward derivatives of it and run in
`shard_map`; linear in each operand, whose transposes depend on the other one.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from sgap_jax.primitives._define import bind, define, is_linear_operand, joint_batch, out_aval


def zero_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Zeros, as of x weight^T with a weight of zeros: [..., M] of x [..., K] and weight [M, K], in
    the dtype of x. The gradient in the weight is dy^T x, in its dtype."""
    return of_rows(lambda rows: _bind(rows[None], weight[None])[0], x)


def of_rows(product: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """[..., M]: the product [n, M] of the rows [n, K] that x [..., K] has, in one call for all
    leading axes. Where explicit mesh axes split several, which do not become one, it is mapped over
    all of these but the last."""
    axes = range(x.ndim - 1)
    split = [axis for axis in axes if jax.typeof(x).sharding.spec[axis]]
    if split not in ([], [0]):
        order = [*split, *(axis for axis in axes if axis not in split), x.ndim - 1]
        part = partial(of_rows, product)
        y = (jax.vmap(part) if len(split) > 1 else part)(x.transpose(order))
        return y.transpose(np.argsort(order))
    y = product(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
    return y.reshape(*x.shape[:-1], y.shape[-1])


# Operands of the primitive: x [B|1, n, K], weight [B|1, M, K]. Result: [B, n, M].


def _bind(x: Any, weight: Any) -> jax.Array:
    product: jax.Array = bind(zero_product_p, x, weight, schedule=None)
    return product


def _abstract_eval(x: Any, weight: Any, *, schedule: None) -> Any:
    assert x.shape[2] == weight.shape[2]
    batch = joint_batch(x.shape[0], weight.shape[0])
    return out_aval(x, (batch, x.shape[1], weight.shape[1]), x.dtype)


def _reference(x: Any, weight: Any, *, schedule: None) -> jax.Array:
    batch = joint_batch(x.shape[0], weight.shape[0])
    return jnp.zeros((batch, x.shape[1], weight.shape[1]), x.dtype)


def _jvp(primals: Any, tangents: Any, *, schedule: None) -> tuple:
    (x, weight), (dx, dweight) = primals, tangents
    # A tangent of the weight is only ever transposed: nobody asks for its forward derivative.
    return (
        _bind(x, weight),
        None if dx is None else _bind(dx, weight),
        None if dweight is None else _bind(x, dweight),
    )


def _transpose(cotangent: Any, x: Any, weight: Any, *, schedule: None) -> tuple[int, Any]:
    if is_linear_operand(x):
        return 0, _bind(cotangent, jnp.swapaxes(weight, 1, 2))
    x = jnp.broadcast_to(x, (cotangent.shape[0], *x.shape[1:]))
    # Where explicit axes split the rows, JAX wants to be told how the sum over them is split.
    sharding = weight.aval.sharding
    explicit = not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types
    whole = sharding.update(spec=jax.P(None, *sharding.spec[1:])) if explicit else None
    product = jnp.einsum("bnm,bnk->bmk", cotangent, x, out_sharding=whole)
    return 1, product.astype(weight.aval.dtype)


zero_product_p = define(
    "zero_product",
    data=2,
    axes="b n _, b m _ -> b n m",
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=None,
    jvp=_jvp,
    transpose=_transpose,
)
