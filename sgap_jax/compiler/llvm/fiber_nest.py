"""Nests over the fibers of a sparse operand, and the one loop that does the same: its pattern.

Fibers of a few entries cost a mispredicted branch each. A nest that only sums up may instead run
over the positions of the last level, through all fibers in a row, if the coordinates above each
position are listed beforehand. What a fiber sums up first is distributed over its entries:
s += w * x, with w the sum of t over the fiber, becomes s += t * x for each t.

All here is from loop IR to loop IR; flatten_fibers.py writes it in LLVM IR.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sgap_jax.compiler.loop_ir.arithmetic import ONE, ZERO, add, least, names_in
from sgap_jax.compiler.loop_ir.loopir import (
    Binary,
    Comment,
    Expr,
    Float,
    For,
    If,
    Let,
    Load,
    Set,
    Stmt,
    Var,
)
from sgap_jax.compiler.loop_ir.patterns import parts, replaced

_Lets = dict[str, Expr]

ORIGIN = "listed from"  # the scalar that names the position of the lists' first elements


@dataclasses.dataclass(frozen=True)
class Level:
    """A level of the operand above the last.

    Attributes:
      var: the variable of its positions.
      scalar: the coordinate at a position, if the body reads it; `coordinates` is its array.
      children: the position at which the next level begins.
    """

    var: str
    scalar: str | None
    coordinates: str
    children: Expr


@dataclasses.dataclass(frozen=True)
class FiberNest:
    """A loop over segments (rows, or slices) whose fibers follow each other.

    Attributes:
      loop: that loop, with the nest over a segment flattened, which reads the lists.
      levels: those above the last, outermost first.
      begin, end: positions of the first of them, of all segments together.
      any_segment: whether there is one; `begin` and `end` may only be evaluated where it holds.
    """

    loop: For
    levels: tuple[Level, ...]
    begin: Expr
    end: Expr
    any_segment: Expr

    def below(self, place: Expr, levels: int) -> Expr:
        """Where, `levels` levels down, what is below a position of the first level begins."""
        for level in self.levels[:levels]:
            place = replaced(level.children, Var(level.var), place)
        return place


def list_name(scalar: str) -> str:
    return f"{scalar} of positions"


def fiber_nest(loop: For) -> FiberNest | None:
    """None where no loop over lanes in the body has such a nest of two levels or more."""
    found = _in_body(loop.body, {}, lanes=False)
    if found is None or loop.step != 1:
        return None
    segment, base = _counted(found.lets, loop.var)
    lets = {name: value for name, value in found.lets.items() if name != segment}
    begin, end = _resolved(found.begin, lets), _resolved(found.end, lets)
    at, changing = Var(segment), _changing(loop.var, found.lets)
    # Each segment begins where the one before it ends.
    adjoining = begin != end == replaced(begin, at, add(at, ONE))
    if not adjoining or names_in(begin) & (changing - {segment}):
        return None
    first, last = add(base, loop.begin), add(base, loop.end)
    if found.limit is not None:
        if found.limit.left != at or names_in(found.limit.right) & changing:
            return None
        last = least(last, found.limit.right)
    return FiberNest(
        dataclasses.replace(loop, body=found.body),
        found.levels,
        replaced(begin, at, first),
        replaced(begin, at, last),
        Binary("<", first, last),
    )


def _counted(lets: _Lets, var: str) -> tuple[str, Expr]:
    """The scalar that grows with a loop's variable, and what it is where that is 0."""
    for name, value in lets.items():
        match value:
            case Binary("+", base, Var(same)) if same == var and var not in names_in(base):
                return name, base
    return var, ZERO


@dataclasses.dataclass(frozen=True)
class _Flattened:
    """A body in which a nest is flattened: what the nest ran over, with the scalars around it, and
    the condition of the branch around it."""

    body: tuple[Stmt, ...]
    levels: tuple[Level, ...]
    begin: Expr
    end: Expr
    lets: _Lets
    limit: Binary | None = None


def _in_body(body: Sequence[Stmt], around: _Lets, lanes: bool) -> _Flattened | None:
    """Flattens the first nest in a loop over lanes; `lanes`: `body` is in one."""
    lets = dict(around)
    for n, statement in enumerate(body):
        found, new = None, statement
        match statement:
            case Let(name, value, mutable=False):
                lets[name] = value
                continue
            case If(Binary("<") as limit, then, ()) if not lanes:
                found = _in_body(then, lets, lanes)
                if found is None or found.limit is not None:
                    return None
                new = dataclasses.replace(statement, then=found.body)
                found = dataclasses.replace(found, limit=limit)
            case For(unit="CPUVector") if not lanes:
                found = _in_body(statement.body, lets, lanes=True)
                if found is None:
                    continue
                new = dataclasses.replace(statement, body=found.body)
            case For() if lanes:
                loop, levels = _flattened(statement) or (statement, ())
                if levels:
                    found = _Flattened((), levels, statement.begin, statement.end, lets)
                    new = dataclasses.replace(loop, body=(*_listed(loop, levels), *loop.body))
            case Let() | Comment():
                continue
        if found is None:
            return None
        return dataclasses.replace(found, body=(*body[:n], new, *body[n + 1 :]))
    return None


