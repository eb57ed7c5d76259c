"""Transformations that introduce a temporary: precompute and scalar_promote (Kjolstad et al., CGO
2019, section 4)."""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.notation.cin import Assignment, Forall, Precompute, SuchThat, Where
from sgap_jax.compiler.notation.expr import Access, Assign, Attained, Factor, IndexVar
from sgap_jax.compiler.notation.nest import chain, paths, perfect, replace, wrap
from sgap_jax.compiler.notation.provenance import Provenance, segment_loops
from sgap_jax.schedules.schedule import ScheduleError


def precompute(
    expression: Assign,
    graph: Provenance,
    statement: SuchThat,
    factors: tuple[Factor | str, ...],
    var: tuple[IndexVar, ...],
    fresh: tuple[IndexVar, ...],
    name: str,
) -> SuchThat:
    """Makes `where(target op= workspace * others, workspace = factors)`, as far out as possible:
    each loop inside it belongs only to the producer, only to the consumer, or is one of `var`."""
    if len(var) != len(fresh):
        raise ScheduleError("expected as many fresh variables as variables")
    _check_name(expression, statement, name)
    around, leaf = _assignment_of(statement, factors)
    if expression.merges and (leaf.terms or expression.reduction != "+"):
        raise NotImplementedError(
            "of merged coordinates a workspace takes a part of one product that is added, not of "
            "several terms, of a maximum or of a minimum"
        )
    chosen = [f for f in leaf.factors if f in factors or f.tensor in factors]
    others = [f for f in leaf.factors if f not in chosen]

    if others and any(isinstance(f, Attained) for f in leaf.factors):
        raise ScheduleError("a product counts where it attains an extremum; precompute all of it")

    def needs(loop: Forall, *factors: Factor) -> bool:
        roots = {root for a in factors for index in a.indices for root in graph.roots(index)}
        return not roots.isdisjoint(graph.roots(loop.var))

    nest = perfect(around)
    _check_segment(expression, graph, nest, leaf)
    shared = [loop for loop in nest if needs(loop, *chosen) and needs(loop, leaf.target, *others)]
    last = [n for n, loop in enumerate(nest) if loop in shared and loop.var not in var]
    inside = nest[last[-1] + 1 :] if last else nest
    absent = [v for v in var if v not in [loop.var for loop in inside if loop in shared]]
    if absent:
        raise ScheduleError(
            f"{absent[0]} is no loop that both the workspace and the rest run over, inside of all "
            "others of that kind; reorder first"
        )
    summed = [loop for loop in inside if needs(loop, *chosen) and loop not in shared]
    if summed and others and expression.reduction != "+":
        raise ScheduleError(
            f"{expression.reduction} over {summed[0].var} does not distribute over the product "
            f"with {others[0]}; precompute all factors, or inside that loop"
        )
    if expression.reduction != "+" and (sparse := expression.sparse) in chosen:
        filled = [v for v in var if not graph.position(v)]
        gaps = [v for v in filled if sparse and set(graph.roots(v)) & set(sparse.indices)]
        if gaps:
            raise ScheduleError(
                f"the workspace over {gaps[0]} has elements for entries that {sparse} does not "
                f"store, and {expression.reduction} must not see them; take positions first"
            )
    rename = dict(zip(var, fresh, strict=True))
    consumer = wrap(
        [loop for loop in inside if loop not in summed],
        Assignment(leaf.target, (Access(name, var), *others), leaf.op),
    )
    producer = wrap(
        [
            dataclasses.replace(loop, var=rename.get(loop.var, loop.var))
            for loop in inside
            if loop in shared or loop in summed
        ],
        Assignment(Access(name, fresh), tuple(chosen), expression.reduction if summed else None),
    )
    return _placed(
        statement,
        nest,
        len(nest) - len(inside),
        Where(consumer, producer),
        tuple(Precompute(old, new) for old, new in rename.items()),
    )


def promote(
    expression: Assign, graph: Provenance, statement: SuchThat, loop: Forall, name: str | None
) -> SuchThat:
    """Makes `where(target op= scalar, forall(..., scalar op= factors))` of a loop."""
    inside, leaf = chain(loop)
    if not isinstance(leaf, Assignment):
        raise ScheduleError(f"the loops from {loop.var} inwards are not a perfect nest")
    if leaf.op is None or not any(
        root in expression.reduced for inner in inside for root in graph.roots(inner.var)
    ):
        raise ScheduleError(f"nothing is reduced over the loops from {loop.var} inwards")
    _check_segment(expression, graph, inside, leaf)
    for inner in inside:
        roots = set(graph.roots(inner.var))
        moved = [index for index in leaf.target.indices if roots & set(graph.roots(index))]
        segments = (
            graph.position(inner.var) is not None
            and inner.unit is None
            and leaf.target == expression.output
        )
        if moved and not segments:
            raise ScheduleError(
                f"the loop of {inner.var} goes through different elements of {leaf.target} "
                f"(its {moved[0]}); promote inside of it"
            )
    scalar = Access(name or f"t{loop.var}{leaf.target.tensor}", ())
    _check_name(expression, statement, scalar.tensor)
    where = Where(
        Assignment(leaf.target, (scalar,), leaf.op),
        wrap(inside, dataclasses.replace(leaf, target=scalar)),
    )
    return SuchThat(replace(statement.body, loop.var, lambda _: where), statement.relations)


def _check_name(expression: Assign, statement: SuchThat, name: str) -> None:
    there = [a for _, leaf in paths(statement.body) for a in (leaf.target, *leaf.factors)]
    taken = {a.tensor for a in (expression.output, *expression.accesses, *there)}
    if not name.isidentifier() or name in taken:
        raise ScheduleError(f"the workspace needs a new name, got {name!r}")


def _assignment_of(
    statement: SuchThat, factors: tuple[Factor | str, ...]
) -> tuple[tuple[Forall, ...], Assignment]:
    for around, leaf in paths(statement.body):
        there = {*leaf.factors, *(factor.tensor for factor in leaf.factors)}
        if factors and all(factor in there for factor in factors):
            return around, leaf
    said = " * ".join(map(str, factors)) or "nothing"
    raise ScheduleError(f"no assignment has the factors {said}")


def _check_segment(
    expression: Assign, graph: Provenance, nest: list[Forall], leaf: Assignment
) -> None:
    if segment_loops(expression, graph, nest, leaf):
        raise ScheduleError(
            f"{leaf.target} is already the sum of a run of positions; make the other temporary "
            "before that"
        )


def _placed(
    statement: SuchThat,
    nest: list[Forall],
    depth: int,
    where: Where,
    relations: tuple[Precompute, ...],
) -> SuchThat:
    """The statement with `where` as the body of the first `depth` loops of a nest."""
    if not nest:
        raise ScheduleError("the assignment is inside no loop of its own: nothing to precompute")
    whole = wrap(nest[:depth], where)
    # Of several terms each may have a loop of this variable.
    body = replace(statement.body, nest[0].var, lambda loop: whole if loop == nest[0] else loop)
    return SuchThat(body, (*statement.relations, *relations))
