"""Random expressions and schedule chains: what `Schedule` refuses is left out of the chain."""

from sgap_jax import BCSR, COO, CSC, CSR, CVS, ScheduleError
from sgap_jax.compiler import cin, loopir, nest
from sgap_jax.compiler.expr import assign
from sgap_jax.compiler.schedule import Schedule
from sgap_jax.formats.levels import CSF, Compressed, Dense, Format

MATRICES = [CSR, CSR, CSR, CSC, COO, CSF(2), CVS(4), BCSR(2, 4), CVS(2).transposed]
TENSORS = [CSF(3), COO, Format((Dense, Compressed, Compressed))]
TENSORS += [Format((Compressed, Dense, Compressed)), Format((Compressed,) * 3, order=(1, 2, 0))]
# TTM into the fibers of the outer two levels.
BY_FIBERS = {f: Format((*f.levels[:2], Dense())) for f in (TENSORS[0], TENSORS[2])}
OF_MATRIX = [("ij,j->i", ()), ("ij,jk->ik", ()), ("ij,i->j", ()), ("ij,ik,kj->ij", ())]
OF_MATRIX += [("ij,ik,kj->ij", "D"), ("ij,i,j->", ()), ("ij,i->ij", "C")]
OF_TENSOR = ["ijk,k->ij", "ijk,kl->ijl", "ijk,kl,jl->il", "ijk->j", "ijk,jl->ilk"]
RACES = [cin.NO_RACES, cin.ATOMICS, cin.PARALLEL_REDUCTION, cin.TEMPORARY]


def random_expression(random):
    if random.random() < 0.3:
        subscripts, format = random.choice(OF_TENSOR), random.choice(TENSORS)
        if subscripts == "ijk,kl->ijl" and format in BY_FIBERS:
            return assign(subscripts, {"A": format, "C": BY_FIBERS[format]})
        return assign(subscripts, {"A": format})
    subscripts, sparse = random.choice(OF_MATRIX)
    reduction = random.choice(["+", "+", "+", "max"]) if not sparse else "+"
    format = random.choice(MATRICES)
    return assign(subscripts, dict.fromkeys(["A", *sparse], format), reduction=reduction)


def random_chain(random):
    expression = random_expression(random)
    schedule, names = Schedule(expression), iter(f"v{n}" for n in range(100))
    for _ in range(random.randint(0, 8)):
        schedule = attempt(schedule, lambda s: transformed(s, random, names))
    loops = [loop.var for loop in nest.loops(schedule.statement.body)]
    machine = random.choice(["serial", "cpu", "gpu", "gpu"])
    if machine == "serial" or len(loops) < 2:
        return schedule
    outer, inner = loops[0], random.choice(loops[1:])
    units = (loopir.CPU_THREAD, loopir.CPU_VECTOR)
    if machine == "gpu":
        units = (loopir.GPU_BLOCK, loopir.GPU_THREAD)
    for var, unit in zip((outer, inner), units, strict=True):
        for race in random.sample(RACES, 4):
            tagged = attempt(schedule, lambda s, at=(var, unit, race): s.parallelize(*at))
            if tagged != schedule:
                schedule = tagged
                break
    middle = loops[1 : loops.index(inner)]
    if machine == "gpu" and middle and random.random() < 0.5:
        at = (random.choice(middle), loopir.GPU_WARP, random.choice(RACES[:2]))
        schedule = attempt(schedule, lambda s: s.parallelize(*at))
    size, strategy = random.choice([2, 4, 8]), random.choice(cin.GROUP_STRATEGIES)
    return attempt(schedule, lambda s: s.group(inner, size, strategy))


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
