"""Where a sum is kept and how it reaches the output: computed from the loops, not trusted.

A sum is kept in a scalar across the innermost loops that do not move the element it belongs to. A
loop over the positions of several levels moves it only where a segment ends, if the element is one
of an outer level: then the sum is stored there. What loops remain decide between `=` and `+=`; what
parallel loops remain must own the element, or the store is atomic, or a collective.
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler import cin
from sgap_jax.compiler.cin import Assignment, Body, Forall, Pos
from sgap_jax.compiler.expr import Assign, IndexVar
from sgap_jax.compiler.loopir import CPU_THREAD, CPU_VECTOR, GPU_BLOCK, GPU_THREAD, GPU_WARP
from sgap_jax.compiler.nest import paths
from sgap_jax.compiler.relations import Relations
from sgap_jax.schedules.schedule import ScheduleError

IDENTITY = {"+": 0.0, "max": float("-inf"), "min": float("inf")}


@dataclasses.dataclass(frozen=True)
class Group:
    """A collective store: by `size` neighbours among the iterations of `var`."""

    var: IndexVar
    size: int
    strategy: str
    atomic: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the assignment to the output is done."""

    assignment: Assignment
    path: tuple[Forall, ...]
    start: IndexVar | None  # the outermost loop across which the sum is kept
    tracked: IndexVar | None  # == start, where the sum is stored at the ends of segments too
    op: str | None
    atomic: bool
    group: Group | None
    fill: float | None


