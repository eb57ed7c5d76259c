"""Random expressions and schedules; a transformation that `Schedule` refuses is skipped."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from compiler_tensors import Problem

from sgap_jax import BCSR, COO, CSC, CSR, CVS, ScheduleError
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.batches import of_batch
from sgap_jax.compiler.loop_ir.loopir import INTEGERS
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.lowering.storage import array_name
from sgap_jax.compiler.notation import cin, nest
from sgap_jax.compiler.notation.expr import assign
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import CSF, Compressed, Dense, Format

MATRICES = [CSR, CSR, CSR, CSC, COO, CSF(2), CSF(2).transposed, CVS(4), CVS(2).transposed]
MATRICES += [BCSR(2, 4), BCSR(3, 2).transposed]
TENSORS = [CSF(3), COO, Format((Dense, Compressed, Compressed))]
TENSORS += [Format((Compressed, Dense, Compressed)), Format((Dense, Dense, Compressed))]
TENSORS += [Format((Compressed,) * 3, order) for order in ((1, 2, 0), (2, 1, 0))]
FOUR = [CSF(4), CSF(4), COO, Format((Compressed, Compressed, Dense, Compressed))]
# Output formats of TTM: fibers of the outer two levels.
BY_FIBERS = {f: Format((*f.levels[:2], Dense())) for f in (TENSORS[0], TENSORS[2])}
OF_MATRIX = [("ij,j->i", ()), ("ij,jk->ik", ()), ("ij,i->j", ()), ("ij,ik,kj->ij", ())]
OF_MATRIX += [("ij,ik,kj->ij", "D"), ("ij,i,j->", ()), ("ij,i->ij", "C"), ("ij,jk,kl->il", ())]
OF_MATRIX += [("ij,jk,k->ik", ()), ("ij,k->ik", ()), ("ij->j", ()), ("ij,i,j->ij", "D")]
OF_TENSOR = ["ijk,k->ij", "ijk,kl->ijl", "ijk,kl,jl->il", "ijk->j", "ijk,jl->ilk", "ijk->ik"]
OF_FOUR = ["ijkm,jl,kl,ml->il", "ijkm,m->ijk", "ijkm,ml->ijkl", "ijkm->jm", "ijkm,j,k,m->i"]
RACES = [cin.NO_RACES, cin.ATOMICS, cin.PARALLEL_REDUCTION, cin.TEMPORARY]
DTYPES = [*["float32"] * 4, "float64", "float16", "bfloat16", *INTEGERS]
FACTORS = (1, -2)  # batch elements differ by these factors only


def random_expression(random):
    kind, reduction = random.random(), random.choice(["+", "+", "+", "max", "min"])
    if kind < 0.15:
        return assign(random.choice(OF_FOUR), {"A": random.choice(FOUR)}, reduction=reduction)
    if kind < 0.4:
        subscripts, format = random.choice(OF_TENSOR), random.choice(TENSORS)
        formats = {"A": format}
        if subscripts == "ijk,kl->ijl" and format in BY_FIBERS:
            formats["C"], reduction = BY_FIBERS[format], "+"
        return assign(subscripts, formats, reduction=reduction)
    subscripts, sparse = random.choice(OF_MATRIX)
    format = random.choice(MATRICES)
    formats = dict.fromkeys(["A", *sparse], format)
    return assign(subscripts, formats, reduction="+" if sparse else reduction)


def random_chain(random, machines=("serial", "cpu", "gpu", "gpu")):
    expression, names = random_expression(random), iter(f"v{n}" for n in range(100))
    schedule, machine = Schedule(expression), random.choice(machines)
    if random.random() < 0.4:
        schedule = in_positions(schedule, random, names)
    for _ in range(random.randint(0, 8)):
        schedule = attempt(schedule, lambda s: transformed(s, random, names))
    if machine == "gpu":
        schedule = on_gpu(schedule, random, names)
    elif machine == "cpu":
        outer, *rest = (loop.var for loop in nest.loops(schedule.statement.body))
        schedule = parallel(schedule, outer, loopir.CPU_THREAD, random)
        if rest:
            schedule = parallel(schedule, random.choice(rest), loopir.CPU_VECTOR, random)
    loops = [loop.var for loop in nest.loops(schedule.statement.body)]
    if random.random() < 0.3:
        schedule = attempt(schedule, lambda s: s.unroll(random.choice(loops)))
    return schedule


def in_positions(schedule, random, names):
    """Turns the loops over the outer levels of the sparse operand into one loop over its
    positions."""
    access = schedule.expression.sparse
    order = [access.indices[mode] for mode in access.format.modes]
    rest = [index for index in schedule.expression.indices if index not in order]
    first, *others = order[: random.randint(1, len(order))]
    s = attempt(schedule, lambda s: s.reorder(*order, *rest))
    for other in others:
        fused = next(names)
        s = attempt(s, lambda s, pair=(first, other, fused): s.fuse(*pair))
        first = fused
    return attempt(s, lambda s: s.pos(first, next(names), access.tensor))


def on_gpu(schedule, random, names):
    """Binds loops to blocks, to a known number of threads, and sometimes to warps and groups."""
    loops = [loop.var for loop in nest.loops(schedule.statement.body)]
    outer, lane, threads = next(names), next(names), random.choice([2, 4, 8, 32])
    several = random.choice(loops)
    schedule = attempt(schedule, lambda s: s.split(several, outer, lane, threads))
    if random.random() < 0.3:  # one product per lane, for a segment reduction
        every = " ".join(factor.tensor for factor in schedule.expression.factors)
        schedule = attempt(schedule, lambda s: s.precompute(every, (), (), next(names)))
    loops = {loop.var.name: loop.var for loop in nest.loops(schedule.statement.body)}
    block, *rest = loops.values()
    schedule = parallel(schedule, block, loopir.GPU_BLOCK, random)
    inner = loops.get(lane) or random.choice([*rest, block])
    threaded = parallel(schedule, inner, loopir.GPU_THREAD, random)
    middle = rest[: rest.index(inner)] if inner in rest and threaded != schedule else []
    if middle and random.random() < 0.5:
        threaded = parallel(threaded, random.choice(middle), loopir.GPU_WARP, random)
    for strategy in random.sample(cin.GROUP_STRATEGIES, 2):
        group = (inner, min(threads, random.choice([2, 4, 8, 32])), strategy)
        threaded = attempt(threaded, lambda s, group=group: s.group(*group))
    return threaded


def parallel(schedule, var, unit, random):
    """Parallelizes with the first legal race strategy in a random order; TEMPORARY is tried rarely,
    since it is seldom legal."""
    every = random.sample(RACES[:3], 3)
    for race in [cin.TEMPORARY, *every] if random.random() < 0.1 else every:
        tagged = attempt(schedule, lambda s, race=race: s.parallelize(var, unit, race))
        if tagged != schedule:
            return tagged
    return schedule


@dataclasses.dataclass(frozen=True)
class Case:
    """The lowered loops of a schedule, batched or not, with their inputs and the exact result."""

    schedule: Schedule
    function: loopir.Function
    inputs: dict
    want: np.ndarray

    @property
    def output(self):
        (output,) = self.function.outputs
        return output

    def check(self, found):
        found = np.asarray(found)[: self.output.size]
        np.testing.assert_array_equal(np.float64(found), self.want, f"{self.schedule}")


def random_case(random, machines):
    """A Case, or None where lowering refuses the chain."""
    schedule = random_chain(random, machines)
    expression, dtype = schedule.expression, random.choice(DTYPES)
    if dtype == "uint8" and expression.reduction != "+":
        dtype = "int8"  # products have both signs
    extents = {"i": [0, 1, 4, 8, 11, 13], "j": [1, 4, 7, 9], "k": [1, 3, 7], "l": [1, 2, 5]}
    sizes = {name: random.choice(of) for name, of in extents.items()} | {"m": 3}
    density, spare = random.choice([0, 0.1, 0.3, 0.6, 1]), random.choice([0, 3, 40])
    seed, batched, summed = random.randrange(9), random.random() < 0.3, random.random() < 0.4
    problem = Problem(expression, sizes, density, spare, dtype, seed)
    try:
        function = lower(schedule, sizes, problem.positions, dtype)
    except (ScheduleError, NotImplementedError):
        return None
    inputs = {array.name: problem.inputs[array.name] for array in function.inputs}
    want, (output,) = problem.want, function.outputs
    if batched and expression.reduction == "+":
        values = array_name(expression.sparse, expression)
        own = {values} if summed else {values, output.name}
        function = of_batch(function, len(FACTORS), own, random.choice([1, 2]))
        given = inputs[values].astype(np.float64)
        inputs[values] = as_numbers(np.concatenate([n * given for n in FACTORS]), dtype)
        want = sum(FACTORS) * want if summed else np.concatenate([n * want for n in FACTORS])
        (output,) = function.outputs
    return Case(schedule, function, inputs, np.float64(as_numbers(want, output.dtype)))


def as_numbers(x, dtype):
    """Casts to the dtype: integers wrap, and infinities become the ends of the integer range."""
    if dtype not in INTEGERS:
        return x.astype(jnp.dtype(dtype))
    ends = np.iinfo(dtype)
    with np.errstate(invalid="ignore"):  # padding may hold any value
        finite = np.where(np.isfinite(x), x, 0).astype(np.int64).astype(dtype)
    return np.where(x == np.inf, ends.max, np.where(x == -np.inf, ends.min, finite)).astype(dtype)


def attempt(schedule, change):
    try:
        return change(schedule)
    except (ScheduleError, NotImplementedError):
        return schedule


def transformed(s, random, names):
    loops = [loop.var.name for loop in nest.loops(s.statement.body)]
    one, new, sparse = random.choice(loops), names, s.expression.sparse
    factors = [factor.tensor for factor in s.expression.factors]
    match random.randrange(13):
        case 0 | 1:
            return s.split(one, next(new), next(new), random.choice([1, 2, 3, 4, 8]))
        case 2:
            return s.divide(one, next(new), next(new), random.choice([1, 2, 3]))
        case 3 | 4 if one != loops[-1]:
            both, fused = (one, loops[loops.index(one) + 1]), next(new)
            fuse = s.fuse(*both, fused)
            return attempt(fuse, lambda s: s.pos(fused, next(new), sparse))
        case 5 | 6:
            return s.pos(one, next(new), sparse)
        case 7 | 8 | 9:
            return s.reorder(*random.sample(loops, random.randint(1, len(loops))))
        case 10:
            return s.coord(one, next(new))
        case 11:
            chosen = random.sample(factors, random.randint(1, len(factors)))
            over = random.choice([(), (one,)])
            fresh = tuple(next(new) for _ in over)
            return s.precompute(" ".join(chosen), over, fresh, next(new))
        case 12:
            return attempt(s.scalar_promote(one), lambda s: s.unroll(one))
    return s.bound(one, next(new), random.choice([1, 2, 3, 4]))
