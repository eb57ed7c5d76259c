"""A schedule never changes what is computed: schedules and random transformations, run as concrete
index notation by brute force, give the value of the expression."""

import dataclasses
import itertools

import numpy as np
import pytest
from cin_meaning import Meaning, direct, operands

from sgap_jax import COO, CSC, CSR, ScheduleError
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.expr import IndexVar, assign
from sgap_jax.compiler.notation.nest import loops, replace
from sgap_jax.compiler.presets import cpu, spmm_point
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import CSF

SIZES = dict(i=5, j=4, k=3, l=2, m=2)
SPMV = assign("ij,j->i", {"A": CSR})
SPMM = assign("ij,jk->ik", {"A": CSR})
MTTKRP = assign("ikl,lj,kj->ij", {"A": CSF(3)})
LONGEST = assign("ij,jk->ik", {"A": CSR}, reduction="max")


def positions(expression):
    return Schedule(expression).reorder("i", "j", "k").fuse("i", "j", "f").pos("f", "p", "A")


CHAINS = {
    "spmv workspace": lambda: (
        Schedule(SPMV)
        .fuse("i", "j", "f")
        .pos("f", "p", "A")
        .split("p", "p0", "p1", 3)
        .precompute("A B", "p1", "pw", "w")
    ),
    "spmv sums of a row": lambda: Schedule(SPMV).precompute("A B", (), (), "t"),
    "spmm product": lambda: (
        positions(SPMM)
        .split("p", "b", "p1", 4)
        .split("k", "k0", "k1", 2)
        .reorder("b", "k0", "k1", "p1")
        .precompute("A B", (), (), "t")
    ),
    "spmm shared rows": lambda: (
        Schedule(SPMM)
        .fuse("i", "k", "io")
        .split("io", "o", "o1", 4)
        .pos("j", "jp", "A")
        .split("jp", "j0", "j1", 2)
        .reorder("o", "o1", "j1", "j0")
        .scalar_promote("j1")
    ),
    "spmm row in a workspace": lambda: (
        Schedule(SPMM).reorder("i", "j", "k").precompute("A B", "k", "kw", "w")
    ),
    "spmm dense part": lambda: (
        Schedule(SPMM).reorder("i", "j", "k").precompute("B", "k", "kw", "w")
    ),
    "spmm tiles of coordinates": lambda: (
        Schedule(SPMM)
        .split("i", "i0", "i1", 2)
        .split("j", "j0", "j1", 3)
        .reorder("i0", "j0", "i1", "j1", "k")
    ),
    "spmm positions in tiles of coordinates": lambda: (
        Schedule(SPMM).split("j", "j0", "j1", 3).pos("j1", "jp", "A").divide("jp", "d0", "d1", 2)
    ),
    "spmm back to coordinates": lambda: Schedule(SPMM).pos("j", "jp", "A").coord("jp", "c"),
    "spmv coordinates of a tile": lambda: (
        Schedule(SPMV).pos("j", "jp", "A").split("jp", "j0", "j1", 3).coord("j1", "c")
    ),
    "mttkrp workspace": lambda: (
        Schedule(MTTKRP).reorder("i", "k", "l", "j").precompute("A B", "j", "jw", "w")
    ),
    "mttkrp one level inside": lambda: (
        Schedule(MTTKRP).reorder("i", "k", "l", "j").fuse("k", "l", "f").pos("f", "p", "A")
    ),
    "max of a row": lambda: Schedule(LONGEST).scalar_promote("j"),
    "max in a workspace": lambda: (
        Schedule(LONGEST).reorder("i", "j", "k").precompute("A B", "k", "kw", "w")
    ),
}


def check(schedule, seed=0):
    arrays, stored = operands(schedule.expression, SIZES, seed)
    got = Meaning(schedule, SIZES, arrays, stored).run()
    want = direct(schedule.expression, SIZES, arrays, stored)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=str(schedule))


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name):
    check(CHAINS[name]())


def test_defaults_of_the_cpu():
    for expression in (SPMV, SPMM, MTTKRP, LONGEST, assign("ik,ij,jk->ik", {"A": CSR})):
        check(cpu(expression, rows=2))
    check(cpu(assign("ij,jk->ik", {"A": COO})))
    check(cpu(assign("ij,jk->ik", {"A": CSC})))


def test_points():
    for data, formats in (("nnz", (CSR, COO, CSF(2))), ("row", (CSR,))):
        for amount, group in (("2", 1), ("1/4", 1), ("1/4", 2), ("1", 4), ("3", 8)):
            if (data == "nnz") == ("/" in amount) or data == "row" and group > 2:
                continue
            for col, format in itertools.product((1, 2, 4), formats):
                point = Schedule.parse(f"{{<{amount} {data}, {col} col>, {group}}} block_size=32")
                expression = assign("ij,jk->ik", {"A": format})
                check(spmm_point(expression, point, SIZES["k"]))


def step(schedule, rng):
    """A random transformation of random loops, whether legal or not."""
    names = [loop.var.name for loop in loops(schedule.statement.body)]
    var, fresh = str(rng.choice(names)), [f"v{rng.integers(10**6)}" for _ in range(2)]
    size = int(rng.integers(1, 4))
    match int(rng.integers(8)):
        case 0:
            return schedule.split(var, *fresh, size)
        case 1:
            return schedule.divide(var, *fresh, size)
        case 2:
            return schedule.reorder(*rng.permutation(names)[: rng.integers(2, 5)].tolist())
        case 3:
            n = int(rng.integers(len(names)))
            return schedule.fuse(names[n], names[(n + 1) % len(names)], fresh[0])
        case 4 | 5:
            return schedule.pos(var, fresh[0], "A")
        case 6:
            return schedule.scalar_promote(var)
        case _:
            factors = [f.tensor for f in schedule.expression.factors if rng.random() < 0.7]
            return schedule.precompute(
                " ".join(factors), *[((), ()), (var, fresh[0])][size % 2], f"w{fresh[1]}"
            )


@pytest.mark.parametrize("seed", range(12))
def test_random_chains(seed):
    rng, taken, refused = np.random.default_rng(seed), 0, 0
    for expression in (SPMV, SPMM, MTTKRP, LONGEST, assign("jk,ij->ik", {"A": CSC})):
        schedule = Schedule(expression)
        for _ in range(8):
            try:
                schedule = step(schedule, rng)
                taken += 1
            except ScheduleError:
                refused += 1
        check(schedule, seed)
    assert taken > 5 and refused > 0


def test_a_wrong_workspace_is_caught():
    """A transformation that the checks refuse gives wrong results, and these tests detect it."""
    schedule = CHAINS["mttkrp workspace"]()
    body = str(schedule)
    assert "w(jw) += A(i,k,l) * B(l,j)" in body
    where = next(
        loop.body for loop in loops(schedule.statement.body) if isinstance(loop.body, cin.Where)
    )
    set_only = dataclasses.replace(where.producer.body.body, op=None)
    inner = dataclasses.replace(where.producer.body, body=set_only)
    wrong = cin.Where(where.consumer, dataclasses.replace(where.producer, body=inner))

    def swap(loop):
        return dataclasses.replace(loop, body=wrong)

    statement = cin.SuchThat(
        replace(schedule.statement.body, IndexVar("k"), swap), schedule.statement.relations
    )
    with pytest.raises(AssertionError):
        check(Schedule(MTTKRP, statement))
