"""`choose_schedule`: the default schedule, for calls that name none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

from sgap_jax.formats.levels import CSR
from sgap_jax.schedules.attention import Unfused
from sgap_jax.schedules.cpu import CpuTile, scatter, scatter_entries
from sgap_jax.schedules.families import working
from sgap_jax.schedules.machine import this_machine
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Reference, Schedule
from sgap_jax.schedules.select_cuda import on_cuda, same_bits_asked
from sgap_jax.schedules.subwarp import BYTES
from sgap_jax.schedules.tiles import CPU_DEPTH, CPU_STEP, OctetTile

_SMALL_SDDMM = 1 << 17  # nonzeros: fewer take smaller chunks
_SMALLER_SDDMM = 1 << 15  # nonzeros, for column vectors: fewer take the smallest chunks
_BLOCK = Fraction(5, 8)  # of L2: rows of Y that sddmm keeps near for a chunk
_BLOCK_LEAST = Fraction(3, 2)  # of L2: a Y of so many bytes is taken in blocks of rows
_BLOCK_USES = 3  # by a chunk, of each row of Y
_BLOCK_BYTES = 1024  # of rows of Y that a row of the pattern uses of a block
_CHUNKS = 4  # for each core, where they are large
_MOST_NONZEROS = 2**31 - 1  # of a chunk: index arrays are int32
_OCTET_LENGTHS = (4, 8, 16, 32)  # V for which matrix tiles of the CPU pay
_OCTET_WORK = 4096  # attention on matrix tiles needs so many multiply-adds of scores in a block row
_PACKED_BYTES = {"float32": 4, "float64": 8}  # the dtypes that are packed, and their sizes
_SLAB_ROW = 128  # bytes of a row of a packed tile
_WIDE_ROW = 512  # bytes of a row of a packed tile, if values are reached through a permutation
_BEYOND_L2 = Fraction(5, 4)  # of L2: a dense operand of so many bytes does not fit there
_ROW_USES = 40  # packing needs so many nonzeros per row of the dense operand
_WIDENED_USES = 16  # widening 16-bit rows needs so many entries (or vectors) per row of B
_WIDENED = Fraction(1, 2)  # of L2: the most bytes of a tile of widened rows
_HALF = ("bfloat16", "float16")
_WIDENED_COLUMNS = 32  # of float16 that pay for widening, with registers of 64 bytes
_WIDENED_MOST = 64  # columns of float16 that pay for it with vectors of 4 rows and more on Intel
_FEW_COLUMNS = 48  # of float16: with fewer, entries pay for widening too
_TWO_ROW_COLUMNS = (1, 4)  # with which vectors of two rows have loops of their own, without pairs
_TAIL = 8  # columns that fill a register of 32 bytes, once they are widened
_WIDE = 64  # bytes of the registers of AVX-512
_DENSE = 6  # packing narrow rows needs one of so many entries to be stored
_SMALL_SPMM = 1 << 15  # nonzeros plus rows: fewer take smaller chunks
_SMALL_INTEL = 1 << 17  # the same on Intel
_FEW_USES = 8  # on Intel tiles need so many nonzeros per row of the dense operand


def choose_schedule(problem: Problem) -> Schedule:
    """The default schedule of a problem; pure Python, reads no array. `explain_choice` says which
    of the following rules gave it, and what that rule reads of the problem and of the machine.

    On CUDA it is the first schedule of `on_cuda` (select_cuda.py): a tile of column vectors, else a
    point of the atomic-parallelism space, for skewed rows another one. Kernels that `python -m
    sgap_jax doctor` found to fail on the GPU are passed over, with one warning, for the next best;
    after all of them comes the plain-JAX lowering. On platforms other than CPU and CUDA it is the
    plain-JAX lowering.

    On a CPU with a matrix unit, column vectors of bfloat16 take the tile of `_cpu_octets`, if there
    is one.

    Else most calls of spmm have one tile with all columns on the CPU. A dense operand whose rows
    are used many times is packed into tiles of 128 bytes a row if that brings it into a nearer
    cache: a slab of 96 KB is half in the first-level cache, one of 1.25 MB about in the second.
    Speed relative to one tile, measured on two Zen 5 cores (48 KB L1 and 1 MB L2 each, 32 MB L3),
    float32:

    - where packing is chosen: 1.0x to 1.6x for n = 128, 0.99x to 1.7x for 256, 1.1x to 1.6x for
      512, and 1.05x to 1.5x for 64 and 96; built for AVX2 0.93x to 1.2x for 64 and 96, 0.96x to
      1.5x for more;
    - where it is not chosen: slabs of 128 to 192 KB 0.91x to 1.0x (n = 128); n = 64 with other
      slabs or fewer entries 0.9x to 1.1x; rows of A with 10 nonzeros 0.6x to 1.1x; 10 uses of a row
      of B about 0.9x; tiles that are not packed at most 1.15x;
    - for A^T B, where each tile gathers the values through a permutation, packed rows are 512
      bytes, chosen if B does not fit in L2: 1.02x to 1.24x for 192 and 256 columns, 1.1x to 1.5x
      for 512 (float64 1.03x to 1.4x); not chosen: B within L2 0.8x to 0.97x, more rows of B 0.6x to
      1.0x;
    - A^T B with up to 8 columns runs by rows of A, if its structure was checked and a row of C
      receives an entry from each core's rows: values are then read in order;
    - chunks of 2048 to 16384 nonzeros 0.87x to 1.1x; a small problem takes smaller chunks, so that
      all cores get a share.

    Caches are counted in those of the machine (`this_machine`, which `info()` shows), so these
    bounds are 2 and 1.25 times the caches of a core, and so on, and all calls of a process choose
    alike. The bound of 1.25 second-level caches, and that rows of A have 24 nonzeros, are what
    `python -m sgap_jax calibrate` measures and keeps by CPU model: `slab` and `row_length` of the
    machine, read at import.

    On Intel, whose second-level cache delivers rows about as fast as the kernels take them, tiles
    need a dense operand of twice that cache (4 MB), or of 2 MB if its rows are used 40 times and
    have 1024 bytes or more. Time relative to one tile, measured on an Intel Xeon (family 6 model
    167, 2 threads, 48 KB L1, 2 MB L2), float32, n = 128 and 256:

    - where rows of B are used 40 times: packed rows of 256 bytes if such a slab fits in 3/4 of L2
      (0.68 for a graph of 5201 vertices; 1.02 for the banded bcsstk16, whose rows are near
      anyway), else of 128 bytes (0.52 and 0.37 for 10,000 columns); where B is smaller, packing
      took 1.06 to 1.5 and is not chosen;
    - where they are used 8 to 40 times: n = 128 in tiles of 256 bytes that are not packed, up to
      slabs of 2.5 times L2 (0.80, 0.85); more columns in packed rows of 128 bytes if B has four
      times L2 (0.64 to 1.07; where it has 2.4 times, that took 1.07 of one tile);
    - for A^T B of float32 and float64 too, where those tiles are packed: the first of them to come
      to some values puts these in order (n = 256: 0.42 to 0.5 for 10,000 columns with 40 uses and
      100, 0.75 with 20, 0.93 for 20,000 with 20, 0.69 for the graph and 0.75 for weights of
      [2048, 1024] at 90%; n = 128: 0.73 with 100 uses);
    - for n of 128 and more, chunks of 2048 up to 131,000 nonzeros and rows: 0.86 to 1.03;
    - 16-bit numbers take the same packed rows, of accumulators, as a B in float16 of twice its size
      and one in bfloat16 of its own: uniform, 10,000 columns, 0.90 (float16, n = 128), 0.76 and
      0.83 (256), 0.60 and 0.66 (512).

    The kernels of column vectors walk narrow blocks of columns by themselves, without packing.

    A packed tile holds accumulators, so 16-bit rows are widened once and not at each use, if it
    takes half of a second-level cache or less; all of B is one tile, but for float16. Of up to four
    columns that takes 0.55x to 1.0x of the time (CSR and V = 8; n = 2 most), of V = 2 0.84x to
    0.95x, in float16 for all columns, in bfloat16 up to 16. Measured on two cores of an Intel Xeon
    with AVX-512 (48 KB L1 and 2 MB L2 each). Vectors of 4 rows and more in float16 take 0.90x to
    0.99x so with 32 columns, 0.96x to 1.02x with 48 and 64 (weights at 70% to 90%; an Xeon of
    family 6, model 167). All else was up to 1.3x slower so. On other processors with registers of
    64 bytes vectors of 2 rows are packed with one column and four (bfloat16 0.60x to 0.90x and
    0.81x to 1.1x, float16 0.89x to 0.99x and 0.93x to 1.1x; one core of a busy Zen 4) and not with
    others (1.06x to 1.16x, 2 to 16), and entries only if all of B then fits in the first-level
    cache (0.93x for n = 1 and 4; where it does not, packed took 1.19x and 1.05x; one core of a busy
    Zen 4, 32 KB L1); on Zen 5 with two and three columns wherever a tile holds B (0.64x to 0.75x;
    10,000 columns with 100 uses, a graph of 5201 vertices). On Zen 4, where a conversion takes the
    place of a multiply-add, 32 columns of float16 and more with vectors are packed: 0.89x to 0.97x
    (V = 2 and 8, 32 to 128 columns; 8 and 16 took 1.06x to 1.13x), in tiles of 128 columns, whose
    passes share A's values (V = 8, 96 to 256 columns: 0.89x to 0.98x of no tiles and 0.93x to 0.98x
    of tiles of 64, V = 4 0.89x to 1.04x of either; two cores), for V > 8 of 64, and 32 to 47
    columns with entries (0.88x; 16 took 1.03x, 48 1.01x, 128 1.10x). On Zen 5, which takes
    registers of 64 bytes whole, the same took 1.0x to 1.08x (V = 8), 1.14x to 1.26x (V = 2) and
    1.19x to 1.34x (entries, 16 to 128 columns) of no packing, and is not chosen. Where there are
    products of pairs of bfloat16, V = 2 takes 0.54x to 0.70x of that without packing (2, 3 and 5 to
    16 columns, two cores of an AMD EPYC, family 25, model 17). With registers of 32 bytes, where
    part of a 16-bit row has no instruction of its own, A^T B of up to seven columns takes 0.38x to
    0.6x (V = 2 and 8; one core of a busy Zen 3); on Intel with wider ones up to four 0.88x to
    1.02x.

    A small sddmm takes smaller chunks, so that both cores get an equal share. Measured on the same
    machine with d = 64, chunks of 2048 nonzeros against 8192: 1.90x on 42,000 nonzeros; 1.21x,
    1.01x and 0.94x on about 100,000; a loss of 1 to 6% from 200,000 on. For column vectors, whose
    kernel does more work at the start of a task, chunks are 4096 from 33,000 nonzeros on: 1.05x to
    1.11x of 2048 with d = 32, 0.98x to 1.07x with d = 128 and 256.

    On Intel an sddmm whose Y is 3/2 of the second-level cache or more takes rows of Y in blocks of
    5/8 of that cache, in chunks of a quarter of what a core has, if a chunk uses each row of Y
    three times and a row of the pattern 1 KB of each block. Measured on two cores of an Xeon
    (family 6, model 167; 2 MB L2), float32, speed relative to chunks of 8192 nonzeros without
    blocks, d = 64, 128 and 256: uniform patterns of 10,000 rows and columns with 20 entries a row
    0.95x, 1.31x and 1.50x, with 100 1.2x, 2.4x and 2.8x; of 30,000 with 30 1.08x, 1.37x and 1.20x,
    with 100 1.25x and 2.5x (64 and 128); of 100,000 with 30 0.77x and 1.03x; weights of [512, 4608]
    at 90% 2.6x, a graph of 5201 nodes with 198,000 edges 1.5x (256); graphs of 131,000 with 8 a
    node 0.4x to 0.6x. 16-bit rows of 512 bytes 1.4x to 1.5x.
    """
    return _choose(problem)[0]


def explain_choice(problem: Problem) -> str:
    """Why `choose_schedule` takes the schedule that it does, as text: the schedule, the rule, the
    sizes that rules are about, the fields of the machine that the rules for this problem read
    (those of `info()`; none on CUDA), and the equivalent loops, which are those of
    `Schedule.explain`. Pure Python, reads no array.

    Raises NotImplementedError if no kernel takes the problem's dtype, as the operation does.
    """
    schedule, rule = _choose(problem)
    schedule.check(problem)
    lines = [str(schedule), f"rule:    {rule}", f"problem: {_sizes(problem)}"]
    if fields := _machine_fields(problem):
        values = (f"{name} {getattr(this_machine(), name)}" for name in fields)
        lines.append(f"machine: {', '.join(values)}")
    return "\n".join([*lines, schedule.explain(problem)])


def _sizes(problem: Problem) -> str:
    m, k = problem.shape
    text = f"{problem.op} of [{m}, {k}], {problem.format}, {problem.dtype}, {problem.nnz} entries"
    if problem.symbolic:
        return text
    text += f" ({problem.nnz / max(m, 1):.3g} for each row"
    if k:  # operations on rows alone do not have it
        text += f", {problem.nnz / k:.3g} for each column"
    text += f"), n = {problem.n}"
    if problem.op == "spmm" and (size := BYTES.get(problem.dtype)):
        text += f", B of {k * problem.n * size} bytes"
    return text + (f", batch of {problem.batch}" if problem.batch != 1 else "")


def _machine_fields(problem: Problem) -> list[str]:
    """The fields of the machine on which the choice for a problem depends."""
    if problem.platform != "cpu" or problem.symbolic:
        return []
    octets = problem.dtype == "bfloat16" and problem.vector_length in _OCTET_LENGTHS
    fields = ["matrix_tiles"] if octets else []
    if problem.op == "sddmm" and not problem.vector_length and _many(problem):
        return ["l2_bytes", "cores", "intel"]
    if problem.op != "spmm":
        return fields
    if problem.format == CSR:
        of_caches = ["l1_bytes", "l2_bytes", "intel", "slab", "row_length"]
        fields += of_caches if problem.dtype in _PACKED_BYTES else ["intel"]
    if problem.dtype in _HALF:
        fields += ["l2_bytes"]
        fields += ["vector_bytes"] if problem.vector_length or not problem.permuted else []
        if problem.permuted:
            fields += ["intel"] if problem.vector_length else []
        else:
            fields += ["l1_bytes", "slab"] if problem.format == CSR else ["intel"]
            fields += ["whole"]
            pairs = problem.dtype == "bfloat16" and problem.vector_length == 2
            fields += ["pair_dots"] if pairs else []
    if problem.format == CSR and scatter_entries(problem, made=False)[0]:
        fields += ["cores"]
    return fields


def choose_same_bits(problem: Problem) -> Schedule:
    """As `choose_schedule`, of the schedules that give the same bits at each call."""
    return _choose(problem, same_bits=True)[0]


def _choose(problem: Problem, same_bits: bool = False) -> tuple[Schedule, str]:
    """The schedule, and the rule that gives it."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"choose_schedule: problem must be a Problem, got a {type(problem).__name__}; "
            "explain(spmm, A, B) says what is chosen for a call"
        )
    if problem.platform == "cpu":
        return _on_cpu(problem)
    if problem.platform == "cuda":
        schedule = working(problem, on_cuda(problem, same_bits or same_bits_asked()))
        return schedule, "the first of the kernels for CUDA that is not known to fail there"
    plain = Unfused() if problem.op == "attention" else Reference()
    return plain, f"there are no kernels for {problem.platform}"


