"""What a traced function is made of."""

import jax


def equations(function, *operands):
    """All equations, those of inner functions after the one that has them."""
    return list(_equations(jax.make_jaxpr(function)(*operands).jaxpr))


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "jaxpr"):
                yield from _equations(inner.jaxpr)
