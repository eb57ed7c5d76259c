"""Random expressions of +, - and * over several sparse and dense operands, and random schedules."""

import numpy as np
from merged_operands import Merged
from random_chains import DTYPES, Case, as_numbers, attempt, on_gpu, parallel, transformed

from sgap_jax import ScheduleError
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.notation import nest
from sgap_jax.compiler.notation.expr import Assign, Product, Sum, Tensor, Term, index_vars
from sgap_jax.compiler.transform.schedule import Schedule
from sgap_jax.formats.levels import Compressed, Dense, Format

EXTENTS = {"i": [0, 1, 4, 8, 13], "j": [1, 4, 7, 9], "k": [1, 3, 7]}


def random_operand(random, name, order, sparse):
    """An access with some of the indices. Levels are in the order of the loops, mostly."""
    count = random.choice([1, 2, 2, 2, 3])
    indices = tuple(random.sample(order, min(count, len(order))))
    if not sparse:
        return Tensor(name)[indices]
    levels = random.choices([Compressed(), Dense()], [3, 1], k=len(indices))
    if all(level == Dense() for level in levels):
        levels[-1] = Compressed()
    modes = sorted(range(len(indices)), key=lambda mode: order.index(indices[mode]))
    if random.random() < 0.05:
        random.shuffle(modes)
    return Tensor(name, Format(tuple(levels), tuple(modes)))[indices]


def random_expression(random):
    """An Assign, or None where it would not be one, or not of merged coordinates."""
    order = random.sample(index_vars("i j k"), random.choice([1, 2, 2, 3]))
    names, pool, terms = iter("ABCDEFGIJ"), [], []
    for _ in range(random.choice([1, 1, 2, 2, 3])):
        factors = []
        for _ in range(random.choice([1, 1, 2, 2, 3])):
            if pool and random.random() < 0.15:
                factors.append(random.choice(pool))
                continue
            few = sum(x.format is not None for x in pool) < 3
            pool.append(random_operand(random, next(names), order, few and random.random() < 0.7))
            factors.append(pool[-1])
        terms.append(Term(tuple(factors), random.random() < 0.3))
    there = [i for i in order if any(i in x.indices for x in pool)]
    output = Tensor("R")[tuple(random.sample(there, random.randint(0, len(there))))]
    if random.random() < 0.2:  # a result that shares the structure of a factor of all terms
        holder = random_operand(random, "H", order, sparse=True)
        terms = [Term((holder, *term.factors), term.negative) for term in terms]
        output = Tensor("R", holder.format)[holder.indices]
    one = len(terms) == 1 and not terms[0].negative
    reduction = random.choice(["+", "+", "max", "min"]) if one and not output.format else "+"
    every_entry = all(x.format is None or x.format.levels[-1] == Compressed() for x in pool)
    if reduction != "+" and not every_entry:
        reduction = "+"  # a stored zero takes part, which Merged does not tell apart
    try:
        expression = Assign(
            output, Product(terms[0].factors) if one else Sum(tuple(terms)), reduction
        )
    except (NotImplementedError, ValueError):
        return None
    return expression if expression.merges else None


def random_case(random, machines):
    """A Case, or None where the expression or its loops are refused."""
    expression = random_expression(random)
    if expression is None:
        return None
    try:
        schedule = Schedule(expression)
    except ScheduleError:
        return None
    names, machine = iter(f"v{n}" for n in range(100)), random.choice(machines)
    for _ in range(random.randint(0, 5)):
        schedule = attempt(schedule, lambda s: transformed(s, random, names))
    if expression.merged and random.random() < 0.4:
        loops = [loop.var for loop in nest.loops(schedule.statement.body)]
        over = random.choice(loops or [None]), next(names), random.choice(expression.merged)
        schedule = attempt(schedule, lambda s: s.pos(*over))
        if random.random() < 0.5:
            again = over[1], next(names)
            schedule = attempt(schedule, lambda s: s.coord(*again))
            for _ in range(random.randint(0, 3)):
                schedule = attempt(schedule, lambda s: transformed(s, random, names))
    if nest.loops(schedule.statement.body):
        if machine == "gpu":
            schedule = on_gpu(schedule, random, names)
        elif machine == "cpu":
            outer, *rest = (loop.var for loop in nest.loops(schedule.statement.body))
            schedule = parallel(schedule, outer, loopir.CPU_THREAD, random)
            if rest:
                schedule = parallel(schedule, random.choice(rest), loopir.CPU_VECTOR, random)
    sizes, dtype = {name: random.choice(of) for name, of in EXTENTS.items()}, random.choice(DTYPES)
    if dtype == "uint8" and expression.reduction != "+":
        dtype = "int8"  # products have both signs
    density, spare = random.choice([0, 0.1, 0.3, 0.6, 1]), random.choice([0, 3, 40])
    problem = Merged(expression, sizes, density, spare, dtype, random.randrange(9))
    try:
        function = problem.function(schedule, dtype)
    except (ScheduleError, NotImplementedError):
        return None
    (output,) = function.outputs
    want = np.float64(as_numbers(problem.want, output.dtype))
    return Case(schedule, function, problem.given(function), want)
