"""Iteration spaces as set expressions: which coordinates of an index a sum of products needs
(Senanayake et al., OOPSLA 2020, section 3; Kjolstad et al., OOPSLA 2017, section 5).

A product needs the intersection of the coordinates that its factors store, a sum the union over its
terms. A factor whose level is Dense, or that lacks the index, has all of the dimension:

    A(i,j) * B(i,j)           in CSR, over j:    A ∩ B
    A(i,j) + B(i,j) * x(j)    in CSR, over j:    A ∪ B
    y(j) + A(i,j)             in CSR, over j:    all ∪ A
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar, Term
from sgap_jax.formats.levels import Dense

MOST_POINTS = 128  # a union of seven operands; each point has a loop

Part = frozenset[Access]  # the intersection of what these store; none of them: all coordinates


@dataclasses.dataclass(frozen=True)
class Space:
    """The union of `parts`, one for each term."""

    parts: tuple[Part, ...]

    @property
    def whole(self) -> bool:
        """Whether a term needs all coordinates of the dimension."""
        return frozenset() in self.parts

    @property
    def operands(self) -> Part:
        """The operands whose coordinates are merged."""
        return frozenset().union(*self.parts)

    def points(self) -> list[Part]:
        """The merge lattice: what may be left when some operands have no coordinates any more, from
        all operands on. Each point is a union of parts, and comes before those it contains.

        Raises NotImplementedError where there are more than MOST_POINTS."""
        found: dict[Part, None] = dict.fromkeys(part for part in self.parts if not part)
        for part in dict.fromkeys(self.parts):
            found |= dict.fromkeys([part, *(part | other for other in found)])
            if len(found) > MOST_POINTS:
                raise NotImplementedError(
                    f"{self}: a lattice of more than {MOST_POINTS} points; add up fewer at once"
                )
        return sorted(found, key=lambda p: (-len(p), sorted(x.tensor for x in p)))

    def __str__(self) -> str:
        words = [" ∩ ".join(sorted(x.tensor for x in part)) or "all" for part in self.parts]
        return " ∪ ".join(dict.fromkeys(words))


def space_of(terms: Sequence[Term], index: IndexVar) -> Space:
    """The coordinates of an index that some terms need."""
    return Space(tuple(part_of(term, index) for term in terms))


def part_of(term: Term, index: IndexVar) -> Part:
    """The factors of a term that store coordinates of an index."""
    factors = (x for x in term.factors if isinstance(x, Access))
    return frozenset(x for x in factors if stores(x, index))


def stores(access: Access, index: IndexVar) -> bool:
    """Whether an operand stores its coordinates of an index, rather than having all of them."""
    if access.format is None or index not in access.indices:
        return False
    mode = access.indices.index(index)
    return access.format.levels[access.format.modes.index(mode)] != Dense()


def stored_indices(expression: Assign) -> tuple[IndexVar, ...]:
    """The indices of which coordinates are merged."""
    return tuple(
        index for index in expression.indices if any(stores(x, index) for x in expression.merged)
    )


def is_stored_whole(expression: Assign) -> bool:
    """Whether loops over the output's indices come to all of its elements: one term needs all."""
    outputs = expression.output.indices
    return any(not any(part_of(t, i) for i in outputs) for t in expression.products)


def in_order(indices: Sequence[IndexVar], operands: Sequence[Access]) -> list[IndexVar] | None:
    """The indices in their order, but each after those of the levels above it in every operand;
    None where operands disagree."""
    above: dict[IndexVar, set[IndexVar]] = {index: set() for index in indices}
    for access in operands:
        if access.format is not None:
            levels = [access.indices[mode] for mode in access.format.modes]
            for upper, lower in itertools.pairwise(levels):
                above[lower].add(upper)
    order: list[IndexVar] = []
    while len(order) < len(above):
        ready = [i for i in above if i not in order and above[i] <= set(order)]
        if not ready:
            return None
        order.append(ready[0])
    return order
