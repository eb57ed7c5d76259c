"""What lowering refuses: races, groups and extents that do not hold, units without a backend."""

import dataclasses

import numpy as np
import pytest
from compiler_chains import SPMM, SPMV, positions
from compiler_tensors import Problem
from loop_interpreter import interp
from lowered_chains import COORDINATES, POSITIONS, SMALL, check, over

from sgap_jax import BCSR, COO, CSC, CSR, Compressed, Dense, Format, ScheduleError
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import Forall
from sgap_jax.compiler.notation.expr import assign
from sgap_jax.compiler.transform.schedule import Schedule


def with_loop(schedule, var, **changes):
    """A loop changed behind the schedule's back."""

    def changed(body):
        assert isinstance(body, Forall)
        if body.var.name == var:
            return dataclasses.replace(body, **changes)
        return dataclasses.replace(body, body=changed(body.body))

    statement = dataclasses.replace(schedule.statement, body=changed(schedule.statement.body))
    other = object.__new__(Schedule)
    object.__setattr__(other, "expression", schedule.expression)
    object.__setattr__(other, "statement", statement)
    return other


def refused(schedule, message, error=ScheduleError, sizes=SMALL):
    problem = Problem(schedule.expression, sizes)
    with pytest.raises(error, match=message):
        lower(schedule, sizes, problem.positions, "float32")


def test_races_are_refused():
    tiled = POSITIONS.split("fpos", "p0", "p1", 4)
    refused(
        with_loop(tiled, "p0", unit=loopir.CPU_THREAD, race=cin.NO_RACES),
        r"`y\(i\) \+= A\(i,j\) \* x\(j\)` is not owned by the iterations of p0 \(CPUThread",
    )
    rows = positions(assign("ij,j->i", {"A": COO}), "A", "i", "j")
    refused(with_loop(rows, "fpos", unit=loopir.CPU_THREAD, race=cin.NO_RACES), "not owned")
    columns = Schedule(assign("ij,j->i", {"A": CSC}))
    refused(with_loop(columns, "j", unit=loopir.CPU_THREAD, race=cin.NO_RACES), "not owned")
    vectors = with_loop(Schedule(SPMV), "j", unit=loopir.CPU_VECTOR, race=cin.NO_RACES)
    refused(vectors, "not owned")
    # No two threads run at once, but columns have no order between them.
    columns = with_loop(
        columns.split("j", "b", "c", 4), "b", unit=loopir.GPU_BLOCK, race=cin.ATOMICS
    )
    refused(
        with_loop(columns, "i", unit=loopir.GPU_THREAD, race=cin.NO_RACES), "not owned|run time"
    )
    entries = columns.pos("i", "ip", "A").split("ip", "ip0", "t", 4)
    refused(with_loop(entries, "t", unit=loopir.GPU_THREAD, race=cin.NO_RACES), "iterations of t")
    refused(
        with_loop(tiled, "p0", unit=loopir.CPU_THREAD, race=cin.TEMPORARY),
        "nearest is Atomics",
        NotImplementedError,
    )
    # The same loops are lowered if the race is claimed or atomic: a task shares its first and last
    # rows.
    for race, atomic in [(cin.IGNORE_RACES, 0), (cin.ATOMICS, 2)]:
        claimed = with_loop(tiled, "p0", unit=loopir.CPU_THREAD, race=race)
        function = lower(claimed, SMALL, Problem(SPMV, SMALL).positions, "float32")
        assert str(function.body).count("atomic=True") == atomic


def test_claimed_races_are_real():
    """The interpreter agrees with the analysis: elements analysed as owned have no races, and a
    false claim is found."""
    claimed = with_loop(
        POSITIONS.split("fpos", "p0", "p1", 4), "p0", unit=loopir.CPU_THREAD, race=cin.IGNORE_RACES
    )
    with pytest.raises(interp.LoopFault, match="a race for y"):
        check(claimed, SMALL, density=1)


def test_groups_are_checked():
    block = POSITIONS.split("fpos", "b", "t", 8)
    block = with_loop(block, "b", unit=loopir.GPU_BLOCK, race=cin.ATOMICS)
    thread = {"unit": loopir.GPU_THREAD, "race": cin.ATOMICS}
    refused(with_loop(block, "t", **thread, group=(4, cin.PARALLEL_REDUCTION)), "i moves with t")
    refused(with_loop(block, "t", **thread, group=(16, cin.SEGMENT)), "16 does not divide 8")
    columns = over(Schedule(assign("ij,j->i", {"A": CSC})), "j", "i").split("fpos", "b", "t", 8)
    columns = with_loop(columns, "b", unit=loopir.GPU_BLOCK, race=cin.ATOMICS)
    refused(with_loop(columns, "t", **thread, group=(4, cin.SEGMENT)), "do not come in order")
    rows = Schedule(SPMV).split("i", "b", "t", 8)
    rows = with_loop(rows, "t", unit=loopir.GPU_THREAD, race=cin.NO_RACES)
    refused(rows, "t .* in no GPUBlock loop")
    # Of two faults the outer loop's is reported, independent of hash order.
    refused(with_loop(rows, "j", unit=loopir.GPU_BLOCK, race=cin.ATOMICS), "t .* in no GPUBlock")


