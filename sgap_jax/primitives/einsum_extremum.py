"""The derivative of einsum's maxima and minima: sums over the products that attain them.

All of it is sums and maxima of the same primitive. The set of products that attain is taken from
products that are formed here, in the accumulator's dtype, and not from the primal result: whatever
a compiler rounded differently, each maximum is attained.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.primitives._define import accumulator, derived
from sgap_jax.primitives.einsum_expression import ENTRY, Expression


def tangents_of_extremum(
    bind: Any, primals: Any, tangents: Any, *, expression: Expression, schedule: Any
) -> list:
    """The part of the result's tangent that comes from each factor's; None from none.

    Products that tie share it equally, as in `jnp.max` and `row_max`; where the result is NaN, it
    is NaN. Holds a number for each entry and each index that the sparse operand lacks.
    """
    count = len(expression.factors)
    dtype = primals[0].dtype
    wide = accumulator(dtype)
    factors = [x.astype(wide) for x in primals[:count]]
    stored = (ENTRY, expression.fiber[0], *expression.sparse)
    dense = (index for index, _ in expression.sizes if index not in stored)
    points = "".join([ENTRY, *dense])  # each product
    output, reduction = expression.output, expression.reduction

    def einsum(words: Any, output: str, *given: Any, reduction: str = "+") -> Any:
        e = replace(expression, factors=tuple(words), output=output, reduction=reduction)
        return bind(*given, *primals[count:], expression=e, schedule=derived(schedule))

    products = partial(einsum, expression.factors, points)
    reduced = partial(einsum, (points,), output)
    every = products(*map(jax.lax.stop_gradient, factors))
    best = reduced(every, reduction=reduction)
    spread = einsum((output,), points, best)
    attains = (every == spread) | jnp.isnan(spread)
    ties = jnp.maximum(reduced(attains.astype(wide)), 1)
    shares = jnp.where(jnp.isnan(best), jnp.nan, ties)

    def part(place: int, tangent: Any) -> Any:
        if tangent is None:
            return None
        moved = products(*factors[:place], tangent.astype(wide), *factors[place + 1 :])
        return (reduced(jnp.where(attains, moved, 0)) / shares).astype(dtype)

    return [part(place, tangent) for place, tangent in enumerate(tangents)]
