"""Loops over the levels of a sparse operand as one loop over the positions of the last.

Fibers of a few entries cost a mispredicted branch each. A nest that only sums up may run over the
positions of all its fibers instead, if the coordinates above an entry are listed beforehand, one
for each position. What a fiber sums up first is distributed: s += w * x, with w the sum of t over
the fiber, becomes s += t * x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sgap_jax.compiler.loop_ir.arithmetic import ONE, ZERO, add, least
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

Lets = dict[str, Expr]

ORIGIN = "listed from"  # a scalar: the position of the first element of the lists


@dataclasses.dataclass(frozen=True)
class Parent:
    """A level above the last: the variable of its positions, what the body needs of them (a scalar
    and the array of its coordinates), and the position at which the next level begins."""

    var: str
    scalar: str | None
    coordinates: str
    children: Expr


@dataclasses.dataclass(frozen=True)
class Listed:
    """A loop over segments that follow each other, with the nest that walks a segment flat.

    Attributes:
      loop: that loop.
      parents: the levels above the last of that nest, outermost first.
      begin, end: positions of the first of them, of all segments together.
      some: whether there is a segment; the others may only be evaluated where it holds.
    """

    loop: For
    parents: tuple[Parent, ...]
    begin: Expr
    end: Expr
    some: Expr

    def below(self, place: Expr, levels: int) -> Expr:
        """Where what is under a position begins, so many levels down."""
        for parent in self.parents[:levels]:
            place = replaced(parent.children, Var(parent.var), place)
        return place


def list_name(scalar: str) -> str:
    return f"{scalar} of positions"


def listed(loop: For) -> Listed | None:
    """None where there is no such nest in the lanes of a loop, or it is not of several levels."""
    found = _in_lanes(loop.body, {}, lanes=False)
    if found is None or loop.step != 1:
        return None
    number, base = _counted(found.lets, loop.var)
    lets = {name: value for name, value in found.lets.items() if name != number}
    begin, end = _resolved(found.begin, lets), _resolved(found.end, lets)
    segment, moving = Var(number), _moving(loop.var, found.lets)
    follow = begin != end == replaced(begin, segment, add(segment, ONE))
    if not follow or _names(begin) & (moving - {number}):
        return None
    first, last = add(base, loop.begin), add(base, loop.end)
    if found.limit is not None:
        if found.limit.left != segment or _names(found.limit.right) & moving:
            return None
        last = least(last, found.limit.right)
    return Listed(
        dataclasses.replace(loop, body=found.body),
        found.parents,
        replaced(begin, segment, first),
        replaced(begin, segment, last),
        Binary("<", first, last),
    )


def _counted(lets: Lets, var: str) -> tuple[str, Expr]:
    """The scalar that a loop's variable counts up, and what it starts from."""
    for name, value in lets.items():
        match value:
            case Binary("+", base, Var(same)) if same == var and var not in _names(base):
                return name, base
    return var, ZERO


@dataclasses.dataclass(frozen=True)
class _Found:
    """A body with its nest flat; what the nest ran over; the scalars and the guard around it."""

    body: tuple[Stmt, ...]
    parents: tuple[Parent, ...]
    begin: Expr
    end: Expr
    lets: Lets
    limit: Binary | None = None


def _in_lanes(body: Sequence[Stmt], around: Lets, lanes: bool) -> _Found | None:
    lets = dict(around)
    for n, statement in enumerate(body):
        found, new = None, statement
        match statement:
            case Let(name, value, mutable=False):
                lets[name] = value
                continue
            case If(Binary("<") as limit, then, ()) if not lanes:
                found = _in_lanes(then, lets, lanes)
                if found is None or found.limit is not None:
                    return None
                new = dataclasses.replace(statement, then=found.body)
                found = dataclasses.replace(found, limit=limit)
            case For(unit="CPUVector") if not lanes:
                found = _in_lanes(statement.body, lets, lanes=True)
                if found is None:
                    continue
                new = dataclasses.replace(statement, body=found.body)
            case For() if lanes:
                run, parents = _flat(statement) or (statement, ())
                if parents:
                    found = _Found((), parents, statement.begin, statement.end, lets)
                    new = dataclasses.replace(run, body=(*_from_lists(run, parents), *run.body))
            case Let() | Comment():
                continue
        if found is None:
            return None
        return dataclasses.replace(found, body=(*body[:n], new, *body[n + 1 :]))
    return None


def _from_lists(run: For, parents: Sequence[Parent]) -> tuple[Let, ...]:
    at = Binary("-", Var(run.var), Var(ORIGIN))
    return tuple(
        Let(parent.scalar, Load(list_name(parent.scalar), at))
        for parent in parents
        if parent.scalar is not None
    )


def _flat(nest: For) -> tuple[For, tuple[Parent, ...]] | None:
    """The loop over the positions of the last level, and the levels above it."""
    inner = [s for s in nest.body if isinstance(s, For)]
    if nest.unit is not None or nest.step != 1 or len(inner) > 1:
        return None
    if not inner:
        simple = all(_constant(s) or isinstance(s, Set | Comment) for s in nest.body)
        return (nest, ()) if simple else None
    found = _flat(inner[0])
    place = nest.body.index(inner[0])
    before, after = nest.body[:place], nest.body[place + 1 :]
    if found is None or not all(isinstance(s, Let) for s in before):
        return None
    run, parents = found
    lets = {s.name: s.value for s in before if isinstance(s, Let) and not s.mutable}
    begin, end, children = (_resolved(x, lets) for x in (run.begin, run.end, inner[0].begin))
    at = Var(nest.var)
    body = _distributed(run.body, before, after)
    if body is None or begin == end or end != replaced(begin, at, add(at, ONE)):
        return None
    used = {part.name for part in parts(body) if isinstance(part, Var)}
    needed = [name for name in lets if name in used]
    if len(needed) > 1 or nest.var in used:
        return None
    parent = Parent(nest.var, None, "", children)
    for name in needed:
        match lets[name]:
            case Load(array, index) if index == at:
                parent = Parent(nest.var, name, array, children)
            case _:
                return None
    first, last = (replaced(begin, at, place) for place in (nest.begin, nest.end))
    return For(run.var, first, last, body), (parent, *parents)


def _distributed(
    body: Sequence[Stmt], before: Sequence[Stmt], after: Sequence[Stmt]
) -> tuple[Stmt, ...] | None:
    """The body with what was done with its sums done with each of their terms."""
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


def _constant(statement: Stmt) -> bool:
    return isinstance(statement, Let) and not statement.mutable


def _resolved(expr: Expr, lets: Lets) -> Expr:
    for name, value in reversed(lets.items()):
        expr = replaced(expr, Var(name), value)
    return expr


def _names(expr: Expr) -> set[str]:
    return {part.name for part in parts(expr) if isinstance(part, Var)}


def _moving(var: str, lets: Lets) -> set[str]:
    """The variable of a loop and the scalars that change with it."""
    found = {var}
    for name, value in lets.items():
        if _names(value) & found:
            found.add(name)
    return found
