"""The loop IR: what a scheduled expression becomes before it is printed as C, CUDA or LLVM.

Scalars are of two kinds. Integers (coordinates, positions) are as wide as `Function.index` says.
Numbers are of `Function.accumulator`: a load from a narrower array widens, a store rounds once.
Where that is an integer dtype, numbers are all of it and wrap; infinities are its ends.
Arrays are flat; an array of a narrow dtype is never read back after a rounded store.
"""

from __future__ import annotations

import dataclasses

# Units of parallel loops. A loop of a unit starts at zero, and its extent is a constant.
CPU_THREAD = "CPUThread"  # iterations in any order, on any thread
CPU_VECTOR = "CPUVector"  # SIMD lanes
GPU_BLOCK = "GPUBlock"
GPU_WARP = "GPUWarp"  # of a block, at most one such loop
GPU_THREAD = "GPUThread"  # of a warp (at most 32) where there is a loop of warps, else of a block
UNITS = (CPU_THREAD, CPU_VECTOR, GPU_BLOCK, GPU_WARP, GPU_THREAD)

INTEGERS = ("int8", "uint8", "int32", "int64")  # that numbers may be of


# Expressions: immutable trees.


@dataclasses.dataclass(frozen=True)
class Int:
    value: int


@dataclasses.dataclass(frozen=True)
class Float:
    value: float


@dataclasses.dataclass(frozen=True)
class Var:
    """A loop variable or what a Let names."""

    name: str


@dataclasses.dataclass(frozen=True)
class Load:
    array: str
    index: Expr


@dataclasses.dataclass(frozen=True)
class Binary:
    """`op` is one of + - * // % min max (both sides of one kind), < <= > >= == != (a truth value),
    and, or (of truth values; the right side is evaluated only where it decides)."""

    op: str
    left: Expr
    right: Expr


@dataclasses.dataclass(frozen=True)
class Select:
    """Only the chosen side is evaluated: a load on the other side does not happen."""

    condition: Expr
    true: Expr
    false: Expr


@dataclasses.dataclass(frozen=True)
class Search:
    """The largest p in [low, high) with array[p] <= target; the array does not decrease, and
    array[low] <= target. Of equal elements the last (rows without entries are passed over).
    `low` where the range is empty."""

    array: str
    low: Expr
    high: Expr
    target: Expr


Expr = Int | Float | Var | Load | Binary | Select | Search


# Statements.


@dataclasses.dataclass(frozen=True)
class Let:
    """A new scalar of the kind of `value`. Only a mutable one may be `Set`. Names are unique in a
    Function, but for those in clones of one loop body."""

    name: str
    value: Expr
    mutable: bool = False


