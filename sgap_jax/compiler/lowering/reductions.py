"""Where a sum is kept and how it reaches the output: computed from the loops, not trusted.

A sum is kept in a scalar across the innermost loops that do not move the element it belongs to. A
loop over the positions of several levels moves it only where a segment ends, if the element is one
of an outer level: then the sum is stored there. What loops remain decide between `=` and `+=`; what
parallel loops remain must own the element, or the store is atomic, or a collective.
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.loop_ir.loopir import CPU_THREAD, CPU_VECTOR, GPU_BLOCK, GPU_THREAD, GPU_WARP
from sgap_jax.compiler.lowering.output_loops import Movement
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import Assignment, Forall
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.compiler.notation.nest import loops
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


def plan_sums(movement: Movement, warp: tuple[IndexVar, ...]) -> Plan:
    """`warp`: the loops of a nest that a warp runs; its sums are kept all together.

    Raises ScheduleError or NotImplementedError where the parallel loops would race.
    """
    start, tracked = _kept(movement, warp)
    names = [loop.var for loop in movement.path]
    crossed = movement.path[names.index(start) :] if start else ()
    outside = movement.path[: len(movement.path) - len(crossed)]
    _check_units(movement, warp)
    for loop in crossed:
        if loop.unit is not None and loop.race == cin.NO_RACES:
            raise _race(movement, loop)
    group = _group(movement, outside, (*outside, *crossed[: tracked is not None]))
    shared = [loop for loop in outside if not movement.owned(loop)]
    op = None if not shared and tracked is None else movement.expression.reduction
    atomic = _atomic(movement, shared, outside, group)
    if group is not None:
        more = any(loop.unit for loop in shared if loop.var != group.var)
        atomic = atomic and more
        group = dataclasses.replace(group, atomic=group.atomic or atomic)
        op = movement.expression.reduction
    return Plan(
        movement.assignment, movement.path, start, tracked, op, atomic, group, _fill(movement, op)
    )


def _kept(
    movement: Movement, warp: tuple[IndexVar, ...]
) -> tuple[IndexVar | None, IndexVar | None]:
    """The loop across which the sum is kept, and the same again where it is tracked."""
    start = None
    for loop in reversed(movement.path):
        if loop.var in warp:
            start = loop.var
            continue
        if loop.unit not in (None, CPU_VECTOR):
            break
        moved = movement.moved(loop)
        if not moved:
            start = loop.var
            continue
        if not warp and movement.only_tracked(loop.var, moved):
            return loop.var, loop.var
        break
    return start, None


def _check_units(movement: Movement, warp: tuple[IndexVar, ...]) -> None:
    """A parallel loop of a CPU, or of blocks, is outside of everything else."""
    units = [loop.unit for loop in movement.path]
    outermost = movement.body.unit if isinstance(movement.body, Forall) else None
    for loop in loops(movement.body):
        if loop.unit in (GPU_BLOCK, CPU_THREAD) and loop != movement.body:
            raise NotImplementedError(
                f"{loop.var} ({loop.unit}) is inside of something else; a loop of this unit is "
                "the outermost"
            )
        if loop.unit in (GPU_WARP, GPU_THREAD) and outermost != GPU_BLOCK:
            raise ScheduleError(f"{loop.var} ({loop.unit}) is in no GPUBlock loop")
        if loop.unit in (GPU_WARP, GPU_THREAD) and loop.unit not in units:
            raise NotImplementedError(
                f"`{movement.assignment}` is outside of the loop of {loop.var} ({loop.unit}): all "
                "threads would store it"
            )
    if warp:
        return
    if GPU_WARP in units and GPU_THREAD not in units[units.index(GPU_WARP) :]:
        raise ScheduleError(
            f"`{movement.assignment}` is in a GPUWarp loop, but in no GPUThread loop"
        )


def _atomic(
    movement: Movement, shared: list[Forall], outside: tuple[Forall, ...], group: Group | None
) -> bool:
    parallel = [loop for loop in shared if loop.unit is not None]
    grouped = None if group is None else group.var
    for loop in parallel:
        if loop.var == grouped:
            continue
        if loop.race == cin.NO_RACES or loop.unit == CPU_VECTOR:
            raise _race(movement, loop)
        if loop.race in (cin.TEMPORARY, cin.PARALLEL_REDUCTION):
            raise NotImplementedError(
                f"`{movement.assignment}`: {loop.race} over {loop.var} ({loop.unit}) is available "
                "where all iterations of a CPUVector or GPUThread loop have one element; the "
                "nearest is Atomics"
            )
    if any(loop.race == cin.ATOMICS for loop in outside if loop.unit is not None):
        return bool(parallel)
    return False


def _race(movement: Movement, loop: Forall) -> ScheduleError:
    return ScheduleError(
        f"`{movement.assignment}` is not owned by the iterations of {loop.var} ({loop.unit}, "
        f"{loop.race}): several of them meet in one element (Senanayake et al., section 5.3: "
        "such a store is atomic, or reduced in parallel, or claimed by IgnoreRaces)"
    )


def _group(
    movement: Movement, outside: tuple[Forall, ...], storing: tuple[Forall, ...]
) -> Group | None:
    """`storing`: the loops around what is stored, a tracked one among them."""
    for loop in outside:
        reduced = loop.race in (cin.PARALLEL_REDUCTION, cin.TEMPORARY)
        if loop.group is None and not (reduced and loop.unit == GPU_THREAD):
            continue
        size, strategy = loop.group or (0, cin.PARALLEL_REDUCTION)
        moved = [var for var in movement.moving if movement.depends(var, loop.var)]
        if strategy == cin.PARALLEL_REDUCTION and moved:
            if loop.group is None:
                continue
            raise ScheduleError(
                f"group({loop.var}, {size}, {strategy}): `{movement.assignment}`: the lanes of a "
                f"group add up to one element, but {moved[0]} moves with {loop.var} (Sgap, "
                "section 4.2: Segment is for that)"
            )
        if strategy == cin.SEGMENT and not movement.in_order(loop, moved):
            raise ScheduleError(
                f"group({loop.var}, {size}, {strategy}): `{movement.assignment}`: the elements of "
                f"the output do not come in order along {loop.var} (Sgap, section 4.2)"
            )
        _check_together(movement, loop, storing)
        return Group(loop.var, size, strategy, atomic=False)
    return None


def _check_together(movement: Movement, group: Forall, storing: tuple[Forall, ...]) -> None:
    """All lanes of a group go through the same loops around their collective."""
    inner = storing[storing.index(group) + 1 :]
    for pos in movement.positions:
        first, _ = movement.relations.levels_of(pos)
        parents = movement.relations.levels[:first]
        if pos.position in movement.relations.tiles:
            parents = (*parents, pos.coordinate)
        apart = any(group.var in movement.leaves(var) for var in parents)
        for loop in inner:
            if apart and loop.var in movement.leaves(pos.position):
                raise ScheduleError(
                    f"`{movement.assignment}`: the threads of {group.var} reduce together inside "
                    f"of the loop of {loop.var}, which is of another length for each of them"
                )


def _fill(movement: Movement, op: str | None) -> float | None:
    """None where each element of the output is stored for certain."""
    storage = movement.relations.storage
    identity = IDENTITY[movement.expression.reduction]
    if op is not None:
        return identity
    if movement.sparse_output:
        return 0.0  # in the padding
    if storage is None:
        return None
    stored = {var for level, var in enumerate(storage.modes) if not storage.is_dense(level)}
    visited = {leaf for pos in movement.positions for leaf in movement.leaves(pos.position)}
    outputs = movement.expression.output.indices
    sparse = any(var in stored or movement.leaves(var) & visited for var in outputs)
    return identity if sparse else None
