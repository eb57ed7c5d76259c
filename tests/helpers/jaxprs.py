"""The equations of a traced function."""

import jax


def equations(function, *operands):
    """All equations of a function; those of an inner function follow the equation that contains
    it."""
    return list(_equations(jax.make_jaxpr(function)(*operands).jaxpr))


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "jaxpr"):
                yield from _equations(inner.jaxpr)
