"""How a sum reaches the output: derived from the loops, whatever the schedule claims.

The sum stays in a scalar across the innermost loops that do not change its element:

    for i: sum = 0; for j: sum += A[i, j] * x[j]; y[i] = sum

A loop over the positions of several levels comes to another element only where a segment ends, if
the element is one of an outer level: then the sum is stored there, too. What serial loops remain
around the store decide between `=` and `+=`. What parallel loops remain must own the element, or
the store is atomic or collective (Senanayake et al., OOPSLA 2020, section 5.3; Sgap, section 4.2).
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.loop_ir.loopir import CPU_THREAD, CPU_VECTOR, GPU_BLOCK, GPU_THREAD, GPU_WARP
from sgap_jax.compiler.lowering.output_loops import OutputLoops
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import Forall
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.compiler.notation.nest import loops
from sgap_jax.compiler.notation.spaces import is_stored_whole
from sgap_jax.schedules.schedule import ScheduleError

IDENTITY = {"+": 0.0, "max": float("-inf"), "min": float("inf")}


@dataclasses.dataclass(frozen=True)
class Group:
    """A collective store: by `size` neighbours among the iterations of `var`; 0 is all of them."""

    var: IndexVar
    size: int
    strategy: str
    atomic: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the assignment to the output is done."""

    sum_loop: IndexVar | None  # the outermost loop across which the sum stays in a scalar
    by_segment: bool  # that loop also stores the sum where a segment ends
    op: str | None  # the reduction of the store with what the element holds; None is `=`
    atomic: bool
    group: Group | None
    fill: float | None  # what the output holds beforehand; None if every element is stored
    warp: tuple[IndexVar, ...]  # the loops that a warp runs by octet_mma


def plan_sums(nest: OutputLoops, warp: tuple[IndexVar, ...]) -> Plan:
    """`warp`: the loops that a warp runs by octet_mma; its sums are all in registers.

    Raises ScheduleError or NotImplementedError where the parallel loops would race.
    """
    sum_loop, by_segment = _sum_loop(nest, warp)
    names = [loop.var for loop in nest.path]
    crossed = nest.path[names.index(sum_loop) :] if sum_loop else ()
    outside = nest.path[: len(nest.path) - len(crossed)]
    _check_units(nest, warp)
    for loop in crossed:
        if loop.unit is not None and loop.race == cin.NO_RACES:
            raise _race(nest, loop)
    group = _group(nest, outside, (*outside, *crossed[:by_segment]))
    shared = [loop for loop in outside if not nest.owned(loop)]
    op = nest.expression.reduction if shared or by_segment else None
    atomic = _atomic(nest, shared, outside, group)
    if group is not None:
        more = any(loop.unit for loop in shared if loop.var != group.var)
        atomic = atomic and more
        group = dataclasses.replace(group, atomic=group.atomic or atomic)
        op = nest.expression.reduction
    return Plan(sum_loop, by_segment, op, atomic, group, _fill(nest, op), warp)


def _sum_loop(nest: OutputLoops, warp: tuple[IndexVar, ...]) -> tuple[IndexVar | None, bool]:
    """The loop across which the sum stays in a scalar, and whether it also stores by segment."""
    found = None
    for loop in reversed(nest.path):
        if loop.var in warp:
            found = loop.var
            continue
        if loop.unit not in (None, CPU_VECTOR):
            break
        if nest.changed_by(loop):
            if not warp and nest.changes_by_segment(loop):
                return loop.var, True
            break
        found = loop.var
    return found, False


def _check_units(nest: OutputLoops, warp: tuple[IndexVar, ...]) -> None:
    """A parallel loop of a CPU, or of blocks, is outside of everything else."""
    units = [loop.unit for loop in nest.path]
    outermost = nest.body.unit if isinstance(nest.body, Forall) else None
    for loop in loops(nest.body):
        if loop.unit in (GPU_BLOCK, CPU_THREAD) and loop != nest.body:
            raise NotImplementedError(
                f"{loop.var} ({loop.unit}) is inside of something else; a loop of this unit is "
                "the outermost"
            )
        if loop.unit in (GPU_WARP, GPU_THREAD) and outermost != GPU_BLOCK:
            raise ScheduleError(f"{loop.var} ({loop.unit}) is in no GPUBlock loop")
        if loop.unit in (GPU_WARP, GPU_THREAD) and loop.unit not in units:
            raise NotImplementedError(
                f"`{nest.assignment}` is outside of the loop of {loop.var} ({loop.unit}): all "
                "threads would store it"
            )
    if warp:
        return
    if GPU_WARP in units and GPU_THREAD not in units[units.index(GPU_WARP) :]:
        raise ScheduleError(f"`{nest.assignment}` is in a GPUWarp loop, but in no GPUThread loop")


