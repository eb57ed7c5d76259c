"""Traversal and rewriting of the loops of a statement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from sgap_jax.compiler.notation.cin import Assignment, Body, Forall, Intrinsic, SuchThat, Where
from sgap_jax.compiler.notation.expr import Assign, IndexVar
from sgap_jax.formats.levels import Format


def initial(expression: Assign) -> SuchThat:
    """The loops of an expression before any transformation: one for each of `Assign.indices` in
    order, except that an index of the sparse factor comes after those of outer levels."""
    above: dict[IndexVar, tuple[IndexVar, ...]] = {}
    if (sparse := expression.sparse) is not None and sparse.format is not None:
        levels = level_indices(sparse.format, sparse.indices)
        above = {index: levels[:level] for level, index in enumerate(levels)}
    order: list[IndexVar] = []
    for index in expression.indices:
        order += [i for i in (*above.get(index, ()), index) if i not in order]
    op = expression.reduction if expression.reduced else None
    body: Body = Assignment(expression.output, expression.factors, op)
    for index in reversed(order):
        body = Forall(index, body)
    return SuchThat(body)


def level_indices(format: Format, indices: tuple[IndexVar, ...]) -> tuple[IndexVar, ...]:
    """The index of each level, from the outermost on, without the levels inside a block."""
    return tuple(indices[mode] for mode in format.modes)


def paths(
    body: Body, above: tuple[Forall, ...] = ()
) -> Iterator[tuple[tuple[Forall, ...], Assignment]]:
    """Each assignment, and the loops around it from the outermost on."""
    match body:
        case Assignment():
            yield above, body
        case Forall():
            yield from paths(body.body, (*above, body))
        case Where():
            yield from paths(body.consumer, above)
            yield from paths(body.producer, above)
        case Intrinsic():
            yield from paths(body.body, above)


def loops(body: Body) -> list[Forall]:
    """All loops, each before those inside it."""
    return list(dict.fromkeys(loop for around, _ in paths(body) for loop in around))


def intrinsics(body: Body) -> list[Intrinsic]:
    match body:
        case Forall():
            return intrinsics(body.body)
        case Where():
            return intrinsics(body.consumer) + intrinsics(body.producer)
        case Intrinsic():
            return [body]
    return []


def find(body: Body, var: IndexVar) -> Forall | None:
    return next((loop for loop in loops(body) if loop.var == var), None)


def replace(body: Body, var: IndexVar, change: Callable[[Forall], Body]) -> Body:
    """`body` with the loop of `var` replaced by `change(loop)`."""
    match body:
        case Forall():
            if body.var == var:
                return change(body)
            return dataclasses.replace(body, body=replace(body.body, var, change))
        case Where():
            return Where(replace(body.consumer, var, change), replace(body.producer, var, change))
        case Intrinsic():
            return Intrinsic(body.name, replace(body.body, var, change))
    return body


def chain(loop: Forall) -> tuple[list[Forall], Body]:
    """The loops of the perfect nest that starts at `loop`, and the body of the innermost one."""
    nest: list[Forall] = []
    body: Body = loop
    while isinstance(body, Forall):
        nest.append(body)
        body = body.body
    return nest, body


def perfect(around: tuple[Forall, ...]) -> list[Forall]:
    """The innermost of the loops around an assignment that form a perfect nest: they enclose only
    each other and the assignment."""
    first = len(around)
    while first and isinstance(chain(around[first - 1])[1], Assignment):
        first -= 1
    return list(around[first:])


def wrap(nest: list[Forall] | tuple[Forall, ...], body: Body) -> Body:
    """`body` inside copies of the loops of a nest."""
    for loop in reversed(nest):
        body = dataclasses.replace(loop, body=body)
    return body