class Planner:
    def __init__(
        self,
        expression: Assign,
        body: Body,
        relations: Relations,
        warp: tuple[IndexVar, ...] = (),
    ):
        self.expression, self.body = expression, body
        self.warp = warp  # the loops of a nest that a warp runs: its sums are kept all together
        self.relations = relations
        name = expression.output.tensor
        found = [(path, a) for path, a in paths(body) if a.target.tensor == name]
        if len(found) != 1:
            raise NotImplementedError(f"{name} is assigned in {len(found)} places, expected one")
        self.path, self.assignment = found[0]
        self.loops = {loop.var for loop in self.path}
        storage = relations.storage
        self.sparse_output = expression.output.format is not None
        self.moving = expression.output.indices
        if self.sparse_output and storage is not None:
            self.moving = (*self.moving, *storage.variables[: expression.shared])
        self.positions = [r for r in relations.all if isinstance(r, Pos)]

    def leaves(self, var: IndexVar) -> set[IndexVar]:
        """The loops that a variable comes from; of a block or within one, those of its index."""
        found = self.relations.leaves(var, self.loops)
        storage, made = self.relations.storage, self.relations.source(var)
        if not found and storage is not None and made in storage.splits:
            assert isinstance(made, cin.Split)
            return self.relations.leaves(made.parent, self.loops)
        return found

    def plan(self) -> Plan:
        start, tracked = self._kept()
        names = [loop.var for loop in self.path]
        crossed = self.path[names.index(start) :] if start else ()
        outside = self.path[: len(self.path) - len(crossed)]
        self._check_units()
        for loop in crossed:
            if loop.unit is not None and loop.race == cin.NO_RACES:
                raise self._race(loop)
        group = self._group(outside)
        shared = [loop for loop in outside if not self._owned(loop)]
        op = None if not shared and tracked is None else self.expression.reduction
        atomic = self._atomic(shared, outside, group)
        if group is not None:
            more = any(loop.unit for loop in shared if loop.var != group.var)
            atomic = atomic and more
            group = dataclasses.replace(group, atomic=group.atomic or atomic)
            op = self.expression.reduction
        return Plan(self.assignment, self.path, start, tracked, op, atomic, group, self._fill(op))

    def _kept(self) -> tuple[IndexVar | None, IndexVar | None]:
        start = None
        for loop in reversed(self.path):
            if loop.var in self.warp:
                start = loop.var
                continue
            if loop.unit not in (None, CPU_VECTOR):
                break
            moved = self._moved(loop)
            if not moved:
                start = loop.var
                continue
            if not self.warp and self._only_tracked(loop.var, moved):
                return loop.var, loop.var
            break
        return start, None

    def tracking(self, var: IndexVar) -> Pos | None:
        """The positions of several levels that run on, one after the other, in a serial loop, or in
        lanes that share runs."""
        for pos in self.positions:
            leaves = self.leaves(pos.position)
            inner = [loop for loop in self.path if loop.var in leaves]
            if inner and inner[-1].var == var:
                first, last = self.relations.levels_of(pos)
                if first < last and (inner[-1].unit is None or self.run_steps(inner[-1])):
                    return pos
        return None

    def run_steps(self, loop: Forall) -> list[IndexVar]:
        """The variables from a loop's to a position's, if it goes there run by run; or []. It keeps
        a sum for each position of one level, whose runs are one after the other. On a GPU, threads
        would wait for the longest run."""
        lanes = loop.unit == CPU_VECTOR and loop.race == cin.PARALLEL_REDUCTION
        storage, names = self.relations.storage, [other.var for other in self.path]
        if storage is None or not (lanes or loop.unit is None) or loop.var not in names:
            return []
        if {other.unit for other in self.path} & {GPU_BLOCK, GPU_WARP, GPU_THREAD}:
            return []
        if any(self._moved(inner) for inner in self.path[names.index(loop.var) + 1 :]):
            return []
        for pos in self.positions:
            steps = self.relations.steps(loop.var, pos.position)
            first, last = self.relations.levels_of(pos)
            if steps and first == last - 1 and storage.is_compressed(last):
                moved = self._moved(loop)
                return steps if moved and self._only_levels(pos, moved) else []
        return []

    def _moved(self, loop: Forall) -> set[IndexVar]:
        """What the element of the output moves along with a loop."""
        return {var for var in self.moving if loop.var in self.leaves(var)}

    def owns_runs(self, pos: Pos) -> bool:
        """Whether a run that is not cut has its element to itself."""
        storage, outputs = self.relations.storage, set(self.expression.output.indices)
        assert storage is not None
        first, last = self.relations.levels_of(pos)
        leaves = self.leaves(pos.position)
        above = {self._whole(level) for level in storage.variables[first:last]}
        shared = [loop for loop in self.path if loop.unit != CPU_VECTOR and not self._owned(loop)]
        return (
            above <= outputs
            and not storage.repeats[last - 1]
            and all(loop.var in leaves for loop in shared)
        )

    def _only_tracked(self, var: IndexVar, moved: set[IndexVar]) -> bool:
        pos = self.tracking(var)
        return pos is not None and self._only_levels(pos, moved)

    def _only_levels(self, pos: Pos, moved: set[IndexVar]) -> bool:
        """Whether all that moves along positions does so with the levels above them."""
        storage = self.relations.storage
        if storage is None or self.sparse_output:
            return False
        if any(loop.group is not None for loop in self.path):
            return False  # the threads of a group end their segments at different times
        first, last = self.relations.levels_of(pos)
        outer = set(storage.variables[first:last])
        # An output index with a block is moved by its outer part.
        outer |= {
            split.parent
            for split in self.relations.all
            if isinstance(split, cin.Split) and split.outer in outer
        }
        return moved <= outer and storage.is_compressed(last)

    def _owned(self, loop: Forall) -> bool:
        """Whether no two iterations meet in one element of the output."""
        moves = {var for var in self.expression.indices if loop.var in self.leaves(var)}
        if not moves or not moves <= set(self.expression.output.indices):
            return False
        if self.sparse_output:
            return True
        storage = self.relations.storage
        for pos in self.positions:
            if storage is None or loop.var not in self.leaves(pos.position):
                continue
            first, last = self.relations.levels_of(pos)
            if storage.repeats[last]:
                return False
            # Threads go their own ways: the element must be of one thread under every parent.
            above = {self._whole(level) for level in storage.variables[:first]}
            threads = loop.unit in (GPU_WARP, GPU_THREAD)
            if threads and not above <= set(self.expression.output.indices):
                return False
        return True

    def _atomic(
        self, shared: list[Forall], outside: tuple[Forall, ...], group: Group | None
    ) -> bool:
        parallel = [loop for loop in shared if loop.unit is not None]
        grouped = None if group is None else group.var
        for loop in parallel:
            if loop.var == grouped:
                continue
            if loop.race == cin.NO_RACES or loop.unit == CPU_VECTOR:
                raise self._race(loop)
            if loop.race in (cin.TEMPORARY, cin.PARALLEL_REDUCTION):
                raise NotImplementedError(
                    f"`{self.assignment}`: {loop.race} over {loop.var} ({loop.unit}) is available "
                    "where all iterations of a CPUVector or GPUThread loop have one element; the "
                    "nearest is Atomics"
                )
        if any(loop.race == cin.ATOMICS for loop in outside if loop.unit is not None):
            return bool(parallel)
        return False

    def _race(self, loop: Forall) -> ScheduleError:
        return ScheduleError(
            f"`{self.assignment}` is not owned by the iterations of {loop.var} ({loop.unit}, "
            f"{loop.race}): several of them meet in one element (Senanayake et al., section 5.3: "
            "such a store is atomic, or reduced in parallel, or claimed by IgnoreRaces)"
        )

    def _check_units(self) -> None:
        """A parallel loop of a CPU, or of blocks, is outside of everything else."""
        units = [loop.unit for loop in self.path]
        outermost = self.body.unit if isinstance(self.body, Forall) else None
        for loop in {loop for path, _ in paths(self.body) for loop in path}:
            if loop.unit in (GPU_BLOCK, CPU_THREAD) and loop != self.body:
                raise NotImplementedError(
                    f"{loop.var} ({loop.unit}) is inside of something else; a loop of this unit is "
                    "the outermost"
                )
            if loop.unit in (GPU_WARP, GPU_THREAD) and outermost != GPU_BLOCK:
                raise ScheduleError(f"{loop.var} ({loop.unit}) is in no GPUBlock loop")
            if loop.unit in (GPU_WARP, GPU_THREAD) and loop.unit not in units:
                raise NotImplementedError(
                    f"`{self.assignment}` is outside of the loop of {loop.var} ({loop.unit}): all "
                    "threads would store it"
                )
        if self.warp:
            return
        if GPU_WARP in units and GPU_THREAD not in units[units.index(GPU_WARP) :]:
            raise ScheduleError(
                f"`{self.assignment}` is in a GPUWarp loop, but in no GPUThread loop"
            )

    def _group(self, outside: tuple[Forall, ...]) -> Group | None:
        for loop in outside:
            reduced = loop.race in (cin.PARALLEL_REDUCTION, cin.TEMPORARY)
            if loop.group is None and not (reduced and loop.unit == GPU_THREAD):
                continue
            size, strategy = loop.group or (0, cin.PARALLEL_REDUCTION)
            moved = [var for var in self.moving if self.depends(var, loop.var)]
            if strategy == cin.PARALLEL_REDUCTION and moved:
                if loop.group is None:
                    continue
                raise ScheduleError(
                    f"group({loop.var}, {size}, {strategy}): `{self.assignment}`: the lanes of a "
                    f"group add up to one element, but {moved[0]} moves with {loop.var} (Sgap, "
                    "section 4.2: Segment is for that)"
                )
            if strategy == cin.SEGMENT and not self._in_order(loop, moved):
                raise ScheduleError(
                    f"group({loop.var}, {size}, {strategy}): `{self.assignment}`: the elements of "
                    f"the output do not come in order along {loop.var} (Sgap, section 4.2)"
                )
            self._check_together(loop, outside)
            return Group(loop.var, size, strategy, atomic=False)
        return None

    def depends(self, var: IndexVar, loop: IndexVar) -> bool:
        """Whether a coordinate moves with a loop, be it only that its segment does."""
        levels = self.relations.levels
        parts = [
            number
            for number, level in enumerate(levels)
            if self.relations.is_stored(level) and var in (level, self._whole(level))
        ]
        above = levels[: max(parts)] if parts else ()
        return any(loop in self.leaves(part) for part in (var, *above))

    def _whole(self, level: IndexVar) -> IndexVar:
        """The index that a level has the blocks of."""
        relation = self.relations.source(level)
        return relation.parent if isinstance(relation, cin.Split) else level

    def _check_together(self, group: Forall, outside: tuple[Forall, ...]) -> None:
        """All lanes of a group go through the same loops around their collective."""
        inner = outside[outside.index(group) + 1 :]
        for pos in self.positions:
            first, _ = self.relations.levels_of(pos)
            parents = self.relations.levels[:first]
            if pos.position in self.relations.tiles:
                parents = (*parents, pos.coordinate)
            apart = any(group.var in self.leaves(var) for var in parents)
            for loop in inner:
                if apart and loop.var in self.leaves(pos.position):
                    raise ScheduleError(
                        f"`{self.assignment}`: the threads of {group.var} reduce together inside "
                        f"of the loop of {loop.var}, which is of another length for each of them"
                    )

    def _in_order(self, loop: Forall, moved: list[IndexVar]) -> bool:
        """Whether the place in the output does not decrease from one iteration to the next."""
        if self.sparse_output or not moved:
            return True
        storage = self.relations.storage
        for pos in self.positions:
            if storage is not None and loop.var in self.leaves(pos.position):
                modes = storage.modes
                first, last = self.relations.levels_of(pos)
                return moved == modes[first : first + len(moved)] and last < len(modes)
        fused = [r.fused for r in self.relations.all if isinstance(r, cin.Fuse)]
        return len(moved) == 1 and not any(loop.var in self.leaves(var) for var in fused)

    def _fill(self, op: str | None) -> float | None:
        """None where each element of the output is stored for certain."""
        storage = self.relations.storage
        identity = IDENTITY[self.expression.reduction]
        if op is not None:
            return identity
        if self.sparse_output:
            return 0.0  # in the padding
        if storage is None:
            return None
        stored = {var for level, var in enumerate(storage.modes) if not storage.is_dense(level)}
        visited = {leaf for pos in self.positions for leaf in self.leaves(pos.position)}
        outputs = self.expression.output.indices
        sparse = any(var in stored or self.leaves(var) & visited for var in outputs)
        return identity if sparse else None
