"""Every precondition of a transformation is checked; the error shows the call, the reason and the
statement."""

import re

import pytest
from compiler_chains import MTTKRP, SPMM, SPMM_CVS, SPMV

from sgap_jax import BCSR, COO, CSC, CSR, CVS, ScheduleError
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.expr import assign
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import CSF, Compressed, Dense, Format

BLOCK, WARP, THREAD = loopir.GPU_BLOCK, loopir.GPU_WARP, loopir.GPU_THREAD
VECTOR, CPU = loopir.CPU_VECTOR, loopir.CPU_THREAD
NONE, IGNORE, ATOMIC = cin.NO_RACES, cin.IGNORE_RACES, cin.ATOMICS


def spmv():
    return Schedule(SPMV)


def positions():
    return spmv().fuse("i", "j", "f").pos("f", "p", "A")


def tiled():
    return positions().split("p", "p0", "p1", 64)


def threads(race=cin.PARALLEL_REDUCTION):
    """A block for each row, threads over its entries."""
    s = spmv().pos("j", "jp", "A").split("jp", "j0", "j1", 32).reorder("i", "j1", "j0")
    return s.parallelize("i", BLOCK, NONE).parallelize("j1", THREAD, race)


def vectors(tile=16, columns=64):
    s = Schedule(SPMM_CVS).split("i", "i0", "i1", 8).split("k", "kb", "kt", columns)
    return (
        s.pos("j", "jp", "A")
        .split("jp", "jt", "jn", tile)
        .reorder("i0", "kb", "jt", "i1", "kt", "jn")
    )


coo = assign("ij,j->i", {"A": COO})
csc = assign("ij,j->i", {"A": CSC})
bcsr = assign("ij,j->i", {"A": BCSR(2, 4)})
longest = assign("ikl,lj,kj->ij", {"A": CSF(3)}, reduction="max")
mttkrp = assign("ikl,lj,kj->ij", {"A": CSF(3)})
dense_top = assign("ikl,l->ik", {"A": Format((Dense, Dense, Compressed))})

