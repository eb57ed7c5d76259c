"""The rules for groups of threads that reduce together (Sgap, sections 3.3 and 5.2)."""

from __future__ import annotations

from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import Forall
from sgap_jax.compiler.notation.expr import Assign
from sgap_jax.compiler.notation.nest import level_indices
from sgap_jax.compiler.notation.provenance import Provenance
from sgap_jax.schedules.schedule import ScheduleError


def check_group(
    expression: Assign, graph: Provenance, loop: Forall, size: int, strategy: str
) -> None:
    """Raises ScheduleError unless a loop of threads can be divided into groups of `size` that
    reduce by this strategy."""
    if strategy not in cin.GROUP_STRATEGIES:
        known = ", ".join(cin.GROUP_STRATEGIES)
        raise ScheduleError(f"no strategy {strategy!r}; there are {known}")
    if loop.unit != loopir.GPU_THREAD:
        raise ScheduleError(
            f"the lanes of a group are threads: parallelize {loop.var} over {loopir.GPU_THREAD} "
            "first"
        )
    if type(size) is not int or size not in (1, 2, 4, 8, 16, 32):
        raise ScheduleError(f"a group has 1, 2, 4, 8, 16 or 32 lanes of a warp, got {size!r}")
    extent = graph.constant(loop.var)
    if extent is None or extent % size:
        raise ScheduleError(
            f"{size} does not divide the extent of {loop.var}, "
            f"{'which is not a constant' if extent is None else extent}"
        )
    roots = graph.roots(loop.var)
    if not any(root in expression.reduced for root in roots):
        raise ScheduleError(f"nothing is reduced over {loop.var}: its lanes have nothing to add up")
    moved = [index for index in expression.output.indices if index in roots]
    if strategy == cin.PARALLEL_REDUCTION:
        if moved:
            raise ScheduleError(
                f"{cin.PARALLEL_REDUCTION} adds up one element of {expression.output}, but the "
                f"lanes of {loop.var} have different {moved[0]}; give {cin.SEGMENT}"
            )
        return
    pos = graph.position(loop.var)
    levels = (
        ()
        if pos is None or pos.access.format is None
        else level_indices(pos.access.format, pos.access.indices)
    )
    if pos is None or tuple(moved) != levels[: len(moved)]:
        raise ScheduleError(
            f"{cin.SEGMENT} needs elements of {expression.output} that do not decrease from lane "
            f"to lane: {loop.var} must be in position space, over leading levels by which the "
            "output is ordered"
        )


def check_segments(
    expression: Assign, graph: Provenance, lanes: Forall, inside: tuple[Forall, ...]
) -> None:
    """Raises ScheduleError unless, at each step, lanes with equal output elements are neighbours:
    no loop inside that of the lanes may change the element."""
    moving = set(graph.roots(lanes.var)) & set(expression.output.indices)
    if own := [loop.var for loop in inside if moving & set(graph.roots(loop.var))]:
        raise ScheduleError(
            f"each lane of {lanes.var} would go through elements of its own in the loop of "
            f"{own[0]}, and the lanes of a {cin.SEGMENT} group store at once; put the loop of "
            f"{own[0]} around that of {lanes.var}"
        )
