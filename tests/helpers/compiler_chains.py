"""The schedules of the compiler's conformance list: rows 1 to 16 of the TACO scheduling paper, its
tests and its appendix, S1 to S4 of Sgap, section 6, V1 and V2 of vectorSparse. Also the package's
presets for expressions of each kind."""

from sgap_jax import COO, CSC, CSR, CVS
from sgap_jax.compiler.loop_ir.loopir import CPU_THREAD, CPU_VECTOR, GPU_BLOCK, GPU_THREAD, GPU_WARP
from sgap_jax.compiler.notation.cin import (
    ATOMICS,
    IGNORE_RACES,
    NO_RACES,
    PARALLEL_REDUCTION,
    SEGMENT,
    TEMPORARY,
)
from sgap_jax.compiler.notation.expr import assign
from sgap_jax.compiler.presets import cpu, cpu_entries, cpu_fibers, spmm_point
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import CSF, Compressed, Dense, Format

DCC = Format((Dense, Compressed, Compressed))
SPMV = assign("ij,j->i", {"A": CSR}, names="A x y")
SPMM = assign("ij,jk->ik", {"A": CSR})
SPMM_DCSR = assign("ij,jk->ik", {"A": CSF(2)})
SDDMM = assign("ik,ij,jk->ik", {"B": CSR}, names="B C D A")
SDDMM_SPARSE = assign("ik,ij,jk->ik", {"B": CSR, "A": CSR}, names="B C D A")
TTV = assign("ijk,k->ij", {"B": CSF(3)}, names="B c A")
TTM = assign("ijk,kl->ijl", {"B": CSF(3)}, names="B C A")
MTTKRP = assign("ikl,lj,kj->ij", {"B": CSF(3)}, names="B C D A")
MTTKRP_DCC = assign("ikl,lj,kj->ij", {"B": DCC}, names="B C D A")
MTTKRP_4 = assign("iklm,kj,lj,mj->ij", {"B": CSF(4)}, names="B C D E A")
MTTKRP_5 = assign("iklmn,kj,lj,mj,nj->ij", {"B": CSF(5)}, names="B C D E F A")
SPMM_CVS = assign("ij,jk->ik", {"A": CVS(8)})
SDDMM_CVS = assign("ik,ij,jk->ik", {"A": CVS(8), "D": CVS(8)})


def blocks(schedule, *units):
    """Binds the named loops to blocks, warps and threads, with a race strategy each."""
    for (var, race), unit in zip(units, (GPU_BLOCK, GPU_WARP, GPU_THREAD), strict=False):
        schedule = schedule.parallelize(var, unit, race)
    return schedule


def positions(expression, tensor, *levels):
    """Fuses the leading levels from the innermost outwards, and moves them to the position space
    `fpos`."""
    s, (*outer, inner) = Schedule(expression), levels
    for n, var in enumerate(reversed(outer)):
        fused = "f" if n == len(outer) - 1 else f"f{n}"
        s, inner = s.fuse(var, inner, fused), fused
    return s.pos(inner, "fpos", tensor)