ILLEGAL = {
    "unknown": (lambda: spmv().split("q", "a", "b", 2), "no loop of q; there are i, j"),
    "taken": (lambda: spmv().split("i", "j", "b", 2), "the name j is taken"),
    "twice": (lambda: spmv().split("i", "a", "a", 2), "the name a is taken"),
    "size": (lambda: spmv().split("i", "a", "b", 0), "size of a tile must be a positive int"),
    "parts": (lambda: spmv().divide("i", "a", "b", 1.5), "number of parts must be a positive int"),
    "bound": (lambda: tiled().bound("p1", "b", 32), "the extent of p1 is 64"),
    "no variable": (lambda: spmv().split("i", 0, 1, 2), "variables or their names, got 0"),
    "no access": (lambda: spmv().pos("j", "jp", 0), "an access or the name of an operand, got 0"),
    "no name": (lambda: spmv().split("i", "a b", "c", 2), "'a b' is not a name"),
    "bound parts": (lambda: spmv().divide("i", "a", "b", 4).bound("a", "c", 5), "of a is 4"),
    "bound fused": (
        lambda: (
            Schedule(assign("ij,jk->ik"))
            .split("i", "i0", "i1", 4)
            .split("k", "k0", "k1", 8)
            .reorder("i0", "k0", "i1", "k1", "j")
            .fuse("i1", "k1", "f")
            .bound("f", "g", 31)
        ),
        "the extent of f is 32",
    ),
    "parallel already": (lambda: threads().split("j1", "a", "b", 2), "GPUThread already"),
    # reorder
    "sparse above": (lambda: spmv().reorder("j", "i"), "inside the loop of i"),
    "position above": (
        lambda: spmv().pos("j", "jp", "A").split("jp", "a", "b", 4).reorder("a", "i", "b"),
        "the loop of a runs over what level 2 of A(i,j) stores (Compressed)",
    ),
    "above a tile": (
        lambda: spmv().split("j", "a", "b", 4).pos("b", "bp", "A").reorder("i", "bp", "a"),
        "must be inside the loop of a",
    ),
    "column above": (lambda: Schedule(csc).reorder("i", "j"), "inside the loop of j"),
    "not one nest": (
        lambda: Schedule(MTTKRP).precompute("B C", (), (), "t").reorder("l", "j"),
        "not in one perfect nest",
    ),
    "named twice": (lambda: spmv().reorder("i", "i"), "each once"),
    # fuse
    "not directly": (lambda: Schedule(SPMM).fuse("i", "j", "f"), "j is not directly inside i"),
    "wrong way": (lambda: spmv().fuse("j", "i", "f"), "i is not directly inside j"),
    "fuse positions": (
        lambda: spmv().pos("j", "jp", "A").fuse("i", "jp", "f"),
        "fuse the coordinates first",
    ),
    # pos
    "dense level": (lambda: spmv().pos("i", "ip", "A"), "level 1 of A(i,j) is Dense"),
    "dense operand": (lambda: spmv().pos("j", "jp", "x"), "x(j) is dense"),
    "not in access": (lambda: Schedule(SPMM).pos("k", "kp", "A"), "k, from which k derives"),
    "wrong access": (lambda: spmv().pos("j", "jp", "B"), "B is not an argument"),
    "no factor": (lambda: spmv().pos("i", "ip", "y"), "y is not an argument"),
    "other levels": (
        lambda: Schedule(MTTKRP).reorder("i", "k", "j", "l").fuse("k", "j", "f").pos("f", "p", "B"),
        "j, from which f derives, is no index of B(i,k,l)",
    ),
    "order of levels": (
        lambda: (
            Schedule(dense_top)
            .reorder("k", "i", "l")
            .fuse("i", "l", "f")
            .fuse("k", "f", "g")
            .pos("g", "p", "A")
        ),
        "not consecutive levels of A(i,k,l)",
    ),
    "tile of coordinates": (
        lambda: Schedule(coo).split("i", "a", "b", 4).pos("a", "p", "A"),
        "outer part of a split",
    ),
    "positions of nowhere": (
        lambda: (
            Schedule(mttkrp)
            .reorder("i", "j", "k", "l")
            .precompute("A C", "l", "lw", "w")
            .pos("l", "lp", "A")
        ),
        "no loop around it says of which k",
    ),
    "positions fused": (
        lambda: (
            Schedule(mttkrp)
            .reorder("i", "k", "l", "j")
            .pos("k", "kp", "A")
            .fuse("kp", "l", "f")
            .pos("f", "p", "A")
        ),
        "f is a fusion of positions",
    ),
    "pos twice": (lambda: positions().pos("p", "q", "A"), "p is in position space already"),
    "pos of a block": (lambda: Schedule(bcsr).pos("j", "jp", "A"), "stores blocks of 4 along j"),
    # coord
    "coord of coordinates": (lambda: spmv().coord("j", "c"), "in coordinate space already"),
    "coord of levels": (lambda: positions().coord("p", "c"), "several levels"),
    "coord of a tile": (
        lambda: spmv().pos("j", "jp", "A").split("jp", "a", "b", 4).coord("a", "c"),
        "outer part of a split",
    ),
    # unroll, parallelize
    "unroll": (lambda: spmv().unroll("j"), "depends on what A(i,j) stores"),
    "cpu thread": (lambda: spmv().parallelize("j", CPU, ATOMIC), "depends on what A(i,j) stores"),
    "thread": (
        lambda: spmv().pos("j", "jp", "A").parallelize("jp", THREAD, ATOMIC),
        "depends on what A(i,j) stores",
    ),
    "unit": (lambda: spmv().parallelize("i", "GPU", NONE), "no unit 'GPU'; there are CPUThread"),
    "race": (lambda: spmv().parallelize("i", CPU, "None"), "no race strategy 'None'"),
    "unit twice": (
        lambda: tiled().parallelize("p0", THREAD, ATOMIC).parallelize("p1", THREAD, ATOMIC),
        "two nested loops run on GPUThread",
    ),
    "two machines": (
        lambda: tiled().parallelize("p0", BLOCK, ATOMIC).parallelize("p1", VECTOR, IGNORE),
        "GPUBlock and CPUVector are of two machines",
    ),
    "thread around block": (
        lambda: tiled().parallelize("p0", WARP, ATOMIC).parallelize("p1", BLOCK, ATOMIC),
        "GPUWarp around GPUBlock",
    ),
    "block inside": (
        lambda: tiled().parallelize("p1", BLOCK, ATOMIC),
        "the loop of p0 is around the blocks",
    ),
    "reduced": (
        lambda: tiled().parallelize("p0", CPU, NONE),
        "p0 derives from j, over which y(i) is reduced",
    ),
    "rows of COO": (
        lambda: Schedule(coo).parallelize("i", CPU, NONE),
        "A(i,j) stores once for each entry",
    ),
    "atomic vector": (lambda: tiled().parallelize("p1", VECTOR, ATOMIC), "no atomic stores"),
    "reduce on blocks": (
        lambda: tiled().parallelize("p0", BLOCK, cin.PARALLEL_REDUCTION),
        "iterations on GPUBlock cannot add up together",
    ),
    # group
    "no threads": (
        lambda: tiled().parallelize("p0", BLOCK, IGNORE).group("p1", 4, cin.SEGMENT),
        "parallelize p1 over GPUThread first",
    ),
    "three": (lambda: threads().group("j1", 3, cin.PARALLEL_REDUCTION), "1, 2, 4, 8, 16 or 32"),
    "divides": (
        lambda: (
            spmv()
            .pos("j", "jp", "A")
            .split("jp", "j0", "j1", 12)
            .parallelize("j1", THREAD, cin.PARALLEL_REDUCTION)
            .group("j1", 8, cin.PARALLEL_REDUCTION)
        ),
        "8 does not divide the extent of j1, 12",
    ),
    "no constant": (
        lambda: spmv().parallelize("i", THREAD, NONE).group("i", 8, cin.PARALLEL_REDUCTION),
        "which is not a constant",
    ),
    "nothing to add": (
        lambda: (
            spmv()
            .split("i", "a", "b", 32)
            .parallelize("b", THREAD, NONE)
            .group("b", 8, cin.SEGMENT)
        ),
        "nothing is reduced over b",
    ),
    "strategy": (lambda: threads().group("j1", 4, "Tree"), "no strategy 'Tree'"),
    "group of rows": (
        lambda: tiled().parallelize("p1", THREAD, ATOMIC).group("p1", 8, cin.PARALLEL_REDUCTION),
        "different i; give Segment",
    ),
    "unordered": (
        lambda: (
            Schedule(assign("ij,i->j", {"A": CSR}))
            .reorder("i", "j")
            .fuse("i", "j", "f")
            .pos("f", "p", "A")
            .split("p", "p0", "p1", 64)
            .parallelize("p1", THREAD, ATOMIC)
            .group("p1", 8, cin.SEGMENT)
        ),
        "do not decrease from lane to lane",
    ),
    "runs of its own": (
        lambda: (
            positions()
            .split("p", "lane", "nnz", 4)
            .bound("lane", "t", 32)
            .parallelize("t", THREAD, ATOMIC)
            .group("t", 8, cin.SEGMENT)
        ),
        "put the loop of nnz around that of t",
    ),
    # precompute, scalar_promote
    "not a factor": (
        lambda: spmv().precompute("A z", (), (), "t"),
        "no assignment has the factors",
    ),
    "no loop": (
        lambda: Schedule(assign("->")).precompute("A", (), (), "t"),
        "inside no loop of its own",
    ),
    "workspace name": (lambda: spmv().precompute("A x", (), (), "y"), "needs a new name"),
    "unpaired": (lambda: spmv().precompute("A x", ("j",), (), "t"), "as many fresh variables"),
    "not both": (
        lambda: Schedule(MTTKRP).precompute("B C", "l", "lw", "w"),
        "l is no loop that both the workspace and the rest run over",
    ),
    "max of a product": (
        lambda: Schedule(longest).reorder("i", "k", "l", "j").precompute("A B", "j", "jw", "w"),
        "max over l does not distribute over the product with C(k,j)",
    ),
    "max of gaps": (
        lambda: Schedule(longest).reorder("i", "k", "l", "j").precompute("A", "l", "lw", "w"),
        "elements for entries that A(i,k,l) does not store",
    ),
    "nothing to promote": (
        lambda: Schedule(SPMM).reorder("i", "j", "k").scalar_promote("k"),
        "nothing is reduced",
    ),
    "promote elements": (
        lambda: Schedule(SPMM).reorder("i", "j", "k").scalar_promote("j"),
        "the loop of k goes through different elements of C(i,k)",
    ),
    "sum in a sum": (
        lambda: tiled().scalar_promote("p0").scalar_promote("p1"),
        "tp0y is already the sum of a run of positions",
    ),
    "parallel sum": (
        lambda: tiled().scalar_promote("p1").parallelize("p1", VECTOR, IGNORE),
        "the loop of p1 cannot run on CPUVector",
    ),
    "bound nest": (
        lambda: vectors().bind("i1", "octet_mma").split("jn", "a", "b", 2),
        "bound to octet_mma",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name):
    call, reason = ILLEGAL[name]
    with pytest.raises(ScheduleError, match=re.escape(reason)) as error:
        call()
    said = str(error.value)
    # The message has the call, the reason, and the statement it was applied to.
    assert re.match(r"\w+\(.*\): ", said) and re.search(r"\nin .* =|\nin .* \S+=", said)


NOT_OCTETS = {
    "no such": (lambda: vectors().bind("i1", "wmma"), "no intrinsic 'wmma'; there are octet_mma"),
    "tile": (lambda: vectors(tile=8).bind("i1", "octet_mma"), "positions of j split by t"),
    "columns": (lambda: vectors(columns=32).bind("i1", "octet_mma"), "part of k split by 64"),
    "order": (
        lambda: vectors().reorder("kt", "i1").bind("kt", "octet_mma"),
        "the loop of kt is not the inner part of i split by 8",
    ),
    "format": (lambda: spmv().bind("i", "octet_mma"), "not of three loops"),
    "no vectors": (lambda: Schedule(SPMM).bind("i", "octet_mma"), "is not in CVS(V)"),
    "another product": (
        lambda: (
            Schedule(assign("ij,ki->jk", {"A": CVS(8)}))
            .reorder("i", "j", "k")
            .bind("i", "octet_mma")
        ),
        "is neither a product nor a sampled one",
    ),
    "another layout": (
        lambda: (
            Schedule(assign("ik,ji,jk->ik", {"A": CVS(8), "D": CVS(8)}))
            .reorder("i", "k", "j")
            .bind("i", "octet_mma")
        ),
        "is neither a product nor a sampled one",
    ),
    "busy": (
        lambda: vectors().parallelize("kt", THREAD, NONE).bind("i1", "octet_mma"),
        "the loop of kt is GPUThread",
    ),
}


@pytest.mark.parametrize("name", NOT_OCTETS)
def test_bind_takes_the_declared_nest_alone(name):
    call, reason = NOT_OCTETS[name]
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        call()
