"""The derivative of einsum's maxima and minima: sums over the products that attain them.

They are sums of the same primitive, in which a product counts where it attains the extremum; the
derivative of that is zero. What is compared is formed twice, in the accumulator's dtype and in one
order of the factors, so that each extremum is attained.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.primitives._define import accumulator, derived
from sgap_jax.primitives.einsum_expression import Expression


def tangents_of_extremum(
    bind: Any, primals: Any, tangents: Any, *, expression: Expression, schedule: Any
) -> list:
    """The part of the result's tangent that comes from each factor's; None from none.

    Products that tie share it equally, as in `jnp.max` and `row_max`; where the result is NaN, it
    is NaN.
    """
    count = len(expression.factors)
    factors, indices = primals[:count], primals[count:]
    dtype = factors[0].dtype
    factors = [x.astype(accumulator(dtype)) for x in factors]
    fixed = list(map(jax.lax.stop_gradient, factors))
    params: dict = dict(schedule=derived(schedule))
    best = bind(*fixed, *indices, expression=expression, **params)
    attaining = replace(
        expression,
        reduction="+",
        attained=(*expression.factors, expression.output),
        extremum=expression.reduction,
    )
    ties = bind(*fixed, best, *indices, expression=replace(attaining, factors=()), **params)
    shares = jnp.where(jnp.isnan(best), jnp.nan, jnp.maximum(ties, 1))

    def part(place: int, tangent: Any) -> Any:
        if tangent is None:
            return None
        moved = (*factors[:place], tangent.astype(shares.dtype), *factors[place + 1 :])
        out = bind(*moved, *fixed, best, *indices, expression=attaining, **params)
        return (out / shares).astype(dtype)

    return [part(place, tangent) for place, tangent in enumerate(tangents)]