def rows():
    """name -> schedule of the rows of the TACO paper."""
    A, N = ATOMICS, NO_RACES
    chains = {}
    tiled = Schedule(SPMV).split("i", "i0", "i1", 16).reorder("i0", "i1", "j")
    chains["1"] = tiled.parallelize("i0", CPU_THREAD, N)
    p = positions(SPMV, "A", "i", "j")
    chains["2"] = p.split("fpos", "p0", "p1", 16).parallelize("p0", CPU_THREAD, A)
    chains["3 tiled"] = Schedule(SPMV).split("i", "i1", "i2", 4)
    chains["3 positions"] = p
    chains["4"] = (
        Schedule(SPMM)
        .split("i", "i0", "i1", 16)
        .pos("j", "jpos", "A")
        .split("jpos", "jpos0", "jpos1", 8)
        .reorder("i0", "i1", "jpos0", "k", "jpos1")
        .parallelize("i0", CPU_THREAD, N)
        .parallelize("k", CPU_VECTOR, IGNORE_RACES)
    )
    for name, expression in (("5", SDDMM), ("5 sparse", SDDMM_SPARSE)):
        chains[name] = (
            Schedule(expression)
            .split("i", "i0", "i1", 16)
            .pos("k", "kpos", "B")
            .split("kpos", "kpos0", "kpos1", 8)
            .reorder("i0", "i1", "kpos0", "j", "kpos1")
            .parallelize("i0", CPU_THREAD, N)
            .parallelize("kpos1", CPU_VECTOR, PARALLEL_REDUCTION)
        )
    chains["6"] = (
        positions(TTV, "B", "i", "j")
        .split("fpos", "chunk", "fpos2", 16)
        .reorder("chunk", "fpos2", "k")
        .parallelize("chunk", CPU_THREAD, N)
    )
    chains["7"] = (
        positions(TTM, "B", "i", "j")
        .split("fpos", "chunk", "fpos2", 16)
        .pos("k", "kpos", "B")
        .split("kpos", "kpos1", "kpos2", 8)
        .reorder("chunk", "fpos2", "kpos1", "l", "kpos2")
        .parallelize("chunk", CPU_THREAD, N)
        .parallelize("kpos2", CPU_VECTOR, PARALLEL_REDUCTION)
    )
    chains["8"] = (
        Schedule(MTTKRP)
        .pos("i", "ipos", "B")
        .split("ipos", "ipos0", "ipos1", 16)
        .reorder("ipos0", "ipos1", "k", "l", "j")
        .parallelize("ipos0", CPU_THREAD, N)
    )
    for name, expression in (("8 workspace", MTTKRP), ("8 DCC", MTTKRP_DCC)):
        chains[name] = (
            Schedule(expression)
            .split("i", "i1", "i2", 16)
            .reorder("i1", "i2", "k", "l", "j")
            .precompute("B C", "j", "jw", "w")
            .parallelize("i1", CPU_THREAD, N)
        )
    chains["8 order 4"] = (
        Schedule(MTTKRP_4)
        .split("i", "i1", "i2", 16)
        .reorder("i1", "i2", "k", "l", "m", "j")
        .precompute("B D E", "j", "jw", "w")
        .precompute("B E", "jw", "jv", "v")
        .parallelize("i1", CPU_THREAD, N)
    )
    chains["8 order 5"] = (
        Schedule(MTTKRP_5)
        .pos("i", "ipos", "B")
        .split("ipos", "ipos0", "ipos1", 16)
        .reorder("ipos0", "ipos1", "k", "l", "m", "n", "j")
        .parallelize("ipos0", CPU_THREAD, N)
    )
    rows_of_threads = Schedule(SPMV).split("i", "block", "thread", 256)
    chains["9"] = rows_of_threads.parallelize("block", GPU_BLOCK, N).parallelize(
        "thread", GPU_THREAD, N
    )
    chains["10"] = blocks(
        Schedule(SPMV)
        .split("i", "block", "block_row", 32)
        .split("block_row", "warp_row", "warp", 8)
        .pos("j", "jpos", "A")
        .split("jpos", "thread_nz", "thread", 32)
        .reorder("block", "warp", "warp_row", "thread", "thread_nz"),
        ("block", IGNORE_RACES),
        ("warp", IGNORE_RACES),
        ("thread", TEMPORARY),
    )
    nonzeros = (
        p.split("fpos", "block", "fpos1", 2048)
        .split("fpos1", "warp", "fpos2", 256)
        .split("fpos2", "thread", "thread_nz", 8)
        .reorder("block", "warp", "thread", "thread_nz")
    )
    chains["11"] = blocks(nonzeros, ("block", IGNORE_RACES), ("warp", IGNORE_RACES), ("thread", A))
    chains["11 workspace"] = blocks(
        nonzeros.precompute("A x", "thread_nz", "thread_nz_pre", "precomputed").unroll(
            "thread_nz_pre"
        ),
        ("block", IGNORE_RACES),
        ("warp", IGNORE_RACES),
        ("thread", A),
    )
    chains["12"] = blocks(
        spmm_positions(SPMM)
        .split("fpos", "block", "fpos1", 64)
        .split("fpos1", "warp", "nnz", 8)
        .split("k", "dense", "thread", 32)
        .bound("dense", "dense_val", 4)
        .reorder("block", "warp", "dense_val", "thread", "nnz"),
        ("block", IGNORE_RACES),
        ("warp", IGNORE_RACES),
        ("thread", A),
    )
    for name, expression in (("13", SPMM), ("13 DCSR", SPMM_DCSR)):
        s, row = Schedule(expression), "i"
        if name == "13 DCSR":
            s, row = s.pos("i", "ipos", "A"), "ipos"
        chains[name] = blocks(
            s.split(row, "block", "block_row", 32)
            .split("block_row", "warp", "warp_row", 4)
            .split("k", "thread_col", "thread", 32)
            .reorder("block", "warp", "warp_row", "thread", "thread_col", "j"),
            ("block", IGNORE_RACES),
            ("warp", IGNORE_RACES),
            ("thread", A),
        )
    chains["14"] = blocks(
        Schedule(SDDMM)
        .reorder("i", "k", "j")
        .fuse("i", "k", "f")
        .pos("f", "fpos", "B")
        .split("fpos", "block", "fpos1", 64)
        .split("fpos1", "warp", "nnz", 8)
        .split("j", "dense", "thread", 32)
        .bound("dense", "dense_val", 4)
        .reorder("block", "warp", "nnz", "thread", "dense_val")
        .unroll("dense_val"),
        ("block", IGNORE_RACES),
        ("warp", A),
        ("thread", PARALLEL_REDUCTION),
    )
    for name, expression, levels, dense in (
        ("15 TTM", TTM, ("i", "j", "k"), "l"),
        ("15 MTTKRP", MTTKRP, ("i", "k", "l"), "j"),
    ):
        s = Schedule(expression).reorder(*levels, dense)
        chains[name] = blocks(
            s.fuse(*levels[1:], "f0")
            .fuse(levels[0], "f0", "f")
            .pos("f", "fpos", "B")
            .split("fpos", "block", "fpos1", 64)
            .split("fpos1", "warp", "nnz", 8)
            .split(dense, "dense", "thread", 32)
            .bound("dense", "dense_val", 1)
            .reorder("block", "warp", "dense_val", "thread", "nnz"),
            ("block", IGNORE_RACES),
            ("warp", IGNORE_RACES),
            ("thread", A),
        )
    chains["16"] = blocks(
        positions(TTV, "B", "i", "j", "k")
        .split("fpos", "block", "fpos1", 2048)
        .split("fpos1", "warp", "fpos2", 256)
        .split("fpos2", "thread", "thread_nz", 8)
        .reorder("block", "warp", "thread", "thread_nz")
        .precompute("B c", "thread_nz", "thread_nz_pre", "precomputed")
        .unroll("thread_nz_pre"),
        ("block", IGNORE_RACES),
        ("warp", IGNORE_RACES),
        ("thread", A),
    )
    return chains | sgap() | octet()


