"""The loop IR: what a scheduled expression becomes before it is printed as C, CUDA or LLVM.

Scalars are of two kinds. Integers (coordinates, positions) have the dtype `Function.index`.
Numbers (values) have the dtype `Function.accumulator`: a load from a narrower array widens, a store
rounds once. With an integer accumulator all arrays of values have its dtype, arithmetic wraps, and
infinities are its limits. Arrays are flat; an array of a narrow dtype is never read back after a
rounded store.
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

INTEGERS = ("int8", "uint8", "int32", "int64")  # integer dtypes of values


# Expressions: immutable trees.


@dataclasses.dataclass(frozen=True)
class Int:
    value: int


@dataclasses.dataclass(frozen=True)
class Float:
    value: float


@dataclasses.dataclass(frozen=True)
class Var:
    """A loop variable, or the scalar of a Let."""

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
    """The largest p in [low, high) with array[p] <= target, `low` if the range is empty.

    The array does not decrease, and array[low] <= target. Of equal elements it finds the last one,
    so that rows without entries are skipped.
    """

    array: str
    low: Expr
    high: Expr
    target: Expr


Expr = Int | Float | Var | Load | Binary | Select | Search


# Statements.


@dataclasses.dataclass(frozen=True)
class Let:
    """A new scalar of the kind of `value`. Only a mutable one may be `Set`. Names are unique in a
    Function, except in copies of one loop body."""

    name: str
    value: Expr
    mutable: bool = False


@dataclasses.dataclass(frozen=True)
class Set:
    name: str
    value: Expr


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A new array of `size` values, private to an iteration of the innermost loop around it with a
    unit other than CPUVector; `fill` is the initial value of its elements, None: anything, so that
    what is computed from it must not be read."""

    name: str
    size: int
    fill: float | None = 0.0


@dataclasses.dataclass(frozen=True)
class For:
    """for (var = begin; var < end; var += step). `unit`: of UNITS, "unroll" or None (serial).
    `stream`: little of what the loop stores is read again soon."""

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
    """Each group of `size` consecutive threads does array[index] = array[index] op (their values,
    reduced), once.

    All threads of the group reach it in one control flow and with the same index. size is a power
    of two, at most 32. `atomic`: other groups may update the same element. atomicAddGroup<T, G> of
    Sgap, section 5.
    """

    array: str
    index: Expr
    value: Expr
    size: int
    op: str = "+"
    atomic: bool = True


@dataclasses.dataclass(frozen=True)
class SegReduce:
    """In each group of `size` consecutive threads, values of neighbours with the same index are
    reduced by op, and the first thread of each such run updates array[index] with the result,
    atomically. segReduceGroup<T, G> of Sgap, section 5.

    All threads of the group reach it; a thread with a negative index takes no part. The other
    indices do not decrease from thread to thread, and threads with equal indices are neighbours.
    """

    array: str
    index: Expr
    value: Expr
    size: int
    op: str = "+"


@dataclasses.dataclass(frozen=True)
class Side:
    """The offsets along one side of a matrix: row or column x is at `stride` * (first + x), or at
    `stride` * gather[first + x]."""

    first: Expr
    stride: int
    gather: str | None = None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix in an array: element (r, c) is array[offset + rows(r) + columns(c)], where a side
    gives the offset of a row or column."""

    array: str
    rows: Side
    columns: Side
    offset: Expr = Int(0)


@dataclasses.dataclass(frozen=True)
class Mma:
    """tile(r, c) += sum over s of left(r, s) * right(s, c), on tensor cores, by the 32 lanes of a
    warp together: it is inside a GPUBlock loop, perhaps a GPUWarp loop, and no GPUThread loop.

    `tile`: a Workspace in row-major order that only Mma and MmaStore use. `shape`: extents of r, c
    and s; only the first `columns` of c and the first `depth` of s exist. `loops`: names of r, c
    and s.
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
    """target(r, c) = tile(r, c), or op= it, for the columns that exist; allowed where an Mma is.

    With `scale`, the tile is multiplied by that array: element (r, c) by scale[offset + p], where
    target(r, c) is the element target.offset + p of its array.
    """

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
    """`dtype`: a NumPy name or "bfloat16". `fill`, of outputs: the initial value of all elements;
    None where the function stores each element first. An array of int32 has coordinates or
    positions unless `holds_values`. `parts`: the array is that many arrays of one size,
    one after another; the first addends of an index select the part."""

    name: str
    dtype: str
    size: int
    fill: float | None = None
    holds_values: bool = False
    parts: int = 1

    @property
    def is_index(self) -> bool:
        return self.dtype == "int32" and not self.holds_values


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
    """The number of iterations of a loop with a unit other than CPUVector."""
    match loop:
        case For(begin=Int(0), end=Int(end), step=1) if end >= 0:
            return end
    raise ValueError(
        f"{loop.unit} loop over {loop.var}: expected 0 to a constant in steps of 1, "
        f"got {loop.begin} to {loop.end} in steps of {loop.step}"
    )
