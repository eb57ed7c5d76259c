"""Tiles that may be cut off: where their guard would be within vectors, it is put before these."""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.loop_ir.arithmetic import (
    ZERO,
    add,
    both,
    greatest,
    least,
    multiply,
    subtract,
)
from sgap_jax.compiler.loop_ir.loopir import CPU_VECTOR, Binary, Expr, Int
from sgap_jax.compiler.lowering.derived_variables import fits
from sgap_jax.compiler.lowering.output_loops import Movement
from sgap_jax.compiler.lowering.ranges import Range, Ranges, Scope
from sgap_jax.compiler.notation.cin import Body, Forall, Pos, Precompute, Split, Where
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.compiler.notation.nest import loops


class Tiles:
    def __init__(self, ranges: Ranges, movement: Movement):
        self.ranges, self.relations, self.movement = ranges, ranges.relations, movement

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

    def trim(self, body: Body, parent: IndexVar, scope: Scope) -> bool:
        """Loops over the inside of a cut tile end where it ends, in this scope. Not where that must
        be known, or is tiled once more."""
        split = next(r for r in self.relations.all if isinstance(r, Split) and r.parent == parent)
        inside = [loop for loop in loops(body) if self.makes({loop.var}, split.inner)]
        if any(loop.unroll or not self.whole(split.inner, loop.var) for loop in inside):
            return False
        extent = self.ranges.of(parent, scope)
        base = multiply(self.ranges.value(split.outer, scope), Int(split.size))
        low = ZERO if extent.low == ZERO else greatest(subtract(extent.low, base), ZERO)
        high = least(subtract(extent.high, base), Int(split.size))
        scope.ranges[split.inner] = Range(low, high)
        scope.unguarded |= {parent}
        return True

    def whole(self, var: IndexVar, loop: IndexVar) -> bool:
        """Whether a loop goes over all of a variable."""
        while loop != var:
            match self.relations.source(loop):
                case Precompute(parent):
                    loop = parent
                case _:
                    return False
        return True

    def _opens(self, loop: Forall, outer: IndexVar, inner: IndexVar, scope: Scope) -> bool:
        """Whether the tile is known from here on, and its guard would be within a vector loop."""
        if inner in scope.known or self.ranges.try_value(outer, scope) is None:
            return False
        return self.makes({loop.var}, outer) and self.makes(self._in_vectors(loop.body), inner)

    def makes(self, loops: set[IndexVar], var: IndexVar) -> bool:
        return bool(self.relations.leaves(var, loops))

    def _in_vectors(self, body: Body, within: bool = False) -> set[IndexVar]:
        """The variables of CPUVector loops, and of the loops inside of these. Those over a run end
        where it ends."""
        match body:
            case Forall(var, inside, unit):
                within = within or unit == CPU_VECTOR and not self.movement.run_steps(body)
                return self._in_vectors(inside, within) | ({var} if within else set())
            case Where():
                parts = (body.consumer, body.producer)
                return {var for part in parts for var in self._in_vectors(part, within)}
        return set()


def without_vectors(body: Body) -> Body:
    match body:
        case Forall():
            unit = None if body.unit == CPU_VECTOR else body.unit
            return dataclasses.replace(body, unit=unit, body=without_vectors(body.body))
        case Where():
            return Where(without_vectors(body.consumer), without_vectors(body.producer))
    return body
