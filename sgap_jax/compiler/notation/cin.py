"""Concrete index notation: a statement's loops in their order (Kjolstad et al., CGO 2019, section
3), and the relations between their variables (Senanayake et al., OOPSLA 2020, section 4)."""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.notation.expr import (
    Access,
    Factor,
    IndexVar,
    Term,
    repr_without_terms,
    written,
)

# Race strategies (Senanayake et al., section 5.3): what makes the parallel loop safe.
NO_RACES = "NoRaces"  # every store is owned by one iteration
IGNORE_RACES = "IgnoreRaces"  # the user claims that there are no races
ATOMICS = "Atomics"  # the reduction's store is atomic
TEMPORARY = "Temporary"  # each iteration has its own sum; the sums are added afterwards
PARALLEL_REDUCTION = "ParallelReduction"  # lanes reduce together
RACES = (NO_RACES, IGNORE_RACES, ATOMICS, TEMPORARY, PARALLEL_REDUCTION)

# Strategies of a group (Sgap, section 5.2).
SEGMENT = "Segment"
GROUP_STRATEGIES = (PARALLEL_REDUCTION, SEGMENT)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """target = product of factors, or a sum of products (`terms`, as in expr.Assign); or target op=
    such a value. A temporary is an Access too: without indices (a scalar), or with the indices of
    its dimensions."""

    target: Access
    factors: tuple[Factor, ...]
    op: str | None = None  # None is =, else one of expr.REDUCTIONS
    terms: tuple[Term, ...] = ()

    @property
    def products(self) -> tuple[Term, ...]:
        """The terms, of which there is one where nothing is added."""
        return self.terms or (Term(self.factors),)

    def __repr__(self) -> str:
        return repr_without_terms(self)

    def __str__(self) -> str:
        sign = {None: "=", "+": "+="}.get(self.op, f"{self.op}=")
        return f"{self.target} {sign} {written(self.products)}"


@dataclasses.dataclass(frozen=True)
class Forall:
    var: IndexVar
    body: Body
    unit: str | None = None  # one of loopir.UNITS
    race: str | None = None  # with a unit: one of RACES
    unroll: bool = False
    group: tuple[int, str] | None = None  # (size, one of GROUP_STRATEGIES), on a GPUThread loop

    def __str__(self) -> str:
        """The group is printed with the relations, as in Sgap, section 6.2."""
        tags = (self.unit, self.race, "Unroll" if self.unroll else None)
        return f"forall({', '.join([str(self.var), str(self.body), *filter(None, tags)])})"


@dataclasses.dataclass(frozen=True)
class Where:
    """The producer fills a temporary, the consumer reads it."""

    consumer: Body
    producer: Body

    def __str__(self) -> str:
        return f"where({self.consumer}, {self.producer})"


@dataclasses.dataclass(frozen=True)
class Intrinsic:
    """`body` is computed by the intrinsic `name` (one of intrinsics.INTRINSICS)."""

    name: str
    body: Body

    def __str__(self) -> str:
        return f"{self.name}({self.body})"


Body = Assignment | Forall | Where | Intrinsic


# Relations: each derives variables from others. Together they form the provenance graph.


@dataclasses.dataclass(frozen=True)
class Split:
    """parent = outer * size + inner, 0 <= inner < size."""

    parent: IndexVar
    outer: IndexVar
    inner: IndexVar
    size: int

    def __str__(self) -> str:
        return f"split({self.parent}, {self.outer}, {self.inner}, {self.size})"


@dataclasses.dataclass(frozen=True)
class Divide:
    """parent = outer * ceil(extent / parts) + inner, 0 <= outer < parts."""

    parent: IndexVar
    outer: IndexVar
    inner: IndexVar
    parts: int

    def __str__(self) -> str:
        return f"divide({self.parent}, {self.outer}, {self.inner}, {self.parts})"


@dataclasses.dataclass(frozen=True)
class Fuse:
    """`fused` goes over the pairs (outer, inner): outer = fused / extent(inner), inner = fused %
    extent(inner). Where `inner` is the index of a stored level, it goes over stored pairs only."""

    outer: IndexVar
    inner: IndexVar
    fused: IndexVar

    def __str__(self) -> str:
        return f"fuse({self.outer}, {self.inner}, {self.fused})"


@dataclasses.dataclass(frozen=True)
class Pos:
    """`position` goes over the positions at which the access stores `coordinate` (one of its
    indices, or a fusion of leading ones): coordinate = crd[position]."""

    coordinate: IndexVar
    position: IndexVar
    access: Access

    def __str__(self) -> str:
        return f"pos({self.coordinate}, {self.position}, {self.access})"


@dataclasses.dataclass(frozen=True)
class Coord:
    """The inverse of Pos: coordinate = crd[position], and the loop goes over the coordinates."""

    position: IndexVar
    coordinate: IndexVar

    def __str__(self) -> str:
        return f"coord({self.position}, {self.coordinate})"


@dataclasses.dataclass(frozen=True)
class Bound:
    """bounded = parent, whose extent is declared to be exactly `size` at compile time."""

    parent: IndexVar
    bounded: IndexVar
    size: int

    def __str__(self) -> str:
        return f"bound({self.parent}, {self.bounded}, {self.size}, MaxExact)"


@dataclasses.dataclass(frozen=True)
class Precompute:
    """The producer of a workspace uses `fresh` where the consumer uses `var`."""

    var: IndexVar
    fresh: IndexVar

    def __str__(self) -> str:
        return f"precompute({self.var}, {self.fresh})"


Relation = Split | Divide | Fuse | Pos | Coord | Bound | Precompute


def parents(relation: Relation) -> tuple[IndexVar, ...]:
    """The variables from which a relation derives others."""
    match relation:
        case Split() | Divide() | Bound():
            return (relation.parent,)
        case Fuse():
            return (relation.outer, relation.inner)
        case Pos():
            return (relation.coordinate,)
        case Coord():
            return (relation.position,)
        case Precompute():
            return (relation.var,)


def children(relation: Relation) -> tuple[IndexVar, ...]:
    """The variables that a relation derives."""
    match relation:
        case Split() | Divide():
            return (relation.outer, relation.inner)
        case Fuse():
            return (relation.fused,)
        case Pos():
            return (relation.position,)
        case Coord():
            return (relation.coordinate,)
        case Bound():
            return (relation.bounded,)
        case Precompute():
            return (relation.fresh,)


@dataclasses.dataclass(frozen=True)
class SuchThat:
    """A whole statement: its loops, and the relations that derive their variables from those of the
    expression."""

    body: Body
    relations: tuple[Relation, ...] = ()

    def __str__(self) -> str:
        said = [str(relation) for relation in self.relations]
        said += [f"parallelize({var}, GPUGroup, {r}, {by})" for var, r, by in groups(self.body)]
        return f"suchthat({self.body},\n         {' and '.join(said)})" if said else str(self.body)


def groups(body: Body) -> list[tuple[IndexVar, int, str]]:
    """(variable, size, strategy) of the groups, from the outermost loop inwards."""
    match body:
        case Forall():
            own = [] if body.group is None else [(body.var, *body.group)]
            return own + groups(body.body)
        case Where():
            return groups(body.consumer) + groups(body.producer)
        case Intrinsic():
            return groups(body.body)
    return []