@pytest.mark.parametrize("group", [0, 4])
def test_threads_reduce_together_where_all_of_them_are(group):
    """Each thread has entries of its own below a dense level, or all walk the same entries."""

    def on_threads(s):
        s = s.parallelize("b", loopir.GPU_BLOCK, cin.ATOMICS)
        s = s.parallelize("t", loopir.GPU_THREAD, cin.PARALLEL_REDUCTION)
        return s.group("t", group, cin.PARALLEL_REDUCTION) if group else s

    below = assign("ijk,k->j", {"A": Format((Dense, Dense, Compressed))})
    own = Schedule(below).fuse("j", "k", "f").pos("f", "p", "A").split("i", "b", "t", 4)
    refused(on_threads(own), "inside of the loop of p, which is of another length for each")
    shared = over(Schedule(assign("ij,jl->i", {"A": CSR})), "i", "j").split("fpos", "b", "p", 8)
    check(
        on_threads(shared.split("l", "lo", "t", 4).reorder("b", "t", "lo", "p")), SMALL | {"l": 8}
    )


def test_rows_that_are_stored_twice_have_no_run_to_themselves():
    """A row may have entries within one task, and more in the next task."""
    format = Format((Compressed(unique=False), Compressed))
    s = over(Schedule(assign("ij->i", {"A": format})), "i", "j").split("fpos", "b", "p", 4)
    s = s.parallelize("b", loopir.CPU_THREAD, cin.ATOMICS)
    rows, offsets = np.array([0, 0, 2, 2, 2]), np.array([0, 2, 5, 6, 7, 12])
    values = np.arange(1, 13, dtype=np.float32)
    arrays = {"A1_pos": [0, 5], "A1_crd": rows, "A2_pos": offsets, "A2_crd": [0] * 12}
    given = {name: np.array(x, np.int32) for name, x in arrays.items()} | {"A_vals": values}
    function = lower(s, {"i": 3, "j": 4}, (5, 12), "float32")
    want = np.bincount(np.repeat(rows, np.diff(offsets)), values)
    np.testing.assert_array_equal(interp.run(function, given)["B"], want)


def test_extents_are_checked():
    four = Schedule(SPMM).split("k", "k0", "k1", 2)
    refused(four.bound("k0", "kb", 2), "the extent of k0 is 3")
    refused(
        Schedule(SPMV).pos("j", "jp", "A").split("jp", "jp0", "jp1", 4).bound("jp0", "jb", 2),
        "run time",
        NotImplementedError,
    )
    squared = Schedule(SPMM).split("k", "k0", "k1", 20).split("k0", "k2", "k3", 20)
    problem = Problem(SPMM, SMALL | {"k": 400})
    with pytest.raises(ScheduleError, match="unroll: 400 copies .* at most 256"):
        nested = squared.reorder("i", "k2", "k3", "k1", "j").unroll("k3").unroll("k1")
        lower(nested, problem.sizes, problem.positions, "float32")
    inner = Schedule(SPMV).pos("j", "jp", "A")
    inner = with_loop(inner, "i", unit=loopir.GPU_BLOCK, race=cin.NO_RACES)
    refused(
        with_loop(inner, "jp", unit=loopir.GPU_THREAD, race=cin.ATOMICS), "known at run time only"
    )
    with pytest.raises(ValueError, match="one capacity for each of the 2 levels"):
        lower(Schedule(SPMV), SMALL, (12,), "float32")
    with pytest.raises(ValueError, match="no size of j"):
        lower(Schedule(assign("ij->i")), {"i": 4}, (), "float32")
    with pytest.raises(ValueError, match="sizes: no index 'q'; there are i, j"):
        Schedule(SPMV).loops({"i": 4, "q": 3})


def test_what_is_not_lowered_is_named():
    refused(COORDINATES.reorder("i", "j1", "j0", "k"), "j1 is above j0", NotImplementedError)
    tiles = Schedule(SPMV).fuse("i", "j", "f").split("f", "f0", "f1", 4)
    refused(tiles, "tiles its positions", NotImplementedError)
    singles = Schedule(assign("ij,j->i", {"A": COO})).split("j", "j0", "j1", 4)
    refused(singles, "one coordinate at each position", NotImplementedError)
    blocks = Schedule(assign("ij,j->i", {"A": BCSR(4, 2)})).split("j", "j0", "j1", 3)
    refused(blocks, "do not locate level 2 of A")
