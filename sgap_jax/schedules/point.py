"""Points of the atomic-parallelism space: which are legal, what their lanes own, and for each
operation which have a kernel.
"""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from typing import TypeVar

from sgap_jax.schedules.problem import ROW_OPS, TILED, Problem
from sgap_jax.schedules.schedule import Schedule, ScheduleError

GROUPS = (1, 2, 4, 8, 16, 32)  # lanes of a warp that can reduce together
# Not part of the paper's notation.
_TUNABLES = ("block_size", "tile_size", "worker_dim_r", "chunk")
MOST_SHARE = 1024  # limit on groups that share a row, and on rows or windows of a group in turn
_TILE_CHUNKS = 32  # the most lanes side by side along the dense columns of a block

_NUMBER = r"[0-9]+(?:/[0-9]+)?"
_NOTATION = re.compile(
    rf"\{{\s*<\s*({_NUMBER})\s*(nnz|row)\s*,\s*({_NUMBER})\s*col\s*>\s*,\s*([0-9]+)\s*\}}"
    rf"((?:[\s,]+\w+={_NUMBER})*)"
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Point(Schedule):
    """The fields and rules of a legal point, whether or not a kernel implements it. Its subclass
    `AtomicParallelism` is the schedule and documents the fields. Source: Sgap, sections 3.2 and
    3.3."""

    nnz: int | Fraction | None = None
    row: int | Fraction | None = None
    col: int | Fraction = 1
    group: int = 1
    block_size: int = 256
    tile_size: int | None = None
    worker_dim_r: int | Fraction = 1
    chunk: int | None = None

    def __post_init__(self) -> None:
        if (self.nnz is None) == (self.row is None):
            raise ScheduleError(
                f"{type(self).__name__}: give either nnz= or row= (Sgap, section 3.2)"
            )
        for name in ("nnz", "row", "col"):
            self._check_amount(name)
        if type(self.group) is not int or self.group not in GROUPS:
            raise ScheduleError(
                f"{type(self).__name__}: group must be one of {GROUPS} (lanes of a warp, Sgap "
                f"section 3.2), got {self.group!r}"
            )
        self._check_rules()
        self._check_tunables()

    def _check_amount(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name != "col":
            return
        fits = type(value) in (int, Fraction) and 0 < value < 2**31
        if not fits or (value.numerator != 1 and value.denominator != 1):
            raise ScheduleError(
                f"{type(self).__name__}: {name} must be a positive int g or Fraction(1, g) (Sgap, "
                f"section 3.2), got {value!r}"
            )

    def _check_rules(self) -> None:
        """The three rules of section 3.3. Rule 2 as printed, r >= g, contradicts the paper's own
        Table 1 (g = 32, r = 8). What mixes rows in one reduction is an r that does not divide g, so
        that is what rule 2 refuses here."""
        share, whole_col = self._row_share, max(Fraction(self.col), Fraction(1))
        if self.nnz is not None and (self.nnz < 1 or self.col < 1):
            broken = "rule 1: a nonzero and its product with one dense element cannot be divided"
            nearest = f"<{max(Fraction(self.nnz), Fraction(1))} nnz, {whole_col} col>, {self.group}"
        elif self.row is not None and self.row < 1 and self.col < 1:
            broken = "rule 3: parallel lanes multiply rows or columns, not both"
            nearest = f"<{self.row} row, 1 col>, {math.gcd(share, self.group)}"
        elif self.row is not None and self.row < 1 and share % self.group:
            broken = "rule 2: a group reduces within one row, so r must divide g"
            nearest = f"<{self.row} row, {self.col} col>, {math.gcd(share, self.group)}"
        else:
            return
        raise ScheduleError(
            f"{self._point()} is illegal by {broken} (Sgap, section 3.3); "
            f"nearest legal point: {{{nearest}}}"
        )

    def _check_tunables(self) -> None:
        size, tile, workers = self.block_size, self.tile_size, self.worker_dim_r
        if type(size) is not int or size % 32 or not 32 <= size <= 1024:
            raise ScheduleError(
                f"{self._point()}: block_size must be a multiple of 32 in [32, 1024], got {size!r}"
            )
        chunks = None if tile is None or type(tile) is not int else Fraction(tile) / self.col
        if tile is not None and (chunks is None or not _is_power_of_two(chunks)):
            raise ScheduleError(
                f"{self._point()}: tile_size must be a power of two times col, got {tile!r}"
            )
        if chunks is not None and chunks * self.group > size:
            raise ScheduleError(
                f"{self._point()}: tile_size={tile} takes {chunks} groups of {self.group} lanes, "
                f"more than block_size={size}"
            )
        fits = type(workers) in (int, Fraction) and 0 < workers <= 1
        share = 1 / Fraction(workers) if fits else Fraction(0)
        if not _is_power_of_two(share) or share > MOST_SHARE:
            raise ScheduleError(
                f"{self._point()}: worker_dim_r must be 1 or Fraction(1, w), w a power of two up "
                f"to {MOST_SHARE} (Sgap, section 7.2), got {workers!r}"
            )
        if workers != 1 and self.group == 1 and (self.row is None or self.row >= 1):
            raise ScheduleError(
                f"{self._point()}: worker_dim_r={workers} is for points whose lanes share a row or "
                "a window; give each lane more rows or nonzeros instead"
            )
        if self.chunk is not None:
            self._check_chunk()

    def _check_chunk(self) -> None:
        chunk = self.chunk
        if type(chunk) is not int or not 1 <= chunk < 2**31:
            raise ScheduleError(
                f"{self._point()}: chunk must be a positive int, the most nonzeros of a row that a "
                f"group takes, got {chunk!r}"
            )
        if not self.deterministic or self.row is None or self.row > 1 or self.walk > 1:
            raise ScheduleError(
                f"{self._point()}: chunk={chunk} is for groups that have one whole row each: "
                f"{{<1 row, {self.col} col>, 1}}, or {{<1/r row, {self.col} col>, r}}, with "
                "worker_dim_r=1"
            )

    @property
    def _row_share(self) -> int:
        """g, the number of lanes that share a row."""
        return Fraction(self.row or 1).denominator

    @property
    def deterministic(self) -> bool:
        """Whether a product has the same bits at each call, because no two groups add to the same
        element of the output. (Other operations do not add across groups: they always have.)"""
        share = self._row_share if self.col >= 1 else Fraction(self.col).denominator
        return self.row is not None and (share == 1 or share == self.group)

    @property
    def workers_in_row(self) -> int:
        """g / r, the number of groups that share a row; products add their sums to one element."""
        return max(self._row_share // self.group, 1)

    @property
    def walk(self) -> int:
        """How many rows (or windows of nonzeros) a group takes one after the other."""
        return Fraction(self.worker_dim_r).denominator

    def columns_of_block(self, n: int) -> int:
        """Dense columns of a block for a product of n columns."""
        if self.tile_size is not None:
            return self.tile_size
        chunks = -(-max(n, 1) // int(self.col))
        widest = min(_TILE_CHUNKS, 1 << (self.block_size // self.group).bit_length() - 1)
        return min(1 << (chunks - 1).bit_length(), widest) * int(self.col)

    def blocks(self, problem: Problem) -> int:
        """Blocks along the sparse operand: a function of shapes and capacity only."""
        tiled = problem.op in TILED
        chunks = self.columns_of_block(problem.n) // int(self.col) if tiled else 1
        if self.chunk is not None:
            groups = pieces_of_rows(problem.shape[0], problem.nnz, self.chunk)
        elif self.row is not None:
            groups = -(-problem.shape[0] // (max(int(self.row), 1) * self.walk))
            groups *= self.workers_in_row
        else:
            # The lanes of a group have different nonzeros, or (sddmm) features of the same ones.
            group = self.group if tiled else 1
            groups = -(-problem.nnz // (int(self.nnz or 1) * group * self.walk))
        return max(-(-groups * chunks * self.group // self.block_size), 1)

    @classmethod
    def _read(cls, text: str) -> Schedule | None:
        match = _NOTATION.fullmatch(text.strip())
        if match is None:
            return None
        data, kind, col, group, rest = match.groups()
        given = re.findall(r"(\w+)=([0-9/]+)", rest)
        fields = dict(given)
        if len(fields) < len(given):
            raise ScheduleError(f"a tunable twice in {text!r}")
        unknown = sorted(set(fields) - set(_TUNABLES))
        if unknown:
            raise ScheduleError(
                f"no tunable {unknown[0]!r} in {text!r}; there are {', '.join(_TUNABLES)}"
            )
        words = {kind: data, "col": col, "group": group, **fields}
        numbers: dict = {name: _number(word, text) for name, word in words.items()}
        return cls(**numbers)

    def _point(self) -> str:
        """The paper's notation, without tunables."""
        data = f"{self.nnz} nnz" if self.nnz is not None else f"{self.row} row"
        return f"{{<{data}, {self.col} col>, {self.group}}}"

    def __repr__(self) -> str:
        return self._repr_without("chunk")

    def __str__(self) -> str:
        tunables = [
            f" {field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name in _TUNABLES and getattr(self, field.name) != field.default
        ]
        return self._point() + "".join(tunables)


def pieces_of_rows(rows: int, capacity: int, chunk: int) -> int:
    """Pieces of up to `chunk` entries into which `rows` rows of at most `capacity` entries are cut:
    a static bound on the full ones, and what is left of each row."""
    return rows + capacity // chunk


LANES_UNDER_WAY = 1 << 18  # an H100 or H200 runs 132 multiprocessors with 2048 lanes each
WARPS_UNDER_WAY = LANES_UNDER_WAY // 32 // 4  # of lanes with 128 registers
_LONG = 64  # entries of each lane, of which a row that is cut has twice as many at least


def chunk_of(
    steps: float, lanes: int, longest: int, least: int = 32, most: int = 128
) -> int | None:
    """The most entries of a piece of a row for `lanes` lanes that share it; None where rows need
    not be cut: where the longest row is at most two pieces, or 128 entries for each lane, or takes
    less than twice `steps`, those that all of the work takes, divided evenly among the lanes that a
    GPU runs at once.

    A piece takes about one and a half times these steps, so that the last pieces to start end soon
    after the others, and few rows need the second launch: a multiple of 16, at most `most` and at
    least `least`, because a piece that is not all of its row writes and reads its sums once more.
    Predicted by the emulator's count of instructions, not measured
    (tests/emulated/test_critical_path.py; docs/gpus.md has the table): for n = 128 products with
    R-MAT graphs of 2^18, 2^17, 2^16 and 2^15 vertices, of 16 edges each, take 1.13, 1.18, 1.22 and
    1.29 times as long as with rows of one length; with whole rows 26 times, of 2^17.
    """
    chunk = min(max(-(-math.ceil(1.5 * steps) // 16) * 16, least), most) * lanes
    return chunk if longest >= 2 * max(chunk, _LONG * lanes, steps * lanes) else None


def check_chunk(name: str, chunk: int | None) -> None:
    """Raises ScheduleError unless the field `chunk` of a tile is a positive int or None."""
    if chunk is not None and (type(chunk) is not int or not 1 <= chunk < 2**31):
        raise ScheduleError(f"{name}: chunk must be a positive int or None, got {chunk!r}")


def _is_power_of_two(value: Fraction) -> bool:
    return value.denominator == 1 and value > 0 and value.numerator & (value.numerator - 1) == 0


def _number(word: str, text: str) -> int | Fraction:
    try:
        value = Fraction(word)
    except (ZeroDivisionError, ValueError):  # also raised for too many digits
        raise ScheduleError(f"{word} in {text!r} is not a number") from None
    return value.numerator if value.denominator == 1 else value


COLUMNS = (1, 2, 4)  # the numbers of dense columns (features) of a lane that are enumerated
_SUMS = 128  # the most bytes of a lane's sums: more do not fit in its 255 registers
_FEATURES = 16  # the most features that a lane loads at once (sddmm)


_P = TypeVar("_P", bound=Point)


def algorithm(point: Point, op: str) -> str | None:
    """The kernel of `op` for a legal point, or None if there is none.

    spmm    row        {<x row, c col>, r}      a lane owns x rows
            row_group  {<1/g row, c col>, r}    a parallel reduction; also {<x row, 1/g col>, r}
            row_pieces both with a chunk        the same for pieces of long rows
            nnz        {<g nnz, c col>, 1}      a lane owns g consecutive nonzeros
            nnz_group  {<g nnz, c col>, r}      the same, and a segment reduction
    gspmm   row, row_group as above, all g lanes of a row in one reduction (`for_kernels`); nnz,
            nnz_group as above, and a second launch that combines what the windows of a row have
    sddmm   nnz        {<g nnz, c col>, r}      r lanes share the features of g nonzeros
            row        {<x row, c col>, r}, {<1/g row, c col>, r}: the same for a row's nonzeros
    on rows row        {<x row, 1 col>, r}
            row_group  {<1/g row, 1 col>, r}, {<x row, 1/g col>, r}, as of gspmm
    """
    if unfit(point, op):
        return None
    if point.chunk is not None:
        return "row_pieces"
    if op == "sddmm":
        return "nnz" if point.row is None else "row"
    return _product(point)


def unfit(point: Point, op: str) -> str:
    """Why no kernel of an operation runs a legal point; "" if one does."""
    share = Fraction(point.col).denominator
    if point.chunk is not None:
        if op != "spmm" or point.row is None or point.col not in COLUMNS:
            return "pieces of rows are for spmm, with 1, 2 or 4 columns a lane"
        if point.row >= 1 and point.group > 1:
            return "with pieces, lanes that have whole rows have no group"
    if op == "sddmm":
        if point.col < 1:
            return "the product of one feature cannot be divided"
        most = f"a lane loads up to {_FEATURES} features at once"
        return most if point.col > _FEATURES else ""
    if share % point.group and point.col < 1:
        return (
            f"{share} lanes share a column, so a group of {point.group} would add up sums of "
            "different columns"
        )
    if op in ROW_OPS:
        if point.nnz is not None:
            return "its lanes have rows; products with a column of ones have points of nonzeros"
        if point.col > 1:
            return "the values are one column"
    if op != "spmm" and point.row is not None:
        lanes = max(point._row_share, share)
        if lanes not in GROUPS:
            return (
                f"{lanes} lanes that share a row are no group of a warp, and groups cannot combine "
                "what they found: no atomic operation keeps an extremum with its position"
                if op == "gspmm"
                else f"{lanes} lanes that share a row are no group of a warp, and what they need "
                "is the result of all of them"
            )
    if 4 * point.col > _SUMS:
        return f"the sums of {point.col} columns do not fit in the registers of a lane"
    return ""


def most_threads(point: Point, op: str, dtype: str) -> int:
    """The largest block whose lanes have registers for their sums; 0 if none has."""
    held = int(max(point.col, 1)) * (8 if dtype == "float64" else 4)
    of_entries = point.nnz is not None and (op == "gspmm" or (point.group > 1 and point.col > 4))
    if of_entries or (point.col > 4 and op == "gspmm"):
        held *= 2  # each sum beside a position, or beside the head of a segment
    if op == "sddmm":  # where a lane loads 64 bytes of a row at once, fewer have room for it
        return 1024 if point.col <= 8 else 0 if dtype == "float64" else 512
    if held <= 32:
        return 1024
    return 512 if held <= 64 else 256 if held <= _SUMS else 0


def for_kernels(point: _P, op: str) -> _P:
    """The point with the same lanes as kernels have it, for the operations that reduce rows:

    {<x row, c col>, r}    {<x row, c col>, 1}. Lanes that have whole rows have nothing to add up.
    {<x row, 1/g col>, r}  {<1/g row, 1 col>, r}, x rows in turn: g lanes share a column of a row's
                           sum, which is a sum over entries.
    {<1/g row, c col>, r}  {<1/g row, c col>, g}, except in products: these add what groups of a row
                           have atomically, which no other operation can.
    """
    if op == "sddmm" or point.row is None:
        return point
    if point.row >= 1 and point.col >= 1:
        rows = int(point.row) * point.walk
        whole = dataclasses.replace(point, row=rows, group=1, worker_dim_r=1)
        return point if point.group == 1 else whole
    lanes = max(point._row_share, Fraction(point.col).denominator)
    group = point.group if op == "spmm" else lanes
    if point.row < 1:
        return point if group == point.group else dataclasses.replace(point, group=group)
    rows = int(point.row) * point.walk
    share = Fraction(1, lanes)
    found = dataclasses.replace(point, row=share, col=1, group=group, worker_dim_r=1)
    # Set past the check: worker_dim_r is a power of two where it is given, and x any number.
    object.__setattr__(found, "worker_dim_r", Fraction(1, rows))
    return found


def _product(point: Point) -> str | None:
    if point.row is not None:
        return "row_group" if point.row < 1 or point.col < 1 else "row"
    return "nnz" if point.group == 1 else "nnz_group"


def side_by_side(length: int, group: int) -> int:
    """How many rows of a vector of `length` the groups of a warp take side by side
    (cuda/row_reduce/row_reduce.cuh)."""
    side = 1
    while 2 * side * group <= 32 and length % (2 * side) == 0:
        side *= 2
    return side


def nearest(point: Point, op: str) -> str:
    """The text of a point that is near a legal point and has a kernel of `op`."""
    col = max(c for c in COLUMNS if c <= max(point.col, 1)) if op not in ROW_OPS else 1
    if op not in ("spmm", "sddmm") and not (op == "gspmm" and point.row is None):
        whole = point.row is not None and point.row >= 1
        return f"{{<{point.row} row, {col} col>, 1}}" if whole else _shared(point.group, col)
    if point.row is not None and point.col < 1:
        return _shared(Fraction(point.col).denominator, col)
    if point.row is None:
        return f"{{<{point.nnz} nnz, {col} col>, {point.group}}}"
    alone = op == "spmm" and point.row >= 1
    return f"{{<{point.row} row, {col} col>, {1 if alone else point.group}}}"


def _shared(lanes: int, col: int) -> str:
    group = max(r for r in (1, 2, 4, 8, 16, 32) if lanes % r == 0)
    return f"{{<1/{group} row, {col} col>, {group}}}" if group > 1 else f"{{<1 row, {col} col>, 1}}"