def _on_cpu(problem: Problem) -> tuple[Schedule, str]:
    if problem.symbolic:
        return CpuTile(), "sizes are symbols: one tile of all columns"
    if (octets := _cpu_octets(problem)) is not None:
        return octets, "vectors of bfloat16, and there is a matrix unit"
    if problem.op == "sddmm" and not _many(problem):
        vectors = problem.vector_length is not None
        smaller = not vectors or problem.nnz * problem.batch < _SMALLER_SDDMM
        rule = f"fewer than {_SMALL_SDDMM} entries: smaller chunks, so that all cores get a share"
        return CpuTile(nonzeros=2048 if smaller else 4096), rule
    if problem.op == "sddmm" and (blocks := _row_blocks(problem)) is not None:
        rule = (
            "rows of Y, which is beyond L2, are used often: large chunks, by blocks that fit there"
        )
        return blocks, rule
    if problem.op != "spmm":
        return CpuTile(), "chunks of the usual size"
    if (narrow := _cpu_tile(problem)) is not None:
        tiles = "packed tiles" if narrow.packed else "tiles"
        return narrow, f"rows of B are used often: {tiles} of its columns fit in a nearer cache"
    if columns := _widened_columns(problem):
        rule = "rows of B of 16 bits, used often: packed, so that each is widened once"
        return CpuTile(columns=columns, packed=True), rule
    work = (problem.nnz + problem.shape[0]) * problem.batch
    small = _SMALL_INTEL if this_machine().intel else _SMALL_SPMM
    if problem.format == CSR and problem.n >= 128 and work < small:
        rule = f"fewer than {small} entries and rows: smaller chunks, so that all cores get a share"
        return CpuTile(nonzeros=2048), rule
    if problem.format == CSR and scatter_entries(problem, made=False)[1]:
        return CpuTile(), "few columns of A^T B: by rows of A, to partial sums of C"
    return CpuTile(), "B is near, or its rows are used too seldom for tiles: all columns in one"


