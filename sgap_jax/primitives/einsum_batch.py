"""einsum under vmap: what loops are of one element of a batch.

A chain of transformations schedules one element, whatever has a batch. Without one that is so where
the stored values have it: the compiler's operands share the structure of the sparse one, and none
has an index beside it. What only dense operands have is one index more of the expression.
"""

from dataclasses import replace

from sgap_jax.primitives.einsum_expression import ENTRY, Expression


def joined(expression: Expression) -> Expression:
    """With no batch but that of stored values, and what stands before that: all that vmap has added
    within are indices like others."""
    stored = {ENTRY, expression.fiber[0]} - {""}
    words = [word for word in (*expression.words, expression.output) if stored & set(word)]
    own = [n for n, index in enumerate(expression.batch) if any(index in word for word in words)]
    return replace(expression, batch=expression.batch[: max(own, default=-1) + 1])


def of_one(expression: Expression) -> Expression:
    """Of one element of the batch."""

    def without(word: str) -> str:
        return "".join(index for index in word if index not in expression.batch)

    return replace(
        expression,
        factors=tuple(map(without, expression.factors)),
        attained=tuple(map(without, expression.attained)),
        output=without(expression.output),
        sizes=tuple(pair for pair in expression.sizes if pair[0] not in expression.batch),
        batch="",
    )
