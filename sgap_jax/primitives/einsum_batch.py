"""einsum under vmap of the stored values: loops for one element of the batch after another.

The compiler's operands share the structure of the sparse one, and none has an index beside it. What
each element computes has such loops, in which threads run, and machine code is made of them once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.primitives._define import accumulator
from sgap_jax.primitives.einsum_expression import ENTRY, Expression


def batch_indices(expression: Expression) -> str:
    """What vmap has put before stored entries, or before fibers, outermost first."""
    found, stored = "", {ENTRY, expression.fiber[0]} - {""}
    for word in (*expression.words, expression.output):
        place = next((n for n, index in enumerate(word) if index in stored), 0)
        found += "".join(index for index in word[:place] if index not in found)
    return found


def of_one(expression: Expression) -> Expression:
    """Of one element of the batch."""
    for index in batch_indices(expression):
        expression = _without(expression, index)
    return expression


def one_by_one(loops: Callable, *operands: Any, expression: Expression) -> jax.Array:
    """`loops`, which takes the operands and the `expression` of one element of the batch, of all.
    Only sums are taken over a batch, in the accumulator's dtype."""
    batch, dtype = batch_indices(expression), operands[0].dtype
    if not set(batch) <= set(expression.output):
        assert expression.reduction == "+"
        count, wide = len(expression.words), accumulator(dtype)
        operands = (*(x.astype(wide) for x in operands[:count]), *operands[count:])
    return _each(loops, batch, operands, expression).astype(dtype)


def _each(loops: Callable, batch: str, operands: Any, expression: Expression) -> jax.Array:
    if not batch:
        return loops(*operands, expression=expression)
    index, inner = batch[0], _without(expression, batch[0])
    places = [n for n, word in enumerate(expression.words) if index in word]
    mapped = [jnp.moveaxis(operands[n], expression.words[n].index(index), 0) for n in places]

    def one(slices: Any) -> jax.Array:
        taken = dict(zip(places, slices, strict=True))
        given = [taken.get(n, x) for n, x in enumerate(operands)]
        return _each(loops, batch[1:], given, inner)

    if index in expression.output:
        return jnp.moveaxis(jax.lax.map(one, mapped), 0, expression.output.index(index))
    zero = jnp.zeros(inner.shape(inner.output), operands[0].dtype)
    return jax.lax.scan(lambda total, slices: (total + one(slices), None), zero, mapped)[0]


def _without(expression: Expression, index: str) -> Expression:
    return replace(
        expression,
        factors=tuple(word.replace(index, "") for word in expression.factors),
        attained=tuple(word.replace(index, "") for word in expression.attained),
        output=expression.output.replace(index, ""),
        sizes=tuple(pair for pair in expression.sizes if pair[0] != index),
    )
