"""`OctetTile`, the schedule for column vectors on tensor cores and on the matrix tiles of a CPU
(vectorSparse's 1-D octet tiling), and the base class of the tiles for column vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sgap_jax.schedules.explain import notes
from sgap_jax.schedules.point import WARPS_UNDER_WAY, check_chunk, chunk_of, pieces_of_rows
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import GRID_Y, Schedule, ScheduleError


@dataclasses.dataclass(frozen=True)
class VectorTile(Schedule):
    """The base class of the schedules for column vectors.

    Attributes:
      vector_length: V of the format.
    """

    vector_length: int = 8

    @property
    def deterministic(self) -> bool:
        """Whether a product has the same bits at each call."""
        return True

    def check_field(self, name: str, allowed: Sequence) -> None:
        """Raises ScheduleError for a field that is not equal to an allowed value of its type."""
        value = getattr(self, name)
        if any(type(value) is type(one) and value == one for one in allowed):
            return
        if isinstance(allowed, range) and len(allowed) > 1:
            step = f" multiple of {allowed.step}" if allowed.step > 1 else "n int"
            words = f"a{step} from {allowed[0]} to {allowed[-1]}"
        else:
            words = f"one of {', '.join(map(repr, allowed))}"
        raise ScheduleError(f"{type(self).__name__}: {name} must be {words}, got {value!r}")

    def check_default(self, problem: Problem, name: str, why: str) -> None:
        """Raises ScheduleError for a field that the problem's operation does not use, if it is not
        the default."""
        default = next(field.default for field in dataclasses.fields(self) if field.name == name)
        if getattr(self, name) != default:
            raise ScheduleError(f"{problem.op}: {self}: {why}; leave {name} out")

    def check_vectors(self, problem: Problem) -> None:
        """Raises NotImplementedError or ScheduleError unless the problem is spmm or sddmm on "cuda"
        with vectors of the tile's length."""
        self._check_vectors(problem, "cuda")

    def _check_vectors(self, problem: Problem, platform: str) -> None:
        """Raises NotImplementedError or ScheduleError unless the problem is spmm or sddmm (on the
        CPU, attention too) on this platform with vectors of the tile's length."""
        ops = ("spmm", "sddmm", "attention") if platform == "cpu" else ("spmm", "sddmm")
        if problem.op not in ops:
            raise NotImplementedError(
                f"{problem.op}: {self} has kernels of {', '.join(ops[:-1])} and {ops[-1]}; leave "
                "the schedule out here"
            )
        if problem.vector_length is None:
            raise NotImplementedError(
                f"{problem.op}: {self} runs on column vectors, not on {problem.format}; "
                f"convert with A.asformat(CVS({self.vector_length}))"
            )
        if problem.vector_length != self.vector_length:
            raise ScheduleError(
                f"{problem.op}: {self} is for vectors of {self.vector_length}, got {problem.format}"
            )
        self.check_kernel(problem, platform)
        self.check_sizes(problem)

    def __str__(self) -> str:
        """As a call, with the vector length and the fields that are not the defaults."""
        given = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name == "vector_length" or getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__}({given})"


_DTYPES = ("float16", "bfloat16", "float32")
_REGISTERS = 65536  # of a multiprocessor
# spmm: a warp takes the vectors of a block row in quads (cuda/spmm/spmm_octet.cuh).
QUAD = 16  # vectors of a quad: four of each of 4 lanes
_PANEL = 64  # columns of a panel: tile_n is a multiple of it
_OF_LANE = 255  # the most registers of a lane
# Registers of a lane for a quad by a panel under way: (for the first 8 rows of a vector, for each
# further 8 rows); _OTHERS are for addresses and the like. With these numbers NVRTC 13 does not
# spill on sm_80 to sm_100.
_OF_QUAD = {"float16": (26, 2), "bfloat16": (26, 2), "float32": (54, 8)}
_OTHERS = 40
_SHARED_BYTES = 48 << 10  # the most shared memory of a block
_NEAR = 8  # neighbouring block rows that share a block
# sddmm: a warp takes a window of vectors (cuda/sddmm/sddmm_octet.cuh).
WARPS = 4  # warps of a block: consecutive windows read the same rows of X
_WARP_WINDOW = 128  # the most vectors of a window
_HELD = 160  # registers of a lane for sums, loads under way and addresses; with more it spills


