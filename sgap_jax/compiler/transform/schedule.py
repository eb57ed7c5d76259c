"""`Schedule`: a chain of transformations of the loops of an expression."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

from sgap_jax.compiler.notation import cin, nest
from sgap_jax.compiler.notation.cin import Body, Forall, SuchThat
from sgap_jax.compiler.notation.derivatives import check_gradient, same
from sgap_jax.compiler.notation.expr import Access, Assign, Factor, IndexVar, Tensor
from sgap_jax.compiler.notation.provenance import Provenance
from sgap_jax.compiler.transform import (
    collectives,
    intrinsics,
    legality,
    text,
    transformations,
    workspaces,
)
from sgap_jax.compiler.transform.calls import Var, Vars, access_of, variable, variables, written
from sgap_jax.schedules import Problem
from sgap_jax.schedules import schedule as schedules
from sgap_jax.schedules.schedule import ScheduleError


@dataclasses.dataclass(frozen=True)
class LoopSchedule(schedules.Schedule):
    """The loops of an expression, transformed one call at a time; each call returns a new one::

        i, j, f, fpos, block, fpos1 = index_vars("i j f fpos block fpos1")
        s = Schedule(assign("ij,j->i", {"A": CSR}))
        s = s.fuse(i, j, f).pos(f, fpos, "A").split(fpos, block, fpos1, 128)
        print(s)

    Variables are of type `IndexVar`, or names. A schedule says in which order the entries are
    visited and on which unit, never what is computed. It prints as concrete index notation.

    Attributes:
      expression: what is computed.
      statement: the loops, and how their variables derive from those of the expression; by default
        one loop for each index, the output's first, the sparse operand's in order of level.
      derivatives: schedules of the gradients' expressions, see `with_derivatives`.

    Raises:
      ScheduleError: each method, where its precondition does not hold; the message shows the
        statement and the reason.

    Source: Senanayake et al., OOPSLA 2020, section 5; `group` is of Sgap, section 5.
    """

    expression: Assign
    statement: SuchThat = None  # type: ignore[assignment]  # made from the expression
    derivatives: tuple[LoopSchedule, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.expression, Assign):
            raise ScheduleError(f"Schedule: expected an Assign, got {self.expression!r}")
        if self.statement is None:
            object.__setattr__(self, "statement", nest.initial(self.expression))
        legality.check_statement(self.expression, self.statement)

    def __str__(self) -> str:
        return "\n".join([str(self.statement), *(f"derivative: {s}" for s in self.derivatives)])

    def provenance(self) -> Provenance:
        """The graph of how variables derive from each other: `print` it, or draw its `svg()`."""
        return Provenance(self.expression.indices, self.statement.relations)

    def with_derivatives(self, *chains: LoopSchedule) -> LoopSchedule:
        """The same schedule with schedules for gradients added. A tangent has the same expression
        and runs by this schedule; a gradient has another expression, and runs by the one of
        `chains` that has it, or as without a schedule if there is none::

            dB = Schedule(gradient(s.expression, "B")).parallelize("k", "CPUVector", "NoRaces")
            s = s.with_derivatives(dB)
        """
        for chain in chains:
            if not isinstance(chain, LoopSchedule):
                raise ScheduleError(f"with_derivatives: expected schedules, got {chain!r}")
            check_gradient(chain.expression, self.expression)
        every = (*self.derivatives, *(dataclasses.replace(s, derivatives=()) for s in chains))
        for one, other in itertools.combinations(every, 2):
            if same(one.expression, other.expression):
                raise ScheduleError(f"with_derivatives: two chains for {other.expression}")
        return dataclasses.replace(self, derivatives=every)

    def of(self, expression: Assign) -> LoopSchedule | None:
        """The one among this schedule and those of its gradients that has `expression`, with the
        others as its `derivatives`; None if there is none."""
        family = (dataclasses.replace(self, derivatives=()), *self.derivatives)
        for n, chain in enumerate(family):
            if same(chain.expression, expression):
                return dataclasses.replace(chain, derivatives=(*family[:n], *family[n + 1 :]))
        return None

    def reorder(self, *order: Var) -> LoopSchedule:
        """Reorders loops of a perfect nest; loops that are not named stay where they are."""

        def change() -> SuchThat:
            return transformations.reorder(self.statement, [variable(var) for var in order])

        return self._step("reorder", order, change)

    def split(self, var: Var, outer: Var, inner: Var, size: int) -> LoopSchedule:
        """var = outer * size + inner, with 0 <= inner < size: tiles of a fixed size."""

        def change() -> SuchThat:
            legality.check_size("the size of a tile", size)
            return self._tile(cin.Split(variable(var), variable(outer), variable(inner), size))

        return self._step("split", (var, outer, inner, size), change)

    def divide(self, var: Var, outer: Var, inner: Var, parts: int) -> LoopSchedule:
        """var = outer * ceil(extent / parts) + inner, with 0 <= outer < parts: a fixed number of
        tiles."""

        def change() -> SuchThat:
            legality.check_size("the number of parts", parts)
            return self._tile(cin.Divide(variable(var), variable(outer), variable(inner), parts))

        return self._step("divide", (var, outer, inner, parts), change)

    def fuse(self, outer: Var, inner: Var, fused: Var) -> LoopSchedule:
        """Two directly nested loops become one over the pairs, in the same order."""

        def change() -> SuchThat:
            relation = cin.Fuse(variable(outer), variable(inner), variable(fused))
            return transformations.fuse(self.provenance(), self.statement, relation)

        return self._step("fuse", (outer, inner, fused), change)

    def pos(self, coordinate: Var, position: Var, access: Access | Tensor | str) -> LoopSchedule:
        """Makes a loop go over the positions at which `access` stores the coordinates of one level,
        or of several fused ones. `access` may be given as the name of the operand."""

        def change() -> SuchThat:
            legality.serial_loop(self.statement, variable(coordinate))
            found = access_of(self.expression, access)
            legality.check_pos(self.expression, self.provenance(), variable(coordinate), found)
            return self._rename(cin.Pos(variable(coordinate), variable(position), found))

        return self._step("pos", (coordinate, position, access), change)

    def coord(self, position: Var, coordinate: Var) -> LoopSchedule:
        """The inverse of `pos`: the loop goes over coordinates again."""

        def change() -> SuchThat:
            graph = self.provenance()
            legality.serial_loop(self.statement, variable(position))
            legality.check_coord(graph, variable(position))
            return self._rename(cin.Coord(variable(position), variable(coordinate)))

        return self._step("coord", (position, coordinate), change)

    def bound(self, var: Var, bounded: Var, size: int) -> LoopSchedule:
        """Declares that the extent of a loop is exactly `size`; checked when shapes are known."""

        def change() -> SuchThat:
            legality.check_size("the extent", size)
            legality.serial_loop(self.statement, variable(var))
            known = self.provenance().constant(variable(var))
            if known not in (None, size):
                raise ScheduleError(f"the extent of {var} is {known}")
            return self._rename(cin.Bound(variable(var), variable(bounded), size))

        return self._step("bound", (var, bounded, size), change)

    def unroll(self, var: Var) -> LoopSchedule:
        """Unrolls a loop: its body is repeated for each iteration."""

        def change() -> SuchThat:
            loop = legality.serial_loop(self.statement, variable(var))
            legality.check_constant(self.expression, self.provenance(), loop.var, "unroll")
            return self._with(loop.var, lambda loop: dataclasses.replace(loop, unroll=True))

        return self._step("unroll", (var,), change)

    def parallelize(self, var: Var, unit: str, race: str) -> LoopSchedule:
        """Runs the iterations of a loop on `unit`, one of loopir.UNITS; `race`, one of cin.RACES,
        says why their stores are safe."""

        def change() -> SuchThat:
            loop = legality.serial_loop(self.statement, variable(var))
            legality.check_parallel(self.expression, self.provenance(), loop.var, unit, race)
            return self._with(
                loop.var, lambda loop: dataclasses.replace(loop, unit=unit, race=race)
            )

        return self._step("parallelize", (var, unit, race), change)

    def group(self, var: Var, size: int, strategy: str) -> LoopSchedule:
        """Makes each `size` neighbouring threads of a loop reduce together: to one element
        (ParallelReduction), or to one for each run of threads with equal elements (Segment)."""

        def change() -> SuchThat:
            loop = legality.loop_of(self.statement, variable(var))
            collectives.check_group(self.expression, self.provenance(), loop, size, strategy)
            return self._with(
                loop.var, lambda loop: dataclasses.replace(loop, group=(size, strategy))
            )

        return self._step("group", (var, size, strategy), change)

    def precompute(
        self,
        factors: Access | tuple[Factor | str, ...] | str,
        var: Vars,
        fresh: Vars,
        workspace: str,
    ) -> LoopSchedule:
        """Computes the product of some factors in a workspace over `var`, which the producer calls
        `fresh`. Loops of the reduction that only these factors need move to the producer: the
        workspace then holds sums.

        `factors` are accesses or names of operands ("A B"); `var` and `fresh` are one variable, or
        a tuple of them: () makes the workspace a scalar.
        """

        def change() -> SuchThat:
            named = factors.replace(",", " ").split() if isinstance(factors, str) else factors
            parts = (named,) if isinstance(named, Access) else tuple(named)
            graph, pairs = self.provenance(), (variables(var), variables(fresh))
            legality.check_fresh(graph, *pairs[1])
            return workspaces.precompute(
                self.expression, graph, self.statement, parts, *pairs, workspace
            )

        return self._step("precompute", (factors, var, fresh, workspace), change)

    def scalar_promote(self, var: Var, name: str | None = None) -> LoopSchedule:
        """Sums in a scalar what the loops from `var` inwards add to one element; over fused
        positions, in one for each run of positions of the same element."""

        def change() -> SuchThat:
            loop = legality.loop_of(self.statement, variable(var))
            return workspaces.promote(
                self.expression, self.provenance(), self.statement, loop, name
            )

        return self._step("scalar_promote", (var,), change)

    def bind(self, var: Var, intrinsic: str) -> LoopSchedule:
        """Runs the nest from the loop of `var` inwards by an intrinsic: "octet_mma" uses tensor
        cores in a schedule with a loop of GPUBlock; in one for the CPU the nest stays as it is.

        Raises NotImplementedError where the nest is not the one that the intrinsic computes.
        """

        def change() -> SuchThat:
            loop = legality.loop_of(self.statement, variable(var))
            intrinsics.check_nest(self.provenance(), loop, intrinsic)
            return self._with(loop.var, lambda loop: cin.Intrinsic(intrinsic, loop))

        return self._step("bind", (var, intrinsic), change)

    def loops(
        self,
        sizes: Mapping[str, int] | None = None,
        nnz: int | None = None,
        dtype: str = "float32",
        batch: Mapping[str, int] | None = None,
    ) -> str:
        """The loop nest as C-like text, for reading.

        Args:
          sizes: extents of indices, by name; others are 1000, or what `bound` declares.
          nnz: stored entries; None: 10,000.
          dtype: of the values.
          batch: operands that have a batch under `vmap`, by name, and its length: the loops are
            those of all its elements, and the output has one part for each.

        Raises ValueError for an index or an operand that the expression lacks, ScheduleError or
        NotImplementedError where the schedule cannot be lowered.
        """
        return self.source("c", sizes, nnz, dtype, batch)

    def source(
        self,
        target: str,
        sizes: Mapping[str, int] | None = None,
        nnz: int | None = None,
        dtype: str = "float32",
        batch: Mapping[str, int] | None = None,
    ) -> str:
        """The text that is compiled for "cuda" (CUDA C++) or for the CPU ("llvm", LLVM IR); "c" is
        the text of `loops`. Arguments are those of `loops`.

        Raises ValueError for another target, and as `loops`.
        """
        return text.source(self, target, sizes, nnz, dtype, batch)

    def check(self, problem: Problem) -> None:
        raise NotImplementedError(
            f"{problem.op}: a chain of transformations schedules einsum; {problem.op} takes a "
            "point such as {<1 nnz, 4 col>, 32}, a tile or None"
        )

    def _tile(self, relation: cin.Split | cin.Divide) -> SuchThat:
        return transformations.tile(self.provenance(), self.statement, relation)

    def _rename(self, relation: cin.Pos | cin.Coord | cin.Bound) -> SuchThat:
        return transformations.rename(self.provenance(), self.statement, relation)

    def _with(self, var: IndexVar, change: Callable[[Forall], Body]) -> SuchThat:
        return transformations.changed(self.statement, var, change)

    def _step(self, name: str, arguments: tuple, change: Callable[[], SuchThat]) -> LoopSchedule:
        """The next schedule; an error of `change` gets the call and the statement added to its
        message."""
        try:
            statement = change()
            kept = nest.intrinsics(statement.body)
            for bound in nest.intrinsics(self.statement.body):
                if bound not in kept:
                    raise ScheduleError(f"that nest is bound to {bound.name}; transform it first")
            return dataclasses.replace(self, statement=statement)
        except (ScheduleError, NotImplementedError) as error:
            call = written(name, arguments)
            raise type(error)(f"{call}: {error}\nin {self}") from None


# Its name before there was another public class of that name (sgap_jax.Schedule).
Schedule = LoopSchedule
