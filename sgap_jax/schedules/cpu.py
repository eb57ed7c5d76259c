"""`CpuTile` and `HashRows`, the schedules of the CPU kernels, and the plans that some derive from
them."""

from __future__ import annotations

import dataclasses
import math
import os
from numbers import Integral

from sgap_jax.schedules.machine import this_machine
from sgap_jax.schedules.problem import ROW_OPS, Problem
from sgap_jax.schedules.schedule import Schedule, ScheduleError

_SCATTER_COLUMNS = {"float64": 16}  # columns of a tile, else 32: rows of 128 bytes
_SCATTER_LEAST = 9  # columns of A^T B by rows of A; 16 on Intel, where 9 to 15 were not measured
_NARROW = 8  # columns of A^T B with entries that is walked by rows of A, as in cpu/spmm/spmm.h
_NARROW_USES = 8
_SCATTER_MOST = 32 << 20  # the most bytes of partial sums: XLA's memory analysis does not see them


def octet_pieces(problem: Problem, columns: int) -> int:
    """How many pieces of the block rows of A have sums of their own in A^T B on matrix tiles."""
    uses = problem.nnz // max(problem.shape[0], 1)
    return 1 if problem.symbolic else max(_pieces_of_sums(problem, uses, columns), 1)


def _pieces_of_sums(problem: Problem, uses: int, columns: int) -> int:
    tiles = max(-(-problem.n // columns), 1)
    wide = 2 if problem.dtype == "float64" else 1
    size = max(4 * problem.batch * problem.shape[0] * problem.n * wide, 1)
    return min(max(uses // 64, 1), -(-16 // tiles), _SCATTER_MOST // size)


def scatter(problem: Problem, tile: CpuTile) -> tuple[int, int]:
    """How A^T B with column vectors runs: (columns of a tile, pieces of the block rows of A).

    With pieces, the kernel walks A by block rows and scatters to rows of C; each piece has partial
    sums of its own. With 0 pieces it walks A by columns, through the permutation. By rows, a loaded
    and stored row of C takes V multiply-adds; by columns, each multiply-add takes a load of a row
    of B from the second-level cache or beyond. Pieces pay only if a row of C receives several
    entries from each. Measured on two busy Zen 5 cores, float32, density 0.1, n = 32 to 512: by
    rows is 3x to 18x as fast as by columns for V = 8, 1.4x to 6x for V = 2; with 9 to 15 columns
    1.0x to 1.9x on Zen 4 (density 0.1; of entries of 20,000 rows in 1,000 columns 3x to 4x), with 5
    0.9x to 1.1x.
    """
    columns = tile.columns or _SCATTER_COLUMNS.get(problem.dtype, 32)
    if problem.symbolic:
        return columns, 0
    uses, n = problem.nnz // max(problem.shape[0], 1), problem.n
    least = 16 if this_machine().intel else _SCATTER_LEAST
    if not problem.permuted or n < least or uses < 16:
        return columns, 0
    pieces = _pieces_of_sums(problem, uses, columns)
    return columns, pieces if pieces * -(-n // columns) >= 2 else 0


def scatter_entries(problem: Problem, made: bool) -> tuple[int, int]:
    """How A^T B with entries runs by default: (columns of a tile, pieces of the rows of A), as in
    `scatter`; with 0 pieces by columns. `made`: the structure of A is made by the same program.

    Up to `_NARROW` columns it runs by rows wherever all cores have a piece and its entries are not
    outnumbered by the sums: by columns each value is reached through the permutation, a line of the
    cache for each. Measured on an AMD EPYC (family 25, model 1; two threads), float32, 1 and 8
    columns of eight matrices: 0.52 to 0.97 of the time by columns, but 1.3 where a mesh has six
    entries in each column and n = 1; 0.74 in the mean.

    Of more columns, if the structure is made by the same program: by columns the program sorts A's
    entries first, at 2 to 3 ns each. By rows it need not, but it loads and stores a row of C for
    each entry; that pays up to 256 columns, if a row of C receives several entries and all cores
    have a piece. Measured on two busy cores of an Intel Xeon (family 6, model 167), 336,000 entries
    in 4,096 columns, float32: by columns 0.63 ms for n = 64, after 1.0 ms of sorting, and by rows
    0.93 ms; 7.1 and 6.6 ms for n = 256.
    """
    cores = this_machine().cores
    if not problem.symbolic and problem.permuted and 1 <= problem.n <= _NARROW:
        return problem.n, _narrow_pieces(problem, cores)
    if problem.symbolic or not made:
        return 0, 0
    columns, pieces = scatter(problem, CpuTile())
    tasks = problem.batch * pieces * -(-problem.n // columns)
    return columns, pieces if problem.n <= 256 and tasks >= cores else 0


def _narrow_pieces(problem: Problem, cores: int) -> int:
    """Pieces of the rows of A, for each core one, and two if a row of C then receives
    `_NARROW_USES` entries from each; 0 if it receives none from some."""
    wide = 8 if problem.dtype == "float64" else 4
    sums = max(problem.shape[0], 1)  # of a column in a piece
    pieces = 2 * cores if problem.nnz >= 2 * cores * _NARROW_USES * sums else cores
    held = problem.batch * pieces * sums * problem.n * wide <= _SCATTER_MOST
    return pieces if held and problem.nnz >= pieces * sums else 0


@dataclasses.dataclass(frozen=True)
class CpuTile(Schedule):
    """Columns in tiles, nonzeros in chunks; a chunk is the unit of parallel work, in spmm of one
    tile.

    Attributes:
      columns: of spmm, dense columns of one pass over the sparse operand; 0 takes all of them in
        one pass. A narrower tile keeps its k x columns slab of the dense operand in cache; a wider
        one reads the sparse operand fewer times. Of sddmm without column vectors, columns of the
        pattern, which are rows of Y: all rows of a chunk take their entries in these before those
        in the next ones, so that rows of Y that a chunk uses many times stay in cache. No other
        operation has tiles.
      nonzeros: nonzeros (and rows) of one task; a row of two tasks' worth is split. Task
        boundaries depend on this and on the structure, never on the number of threads, so results
        are the same bits for any number of threads.
      packed: copy each slab of the dense operand to contiguous memory first: one slab for each
        thread, which XLA's memory analysis does not count and of which up to 32 MB stay with the
        process for the next call. Contiguous rows use all of a cache; rows that are a power of two
        apart use only a few of its sets. With many more threads than tiles, each thread copies a
        slab for little work; measured with two threads.
    """

    columns: int = 0
    nonzeros: int = 8192
    packed: bool = False

    def __post_init__(self) -> None:
        for field, least in (("columns", 0), ("nonzeros", 1)):
            value = getattr(self, field)
            # Index arrays are int32, so larger values are useless, and overflow in the kernels.
            if type(value) is not int or not least <= value < 2**31:
                raise ScheduleError(
                    f"CpuTile: {field} must be an int in [{least}, 2**31), got {value!r}"
                )
        if type(self.packed) is not bool:
            raise ScheduleError(f"CpuTile: packed must be a bool, got {self.packed!r}")
        if self.packed and self.columns == 0:
            raise ScheduleError("CpuTile: packed=True copies tiles; say how wide, e.g. columns=32")

    def check(self, problem: Problem) -> None:
        entries = problem.op == "sddmm" and problem.vector_length is None
        if problem.op != "spmm" and self.columns != 0 and not entries:
            raise ScheduleError(
                "CpuTile: only spmm, and sddmm without column vectors, have columns to tile; use "
                f"columns=0 for {problem.op}"
            )
        if problem.op == "sddmm" and self.packed:
            raise ScheduleError("CpuTile: only spmm packs tiles; use packed=False for sddmm")
        self.check_kernel(problem, "cpu")

    def explain(self, problem: Problem) -> str:
        if problem.vector_length and problem.op in ("spmm", "sddmm", *ROW_OPS):
            return self._explain_vectors(problem, problem.vector_length)
        if problem.op == "spmm":
            tile = self.columns if 0 < self.columns < problem.n else problem.n
            pack = f"  a slab for each thread = B[:, j0:j0+{tile}]\n" if self.packed else ""
            return (
                f"for j0 in range(0, {problem.n}, {tile}):          # slab of B in cache\n"
                f"{pack}"
                f"  parallel for chunk of {self.nonzeros} nonzeros:\n"
                "    for i in rows of chunk:               # a split row is summed in order\n"
                f"      acc[0:{tile}] = 0                     # registers\n"
                "      for p in range(row_offsets[i], row_offsets[i + 1]):\n"
                f"        acc[:] += values[p] * B[column_indices[p], j0:j0+{tile}]\n"
                f"      C[i, j0:j0+{tile}] = acc"
            )
        if problem.op == "sddmm":
            k, tile, begin = problem.shape[1], self.columns, "  "
            chunk = "chunk:                         # row i of p by binary search"
            if 0 < tile < k:
                begin = f"  for j0 in range(0, {k}, {tile}):           # rows of Y in cache\n    "
                chunk = f"chunk with j0 <= column_indices[p] < j0 + {tile}:"
            return (
                f"parallel for chunk of {self.nonzeros} nonzeros:\n"
                f"{begin}for p in {chunk}\n"
                f"{' ' * len(begin.rpartition(chr(10))[2])}  values[p] = "
                f"dot(X[i, 0:{problem.n}], Y[column_indices[p], 0:{problem.n}])"
                " * weights[p] * scale  # where given"
            )
        return (
            f"parallel for chunk of {self.nonzeros} nonzeros:\n"
            f"  for i in rows of chunk: {problem.op}"
        )

    def _explain_vectors(self, problem: Problem, V: int) -> str:
        chunk = f"parallel for chunk of {max(self.nonzeros // V, 1)} vectors:"
        if problem.op == "sddmm":
            return (
                f"{chunk}\n"
                f"  for p in chunk:                         # of block row b, several at once\n"
                f"    for v in range({V}):\n"
                f"      values[p, v] = dot(X[{V} * b + v, 0:{problem.n}], "
                f"Y[column_indices[p], 0:{problem.n}]) * weights[p, v]"
                " * scale  # where given"
            )
        if problem.op in ROW_OPS:
            return (
                f"{chunk}\n"
                f"  for b in block rows of chunk: {problem.op} of {V} rows, "
                f"values[p, v] being of row {V} * b + v"
            )
        tile = self.columns if 0 < self.columns < problem.n else problem.n
        pack = f"  a slab for each thread = B[:, j0:j0+{tile}]\n" if self.packed else ""
        head = f"for j0 in range(0, {problem.n}, {tile}):\n{pack}  {chunk}\n"
        columns, pieces = scatter(problem, self)
        if pieces:
            return (
                f"parallel for piece of {pieces}, for j0 in range(0, {problem.n}, {columns}):\n"
                "  sums[:, :] = 0                          # one for each piece\n"
                "  for b in block rows of the piece:\n"
                f"    rows = B[{V} * b : {V} * (b + 1), j0:j0+{columns}]    # registers\n"
                "    for p in range(row_offsets[b], row_offsets[b + 1]):\n"
                "      sums[column_indices[p], :] += values[p, :] @ rows\n"
                f"parallel for rows of C: C[:, j0:j0+{columns}] = sum of the pieces, in order"
            )
        if problem.permuted:
            return (
                f"{head}    for i in columns of chunk:            # split ones summed in order\n"
                f"      acc[0:{tile}] = 0                     # registers\n"
                "      for q in range(column_offsets[i], column_offsets[i + 1]):\n"
                f"        for v in range({V}):\n"
                f"          acc[:] += values[permutation[q], v] * "
                f"B[{V} * row_indices[q] + v, j0:j0+{tile}]\n"
                f"      C[i, j0:j0+{tile}] = acc"
            )
        return (
            f"{head}    for b in block rows of chunk:         # a split one is summed in order\n"
            f"      acc[0:{V}, 0:{tile}] = 0                # registers, up to 8 rows a pass\n"
            "      for p in range(row_offsets[b], row_offsets[b + 1]):\n"
            f"        for v in range({V}):\n"
            f"          acc[v, :] += values[p, v] * B[column_indices[p], j0:j0+{tile}]\n"
            f"      C[{V} * b : {V} * (b + 1), j0:j0+{tile}] = acc"
        )

    def __str__(self) -> str:
        packed = ", packed=True" if self.packed else ""
        return f"CpuTile(columns={self.columns}, nonzeros={self.nonzeros}{packed})"


@dataclasses.dataclass(frozen=True)
class HashRows(Schedule):
    """`spgemm` with the sums of each row of C in a hash table. The slots of a table are a power of
    two: the least that is 64 or more and twice the row's products or more, or twice C's columns if
    those are fewer.

    Without a schedule the kernel sorts the products of short rows, and adds those of others in an
    array over all columns, or in such tables where A B has more than a million columns. The sums of
    all are in the order of A's entries: the same bits.

    Attributes:
      sorted: the columns of a row of C ascend. False leaves them in the order of their first
        products. Such a C is not `is_checked`: an operation that needs sorted rows sorts them, or
        checks them, at each call. `C.sum_duplicates()` sorts them once.

    Raises:
      ScheduleError: `sorted` is no bool.

    Source: Nagasaka, Matsuoka, Azad, Buluc, "High-performance sparse matrix-matrix products on
    Intel KNL and multicore architectures" (2018), section 4.
    """

    sorted: bool = True

    def __post_init__(self) -> None:
        if type(self.sorted) is not bool:
            raise ScheduleError(f"HashRows: sorted must be a bool, got {self.sorted!r}")

    def check(self, problem: Problem) -> None:
        raise ScheduleError(f"HashRows: only spgemm has rows of sparse results, not {problem.op}")

    def explain(self, problem: Problem | None = None) -> str:
        """The equivalent loops, as text: the same for all products."""
        columns = "sorted(table)" if self.sorted else "table, in the order of their first products"
        return (
            "parallel for rows i of A, in tasks of about as many products:\n"
            "  table = {}                                  # column of C: sum\n"
            "  for p in range(A.row_offsets[i], A.row_offsets[i + 1]):\n"
            "    l = A.column_indices[p]\n"
            "    for q in range(B.row_offsets[l], B.row_offsets[l + 1]):\n"
            "      table[B.column_indices[q]] += A.values[p] * B.values[q]\n"
            f"  columns and sums of row i of C = {columns}"
        )


_OCTET_PART = 32  # features that a matrix tile has
_LANES = {"float64": 8}  # elements of the widest vector register, else 16
_COPIED_USES = 8  # copies pay if vectors use a key so often, counted over all heads that share it
_INTEL_USES = 32  # of each head's keys, on Intel, by vectors of less than 32 rows
_PAGE = 4096  # bytes: rows at this distance fall into the same sets of a first-level cache
_TASKS = 8  # few heads are cut into pieces for at most so many tasks
_PIECE_USES = 16  # entries of a row in a piece of the keys; uses of a key by a task
# Bytes of a register -> the fewest rows of a column vector with which a block row is a task.
_LONG_VECTORS = {32: 2, 64: 32}
# BCSR(r, c) block after block: the most r, the fewest c with one row and with more, the fewest rows
# that see a block, and the most features of a head (docs/cpu_kernels.md: what it gains).
_BLOCK_ROWS, _BLOCK_KEYS, _BLOCK_SEEN, _BLOCK_DEPTH = 8, (16, 64), 64, 256
_OCTET_ROWS = 4  # of a vector that matrix tiles take
_WHOLE_ROWS = 32  # so many block rows, over all heads, are tasks enough
_PIECE_COST = 1 / 16  # share of the time that each further piece costs: it loads the rows again


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """How attention runs on the CPU.

    Attributes:
      packed: copy K and V, some heads at a time, to contiguous rows of the accumulator's dtype.
      backward_packed: the same in the backward pass, where dK and dV are summed in such rows too.
      pieces: how many pieces the backward pass cuts the rows, and the keys, into.
      key_pieces: how many pieces of the keys a task of the forward pass takes one after another.
      nonzeros: of a task of the forward pass, at least.
    """

    packed: bool
    backward_packed: bool
    pieces: int
    key_pieces: int = 1
    nonzeros: int = 1


def attention_plan(
    problem: Problem,
    key_heads: int,
    key_batch: int,
    batch: int,
    widths: tuple[int, int],
    octets: bool = False,
) -> AttentionPlan:
    """The plan for `problem.batch` heads in `batch` sequences, each with `key_heads` heads of keys
    of `widths` features (of k, of v); key_batch is 1 if the sequences share the keys.

    The kernels read whole vector registers of the accumulator's dtype, so K and V are copied if
    their dtype is narrower or a head's width is not a multiple of a register. Else the kernels read
    K and V, and sum dK and dV, in place, unless the rows of a head fall into a part of a cache's
    sets. Copies avoid that if rows are a multiple of a page apart and a key is used 8 times; in the
    backward pass also half a page and 16 times.

    Time with copies over time without (forward, backward), float32 on Zen 5, one thread:

    - rows a page apart (16 heads of 64 features, 8 of 128), 13 to 26 uses: 0.8 to 1.0, 0.5 to 0.7;
    - half a page apart (8 heads of 64, 16 of 32), 26 uses: 1.0, 0.7;
    - a quarter apart (4, 12 and 20 heads of 64): 1.0, 1.0.

    Copies gain nothing if a row is half of the distance (2 heads of 512), or for keys with fewer
    uses.

    On an Intel (AMX, 2 MB of second-level cache) they pay wherever a row has several heads, at any
    distance, if a key is used 32 times and its head is larger than the caches for it: 0.29 to 0.88
    in the forward pass and 0.37 to 0.85 in the backward pass with 32 to 2048 uses (2 to 16 heads,
    512 to 4096 keys); with 16 uses and fewer 0.9 to 1.9. Where vectors have 32 rows and more, all
    of which meet a key at each use, 8 uses are enough: 0.77 to 0.99 in the forward pass and 0.83 to
    0.99 in the backward pass with 8 to 32 uses (32 and 64 rows; 8 heads of 64 features and 4096
    keys, 12 of 64 and 2 of 128 and 2048), but 0.99 to 1.25 with one and two.

    With vectors of 32 bytes (Zen 3: caches of 32 and 512 KB, both of 8 ways) copies pay half a page
    apart in the forward pass too: 256 of 4096 keys for each query, 8 heads of 64, take 0.63 of the
    time in place, and 0.58 in one piece of the keys.

    Where K and V of a head are larger than the second-level cache, and its keys are used often, the
    rows of a task meet them in pieces that fill half of it; in the forward pass over copies with
    vectors of 32 bytes in pieces of twice its size: a Zen 3's third-level cache keeps up.

    Where registers have 32 bytes, or have 64 and a column vector has 32 rows or more, a kernel
    takes up to 64 rows of a column vector against a block of keys at once. A block row is a task
    then, if there are enough of them: pieces of block rows would each leave all its rows in memory.
    """
    rows, keys = problem.shape
    length, wide = problem.vector_length or 1, 8 if problem.dtype == "float64" else 4
    lanes = _LANES.get(problem.dtype, 16)
    if problem.symbolic or not isinstance(batch, Integral):
        uses, batch = 0, 1  # plan as for one sequence with few entries
    else:
        uses = problem.nnz // length * problem.batch // max(keys * key_heads * key_batch, 1)
    if octets:
        ragged = any(width % _OCTET_PART or not width for width in widths)
        packed = ragged or (key_heads > 1 and uses >= _COPIED_USES)
        return AttentionPlan(packed, packed, _pieces_of(problem, batch, key_heads))
    whole = not any(width % lanes for width in widths) and not problem.dtype.endswith("16")
    apart = [math.gcd(key_heads * width * wide, _PAGE) for width in widths]
    apart = [x if 2 * width * wide < x else 0 for x, width in zip(apart, widths, strict=True)]
    machine = this_machine()
    narrow = machine.vector_bytes == 32
    long = length >= _LONG_VECTORS.get(machine.vector_bytes, math.inf)
    packed = max(apart) * (2 if narrow else 1) >= _PAGE and uses >= _COPIED_USES
    backward = 2 * max(apart) >= _PAGE and max(apart) * uses >= _PAGE * _COPIED_USES
    if machine.intel and key_heads > 1:
        often = uses >= (_COPIED_USES if long else _INTEL_USES)
        large = often and keys * sum(widths) * wide > 4 * machine.l1_bytes
        packed, backward = packed or large, backward or large
    pieces = _pieces_of(problem, batch, key_heads)
    plan = AttentionPlan(not whole or packed, not whole or backward, pieces)
    if long and not problem.symbolic:
        blocks = -(-rows // length)
        if blocks * problem.batch >= _WHOLE_ROWS:
            plan = dataclasses.replace(plan, nonzeros=problem.nnz // blocks)
        return plan
    known = not problem.symbolic and length == 1 and not problem.dtype.endswith("16")
    if not known or problem.nnz < _PIECE_USES * keys:
        return plan
    most = problem.nnz // max(rows, 1) // _PIECE_USES

    def in_cache(fill: int) -> int:
        found = -(-keys * sum(widths) * wide // fill)
        return max(min(found if found > 2 else 1, most), 1)

    half = machine.l2_bytes // 2
    key_pieces = in_cache(4 * half if narrow and packed else half)
    plan = dataclasses.replace(plan, pieces=max(pieces, min(in_cache(half), rows, keys)))
    if key_pieces == 1:
        return plan
    return dataclasses.replace(plan, key_pieces=key_pieces, nonzeros=_PIECE_USES * keys)


def meets_blocks(
    shape: tuple[int, ...], block: tuple[int, ...], stored: int, width: int, dtype: str
) -> bool:
    """Whether attention over BCSR(r, c) runs block after block, each with all the rows that see it
    (cpu/attention/attention_blocks.h), rather than row after row. Rows load the keys of their
    blocks again each, so it pays with few rows r; a block of few keys, or that few rows see, does
    not pay for what the rows keep in memory from one block to the next. `stored`: blocks, `width`:
    features of a head."""
    (rows, keys), (height, columns) = shape, block
    if not all(isinstance(size, Integral) for size in (rows, keys, stored)):
        return False
    tiles = dtype == "bfloat16" and height >= _OCTET_ROWS and this_machine().matrix_tiles
    wide = columns >= _BLOCK_KEYS[height > 1] and width <= _BLOCK_DEPTH
    seen = stored * height >= _BLOCK_SEEN * -(-keys // columns)
    return height <= _BLOCK_ROWS and wide and seen and not tiles


def block_pieces(shape: tuple[int, int], block: tuple[int, int], batch: int, key_heads: int) -> int:
    """How many pieces the backward pass cuts the rows, and the blocks of keys, into."""
    most = min(-(-size // of) for size, of in zip(shape, block, strict=True))
    sequences = batch if isinstance(batch, Integral) else 1
    return _pieces(max(sequences * key_heads, 1), most)


def _pieces_of(problem: Problem, batch: int, key_heads: int) -> int:
    rows, keys = problem.shape
    known = isinstance(rows, Integral) and isinstance(keys, Integral)
    most = min(rows // (problem.vector_length or 1), keys) if known else 1
    return _pieces(max(batch * key_heads, 1), most)


def _pieces(heads: int, most: int) -> int:
    """How many pieces, up to `most`, to cut each of `heads` heads into, so that the tasks fill the
    machine's processors. The process's number of threads has no influence, because pieces decide
    how sums round.

    Measured on 2 processors: with 4 heads, one piece takes 0.88 to 0.99 of the time of two; with
    one head, two pieces take 0.63 of the time of one and 0.83 of that of eight; with 3 heads, two
    pieces take 0.86 of the time of one (lengths 2048 and 4096, sparsity 90% and 95%, float32 on
    Zen 5).
    """
    threads = min(os.cpu_count() or 1, _TASKS)

    def time(pieces: int) -> float:  # estimated time of a phase: its rounds of tasks, and the cost
        return -(-heads * pieces // threads) / pieces * (1 + _PIECE_COST * (pieces - 1))

    return min(range(1, max(min(most, _TASKS), 1) + 1), key=time)