def spmm_positions(expression):
    return Schedule(expression).reorder("i", "j", "k").fuse("i", "j", "f").pos("f", "fpos", "A")


def sgap():
    """S1 to S4: Listings 3 to 6 of Sgap, for N = 4 dense columns."""
    A, N = ATOMICS, NO_RACES
    chains = {}
    chains["S1"] = blocks(
        spmm_positions(SPMM)
        .split("fpos", "block", "fpos1", 2048)
        .split("fpos1", "warp", "nnz", 16)
        .split("k", "ko", "thread", 4)
        .bound("ko", "kbounded", 1)
        .reorder("block", "warp", "kbounded", "thread", "nnz")
        .scalar_promote("nnz"),
        ("block", IGNORE_RACES),
        ("warp", IGNORE_RACES),
        ("thread", A),
    )
    chains["S2"] = blocks(
        Schedule(SPMM)
        .split("i", "block", "block_row", 256)
        .split("block_row", "warp", "warp_row", 4)
        .split("k", "dense", "thread", 2)
        .bound("dense", "dense_col", 2)
        .reorder("block", "warp", "warp_row", "thread", "dense_col", "j")
        .scalar_promote("j"),
        ("block", N),
        ("warp", N),
        ("thread", N),
    )
    chains["S3"] = blocks(
        Schedule(SPMM)
        .fuse("i", "k", "io")
        .split("io", "ko", "ki", 128)
        .split("ki", "warp", "kii", 2)
        .pos("j", "jpos", "A")
        .split("jpos", "jpos0", "jpos1", 4)
        .reorder("ko", "warp", "kii", "jpos1", "jpos0")
        .scalar_promote("jpos1"),
        ("ko", N),
        ("warp", A),
        ("jpos1", PARALLEL_REDUCTION),
    ).group("jpos1", 4, PARALLEL_REDUCTION)
    chains["S4"] = blocks(
        spmm_positions(SPMM)
        .split("fpos", "block", "fpos1", 128)
        .split("k", "ko", "ki", 2)
        .bound("ko", "warp", 2)
        .reorder("block", "warp", "ki", "fpos1")
        .precompute("A B", (), (), "tmp"),
        ("block", IGNORE_RACES),
        ("warp", N),
        ("fpos1", A),
    ).group("fpos1", 4, SEGMENT)
    return chains


