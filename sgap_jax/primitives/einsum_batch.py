"""einsum under vmap: what loops are of one element of a batch.

A chain of transformations schedules one element, whatever has a batch. Without one that is so where
the stored values have it: the compiler's operands share the structure of the sparse one, and none
has an index beside it. What only dense operands have is so too where the output has it, and several
numbers of each element for an entry; else it is one index more of the expression.
"""

import math
from dataclasses import replace

from jax import export

from sgap_jax.primitives.einsum_expression import ENTRY, Expression

# Numbers of one element for an entry from which the loops of one element are the quicker ones. With
# one index more an entry's coordinates are read once for all elements, and rows of all are gathered
# at each. Measured on one thread (Zen 5, MTTKRP and TTM, 40,000 entries in short fibers): with 32
# numbers the loops of one take 0.75x of the time in batches of 8 and 0.3x of 64, with 8 they take
# 0.8x to 1.0x, with 4 up to 1.4x, with one up to 2.7x.
_WIDE = 8


def joined(expression: Expression) -> Expression:
    """With no batch but that of stored values, or of wide outputs, and what stands before that: all
    that vmap has added within are indices like others."""
    stored = {ENTRY, expression.fiber[0]} - {""}
    words = [word for word in (*expression.words, expression.output) if stored & set(word)]
    sizes = dict(expression.sizes)
    kept = set(expression.output) - {*expression.sparse, *expression.batch, *stored}
    numbers = [sizes[index] for index in kept]
    if not any(map(export.is_symbolic_dim, numbers)) and math.prod(numbers) >= _WIDE:
        words.append(expression.output)
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
