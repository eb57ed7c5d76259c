"""What the steps of lowering share: the names that are taken, the sum, and the current scope.

A scope is a block of statements that is being made, with all that is known in it: the values of
variables, the positions at each level, the ranges of positions. Statements are emitted into the
current scope; `Context.block` opens one inside of it, which knows what is known here, but what is
learnt there ends with it:

    with ctx.block() as inner:
        ctx.emit(...)
    ctx.emit(For(..., body=inner.close()))
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from sgap_jax.compiler.loop_ir.arithmetic import ZERO, both, reads_memory
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, If, Int, Let, Select, Stmt, Var
from sgap_jax.compiler.lowering.output_loops import OutputLoops
from sgap_jax.compiler.lowering.reductions import Plan
from sgap_jax.compiler.lowering.storage import Storage
from sgap_jax.compiler.notation.cin import Pos
from sgap_jax.compiler.notation.expr import Access, Factor, IndexVar
from sgap_jax.compiler.notation.nest import paths
from sgap_jax.schedules.schedule import ScheduleError


@dataclasses.dataclass(frozen=True)
class Range:
    """low <= value < high. `bound`: a constant that `high` never exceeds, if low is zero and one is
    known; else None."""

    low: Expr
    high: Expr
    bound: int | None = None

    @property
    def exact(self) -> int | None:
        """The number of values, where it is known."""
        return self.high.value if self.low == ZERO and isinstance(self.high, Int) else None

    def fits(self, size: int) -> bool:
        """Whether tiles of a size are known to be whole."""
        return self.exact is not None and size > 0 and self.exact % size == 0


@dataclasses.dataclass(frozen=True)
class TrackedParents:
    """Scalars that hold the positions of the current entry's parents; the loop over positions
    advances them."""

    pos: Pos
    scalars: tuple[tuple[int, str], ...]  # (level, scalar with the position above), inner first
    contiguous: bool  # the loop steps by one position
    begin: Expr  # the first position


@dataclasses.dataclass(frozen=True)
class JoinedThreads:
    """One loop of threads in place of a loop of warps and one of the `count` threads of each."""

    var: IndexVar  # of the loop of a warp's threads
    thread: Var  # of the one loop
    count: int


@dataclasses.dataclass(frozen=True)
class OctetLoops:
    """The tile of the output in registers of a warp, and the loops that octet_mma runs."""

    name: str
    loops: tuple[str, ...]  # over rows, columns and steps of the sum
    first: Expr = ZERO  # column
    count: Expr = ZERO  # of columns


# Fields of a Scope that are copied when a block is opened inside of it, so that what the block adds
# to them ends with it.
_COPIED = ("known", "positions", "located", "ranges", "tracked", "temporaries")


@dataclasses.dataclass
class Scope:
    """A block of statements that is being made, and what is known in it."""

    known: dict[IndexVar, Expr] = dataclasses.field(default_factory=dict)
    positions: dict[int, Expr] = dataclasses.field(default_factory=dict)  # by level
    # Of operands whose coordinates are merged, by operand and level.
    located: dict[tuple[Access, int], Expr] = dataclasses.field(default_factory=dict)
    ranges: dict[IndexVar, Range] = dataclasses.field(default_factory=dict)
    tracked: dict[IndexVar, TrackedParents] = dataclasses.field(default_factory=dict)  # by position
    # A scalar, or a workspace with its extents.
    temporaries: dict[str, Var | tuple[str, list[int]]] = dataclasses.field(default_factory=dict)
    threads: JoinedThreads | None = None
    tile: OctetLoops | None = None
    unguarded: frozenset[IndexVar] = frozenset()  # in range here
    # The products, by their factors, whose entries are stored at the coordinates of all loops here.
    alive: frozenset[tuple[Factor, ...]] = frozenset()
    masked: bool = False  # a collective follows: no lane may leave
    live: Expr | None = None  # where masked: whether this lane takes part
    statements: list[Stmt] = dataclasses.field(default_factory=list)
    conditions: list[tuple[Expr, list[Stmt]]] = dataclasses.field(default_factory=list)

    def child(self, **changes: Any) -> Scope:
        copies = {name: dict(getattr(self, name)) for name in _COPIED if name not in changes}
        return dataclasses.replace(self, statements=[], conditions=[], **(copies | changes))

    def only_if(self, condition: Expr) -> None:
        """All that follows in this block is under a condition."""
        self.conditions.append((condition, self.statements))
        self.statements = []

    def close(self) -> tuple[Stmt, ...]:
        """The statements of the block, under their conditions."""
        while self.conditions:
            condition, before = self.conditions.pop()
            if self.statements:
                before.append(If(condition, tuple(self.statements)))
            self.statements = before
        return tuple(self.statements)


class Context:
    """The loops and the plan of one function, which stay as they are, and what changes as its
    statements are made: `names` are those taken, `sum` is the scalar that the assignment to the
    output adds to, `scope` is the block that statements go to.

    `cleared_row`: the loop that clears a row of the output before its stores (clearing.py).
    `merged`: the operands whose coordinates are merged (merge_loops.py), with their levels;
    `leaders`: the one over whose positions the loop of an index goes.
    """

    def __init__(
        self,
        nest: OutputLoops,
        plan: Plan,
        sizes: dict[str, int],
        names: set[str],
        cleared_row: IndexVar | None,
        merged: dict[Access, Storage],
        leaders: dict[IndexVar, Access],
    ):
        self.nest, self.plan, self.sizes, self.cleared_row = nest, plan, sizes, cleared_row
        self.expression, self.relations = nest.expression, nest.relations
        self.storage = nest.relations.storage
        self.names, self.merged, self.leaders = names, merged, leaders
        self.sum: str | None = None
        self.cases = 0  # bodies of merge loops so far
        products = [term for _, leaf in paths(nest.body) for term in leaf.products]
        self.scope = Scope(alive=frozenset(term.factors for term in products))

    # What changes for a while.

    @contextlib.contextmanager
    def block(self, **changes: Any) -> Iterator[Scope]:
        """A scope inside of the current one; `changes` are fields of it. Nothing of it is emitted
        unless its statements are."""
        outer = self.scope
        self.scope = inner = outer.child(**changes)
        try:
            yield inner
        finally:
            self.scope = outer

    @contextlib.contextmanager
    def adding_to(self, scalar: str | None) -> Iterator[None]:
        """The assignment to the output adds to this scalar; None: it stores."""
        outer, self.sum = self.sum, scalar
        try:
            yield
        finally:
            self.sum = outer

    @contextlib.contextmanager
    def reusable_names(self) -> Iterator[set[str]]:
        """For lowering one body several times with the same names: names that are taken inside are
        free again afterwards. Gives the set of them; after the last clone the caller adds it to
        `names`."""
        outer, self.names = self.names, set(self.names)
        try:
            yield self.names
        finally:
            self.names = outer

    def located(self, access: Access, level: int) -> Expr:
        """The position of an operand at a level, -1 being the root."""
        if level < 0:
            return ZERO
        if (access, level) not in self.scope.located:
            raise ScheduleError(
                f"the loops do not locate level {level + 1} of {access} "
                f"({self.merged[access].variables[level]})"
            )
        return self.scope.located[access, level]

    # Statements.

    def emit(self, *statements: Stmt) -> None:
        self.scope.statements += statements

    def fresh(self, name: str) -> str:
        number, unique = 2, name
        while unique in self.names:
            number, unique = number + 1, f"{name}_{number}"
        self.names.add(unique)
        return unique

    def let(self, name: str, value: Expr, by_lane: bool = True) -> Expr:
        """Emits `let name = value` and returns the variable; a variable or a constant is returned
        as it is. If the value reads memory and differs by lane (`by_lane`) while lanes are masked,
        it is 0 in lanes that take no part, so that these read nothing."""
        if isinstance(value, Var | Int):
            return value
        if self.scope.live is not None and by_lane and reads_memory(value):
            value = Select(self.scope.live, value, ZERO)
        name = self.fresh(name)
        self.emit(Let(name, value))
        return Var(name)

    def define(self, var: IndexVar, value: Expr) -> None:
        """A variable of the schedule has become known."""
        self.scope.known[var] = self.let(var.name, value, self.by_lane(var))

    def by_lane(self, var: IndexVar) -> bool:
        """Whether the lanes of a group have different values of a variable."""
        group = self.plan.group
        return group is None or self.nest.depends(var, group.var)

    def guard(self, var: IndexVar, condition: Expr | None) -> None:
        """What follows is done only if a condition on a variable holds: under an `if`; or, if lanes
        may differ and a collective follows, which every lane must reach, by masking lanes
        (`live`)."""
        scope = self.scope
        if condition is None:
            return
        if not scope.masked or not self.by_lane(var):
            scope.only_if(condition)
            return
        condition = both(scope.live, condition)
        assert condition is not None
        name = self.fresh("live")
        self.emit(Let(name, Select(condition, Int(1), ZERO)))
        scope.live = Binary("!=", Var(name), ZERO)