def _cpu_octets(problem: Problem) -> OctetTile | None:
    """The tile for bfloat16 vectors on a CPU with a matrix unit; None if `CpuTile` is faster, or
    there is no matrix unit.

    Measured on an Intel Xeon (family 6, model 167; AMX), two cores, weights of [2048, 1024] with 70
    to 95% sparsity and n = 256, as speed relative to `CpuTile` on float32: spmm 1.4x to 1.7x for
    V = 4, 2.2x to 2.7x for 8, 2.9x to 3.8x for 16 and 32; sddmm 1.4x to 1.6x, 2.1x to 3.2x and 2.5x
    to 4.9x; A^T B 1.2x to 2.4x for V = 16 and 32, but 0.5x to 0.9x for 4 and 8, where adding the
    products to rows of C takes longer than the products.

    Attention, likewise: L = 2048, 90% sparse, 64 features 2.4x to 2.9x forward, 2.0x to 2.4x both
    ways; block rows of `_OCTET_WORK` multiply-adds and more 0.97x to 1.6x, 0.98x to 1.6x; of 2560
    0.9x to 1.0x, 0.9x to 1.2x; of fewer 0.7x, 0.4x to 0.8x.
    """
    V = problem.vector_length
    if problem.dtype != "bfloat16" or V not in _OCTET_LENGTHS:
        return None
    if not this_machine().matrix_tiles:
        return None
    work = problem.nnz * problem.n * V  # of scores, in all rows of a block row
    attends = problem.n <= CPU_DEPTH and work >= _OCTET_WORK * problem.shape[0]
    if problem.op == "sddmm" or (problem.op == "attention" and attends):
        tile_n, tile_k = CPU_STEP
        return OctetTile(V, tile_n=tile_n, tile_k=tile_k)
    if problem.op != "spmm" or problem.n < 16:
        return None
    if problem.permuted:
        pays = V >= 16 and scatter(problem, CpuTile())[1]
        return OctetTile(V, tile_k=32) if pays else None
    return OctetTile(V, tile_n=512, tile_k=32)