@dataclasses.dataclass(frozen=True)
class OctetTile(VectorTile):
    """Tiles of column vectors times gathered rows, on the tensor cores of a GPU or on the matrix
    unit of a CPU.

    On CUDA one warp computes a tile. Operands are swapped and transposed: the gathered dense rows
    are the 16-row operand of an mma and the vectors the 8-column one. So V = 8 wastes nothing, with
    V = 16 and 32 a gathered row serves 2 and 4 mmas, and V < 8 leaves columns idle. float16 and
    bfloat16 use m16n8k16, float32 m16n8k8 in tf32; the accumulator is float32.

    On the CPU (bfloat16) a tile is up to 16 rows of vectors by 64 columns, on Intel AMX. Processors
    without it compute the same tiles with AVX512-BF16 or in vector arithmetic: right, but slower
    than `CpuTile`. spmm takes vectors of 2 to 32 rows, with 16 or 32 vectors (`tile_k`) in a step;
    for A^T B, products are scattered to rows of C. sddmm and attention take vectors of 4 to 32
    rows, in steps of `tile_n=32` vectors and `tile_k=64` features.

    In attention, heads have up to 512 features. Scores, their exponentials and all sums are
    float32. Probabilities, and gradients of scores, are rounded to bfloat16 before they are
    multiplied, as by `AttentionTile(octet=True)` on CUDA.

    Attributes:
      vector_length: V of the format, 2, 4, 8, 16 or 32.
      tile_n: width of the tile that a warp computes for a block row: dense columns (spmm, a
        multiple of 64) or vectors (sddmm, a multiple of 16).
      tile_k: length of the reduction in one step, a multiple of 16: vectors (spmm) or features
        (sddmm; a lane loads 16 bytes of a row at once if 64 divides the bytes of a step, else 8).
      stages: steps whose loads are under way at once, 1 to 4.
      row_warps: warps that share a block row, each taking every row_warps-th step (spmm); their
        sums are added in order, so the bits are the same at each call. 1, 2, 4, 8 or 16.
      swizzle: take block rows longest first (spmm), for patterns with a few long ones; costs a sort
        of the block rows at each call, and changes no bit of the result.
      tf32: float32 operands may be rounded to 10 bits of mantissa; without it float32 is refused.
      chunk: cut block rows of more than so many vectors into pieces of so many (spmm), each for
        warps of its own; a second launch adds the float32 sums of a block row's pieces, in their
        order. Pieces of full length start first, so it goes without `swizzle`. None walks each
        block row whole.

    Raises:
      ScheduleError: a field is out of its range.

    Source: vectorSparse, sections 5.3 and 6.3 (there m8n8k4 of sm_70), re-derived for the mma of
    sm_80 and later.
    """

    tile_n: int = 64
    tile_k: int = 16
    stages: int = 1
    row_warps: int = 1
    swizzle: bool = False
    tf32: bool = False
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("vector_length", (2, 4, 8, 16, 32)),
            ("tile_n", range(16, 513, 16)),
            ("tile_k", range(16, 129, 16)),
            ("stages", range(1, 5)),
            ("row_warps", (1, 2, 4, 8, 16)),
        ):
            self.check_field(name, allowed)
        for name in ("swizzle", "tf32"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise ScheduleError(f"OctetTile: {name} must be a bool, got {value!r}")
        check_chunk("OctetTile", self.chunk)
        if self.chunk is not None and self.swizzle:
            raise ScheduleError("OctetTile: with chunk, full pieces start first; leave swizzle out")

    def check(self, problem: Problem) -> None:
        if problem.platform == "cpu":
            return _check_cpu(self, problem)
        self.check_vectors(problem)
        self._check_tensor_cores(problem)
        if problem.dtype not in _DTYPES:
            raise NotImplementedError(
                f"{problem.op}: {self}: tensor cores have no {problem.dtype} with float32 sums; "
                f"cast to one of {', '.join(_DTYPES)} or leave the schedule out"
            )
        if problem.dtype == "float32" and not self.tf32:
            raise ScheduleError(
                f"{problem.op}: {self} would round float32 to the 10 bits of tf32; allow it with "
                "tf32=True, or leave the schedule out"
            )
        check = _check_sddmm if problem.op == "sddmm" else _check_spmm
        check(self, problem)

    def __repr__(self) -> str:
        return self._repr_without("chunk")

    def transposed(self) -> None:
        """The transpose of column vectors is row vectors, which share no gathered row."""
        return None

    def explain(self, problem: Problem) -> str:
        if problem.platform == "cpu":
            return _explain_cpu(self, problem)
        explain = _explain_sddmm if problem.op == "sddmm" else _explain_spmm
        return "\n".join([explain(self, problem), *notes(self, problem)])


# On the CPU (cpu/spmm/spmm_octet_kernel.cc, cpu/sddmm/sddmm_octet_kernel.cc, cpu/attention).
CPU_STEP = (32, 64)  # vectors and features of a step of sddmm and attention
CPU_DEPTH = 512  # the most features of a head of attention
_CPU_DEPTHS = (16, 32)  # vectors of a step of spmm
CPU_TASK = 8192  # nonzeros of a task, as those of `CpuTile`


def _check_cpu(tile: OctetTile, problem: Problem) -> None:
    """Raises ScheduleError or NotImplementedError if the CPU has no kernel for the tile."""
    tile._check_vectors(problem, "cpu")
    if problem.dtype != "bfloat16":
        raise NotImplementedError(
            f"{problem.op}: {tile}: matrix tiles of the CPU multiply bfloat16, got "
            f"{problem.dtype}; cast, or leave the schedule out"
        )
    for name in ("stages", "row_warps", "swizzle", "tf32", "chunk"):
        tile.check_default(problem, name, "is of tensor cores, not of the CPU's tiles")
    if problem.op != "spmm":
        if (tile.tile_n, tile.tile_k) != CPU_STEP or tile.vector_length < 4:
            raise NotImplementedError(
                f"{problem.op}: no kernel on the CPU obeys {tile}; those of vectors of 4 to 32 "
                f"rows have tile_n={CPU_STEP[0]} and tile_k={CPU_STEP[1]}"
            )
        if problem.op == "attention":
            check_depth(tile, problem.n)
    elif tile.tile_n % _PANEL or tile.tile_k not in _CPU_DEPTHS:
        raise NotImplementedError(
            f"spmm: no kernel on the CPU obeys {tile}; tile_n is a multiple of {_PANEL} there, and "
            f"tile_k one of {', '.join(map(str, _CPU_DEPTHS))}"
        )


def _block(length: int) -> int:
    """How many keys attention has the scores of at once."""
    return 256 if length > 8 else 512


def check_depth(tile: OctetTile, depth: int) -> None:
    """Raises NotImplementedError for heads of more features than attention's kernels take."""
    if depth > CPU_DEPTH:
        raise NotImplementedError(
            f"attention: {tile} takes heads of up to {CPU_DEPTH} features on the CPU, got {depth}; "
            "CpuTile() takes more"
        )


def _explain_cpu(tile: OctetTile, problem: Problem) -> str:
    """Who computes what, and the equivalent loops."""
    n, V = problem.n, tile.vector_length
    rows = min(V, 16)
    task = f"parallel for chunk of {max(CPU_TASK // V, 1)} vectors:"
    if problem.op == "attention":
        keys, features = CPU_STEP
        return (
            f"{task}                              # of each head\n"
            f"  for b in block rows of chunk:           # up to {rows} rows at once\n"
            f"    for p in range(row_offsets[b], row_offsets[b + 1], {_block(V)}):\n"
            f"      j = column_indices[p:p+{_block(V)}]\n"
            f"      s = scale * K[j, :] @ Q[{V} * b : {V} * (b + 1), :].T + bias[p:p+{_block(V)}]"
            f"  # 16 keys x {features} features gathered\n"
            "      raise the peaks, rescale acc and total\n"
            "      P = exp(s - peak); total += P.sum(0)    # then rounded to bfloat16\n"
            f"      acc += P.T @ V[j, :]                # {keys} values gathered as pairs of rows\n"
            "    out = acc / total;  lse = peak + log(total)"
        )
    if problem.op == "sddmm":
        vectors, features = CPU_STEP
        return (
            f"{task}\n"
            f"  for p0 in range(start, stop, {vectors}):           # of block row b\n"
            f"    acc[0:{vectors}, 0:{V}] = 0                     # tiles of 16 x {rows}\n"
            f"    for l0 in range(0, {n}, {features}):\n"
            f"      acc += Y[column_indices[p0:p0+{vectors}], l0:l0+{features}] "
            f"@ X[{V} * b : {V} * (b + 1), l0:l0+{features}].T  # gathered, then bfloat16 pairs\n"
            "    values[p0 + i, :] = acc[i, :] * weights[p0 + i, :] * scale  # where given"
        )
    if problem.permuted:
        return (
            "parallel for piece of the block rows:      # with sums of its own, added in order\n"
            f"  for j0 in range(0, {n}, 64):\n"
            f"    for p0 in range(row_offsets[b], row_offsets[b + 1], 16):\n"
            f"      products = values[p0:p0+16, :] @ B[{V} * b : {V} * (b + 1), j0:j0+64]\n"
            "      sums[column_indices[p0 + i], j0:j0+64] += products[i, :]"
        )
    return (
        f"for j0 in range(0, {n}, {tile.tile_n}):\n"
        f"  {task}\n"
        "    for b in block rows of chunk:           # a split one is summed in order\n"
        f"      A = values of b, transposed           # [{V}, vectors]\n"
        f"      for j1 in range(j0, min(j0 + {tile.tile_n}, {n}), 64):\n"
        f"        acc[0:{V}, 0:64] = 0                  # tiles of {rows} x 16\n"
        f"        for p0 in range(row_offsets[b], row_offsets[b + 1], {tile.tile_k}):\n"
        f"          acc += A[:, p0:p0+{tile.tile_k}] @ "
        f"B[column_indices[p0:p0+{tile.tile_k}], j1:j1+64]  # gathered as pairs of rows\n"
        f"        C[{V} * b : {V} * (b + 1), j1:j1+64] = acc"
    )


def _check_spmm(tile: OctetTile, problem: Problem) -> None:
    """Raises ScheduleError or NotImplementedError if spmm has no kernel for the tile; vectors and
    dtype were checked before."""
    if problem.permuted:
        raise NotImplementedError(
            f"spmm: {tile} multiplies by A, whose vectors share the rows of B that they gather; "
            "those of A^T do not: leave the schedule out"
        )
    if tile.tile_n % _PANEL:
        raise ScheduleError(
            f"spmm: {tile}: tile_n must be a multiple of {_PANEL}, the columns that 8 lanes load "
            "in 16 bytes each"
        )
    most = min(_OF_LANE, _REGISTERS // (32 * tile.row_warps))
    if (held := spmm_registers(tile, problem.dtype)) > most:
        raise ScheduleError(
            f"spmm: {tile} takes some {held} registers of a lane, of which there are {most}; give "
            "a smaller tile_n or tile_k, fewer stages or row_warps"
        )
    if (shared := shared_bytes(tile)) > _SHARED_BYTES:
        raise ScheduleError(
            f"spmm: {tile} sums through {shared} bytes of shared memory, of which there are "
            f"{_SHARED_BYTES}; give fewer row_warps or a smaller tile_n"
        )
    if tile.chunk is not None and problem.nnz // tile.vector_length // tile.chunk >= 2**30:
        raise ScheduleError(f"spmm: {tile}: more sums than 2^31; give a larger chunk")
    if -(-problem.n // tile.tile_n) > GRID_Y:
        raise ScheduleError(
            f"spmm: {tile}: n = {problem.n} in tiles of {tile.tile_n} columns exceeds the "
            f"{GRID_Y} tiles of a launch; give a wider tile_n"
        )


def _sums(tile: OctetTile) -> int:
    """How many float32 sums a lane has: four for 8 rows by 16 columns; V < 8 counts as 8 rows."""
    return tile.tile_n * max(tile.vector_length, 8) // 32


def spmm_registers(tile: OctetTile, dtype: str) -> int:
    """About how many registers a lane needs."""
    quads = tile.stages * (tile.tile_k // QUAD) * (tile.tile_n // _PANEL)
    of_first, of_others = _OF_QUAD[dtype]
    of_quad = of_first + of_others * (max(tile.vector_length // 8, 1) - 1)
    return _sums(tile) + quads * of_quad + _OTHERS


def blocks_of_multiprocessor(tile: OctetTile, problem: Problem) -> int:
    """How many blocks the compiler must let a multiprocessor run at once: as many as have 16 warps,
    if their registers suffice without spills, else 1."""
    most, warps = _REGISTERS // (32 * 16), tile.row_warps * neighbours(tile, problem)
    return 16 // warps if spmm_registers(tile, problem.dtype) <= most else 1


def neighbours(tile: OctetTile, problem: Problem) -> int:
    """How many neighbouring block rows (or pieces) share a thread block of spmm, a warp each, so
    that a row of B that several of them gather, as those of a band do, comes from the L1; 1 where
    warps share block rows, which neighbours are not if sorted, or where there are so few that they
    are better spread.
    """
    if tile.row_warps > 1 or tile.swizzle:
        return 1
    warps = _spmm_warps(tile, problem) * max(-(-problem.n // tile.tile_n), 1) * problem.batch
    return _NEAR if warps >= 2 * WARPS_UNDER_WAY else 1


def _spmm_warps(tile: OctetTile, problem: Problem) -> int:
    """Sets of warps along the block rows, one for each of these or for each piece."""
    rows = -(-problem.shape[0] // tile.vector_length)
    if tile.chunk is None or problem.nnz // tile.vector_length <= tile.chunk:
        return rows
    return pieces_of_rows(rows, problem.nnz // tile.vector_length, tile.chunk)


def shared_bytes(tile: OctetTile) -> int:
    """Bytes of shared memory through which half of the warps of a block row pass their sums to the
    other half."""
    return tile.row_warps // 2 * 32 * 4 * _sums(tile)


def spmm_grid(tile: OctetTile, problem: Problem) -> tuple[int, int]:
    """The grid (x, y): sets of neighbouring block rows or pieces, and tiles of dense columns."""
    sets = -(-_spmm_warps(tile, problem) // neighbours(tile, problem))
    return max(sets, 1), max(-(-problem.n // tile.tile_n), 1)


def octet_chunk(tile: OctetTile, problem: Problem) -> int | None:
    """The `chunk` for a pattern with skewed block rows, whose statistics the problem has; else
    None. What a piece leaves is V rows, so it has twice the vectors of `chunk_of`."""
    if problem.rows is None:
        return None
    tiles = max(-(-problem.n // tile.tile_n), 1)
    steps = problem.nnz // tile.vector_length * tiles * problem.batch / WARPS_UNDER_WAY
    return chunk_of(steps / 2, 2 * tile.row_warps, problem.rows.longest, least=64)


def _explain_spmm(tile: OctetTile, problem: Problem) -> str:
    """What a block, a warp and a lane own, who writes, and the equivalent loops."""
    (m, k), n, length = problem.shape, problem.n, tile.vector_length
    sets, tiles = spmm_grid(tile, problem)
    rows, near = max(-(-m // length), 1), neighbours(tile, problem)
    chunk, depth = (4, 8) if problem.dtype == "float32" else (8, 16)
    panels = tile.tile_n // (8 * chunk)
    batch = f", for each of {problem.batch} products" if problem.batch > 1 else ""
    order = ", longest first" if tile.swizzle else ""
    idle = f" ({8 - length} of 8 columns idle)" if length < 8 else ""
    shared = tile.row_warps > 1
    warps = f"{tile.row_warps} warps, each every {tile.row_warps}-th step," if shared else "a warp"
    of_block = f"{near} neighbouring block rows, a warp each" if near > 1 else ""
    of_block = of_block or f"{warps} for the block row"
    cut = "" if tile.chunk is None else f", or pieces of up to {tile.chunk} vectors of one,"
    ahead = f", {tile.stages} such steps under way" if tile.stages > 1 else ""
    writer = "the first warp, after a sum over the warps" if shared else "every warp"
    step = tile.row_warps * tile.tile_k
    steps = f"range(row_offsets[b] + {tile.tile_k} * w, row_offsets[b + 1], {step})"
    return "\n".join(
        [
            f"{tile}: spmm of [{m}, {k}] with {problem.nnz // length} vectors of {length}, n = {n}",
            f"grid:  {sets} x {tiles} blocks: block rows{order}{cut} x tiles of {tile.tile_n} "
            f"columns{batch}",
            f"block: {32 * tile.row_warps * near} threads: {of_block}",
            f"warp:  steps of {tile.tile_k} vectors; an mma is 16 columns x {min(length, 8)} rows "
            f"x {depth} vectors{idle}",
            f"lane:  {chunk} columns of each of {panels} panels, 2 of them an mma, of the rows of "
            f"B of {tile.tile_k // 4} vectors{ahead}",
            f"write: {writer}; a lane {chunk} columns at once of {max(length // 4, 1)} rows of C",
            f"parallel for j0 in range(0, {n}, {tile.tile_n}):  # blocks; j = j0..j0 + "
            f"{tile.tile_n - 1}, below n",
            f"  parallel for b in range({rows}):  # blocks",
            f"    parallel for w in range({tile.row_warps}):  # warps",
            "      acc[w, v, j] = 0",
            f"      for p0 in {steps}:",
            f"        for p in range(p0, min(p0 + {tile.tile_k}, row_offsets[b + 1])):  # mma",
            "          acc[w, v, j] += values[p, v] * B[column_indices[p], j]",
            f"    C[{length} * b + v, j] = sum over w of acc[w, v, j]",
            *(() if tile.chunk is None else (_explain_pieces(tile, problem),)),
        ]
    )


def _explain_pieces(tile: OctetTile, problem: Problem) -> str:
    text = f"pieces: of up to {tile.chunk} vectors of a block row, each as a block row above"
    if (rows := problem.rows) is not None and tile.chunk is not None:
        text += f"; the longest row, of {rows.longest}, has {-(-rows.longest // tile.chunk)}"
    return text + "\n  a second launch adds the sums of a block row's pieces, in order"


def _check_sddmm(tile: OctetTile, problem: Problem) -> None:
    """Raises ScheduleError if sddmm has no kernel for the tile; vectors and dtype were checked
    before."""
    if tile.row_warps != 1 or tile.swizzle or tile.chunk is not None:
        raise ScheduleError(
            f"sddmm: {tile}: row_warps, swizzle and chunk are of spmm; a warp has tile_n vectors "
            "here, whatever their block rows"
        )
    if tile.tile_n > _WARP_WINDOW:
        raise ScheduleError(
            f"sddmm: {tile}: tile_n is the vectors of a warp, up to {_WARP_WINDOW}; "
            "give a smaller one"
        )
    if (held := sddmm_registers(tile, problem.dtype)) > _HELD:
        raise ScheduleError(
            f"sddmm: {tile} holds {held} registers of a lane, more than {_HELD}; give a smaller "
            "tile_n or tile_k, or fewer stages"
        )


def features_of_load(tile: OctetTile, dtype: str) -> int:
    """How many features a lane loads at once: those of 16 bytes if four lanes' loads divide a step,
    else of 8 bytes."""
    in_16_bytes = 4 if dtype == "float32" else 8
    return in_16_bytes if tile.tile_k % (4 * in_16_bytes) == 0 else in_16_bytes // 2


def sddmm_registers(tile: OctetTile, dtype: str) -> int:
    """How many registers a lane needs: for sums, words of the steps under way, and the address of
    each row."""
    words = tile.tile_k // (8 if dtype == "float32" else 16) * 2
    columns = max(tile.vector_length // 8, 1)
    return tile.tile_n // 4 * columns + (tile.stages * words + 2) * (columns + tile.tile_n // 8)


def sddmm_blocks(tile: OctetTile, problem: Problem) -> int:
    """Blocks along the vectors; depends on their capacity only."""
    return max(-(-(problem.nnz // tile.vector_length) // (WARPS * tile.tile_n)), 1)


def _explain_sddmm(tile: OctetTile, problem: Problem) -> str:
    """What a block, a warp and a lane own, who writes, and the equivalent loops."""
    (m, k), d, length = problem.shape, problem.n, tile.vector_length
    vectors, blocks = problem.nnz // length, sddmm_blocks(tile, problem)
    c, stages = features_of_load(tile, problem.dtype), tile.stages
    depth = 8 if problem.dtype == "float32" else 16
    batch = f", for each of {problem.batch} products" if problem.batch > 1 else ""
    under_way = f", {stages} such steps" if stages > 1 else ""
    idle = f" ({8 - length} of 8 columns idle)" if length < 8 else ""
    return "\n".join(
        [
            f"{tile}: sddmm of [{m}, {k}] with {vectors} vectors of {length}, d = {d}",
            f"grid:  {blocks} blocks along the vectors{batch}",
            f"block: {32 * WARPS} threads, {WARPS} warps with neighbouring windows",
            f"warp:  a window of {tile.tile_n} vectors, block row after block row; an mma is 16 "
            f"vectors x {min(length, 8)} rows x {depth} features{idle}",
            f"lane:  {c} consecutive features of every {4 * c}, of {tile.tile_n // 8} rows of Y "
            f"and {max(length // 8, 1)} of X; loads of {tile.tile_k} features under way{under_way}",
            f"write: {min(length // 2, 4)} lanes for each vector, plain stores; all lanes, zeros "
            "in the padding",
            f"parallel for p0 in range(0, vectors, {tile.tile_n}):  # warps",
            f"  for b in block rows with vectors p in range(p0, p0 + {tile.tile_n}):",
            "    acc[p, v] = 0",
            f"    for l0 in range(0, d, {tile.tile_k}):  # l = l0..l0 + {tile.tile_k - 1}, below d",
            f"      acc[p, v] += X[{length} * b + v, l] * Y[column_indices[p], l]  # mma",
            "    values[p, v] = acc[p, v] * weights[p, v] * scale  # where given; zero for rows "
            "past the end",
        ]
    )
