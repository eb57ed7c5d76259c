"""Traversal and rewriting of the loops of a statement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sgap_jax.compiler.notation.cin import (
    Assignment,
    Body,
    Coord,
    Forall,
    Intrinsic,
    Pos,
    Relation,
    SuchThat,
    Where,
)
from sgap_jax.compiler.notation.expr import Access, Assign, Factor, IndexVar, Term, written
from sgap_jax.compiler.notation.spaces import in_order
from sgap_jax.formats.levels import Format
from sgap_jax.schedules.schedule import ScheduleError


def mentioned(relation: Relation) -> list[object]:
    """The variables of a relation, with its other fields."""
    return [getattr(relation, field.name) for field in dataclasses.fields(relation)]


def with_variable(body: Body, old: IndexVar, new: IndexVar) -> Body:
    """The body with another variable, in loops and in accesses."""

    def of(access: Any) -> Any:
        if old not in access.indices:
            return access
        indices = tuple(new if index == old else index for index in access.indices)
        return dataclasses.replace(access, indices=indices)

    match body:
        case Assignment():
            terms = tuple(Term(tuple(map(of, t.factors)), t.negative) for t in body.terms)
            factors = tuple(map(of, body.factors))
            return dataclasses.replace(body, target=of(body.target), factors=factors, terms=terms)
        case Forall():
            var = new if body.var == old else body.var
            return dataclasses.replace(body, var=var, body=with_variable(body.body, old, new))
        case Where(consumer, producer):
            return Where(with_variable(consumer, old, new), with_variable(producer, old, new))
    return dataclasses.replace(body, body=with_variable(body.body, old, new))


def over_variable(relation: Relation, old: IndexVar, new: IndexVar) -> Relation:
    """The relation with another variable."""
    made: dict[str, Any] = {
        field.name: new
        for field in dataclasses.fields(relation)
        if getattr(relation, field.name) == old
    }
    return dataclasses.replace(relation, **made)


def without_pair(
    body: Body, relations: tuple[Relation, ...], pos: Pos, coord: Coord
) -> tuple[Body, tuple[Relation, ...]]:
    """A statement's loops and relations without pos(j, p, A) and coord(p, c), which undoes it:
    loops over c, workspaces over c, and relations that tile c, are of j."""
    old, new = coord.coordinate, pos.coordinate
    left = tuple(over_variable(x, old, new) for x in relations if x not in (coord, pos))
    return with_variable(body, old, new), left


def without_pairs(statement: SuchThat) -> SuchThat:
    """The statement without pairs of pos(j, p, A) and coord(p, c). A pair stays where something
    else is made of the positions p: a workspace over them."""
    body, relations = statement.body, statement.relations
    for coord in [x for x in relations if isinstance(x, Coord)]:
        over = [x for x in relations if x != coord and coord.position in mentioned(x)]
        if len(over) == 1 and isinstance(over[0], Pos):
            body, relations = without_pair(body, relations, over[0], coord)
    return SuchThat(body, relations)


def initial(expression: Assign) -> SuchThat:
    """The loops of an expression before any transformation: one for each of `Assign.indices` in
    order, except that an index of a sparse factor comes after those of outer levels."""
    if expression.merges:
        return SuchThat(_merged(expression))
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


def _merged(expression: Assign) -> Body:
    """The loops of an expression whose coordinates are merged. Terms that are reduced over the same
    indices are added up in one nest. Where other terms are not, each such nest fills a scalar:

        forall(i, where(y(i) = b(i) - tjy, forall(j, tjy += A(i,j) * x(j))))
    """
    order = in_order(expression.indices, expression.merged)
    if order is None:
        levels = (
            f"{x} by {', '.join(map(str, level_indices(x.format, x.indices)))}"
            for x in expression.merged
            if x.format is not None
        )
        raise ScheduleError(
            f"{expression}: no order of the loops goes from the outer to the inner levels of all "
            f"operands ({'; '.join(levels)}); convert one to a format in the order of another"
        )
    together: dict[tuple[IndexVar, ...], list[Term]] = {}
    for term in expression.products:
        together.setdefault(expression.reduced_in(term), []).append(term)
    if len(together) == 1:
        op = expression.reduction if expression.reduced else None
        whole: Body = Assignment(expression.output, expression.factors, op, expression.terms)
        return wrap([Forall(index, whole) for index in order], whole)
    outer = [index for index in order if index in expression.output.indices]
    names = {x.tensor for x in (expression.output, *expression.accesses)}
    terms, producers = list(together.pop((), ())), []
    for reduced, summed in together.items():
        name = f"t{''.join(map(str, reduced))}{expression.output.tensor}"
        while name in names:
            name += "_"
        names.add(name)
        inner = [index for index in order if index in reduced]
        own = {index for term in summed for x in term.factors for index in x.indices}
        last = max((order.index(i) for i in own if i in outer), default=-1)
        if early := [i for i in inner if order.index(i) < last]:
            raise ScheduleError(
                f"{expression}: {written(summed)} is added to other terms, and {early[0]}, over "
                f"which it is reduced, would be the index of a loop outside of {order[last]}; "
                "compute that sum first, or store its operands in another order"
            )
        negative = all(term.negative for term in summed)
        if negative:  # the scalar is subtracted
            summed = [Term(term.factors) for term in summed]
        one = len(summed) == 1 and not summed[0].negative
        factors = summed[0].factors if one else _operands(summed)
        total = Access(name, ())
        leaf = Assignment(total, factors, expression.reduction, () if one else tuple(summed))
        producers.append(wrap([Forall(index, leaf) for index in inner], leaf))
        terms.append(Term((total,), negative))
    body: Body = Assignment(expression.output, _operands(terms), None, tuple(terms))
    for producer in reversed(producers):
        body = Where(body, producer)
    return wrap([Forall(index, body) for index in outer], body)


def _operands(terms: Sequence[Term]) -> tuple[Factor, ...]:
    return tuple(dict.fromkeys(factor for term in terms for factor in term.factors))


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
