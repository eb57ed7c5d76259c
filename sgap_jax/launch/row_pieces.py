"""`WorkList`, the sizes of a list of pieces of rows, and the launch that adds the sums of the
pieces (cuda/row_pieces/row_pieces.cuh)."""

from __future__ import annotations

import dataclasses

from sgap_jax.launch.kernel_call import TYPES, KernelCall
from sgap_jax.schedules.point import LANES_UNDER_WAY, pieces_of_rows
from sgap_jax.schedules.schedule import GRID_Y

# Elements of the list are (row, first, last, place): struct RowPiece in row_pieces.cuh.
FIELDS = 4
_SHARES = 4  # groups of lanes that share the pieces of a row
_LANES = 32
_BLOCKS = LANES_UNDER_WAY * 5 // 8 // (_LANES * _SHARES)  # of 48 registers a lane


@dataclasses.dataclass(frozen=True)
class WorkList:
    """The sizes of the list of work on `rows` rows of at most `capacity` entries, of which a group
    takes up to `chunk`. They depend on shapes only, as grids do; the list, on the row offsets
    (`primitives/_row_pieces.py` makes it).

    The rows may be block rows, columns of a transposed structure, ..., and entries vectors. With
    `least` the list has shorter pieces, of chunk / 2, chunk / 4, ... and `least` entries at least:
    the shortest that exceed a mean row by a quarter and make no more full chunks than the sizes
    hold.
    """

    rows: int
    capacity: int
    chunk: int
    least: int | None = None

    @property
    def whole(self) -> int:
        """The most full chunks: elements of the first part of the list."""
        return self.capacity // self.chunk

    @property
    def pieces(self) -> int:
        """The elements that groups compute: full chunks, then what is left of each row."""
        return pieces_of_rows(self.rows, self.capacity, self.chunk)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The numbers of entries that pieces may have, in descending order."""
        found = [self.chunk]
        while self.least is not None and found[-1] // 2 >= max(self.least, 1):
            found.append(found[-1] // 2)
        return tuple(found)

    @property
    def merged(self) -> int:
        """The most rows of several pieces, each of a full chunk and an entry or more: elements of
        the last part of the list. 0: the list is not needed."""
        return min(self.rows, self.whole, self.capacity // (self.chunks[-1] + 1))

    @property
    def elements(self) -> int:
        return self.pieces + self.merged

    @property
    def places(self) -> int:
        """Places of partial sums. A row after `before` full chunks has those from 2 `before` on: of
        several pieces, it has at most twice as many as full chunks."""
        return 2 * self.whole

    @property
    def scalars(self) -> tuple[int, int, int]:
        """The kernels' arguments about the list."""
        return self.pieces, self.elements, self.places


def merging_blocks(most: int, beside: int) -> int:
    """The blocks of 128 threads in x that merge up to `most` rows, in turn, where the grid has
    `beside` such columns of blocks: no more than a GPU runs at once, since few rows of a list have
    several pieces."""
    return min(most, max(-(-_BLOCKS // max(beside, 1)), 1))


def sum_plan(
    work: WorkList, dtype: str, width: int, size: int, batch: int, columns: int
) -> KernelCall:
    """The launch that adds the sums of the pieces of each row of several: out[row, :] = sum of
    partial[place, :] over the row's places, in their order, rounded once.

    Inputs: partial [batch, places, width] in the accumulator's dtype, the work list, and out, which
    is changed in place: [batch, size], of which row i of the list has the elements from i * width
    on, `width` of them or those that there are.

    Args:
      work: the sizes of the list.
      dtype: of out.
      width: numbers in an element of the list: V n for block rows of V.
      size: the elements of a member of the batch.
      columns: numbers that a lane adds side by side, 1, 2 or 4; vectors, if they divide the width.
    """
    wide = "double" if dtype == "float64" else "float"
    pointers = [f"const {wide}", "const int", f"const {TYPES[dtype]}", TYPES[dtype]]
    tiles = min(-(-width // (_LANES * columns)), GRID_Y)
    call = KernelCall.of(
        "row_pieces.cuh",
        "SumPiecesKernel",
        [TYPES[dtype], columns, _LANES, _SHARES, width % columns == size % columns == 0],
        pointers,
        (*work.scalars, width, size, work.rows, batch),
        blocks=(merging_blocks(work.merged, tiles * batch), tiles),
        threads=_LANES * _SHARES,
        batch=batch,
    )
    return dataclasses.replace(call, in_place=((2, 0),))
