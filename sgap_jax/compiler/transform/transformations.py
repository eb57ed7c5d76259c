"""Transformations that change which loops there are and their order (Senanayake et al., section 5),
as functions of a statement. `Schedule` has a method for each, which adds the call to an error."""

from __future__ import annotations

from collections.abc import Callable

from sgap_jax.compiler.notation import cin, nest
from sgap_jax.compiler.notation.cin import Body, Forall, Relation, SuchThat, children, parents
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.compiler.notation.provenance import Provenance
from sgap_jax.compiler.transform import legality
from sgap_jax.schedules.schedule import ScheduleError


def reorder(statement: SuchThat, wanted: list[IndexVar]) -> SuchThat:
    """Reorders loops of a perfect nest; loops that are not named stay where they are."""
    if len(set(wanted)) < len(wanted) or not wanted:
        raise ScheduleError("expected variables, each once")
    for var in wanted:
        legality.loop_of(statement, var)
    first = next(x for x in nest.loops(statement.body) if x.var in wanted)
    loops, inside = nest.chain(first)
    there = [loop for loop in loops if loop.var in wanted]
    if len(there) < len(wanted):
        absent = next(v for v in wanted if v not in [loop.var for loop in there])
        raise ScheduleError(
            f"{absent} and {first.var} are not in one perfect nest: another statement stands "
            "between their loops"
        )
    fresh = iter(sorted(there, key=lambda loop: wanted.index(loop.var)))
    loops = [next(fresh) if loop.var in wanted else loop for loop in loops]
    return changed(statement, first.var, lambda _: nest.wrap(loops, inside))


def tile(graph: Provenance, statement: SuchThat, relation: cin.Split | cin.Divide) -> SuchThat:
    legality.serial_loop(statement, relation.parent)
    legality.check_fresh(graph, relation.outer, relation.inner)
    return changed(
        statement,
        relation.parent,
        lambda loop: Forall(relation.outer, Forall(relation.inner, loop.body)),
        relation,
    )


def fuse(graph: Provenance, statement: SuchThat, relation: cin.Fuse) -> SuchThat:
    legality.check_fuse(graph, statement, relation.outer, relation.inner)
    legality.check_fresh(graph, relation.fused)

    def both(loop: Forall) -> Body:
        assert isinstance(loop.body, Forall)
        return Forall(relation.fused, loop.body.body)

    return changed(statement, relation.outer, both, relation)


def rename(
    graph: Provenance, statement: SuchThat, relation: cin.Pos | cin.Coord | cin.Bound
) -> SuchThat:
    """Replaces the variable of a loop by the one that a relation derives from it."""
    (old,), (new,) = parents(relation), children(relation)
    legality.check_fresh(graph, new)
    return changed(statement, old, lambda loop: Forall(new, loop.body), relation)


def changed(
    statement: SuchThat, var: IndexVar, change: Callable[[Forall], Body], *relations: Relation
) -> SuchThat:
    """The statement with the loop of `var` replaced by `change(loop)`, and with more relations."""
    body = nest.replace(statement.body, var, change)
    return SuchThat(body, (*statement.relations, *relations))