@dataclasses.dataclass(frozen=True)
class Set:
    name: str
    value: Expr


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A new array of `size` numbers, private to an iteration of the innermost loop around it that
    has a unit other than CPUVector; every element starts as `fill`."""

    name: str
    size: int
    fill: float = 0.0


@dataclasses.dataclass(frozen=True)
class For:
    """for (var = begin; var < end; var += step). `unit`: of UNITS, "unroll" or None (serial).
    `stream`: little of what it stores is used soon."""

    var: str
    begin: Expr
    end: Expr
    body: tuple[Stmt, ...]
    step: int = 1
    unit: str | None = None
    stream: bool = False


@dataclasses.dataclass(frozen=True)
class While:
    condition: Expr
    body: tuple[Stmt, ...]


@dataclasses.dataclass(frozen=True)
class If:
    condition: Expr
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


@dataclasses.dataclass(frozen=True)
class Store:
    """array[index] = value, or array[index] op= value where `op` (+, max, min) is given.

    `atomic`: another thread may do the same to the same element. `array`: an output or a workspace.
    """

    array: str
    index: Expr
    value: Expr
    op: str | None = None
    atomic: bool = False


@dataclasses.dataclass(frozen=True)
class GroupReduce:
    """Each `size` consecutive threads: array[index] = array[index] op all their values, once.

    All threads of the group reach it, in one control flow, with one index. size is a power of two,
    at most 32. `atomic`: other groups may meet the same element. atomicAddGroup<T, G> of Sgap,
    section 5.
    """

    array: str
    index: Expr
    value: Expr
    size: int
    op: str = "+"
    atomic: bool = True


@dataclasses.dataclass(frozen=True)
class SegReduce:
    """Each `size` consecutive threads: values of neighbours with one index are put together, and
    the first of each run does array[index] = array[index] op (sum), atomically.
    segReduceGroup<T, G> of Sgap, section 5.

    All threads of the group reach it; a negative index takes no part. Indices that take part do not
    decrease from thread to thread, and threads with one index are neighbours.
    """

    array: str
    index: Expr
    value: Expr
    size: int
    op: str = "+"


@dataclasses.dataclass(frozen=True)
class Side:
    """One index of a matrix: its number x is of `stride` * (first + x), or of `stride` *
    gather[first + x]."""

    first: Expr
    stride: int
    gather: str | None = None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A part of an array: (r, c) is array[offset + row + column], where the sides say which these
    are."""

    array: str
    rows: Side
    columns: Side
    offset: Expr = Int(0)


@dataclasses.dataclass(frozen=True)
class Mma:
    """tile(r, c) += sum over s of left(r, s) * right(s, c), on tensor cores, by the 32 lanes of a
    warp together: a GPUBlock loop is around it, maybe a GPUWarp loop, and no GPUThread loop.

    `tile`: a Workspace that only Mma and MmaStore use, row by row. `shape`: of r, c and s; only the
    first `columns` of c and the first `depth` of s exist. `loops` are names of r, c and s.
    """

    tile: str
    left: Matrix
    right: Matrix
    shape: tuple[int, int, int]
    columns: Expr
    depth: Expr
    loops: tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class MmaStore:
    """target(r, c) = tile(r, c), or op= it, times what `scale` has from `offset` on in the place
    that the target has from its own on, where that is given; where an Mma may be, of the columns
    that exist."""

    tile: str
    target: Matrix
    shape: tuple[int, int]
    columns: Expr
    loops: tuple[str, str]
    op: str | None = None
    atomic: bool = False
    scale: str | None = None
    offset: Expr = Int(0)


@dataclasses.dataclass(frozen=True)
class Comment:
    text: str


Stmt = (
    Let
    | Set
    | Workspace
    | For
    | While
    | If
    | Store
    | GroupReduce
    | SegReduce
    | Mma
    | MmaStore
    | Comment
)


@dataclasses.dataclass(frozen=True)
class Array:
    """`dtype`: a NumPy name or "bfloat16". `fill`, of outputs: what every element holds before the
    function starts; None where the function stores each element first. An array of int32 has
    coordinates or positions, but for one of `numbers`. `parts`: it is so many arrays of one size,
    one after another, of which a place says by its first addends which one it is in."""

    name: str
    dtype: str
    size: int
    fill: float | None = None
    numbers: bool = False
    parts: int = 1

    @property
    def is_index(self) -> bool:
        return self.dtype == "int32" and not self.numbers


@dataclasses.dataclass(frozen=True)
class Function:
    """`inputs` are only read; `outputs` are disjoint from them and from each other."""

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    body: tuple[Stmt, ...]
    accumulator: str = "float32"  # or float64, or one of INTEGERS
    index: str = "int32"  # or int64: where a size or a product of sizes does not fit


def extent(loop: For) -> int:
    """The iterations of a loop that has a unit other than CPUVector."""
    match loop:
        case For(begin=Int(0), end=Int(end), step=1) if end >= 0:
            return end
    raise ValueError(
        f"{loop.unit} loop over {loop.var}: expected 0 to a constant in steps of 1, "
        f"got {loop.begin} to {loop.end} in steps of {loop.step}"
    )