def _cpu_tile(problem: Problem) -> CpuTile | None:
    """A tile narrower than the dense operand on the CPU; None if that does not pay."""
    intel, permuted = this_machine().intel, problem.permuted
    if problem.format != CSR:
        return None
    if problem.dtype in _HALF and intel and not permuted:
        # A conversion in float16 counts like the bytes it saves.
        row, packed = _intel_row(problem, problem.n * (4 if problem.dtype == "float16" else 2))
        return CpuTile(columns=row // 4, packed=True) if packed else None
    if problem.dtype not in _PACKED_BYTES:
        return None
    size = _PACKED_BYTES[problem.dtype]
    row, packed = _intel_row(problem, problem.n * size) if intel else (0, False)
    if not intel or (permuted and not packed):
        row, packed = _packed_row(problem, problem.n * size), True
    return CpuTile(columns=row // size, packed=packed) if row else None


def _packed_row(problem: Problem, row: int) -> int:
    """Bytes of a row of a packed tile, where a row of the dense operand has `row`; 0 if packing
    does not pay."""
    (m, k), machine = problem.shape, this_machine()
    l1, l2 = machine.l1_bytes, machine.l2_bytes
    if problem.permuted:
        wide = row >= 768 and k <= min(5 * row, 10 << 10) and k * row >= _BEYOND_L2 * l2
        return _WIDE_ROW if wide and problem.nnz >= max(16 * k, 12 * m) else 0
    slab = k * _SLAB_ROW
    if problem.nnz < max(_ROW_USES * k, machine.row_length * m) or slab > machine.slab * l2:
        return 0
    if 8 * k * row < l2:
        return 0
    if row < 512:
        near = 4 * l1 <= 3 * slab <= 8 * l1
        pays = row >= 256 and near and _DENSE * problem.nnz >= m * k
    else:
        pays = row >= 1024 or slab <= 2 * l1 or 4 * slab >= l2
    return _SLAB_ROW if pays else 0


def _many(problem: Problem) -> bool:
    """Whether all cores get a share of an sddmm in chunks of the usual size."""
    return problem.nnz * problem.batch >= _SMALL_SDDMM


def _row_blocks(problem: Problem) -> CpuTile | None:
    """The tile of an sddmm on Intel that takes rows of Y in blocks; None if that does not pay."""
    machine, (m, k) = this_machine(), problem.shape
    if not machine.intel or problem.vector_length or problem.dtype not in BYTES:
        return None
    row = problem.n * BYTES[problem.dtype]
    if k * row < _BLOCK_LEAST * machine.l2_bytes:
        return None
    columns = int(_BLOCK * machine.l2_bytes) // row
    chunk = min(problem.nnz, problem.nnz * problem.batch // (_CHUNKS * machine.cores))
    chunk = min(chunk, _MOST_NONZEROS)
    used = problem.nnz * columns * row >= _BLOCK_BYTES * m * k
    return CpuTile(columns=columns, nonzeros=chunk) if used and chunk >= _BLOCK_USES * k else None


def _widened_columns(problem: Problem) -> int:
    """Columns of the tiles in which B is packed on the CPU to have its 16-bit rows widened; 0 if
    that does not pay."""
    if problem.dtype not in _HALF:
        return 0
    length, k, n = problem.vector_length, problem.shape[1], problem.n
    machine = this_machine()
    if problem.format != CSR and length is None:
        return 0
    most = int(_WIDENED * machine.l2_bytes / 4) // max(k, 1)  # columns of a tile
    whole = n if k and n <= most else 0
    if problem.permuted:  # each vector of A^T meets rows of B for each of its values
        few = n < _TAIL if machine.vector_bytes == _TAIL * 4 else machine.intel and n <= 4
        if length is None or not few:
            return 0
        dots = n == 1 and length % 4 == 0  # which reads B in whole registers
        return whole if not dots and problem.nnz >= _WIDENED_USES * k else 0
    if problem.nnz < _WIDENED_USES * k * (length or 1):
        return 0
    two_rows = length == 2 and n in _TWO_ROW_COLUMNS
    if length == 2 and problem.dtype == "bfloat16" and machine.pair_dots and not two_rows:
        return 0
    if machine.vector_bytes == _WIDE and not machine.intel:
        if problem.dtype == "float16" and n >= _WIDENED_COLUMNS:
            return 0 if machine.whole else _float16_columns(length or 1, n, most)
        # Rows of two and three numbers of 16 bits are loaded in parts, those of four in one.
        in_parts = machine.whole and n in (2, 3)
        far = length is None and not in_parts and 4 * n * k > machine.l1_bytes
        return whole if n <= 4 and (length != 2 or two_rows) and not far else 0
    if machine.intel and machine.vector_bytes == _WIDE and problem.dtype == "float16":
        if (length or 1) >= 4 and _WIDENED_COLUMNS <= n <= _WIDENED_MOST:
            return whole
    pays = n <= 4 or (length == 2 and (problem.dtype == "float16" or n <= 16))
    return whole if pays else 0


def _float16_columns(length: int, n: int, most: int) -> int:
    """The same where a register of 64 bytes takes two instructions to be widened, of up to `most`
    columns."""
    if length == 1:
        return n if n < _FEW_COLUMNS and n <= most else 0
    columns = 128 if length <= 8 else 64  # of passes that share A's values, or of two
    while columns > most:
        columns //= 2
    return min(columns, n) if columns >= _WIDENED_COLUMNS else 0


def _intel_row(problem: Problem, row: int) -> tuple[int, bool]:
    """Bytes of a row of a tile on Intel, and whether it is packed; (0, False) for one tile."""
    k, l2, most = problem.shape[1], this_machine().l2_bytes, this_machine().slab
    double, large, many = 2 * _SLAB_ROW, k * row >= 2 * l2, problem.nnz >= _ROW_USES * k
    if not large and not (many and row >= 1024 and k * row >= l2):
        return 0, False
    if row < 512 or problem.nnz < _FEW_USES * k:
        return 0, False
    if row < 1024 and not many:
        return (double, False) if 2 * k * double <= 5 * l2 else (0, False)
    if large and many and 4 * k * double <= 3 * l2:
        return double, True
    if not many and k * row < 4 * l2:
        return 0, False
    return (_SLAB_ROW, True) if k * _SLAB_ROW <= most * l2 else (0, False)


_chooser: ContextVar[Callable[[Problem], Schedule]] = ContextVar("chooser", default=choose_schedule)


def default_schedule(problem: Problem) -> Schedule:
    """`choose_schedule(problem)`, or the same of the function that `choosing` has set."""
    return _chooser.get()(problem)


@contextmanager
def choosing(choose: Callable[[Problem], Schedule]) -> Iterator[None]:
    """A context in which `choose` replaces `choose_schedule` for calls that name no schedule."""
    token = _chooser.set(choose)
    try:
        yield
    finally:
        _chooser.reset(token)


_Chosen = dict[tuple[Any, Any, bool], str | None]
_chosen: ContextVar[_Chosen | None] = ContextVar("chosen", default=None)


@contextmanager
def chosen() -> Iterator[_Chosen]:
    """A context that keeps which calls are lowered in it, each once, in the order in which they
    come: (its Problem, or what it computes as text; its schedule; whether that is the default) ->
    its loops as text, None for those of `Schedule.explain`."""
    found: _Chosen = {}
    token = _chosen.set(found)
    try:
        yield found
    finally:
        _chosen.reset(token)


def keep_chosen(
    call: Any, schedule: Any, is_default: bool, loops: Callable[[], str] | None = None
) -> None:
    """Says to `chosen` that a call is lowered with a schedule."""
    if (found := _chosen.get()) is not None:
        found.setdefault((call, schedule, is_default), loops() if loops else None)
