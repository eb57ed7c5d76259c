"""Tiles that may be cut off: where their guard would be within vectors, it is put before these."""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.arithmetic import ZERO, add, both, multiply
from sgap_jax.compiler.cin import Body, Forall, Pos, Split, Where
from sgap_jax.compiler.expr import IndexVar
from sgap_jax.compiler.loopir import CPU_VECTOR, Binary, Expr, Int
from sgap_jax.compiler.ranges import Ranges, Scope
from sgap_jax.compiler.recovery import fits


class Tiles:
    def __init__(self, ranges: Ranges):
        self.ranges, self.relations = ranges, ranges.relations

    def of(self, loop: Forall, scope: Scope) -> tuple[IndexVar, Expr] | None:
        """What a loop opens a tile of, and whether the tile is whole."""
        if scope.masked:
            return None
        for relation in self.relations.all:
            match relation:
                case Split(parent, outer, inner, size) if self._opens(loop, outer, inner, scope):
                    first = self.relations.source(parent)
                    if parent in scope.unguarded or (
                        isinstance(first, Pos) and parent not in scope.ranges
                    ):
                        continue
                    extent = self.ranges.of(parent, scope)
                    base = multiply(self.ranges.value(outer, scope), Int(size))
                    whole: Expr | None = None
                    if extent.low != ZERO:
                        whole = Binary("<=", extent.low, base)
                    if not fits(extent, size):
                        end = Binary("<=", add(base, Int(size)), extent.high)
                        whole = both(whole, end)
                    if whole is not None:
                        return parent, whole
        return None

    def _opens(self, loop: Forall, outer: IndexVar, inner: IndexVar, scope: Scope) -> bool:
        """Whether the tile is known from here on, and its guard would be within a vector loop."""
        if inner in scope.known or self.ranges.try_value(outer, scope) is None:
            return False
        return self.makes({loop.var}, outer) and self.makes(_in_vectors(loop.body), inner)

    def makes(self, loops: set[IndexVar], var: IndexVar) -> bool:
        return bool(self.relations.leaves(var, loops))


def _in_vectors(body: Body, within: bool = False) -> set[IndexVar]:
    """The variables of CPUVector loops, and of the loops inside of these."""
    match body:
        case Forall(var, inside, unit):
            within = within or unit == CPU_VECTOR
            return _in_vectors(inside, within) | ({var} if within else set())
        case Where():
            return _in_vectors(body.consumer, within) | _in_vectors(body.producer, within)
    return set()


def without_vectors(body: Body) -> Body:
    match body:
        case Forall():
            unit = None if body.unit == CPU_VECTOR else body.unit
            return dataclasses.replace(body, unit=unit, body=without_vectors(body.body))
        case Where():
            return Where(without_vectors(body.consumer), without_vectors(body.producer))
    return body
