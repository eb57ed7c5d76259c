"""The provenance graph: how the variables of loops derive from those of the expression (Senanayake
et al., section 4.2)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from sgap_jax.compiler.notation import drawing
from sgap_jax.compiler.notation.cin import (
    Assignment,
    Bound,
    Coord,
    Divide,
    Forall,
    Fuse,
    Pos,
    Precompute,
    Relation,
    Split,
    children,
    parents,
)
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The graph of the variables of an expression (`originals`) and all that derive from them.

    `str()` draws it as text, `svg()` as a picture, which notebooks show.
    """

    originals: tuple[IndexVar, ...]
    relations: tuple[Relation, ...]

    @functools.cached_property
    def _origin(self) -> dict[IndexVar, Relation]:
        return {child: relation for relation in self.relations for child in children(relation)}

    @property
    def variables(self) -> tuple[IndexVar, ...]:
        every = (child for relation in self.relations for child in children(relation))
        return (*self.originals, *every)

    def origin(self, var: IndexVar) -> Relation | None:
        """The relation that derived a variable; None for a variable of the expression."""
        return self._origin.get(var)

    def lineage(self, var: IndexVar) -> list[tuple[IndexVar, Relation]]:
        """The derivation of `var`: pairs (variable, relation that derived it) from `var` upwards,
        up to a variable of the expression, or up to a fusion, which is the last pair."""
        line = []
        while (relation := self.origin(var)) is not None:
            line.append((var, relation))
            if isinstance(relation, Fuse):
                break
            var = parents(relation)[0]
        return line

    def roots(self, var: IndexVar) -> tuple[IndexVar, ...]:
        """The variables of the expression from which `var` derives, the outermost first."""
        relation = self.origin(var)
        if relation is None:
            return (var,)
        return tuple(root for parent in parents(relation) for root in self.roots(parent))

    def position(self, var: IndexVar) -> Pos | None:
        """The relation that took a variable to position space; None in coordinate space."""
        for _, relation in self.lineage(var):
            if isinstance(relation, Pos):
                return relation
            if isinstance(relation, Coord):
                return None
        return None

    def by_position(self, var: IndexVar) -> bool:
        """Whether a variable is in position space, or was brought back from it by `coord`."""
        return any(isinstance(relation, Pos | Coord) for _, relation in self.lineage(var))

    def fuses_positions(self, var: IndexVar) -> bool:
        """Whether a side of the fusion that a variable derives from is in position space."""
        line = self.lineage(var)
        if not line or not isinstance(line[-1][1], Fuse):
            return False
        sides = parents(line[-1][1])
        return any(self.position(side) or self.fuses_positions(side) for side in sides)

    def whole(self, var: IndexVar) -> bool:
        """Whether consecutive values of a variable are consecutive coordinates or positions: it is
        not, and does not derive from, the outer part of a split or divide, up to the expression, a
        fusion or a `pos`."""
        for derived, relation in self.lineage(var):
            if isinstance(relation, Split | Divide) and derived == relation.outer:
                return False
            if isinstance(relation, Pos):
                break
        return True

    def constant(self, var: IndexVar) -> int | None:
        """The extent of a variable if the schedule fixes it, else None."""
        relation = self.origin(var)
        match relation:
            case Bound():
                return relation.size
            case Precompute():
                return self.constant(relation.var)
            case Split():
                if var == relation.inner:
                    return relation.size
                whole = self.constant(relation.parent)
                return None if whole is None else -(-whole // relation.size)
            case Divide():
                if var == relation.outer:
                    return relation.parts
                whole = self.constant(relation.parent)
                return None if whole is None else -(-whole // relation.parts)
            case Fuse():
                sides = self.constant(relation.outer), self.constant(relation.inner)
                return None if None in sides else (sides[0] or 0) * (sides[1] or 0)
        return None

    def block(self, var: IndexVar, access: Access) -> str | None:
        """ "outer" or "inner" if `var` is that part of the split of a blocked mode's index by
        exactly the side of the block, or derives from it; else None."""
        sides = block_sides(access)
        while (relation := self.origin(var)) is not None:
            if isinstance(relation, Split) and sides.get(relation.parent) == relation.size:
                return "outer" if var == relation.outer else "inner"
            if isinstance(relation, Fuse):
                parts = {self.block(parent, access) for parent in parents(relation)}
                return "outer" if "outer" in parts else None
            var = parents(relation)[0]
        return None

    @property
    def _positions(self) -> set[IndexVar]:
        return {var for var in self.variables if self.position(var)}

    def __str__(self) -> str:
        return drawing.text(self.originals, self.relations, self._positions)

    def svg(self) -> str:
        """The graph as an SVG picture: relations on the arrows, position variables in blue."""
        return drawing.svg(self.originals, self.relations, self._positions)

    def _repr_svg_(self) -> str:
        return self.svg()


def segment_loops(
    expression: Assign, graph: Provenance, nest: Sequence[Forall], leaf: Assignment
) -> list[Forall]:
    """The loops of a scalar's producer over which the element of the output changes. The scalar is
    then the sum over consecutive positions of one element, and is stored where these end."""
    if leaf.target.indices or leaf.target == expression.output:
        return []
    moving = set(expression.output.indices)
    return [loop for loop in nest if moving & set(graph.roots(loop.var))]


def block_sides(access: Access) -> dict[IndexVar, int]:
    """The side of the trailing block along each index of a blocked mode."""
    format = access.format
    if format is None:
        return {}
    modes = zip(format.modes, format.block_shape, strict=False)
    return {access.indices[mode]: side for mode, side in modes}