def octet():
    """V1 and V2: a tile of 8 x 64 of C from 16 column vectors; 16 vectors of D from 32 features."""
    tiled = Schedule(SPMM_CVS).split("i", "i0", "i1", 8)
    return {
        "V1": tiled.split("k", "kb", "kt", 64)
        .pos("j", "jp", "A")
        .split("jp", "jt", "jn", 16)
        .reorder("i0", "kb", "jt", "i1", "kt", "jn")
        .bind("i1", "octet_mma"),
        "V2": Schedule(SDDMM_CVS)
        .split("i", "i0", "i1", 8)
        .pos("k", "kp", "A")
        .split("kp", "kt", "kn", 16)
        .split("j", "jt", "jn", 32)
        .reorder("i0", "kt", "jt", "i1", "kn", "jn")
        .bind("i1", "octet_mma"),
    }


def octet_product(length=8, vectors=16, expression=None):
    """V1 for a GPU with its loops not bound to units yet; `vectors` column vectors a step."""
    return (
        Schedule(expression or assign("ij,jk->ik", {"A": CVS(length)}))
        .split("i", "i0", "i1", length)
        .split("k", "kb", "kt", 64)
        .pos("j", "jp", "A")
        .split("jp", "jt", "jn", vectors)
        .reorder("i0", "kb", "jt", "i1", "kt", "jn")
    )


def octet_sampled(length=8, vectors=16, features=32, rows=False, expression=None):
    """V2 for a GPU, likewise unbound; `features` features a step. With `rows` the features are
    contiguous in both factors."""
    words = "ik,ij,kj->ik" if rows else "ik,ij,jk->ik"
    return (
        Schedule(expression or assign(words, {"A": CVS(length), "D": CVS(length)}))
        .split("i", "i0", "i1", length)
        .pos("k", "kp", "A")
        .split("kp", "kt", "kn", vectors)
        .split("j", "jt", "jn", features)
        .reorder("i0", "kt", "jt", "i1", "kn", "jn")
    )


def octets_on_gpu():
    """name -> schedule. The loops around the nest that is bound to tensor cores go to blocks and
    warps in several ways: one warp owns the tile, several warps share it, or a warp visits it
    several times."""
    N, A = NO_RACES, ATOMICS
    bound = {
        "V1": octet_product().fuse("i0", "kb", "b"),
        "V1 columns": octet_product(4, 32),
        "V1 steps": octet_product(2).split("jt", "jo", "w", 4).reorder("i0", "kb", "w", "jo"),
        "V1 again": octet_product().reorder("jt", "kb"),
        "V2": octet_sampled(8, 16, 64).split("kt", "ko", "w", 4),
        "V2 rows": octet_sampled(2, 32, 64, rows=True).reorder("jt", "kt"),
        "V2 features": octet_sampled(4, 16, 16).reorder("jt", "i0", "kt"),
    }
    bound = {name: schedule.bind("i1", "octet_mma") for name, schedule in bound.items()}
    return {
        "V1": bound["V1"].parallelize("b", GPU_BLOCK, N),
        "V1 columns": blocks(bound["V1 columns"], ("i0", N), ("kb", N)),
        "V1 steps": blocks(bound["V1 steps"], ("i0", N), ("w", A)),
        "V1 again": blocks(bound["V1 again"], ("i0", N), ("kb", N)),
        "V2": blocks(bound["V2"], ("i0", N), ("w", N)),
        "V2 rows": bound["V2 rows"].parallelize("i0", GPU_BLOCK, N),
        "V2 features": bound["V2 features"].parallelize("jt", GPU_BLOCK, A),
    }


def gpu_presets():
    """name -> schedule: for each kernel of the atomic-parallelism space one point, for N
    columns."""
    every = ["{<4 nnz, 1 col>, 1}", "{<2 row, 2 col>, 1}", "{<1/8 row, 2 col>, 4}"]
    every += ["{<1/8 row, 2 col>, 1}", "{<1 nnz, 2 col>, 32}", "{<4 nnz, 2 col>, 8}"]
    return {
        f"{name}, N = {n}": spmm_point(SPMM, Schedule.parse(name), n)
        for name in every
        for n in (1, 4, 100)
    }


def cpu_presets():
    """name -> schedule: the CPU's default for expressions of each kind, and the two named
    presets."""
    expressions = [SPMV, SPMM, SDDMM, TTV, MTTKRP, assign("ij,jk->ik"), assign("i,i->")]
    expressions += [assign("ij,jk->ik", {"A": format}) for format in (COO, CSC)]
    expressions += [assign("ij,j->i", {"A": COO})]
    found = {f"{e}, {e.sparse and e.sparse.format}": cpu(e) for e in expressions}
    for staged in (False, True):
        found[f"{SPMV}, by entries, staged: {staged}"] = cpu_entries(SPMV, staged=staged)
    for e in (SPMM, MTTKRP, assign("ijkl,jr,kr,lr->ir", {"A": CSF(4)})):
        found[f"{e}, by fibers"] = cpu_fibers(e)
    return found
