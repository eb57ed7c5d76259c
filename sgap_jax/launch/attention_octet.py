"""Launch plans of attention in octet tiles, on tensor cores, and of its gradients
(cuda/attention/attention_octet*.cuh)."""

from __future__ import annotations

from sgap_jax.launch.attention_shapes import AttentionShapes, checked, scalars, types
from sgap_jax.launch.kernel_call import TENSOR_CORES, KernelCall
from sgap_jax.launch.row_pieces import WorkList
from sgap_jax.schedules.attention import AttentionTile
from sgap_jax.schedules.point import WARPS_UNDER_WAY
from sgap_jax.schedules.problem import Problem

_WARP = 32
_HALF = 128  # registers of a lane: half of the most that it can have
_BLOCK_WARPS = 4  # warps of a block of the kernel by keys, if there are few of them
_PIECES_WARPS = 2  # of that kernel on pieces: blocks of four differ more in what they issue
_MOST_WARPS = 8  # warps of a block whose lanes have the most registers
# By keys an entry is up to 16 keys by V rows: a piece of so many fewer takes about as long as one
# of a row.
PIECES_BY_KEYS = 16
_NEAR = 8  # warps of a block, of neighbouring block rows or keys, where they fill a GPU
# With pieces at least so many blocks, some sixteen for each of a GPU's 132 multiprocessors, if need
# be of two warps: where each has four, a few more blocks than that take a quarter of the time more.
_BLOCKS_OF_PIECES = 2048


def forward_plan(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    scale: float,
    pointers: list[str],
    work: WorkList | None,
) -> KernelCall:
    """As `forward_plan` in launch/attention.py, which passes the pointers' types and the sizes of
    the work list, if there is one."""
    steps, panels = _pieces(problem.n, 32), _pieces(shapes.value_depth, 64)
    # Registers: 4 a step for the queries, 16 a panel for the sums.
    tiles = _tiles(problem, schedule, shapes, 4 * steps + 16 * panels)
    return _by_rows(
        "attention_octet.cuh",
        "AttentionOctetKernel" if work is None else "AttentionOctetPiecesKernel",
        problem,
        shapes,
        (*tiles, steps, panels, schedule.share),
        pointers,
        scalars(problem, shapes, scale) + (() if work is None else work.scalars),
        full=(32 * steps, 64 * panels),
        work=work,
    )


def rows_backward_plan(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    scale: float,
    wrt_bias: bool,
    pointers: list[str],
    work: WorkList | None,
) -> KernelCall:
    """As `rows_backward_plan` in launch/attention.py."""
    steps, value_steps = _pieces(problem.n, 32), _pieces(shapes.value_depth, 32)
    # Registers of a tile for queries, cotangents and sums; and for the gathered keys and values.
    own, gathered = 12 * steps + 4 * value_steps, 8 * (steps + value_steps)
    tiles = _tiles(problem, schedule, shapes, own, gathered, _most(problem, shapes))
    return _by_rows(
        "attention_octet_backward.cuh",
        "AttentionOctetRowsBackwardKernel"
        if work is None
        else "AttentionOctetRowsBackwardPiecesKernel",
        problem,
        shapes,
        (*tiles, steps, value_steps, min(schedule.share, _MOST_WARPS)),
        pointers,
        (
            *scalars(problem, shapes, scale),
            int(wrt_bias),
            *(() if work is None else work.scalars),
        ),
        full=(32 * steps, 32 * value_steps),
        work=work,
        zero=(1,) if wrt_bias else (),
    )