def _atomic(
    nest: OutputLoops, shared: list[Forall], outside: tuple[Forall, ...], group: Group | None
) -> bool:
    """Whether the store is atomic. `shared`: the loops outside whose iterations may meet."""
    parallel = [loop for loop in shared if loop.unit is not None]
    grouped = None if group is None else group.var
    for loop in parallel:
        if loop.var == grouped:
            continue
        if loop.race == cin.NO_RACES or loop.unit == CPU_VECTOR:
            raise _race(nest, loop)
        if loop.race in (cin.TEMPORARY, cin.PARALLEL_REDUCTION):
            raise NotImplementedError(
                f"`{nest.assignment}`: {loop.race} over {loop.var} ({loop.unit}) is available "
                "where all iterations of a CPUVector or GPUThread loop have one element; the "
                "nearest is Atomics"
            )
    if any(loop.race == cin.ATOMICS for loop in outside if loop.unit is not None):
        return bool(parallel)
    return False


def _race(nest: OutputLoops, loop: Forall) -> ScheduleError:
    return ScheduleError(
        f"`{nest.assignment}` is not owned by the iterations of {loop.var} ({loop.unit}, "
        f"{loop.race}): several of them meet in one element (Senanayake et al., section 5.3: "
        "such a store is atomic, or reduced in parallel, or claimed by IgnoreRaces)"
    )


def _group(
    nest: OutputLoops, outside: tuple[Forall, ...], storing: tuple[Forall, ...]
) -> Group | None:
    """`storing`: the loops around the store, the one that stores by segment among them."""
    for loop in outside:
        reduced = loop.race in (cin.PARALLEL_REDUCTION, cin.TEMPORARY)
        if loop.group is None and not (reduced and loop.unit == GPU_THREAD):
            continue
        size, strategy = loop.group or (0, cin.PARALLEL_REDUCTION)
        changed = [var for var in nest.element if nest.depends(var, loop.var)]
        if strategy == cin.PARALLEL_REDUCTION and changed:
            if loop.group is None:
                continue
            raise ScheduleError(
                f"group({loop.var}, {size}, {strategy}): `{nest.assignment}`: the lanes of a "
                f"group add up to one element, but {changed[0]} moves with {loop.var} (Sgap, "
                "section 4.2: Segment is for that)"
            )
        if strategy == cin.SEGMENT and not nest.in_order(loop, changed):
            raise ScheduleError(
                f"group({loop.var}, {size}, {strategy}): `{nest.assignment}`: the elements of "
                f"the output do not come in order along {loop.var} (Sgap, section 4.2)"
            )
        _check_together(nest, loop, storing)
        return Group(loop.var, size, strategy, atomic=False)
    return None


def _check_together(nest: OutputLoops, group: Forall, storing: tuple[Forall, ...]) -> None:
    """All lanes of a group go through the same loops around their collective."""
    inner = storing[storing.index(group) + 1 :]
    for pos in nest.positions:
        first, _ = nest.relations.levels_of(pos)
        parents = nest.relations.levels[:first]
        if pos.position in nest.relations.tiles:
            parents = (*parents, pos.coordinate)
        unlike = any(group.var in nest.loops_of(var) for var in parents)
        for loop in inner:
            if unlike and loop.var in nest.loops_of(pos.position):
                raise ScheduleError(
                    f"`{nest.assignment}`: the threads of {group.var} reduce together inside "
                    f"of the loop of {loop.var}, which is of another length for each of them"
                )


def _fill(nest: OutputLoops, op: str | None) -> float | None:
    identity = IDENTITY[nest.expression.reduction]
    if op is not None:
        return identity
    if nest.sparse_output:
        return 0.0  # in the padding
    if nest.expression.merges:
        return None if is_stored_whole(nest.expression) else identity
    stored = nest.relations.storage.sparse_modes
    visited = {loop for pos in nest.positions for loop in nest.loops_of(pos.position)}
    outputs = nest.expression.output.indices
    sparse = any(var in stored or nest.loops_of(var) & visited for var in outputs)
    return identity if sparse else None
