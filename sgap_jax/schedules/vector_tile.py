"""What the tiles of column vectors share: checks of fields and problems, and the text of a tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import ScheduleError

if TYPE_CHECKING:
    from sgap_jax.schedules.octet import OctetTile
    from sgap_jax.schedules.paper_octet import PaperOctetTile
    from sgap_jax.schedules.subwarp import SubwarpTile
    from sgap_jax.schedules.warp import WarpTile

    VectorTile: TypeAlias = OctetTile | PaperOctetTile | SubwarpTile | WarpTile


def check_field(tile: VectorTile, name: str, allowed: Sequence) -> None:
    """Raises ScheduleError for a field whose value is none of the allowed ones, type and all."""
    value = getattr(tile, name)
    if any(type(value) is type(one) and value == one for one in allowed):
        return
    if isinstance(allowed, range) and len(allowed) > 1:
        step = f" multiple of {allowed.step}" if allowed.step > 1 else "n int"
        words = f"a{step} from {allowed[0]} to {allowed[-1]}"
    else:
        words = f"one of {', '.join(map(repr, allowed))}"
    raise ScheduleError(f"{type(tile).__name__}: {name} must be {words}, got {value!r}")


def check_default(tile: VectorTile, problem: Problem, name: str, why: str) -> None:
    """Raises ScheduleError for a field that the problem's operation has no use for."""
    default = next(field.default for field in dataclasses.fields(tile) if field.name == name)
    if getattr(tile, name) != default:
        raise ScheduleError(f"{problem.op}: {tile}: {why}; leave {name} out")


def check_vectors(tile: VectorTile, problem: Problem) -> None:
    """Raises where the problem is not a product with vectors of the tile's length on a GPU."""
    if problem.op not in ("spmm", "sddmm"):
        raise NotImplementedError(
            f"{problem.op}: {tile} has kernels of spmm and sddmm; leave the schedule out here"
        )
    if problem.vector_length is None:
        raise NotImplementedError(
            f"{problem.op}: {tile} runs on column vectors, not on {problem.format}; "
            f"convert with A.asformat(CVS({tile.vector_length}))"
        )
    if problem.vector_length != tile.vector_length:
        raise ScheduleError(
            f"{problem.op}: {tile} is for vectors of {tile.vector_length}, got {problem.format}"
        )
    tile.check_kernel(problem, "cuda")


def tile_text(tile: VectorTile) -> str:
    """As a call, with the vector length and the fields that are not the defaults."""
    given = ", ".join(
        f"{field.name}={getattr(tile, field.name)!r}"
        for field in dataclasses.fields(tile)
        if field.name == "vector_length" or getattr(tile, field.name) != field.default
    )
    return f"{type(tile).__name__}({given})"
