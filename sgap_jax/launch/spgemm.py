"""Launch plans of the product of two sparse matrices: its values at a pattern
(cuda/spgemm/spgemm.cuh), and its structure (cuda/spgemm/spgemm_pattern.cuh) by two launches, with
the prefix sum of the counts between them, which is XLA's."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from sgap_jax.launch.kernel_call import TYPES, KernelCall
from sgap_jax.schedules.schedule import GRID_X

_THREADS = 256
_LANES = (_THREADS, _THREADS, 32, 8)  # of a team, for each size of rows
_BLOCKS = 4096  # for the rows of one size: they take rows in turn
# The most products of a row for 8 lanes and for a warp. Not measured on a GPU yet.
_PRODUCTS = {8: 512.0, 32: 8192.0}
_ANY = 2**31 - 1  # entries
_WORDS = 8192  # of a block's bits and keys in shared memory


class RowSizes(NamedTuple):
    """How the rows of C are divided among teams of lanes: a row has the last size s for which it
    has at most `entries[s]` entries and `products[s]` products. All have size 0."""

    entries: tuple[int, ...]
    products: tuple[float, ...]


def slots_of_block(dtype: str) -> int:
    """Slots of all tables of a block in shared memory, of 48 KiB."""
    return 2048 if dtype == "float64" else 4096


def row_sizes(slots: int) -> RowSizes:
    """The sizes of rows where the tables of a block have so many slots: 0 for tables in global
    memory."""
    entries = (_ANY, *(slots // (_THREADS // lanes) // 2 for lanes in _LANES[1:]))
    return RowSizes(entries, tuple(_PRODUCTS.get(lanes, inf) for lanes in _LANES))


def pattern_row_sizes(words: int = _WORDS) -> RowSizes:
    """The sizes of rows for the kernels of the structure: 0 for a block, the others for keys that
    a warp or eight lanes sort."""
    return RowSizes((_ANY,) * 3, (inf, float(words // 16), float(words // 128)))


def global_slots(entries: int, columns: int, slots: int) -> int:
    """Slots of the tables in global memory: none where no row of C can be too long for a block."""
    return 2 * entries if min(entries, columns) > row_sizes(slots).entries[1] else 1


def launch_plan(
    dtype: str,
    rows: int,
    entries: tuple[int, int, int],
    *,
    batches: tuple[int, int] = (1, 1),
    complete: bool = False,
    slots: int | None = None,
) -> KernelCall:
    """The launch of C = A B at the entries of a pattern of C.

    Inputs: a [Ba, entries of A], b [Bb, entries of B], row offsets and column indices of A, of B
    and of C, the rows of C listed by their size [m] and the places [5] where those of sizes 0, 1,
    2, 3 begin and end (`row_sizes`). Offsets are valid; the index of an entry that takes no part
    is -1. Outputs: c [batch, entries of C], and the tables of rows of size 0: keys int32
    [global_slots] and sums in the accumulator of the dtype, likewise.

    Args:
      dtype: of a, b and c, one of `TYPES`.
      rows: m.
      entries: of A, B and C.
      batches: (Ba, Bb), each 1 or the batch.
      complete: whether a row with a product that has no place becomes NaN.
      slots: of the tables of a block in shared memory; None: `slots_of_block`.
    """
    of_a, of_b, of_c = entries
    value, slots = TYPES[dtype], slots_of_block(dtype) if slots is None else slots
    strides = (n if batch > 1 else 0 for n, batch in zip((of_a, of_b), batches, strict=True))
    wide = "double" if dtype == "float64" else "float"
    pointers = [f"const {value}"] * 2 + ["const int"] * 8 + [value, "int", wide]
    return KernelCall.of(
        "spgemm.cuh",
        "SpgemmKernel",
        [value, _THREADS, slots],
        pointers,
        (*strides, of_c, max(batches), complete),
        blocks=(min(rows, _BLOCKS, GRID_X), len(_LANES)),
        threads=_THREADS,
        batch=max(batches),
        zero=(0,),
        structure=False,
    )


def count_plan(
    shape: tuple[int, int, int], entries: tuple[int, int], batch: int, *, words: int = _WORDS
) -> KernelCall:
    """The launch that counts the columns of each row of A B.

    Inputs: row offsets and column indices of A [batch, m + 1] and [batch, entries of A], and of B
    likewise, the rows listed by their size [batch, m] and the places [batch, 4] where those of
    sizes 0, 1 and 2 begin and end (`pattern_row_sizes`). Offsets are valid; the index of an entry
    that takes no part is -1. Output: counts int32 [batch, m].

    Args:
      shape: (m, k, n).
      entries: of A and B.
      words: of a block in shared memory, at least 1024.
    """
    return _pattern_plan("SpgemmCountKernel", 6, shape, entries, (), batch, words)


def indices_plan(
    shape: tuple[int, int, int],
    entries: tuple[int, int],
    capacity: int,
    batch: int,
    *,
    words: int = _WORDS,
) -> KernelCall:
    """The launch that writes the column indices of A B, ascending in each row.

    Inputs: those of `count_plan`, and row offsets of A B [batch, m + 1]. Output: indices int32
    [batch, capacity], of the entries that fit; 0 from the last of them on.
    """
    given = (capacity,)
    call = _pattern_plan("SpgemmIndicesKernel", 7, shape, entries, given, batch, words)
    return replace(call, zero=(0,))


def _pattern_plan(
    kernel: str,
    inputs: int,
    shape: tuple[int, int, int],
    entries: tuple[int, int],
    scalars: tuple[int, ...],
    batch: int,
    words: int,
) -> KernelCall:
    return KernelCall.of(
        "spgemm_pattern.cuh",
        kernel,
        [_THREADS, words],
        [*["const int"] * inputs, "int"],
        (*shape, *entries, *scalars, batch),
        blocks=(min(shape[0], _BLOCKS, GRID_X), len(pattern_row_sizes(words).products)),
        threads=_THREADS,
        batch=batch,
        structure=False,
    )