def _listed(loop: For, levels: Sequence[Level]) -> tuple[Let, ...]:
    """The coordinates above a position of the flattened loop, from the lists."""
    at = Binary("-", Var(loop.var), Var(ORIGIN))
    return tuple(
        Let(level.scalar, Load(list_name(level.scalar), at))
        for level in levels
        if level.scalar is not None
    )


def _flattened(nest: For) -> tuple[For, tuple[Level, ...]] | None:
    """The loop over the positions of the last level, and the levels above it. None where the fibers
    do not follow each other, or the nest does more than to sum up."""
    inner = [s for s in nest.body if isinstance(s, For)]
    if nest.unit is not None or nest.step != 1 or len(inner) > 1:
        return None
    if not inner:
        simple = all(_is_constant(s) or isinstance(s, Set | Comment) for s in nest.body)
        return (nest, ()) if simple else None
    found = _flattened(inner[0])
    place = nest.body.index(inner[0])
    before, after = nest.body[:place], nest.body[place + 1 :]
    if found is None or not all(isinstance(s, Let) for s in before):
        return None
    loop, levels = found
    lets = {s.name: s.value for s in before if isinstance(s, Let) and not s.mutable}
    begin, end, children = (_resolved(x, lets) for x in (loop.begin, loop.end, inner[0].begin))
    at = Var(nest.var)
    body = _distributed(loop.body, before, after)
    if body is None or begin == end or end != replaced(begin, at, add(at, ONE)):
        return None
    used = {part.name for part in parts(body) if isinstance(part, Var)}
    needed = [name for name in lets if name in used]
    if len(needed) > 1 or nest.var in used:  # a list has one coordinate of each level
        return None
    level = Level(nest.var, None, "", children)
    for name in needed:
        match lets[name]:
            case Load(array, index) if index == at:
                level = Level(nest.var, name, array, children)
            case _:
                return None
    first, last = (replaced(begin, at, place) for place in (nest.begin, nest.end))
    return For(loop.var, first, last, body), (level, *levels)


def _distributed(
    body: Sequence[Stmt], before: Sequence[Stmt], after: Sequence[Stmt]
) -> tuple[Stmt, ...] | None:
    """The body of a loop over a fiber, with what is done `after` it with its sums done with each of
    their terms; the sums are mutable scalars of `before`. None where that is not the same."""
    sums = {s.name: s.value for s in before if isinstance(s, Let) and s.mutable}
    new: dict[str, Set] = {}
    for statement in after:
        match statement:
            case Set(name, Binary("+", Var(same), product)) if name == same:
                taken = [part.name for part in parts(product) if isinstance(part, Var)]
                own = [part for part in taken if part in sums]
                if len(own) != 1 or own[0] in new or not _multiplies(product, own[0]):
                    return None
                new[own[0]] = statement
            case _:
                return None
    if set(new) != set(sums) or any(value != Float(0.0) for value in sums.values()):
        return None
    found: list[Stmt] = []
    for statement in body:
        match statement:
            case Set(name, Binary("+", Var(same), term)) if name == same and name in new:
                outer = new[name]
                assert isinstance(outer.value, Binary)
                product = replaced(outer.value.right, Var(name), term)
                found.append(Set(outer.name, Binary("+", Var(outer.name), product)))
            case Set(name) if name in new:
                return None
            case _:
                found.append(statement)
    return tuple(found)


def _multiplies(product: Expr, name: str) -> bool:
    """Whether a scalar is a factor of a product."""
    match product:
        case Var(same):
            return same == name
        case Binary("*", left, right):
            return _multiplies(left, name) or _multiplies(right, name)
    return False


def _is_constant(statement: Stmt) -> bool:
    return isinstance(statement, Let) and not statement.mutable


def _resolved(expr: Expr, lets: _Lets) -> Expr:
    """An expression with the values of scalars in their place."""
    for name, value in reversed(lets.items()):
        expr = replaced(expr, Var(name), value)
    return expr


def _changing(var: str, lets: _Lets) -> set[str]:
    """The variable of a loop and the scalars that change with it."""
    found = {var}
    for name, value in lets.items():
        if names_in(value) & found:
            found.add(name)
    return found