def keys_backward_plan(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    scale: float,
    pointers: list[str],
    work: WorkList | None,
) -> KernelCall:
    """As `keys_backward_plan` in launch/attention.py. Warps of neighbouring keys, which gather the
    same queries in a band, share a block."""
    length = checked(problem, schedule, shapes)
    steps, value_steps = _pieces(problem.n, 32), _pieces(shapes.value_depth, 32)
    tiles = keys_of_warp(problem, shapes) // 8
    share = min(schedule.share, _MOST_WARPS)
    sets = -(-problem.shape[1] // (8 * tiles)) if work is None else work.pieces
    every = sets * shapes.key_heads * shapes.batch * share
    warps = max(share, _neighbours(every, work, _BLOCK_WARPS if work is None else _PIECES_WARPS))
    operand, _ = types(problem)
    constants: list = [operand, length, tiles, steps, value_steps, share, _WARP * warps]
    constants += [_aligned(problem, shapes)]
    constants += [_widths(problem, shapes) == (32 * steps, 32 * value_steps)]
    return KernelCall.of(
        "attention_octet_keys.cuh",
        "AttentionOctetKeysBackwardKernel"
        if work is None
        else "AttentionOctetKeysBackwardPiecesKernel",
        constants,
        pointers,
        scalars(problem, shapes, scale) + (() if work is None else work.scalars),
        blocks=(-(-sets // (warps // share)), shapes.key_heads),
        threads=_WARP * warps,
        batch=shapes.batch,
        requires=TENSOR_CORES,
    )


def keys_of_warp(problem: Problem, shapes: AttentionShapes) -> int:
    """How many neighbouring keys a warp of the kernel by keys has, 8 or 16."""
    steps, value_steps = _pieces(problem.n, 32), _pieces(shapes.value_depth, 32)
    # Registers for two tiles of keys, values and their sums; for the gathered queries and
    # cotangents; and for the lists of the keys' entries.
    registers = (2 * 12 + 8) * (steps + value_steps) + 32
    return 16 if registers <= _most(problem, shapes) else 8


def _tiles(
    problem: Problem,
    schedule: AttentionTile,
    shapes: AttentionShapes,
    registers: int,
    gathered: int = 0,
    most: int = _HALF,
) -> tuple[int, int, int]:
    """(V, rows, heads): of the V rows of a vector and of the heads that share keys, how many a warp
    takes. It computes up to 4 tiles of 8 rows: n tiles need n * registers + gathered registers,
    which must not exceed `most`."""
    length = checked(problem, schedule, shapes)
    tiles = max(n for n in (1, 2, 4) if n == 1 or n * registers + gathered <= most)
    rows = min(length, 8 * tiles)
    group = shapes.heads // max(shapes.key_heads, 1)
    heads = max(n for n in (1, 2, 4) if n == 1 or (group % n == 0 and n * rows <= 8 * tiles))
    return length, rows, heads


def _by_rows(
    header: str,
    kernel: str,
    problem: Problem,
    shapes: AttentionShapes,
    constants: tuple[int, ...],
    pointers: list[str],
    numbers: tuple[int, ...],
    full: tuple[int, int],
    work: WorkList | None,
    zero: tuple[int, ...] = (),
) -> KernelCall:
    """A launch of a kernel whose warps take rows, of all block rows or of the pieces of a list.

    `constants`: V, rows, heads, steps of q and of v, and last the warps that share rows. `full`:
    the features of q and of v that fill all steps. Where there are enough to fill a GPU, warps of
    neighbouring block rows, which gather the same keys in a band, share a block.
    """
    length, rows, heads, *_, warps = constants
    block_rows = -(-problem.shape[0] // length) if work is None else work.pieces
    of_key = max(shapes.heads // max(shapes.key_heads, 1) // heads, 1)
    sets = block_rows * (length // rows) * of_key
    every = sets * shapes.key_heads * shapes.batch * warps
    least = 2 if every >= 2 * WARPS_UNDER_WAY else 1
    near = _neighbours(every, work, least) if warps == 1 else 1
    operand, _ = types(problem)
    widths = _aligned(problem, shapes), _widths(problem, shapes) == full
    all_constants: list = [operand, *constants, near, *widths]
    return KernelCall.of(
        header,
        kernel,
        all_constants,
        pointers,
        numbers,
        blocks=(-(-sets // near), shapes.key_heads),
        threads=_WARP * warps * near,
        batch=shapes.batch,
        requires=TENSOR_CORES,
        zero=zero,
    )


def _neighbours(every: int, work: WorkList | None, least: int) -> int:
    """The warps of a block, of `every` warps: at most `_NEAR`, which is what bands want, if they
    fill a GPU, else `least`."""
    if every < 2 * WARPS_UNDER_WAY:
        return least
    near = _NEAR
    while work is not None and near > least and every < _BLOCKS_OF_PIECES * near:
        near //= 2
    return near


def _most(problem: Problem, shapes: AttentionShapes) -> int:
    """How many registers of a lane operands and sums may take; loads and addresses need the rest,
    and more of it if rows are not aligned."""
    return 160 if _aligned(problem, shapes) else 128


def _aligned(problem: Problem, shapes: AttentionShapes) -> bool:
    return problem.n % 8 == 0 and shapes.value_depth % 8 == 0


def _widths(problem: Problem, shapes: AttentionShapes) -> tuple[int, int]:
    return problem.n, shapes.value_depth


def _pieces(depth: int, size: int) -> int:
    return max(-(-depth // size), 1)
