"""CPUVector loops in LLVM IR: one iteration in each lane, as many at once as there are lanes.

What lanes share stays scalar, what differs by a constant step becomes vectors of neighbours, and
the rest is gathered. Scalars from outside that the body reduces into are reduced in each lane, and
the lanes are reduced after the loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from sgap_jax.compiler.llvm.accumulators import lane_sums, several_accumulators
from sgap_jax.compiler.llvm.builder import Builder, NotVector, Widen
from sgap_jax.compiler.llvm.instructions import INDEX, NUMBER, ROLLED, Cell, Value, constant
from sgap_jax.compiler.loop_ir.loopir import For, Int, Let, Var
from sgap_jax.compiler.loop_ir.patterns import gathers, only_sums

# Vectors of lanes that a loop runs at once: enough to hide the latency of a multiply-add, and they
# leave registers for the operands.
_MOST_VECTORS = 8


def vectorize(builder: Builder, loop: For) -> bool:
    """Takes a CPUVector loop, unless its body has something that lanes cannot do together. Which
    mutable scalars differ from lane to lane is found by trying: all are taken to be shared at
    first, and where one is not, the loop is written again with one for each lane."""
    if not builder.vectorizable(loop):
        return False
    lines, slots, block = len(builder.lines), len(builder.slots), builder.block
    while True:
        try:
            with builder.scope():
                _vector_loop(builder, loop)
            return True
        except Widen as widen:
            builder.wide.add(widen.name)
            again = True
        except NotVector:
            again = False
        del builder.lines[lines:]
        del builder.slots[slots:]
        builder.block = block
        if not again:
            return False


def _vector_loop(builder: Builder, loop: For) -> None:
    if loop.step != 1:
        raise NotVector
    sums = lane_sums(loop)
    if not all(isinstance(builder.scalars[name], Cell) for name in sums):
        raise NotVector
    if isinstance(loop.begin, Int) and isinstance(loop.end, Int):
        return _constant_extent(builder, loop, sums, loop.begin.value, loop.end.value)
    begin, end = builder.bounds(loop)
    simple = bool(sums) and only_sums(loop)
    if simple and gathers(loop):
        return _gathered_sums(builder, loop, sums, begin, end)
    with _sums_of_lanes(builder, builder.native_lanes, sums, looped=True):
        whole = _simple_sums if simple else whole_vectors
        last_lanes(builder, loop, whole(builder, loop, begin, end), end, always=simple)


def _constant_extent(
    builder: Builder, loop: For, sums: dict[str, str], begin: int, end: int
) -> None:
    """A loop whose iterations run in as many vectors as registers hold, if there are two iterations
    or more. The rest runs in fewer and fewer vectors, in the last of which lanes may idle."""
    held = max(sum(isinstance(s, Let) and s.mutable for s in loop.body), 1)
    registers = 32 if builder.vector_bytes == 64 else 16
    vectors = 1 if gathers(loop) else _MOST_VECTORS  # a gather has loads enough to wait for
    while vectors > 1 and vectors * held > registers * 3 // 4:
        vectors //= 2
    native = builder.native_lanes
    width = native * vectors
    if end - begin >= 2 * width:
        last = begin + (end - begin) // width * width
        body = functools.partial(builder.statements, loop.body)
        with _sums_of_lanes(builder, width, sums):
            builder.count(loop.var, constant(begin), constant(last), width, body, stride=1)
        begin = last
    walks, most = any(isinstance(s, For) for s in loop.body), width
    while begin < end:
        left = end - begin
        while width > max(left, 1):
            width //= 2
        if walks and native <= width < min(left, most):
            width *= 2  # lanes that idle cost less than to walk the loop in the body once more
        if width < native and width < left:
            width *= 2  # one vector of which not all lanes take part
        with _sums_of_lanes(builder, width, sums):
            mask = builder.first_lanes(constant(left)) if width > left else None
            with builder.in_lanes(width, mask):
                _iterations(builder, loop, constant(begin))
        begin += width


def _gathered_sums(
    builder: Builder, loop: For, sums: dict[str, str], begin: Value, end: Value
) -> None:
    """Whole vectors, if there are any. What does not fill a vector goes one by one, which is faster
    than a gather under a mask."""
    position = builder.cell(INDEX, begin)
    with _if_longer(builder, builder.native_lanes, begin, end):
        with _sums_of_lanes(builder, builder.native_lanes, sums, looped=True):
            builder.write(position, whole_vectors(builder, loop, begin, end, ROLLED))
    rest = builder.read(position)
    builder.count(loop.var, rest, end, 1, lambda: builder.statements(loop.body), ROLLED)


def _simple_sums(builder: Builder, loop: For, begin: Value, end: Value) -> Value:
    """As `whole_vectors`, with several accumulators. A loop that is too short for one vector takes
    a single branch around all that."""
    position = builder.cell(INDEX, begin)
    with _if_longer(builder, builder.width, begin, end):
        begin = several_accumulators(builder, loop, begin, end, builder.width)
        builder.write(position, whole_vectors(builder, loop, begin, end, ROLLED))
    return builder.read(position)


@contextlib.contextmanager
def _if_longer(builder: Builder, lanes: int, begin: Value, end: Value) -> Iterator[None]:
    """What is written within runs if there are `lanes` iterations or more."""
    many, rest = builder.fresh("many"), builder.fresh("rest")
    enough = builder.binary("<=", constant(lanes), builder.binary("-", end, begin))
    builder.branch_if(enough.text, many, rest)
    builder.start_block(many)
    yield
    builder.branch(rest)
    builder.start_block(rest)


def whole_vectors(
    builder: Builder, loop: For, begin: Value, end: Value, metadata: str = ""
) -> Value:
    """A loop over vectors of which all lanes take part; returns where the rest begins."""
    position = builder.cell(INDEX, begin)
    full = builder.binary("-", end, constant(builder.width - 1))
    head, body, rest = builder.fresh("for"), builder.fresh("body"), builder.fresh("rest")
    builder.branch(head)
    builder.start_block(head)
    now = builder.read(position)
    builder.branch_if(builder.binary("<", now, full).text, body, rest)
    builder.start_block(body)
    _iterations(builder, loop, now)
    builder.write(position, builder.binary("+", now, constant(builder.width)))
    builder.branch(head, metadata)
    builder.start_block(rest)
    return builder.read(position)


def last_lanes(builder: Builder, loop: For, now: Value, end: Value, always: bool) -> None:
    """The last iterations, fewer than a vector has lanes, under a mask. `always`: without a branch
    around them, even if there are none."""
    some, none = builder.fresh("some"), builder.fresh("end")
    if always:
        builder.branch(some)
    else:
        builder.branch_if(builder.binary("<", now, end).text, some, none)
    builder.start_block(some)
    mask = builder.first_lanes(builder.binary("-", end, now))
    with builder.in_lanes(builder.width, mask):
        _iterations(builder, loop, now)
    builder.branch(none)
    builder.start_block(none)


def _iterations(builder: Builder, loop: For, begin: Value) -> None:
    """The body, from iteration `begin` on in lanes."""
    with builder.scope():
        builder.scalars[loop.var] = Value(INDEX, begin.text, stride=int(builder.width > 1))
        builder.statements(loop.body)


@contextlib.contextmanager
def _sums_of_lanes(
    builder: Builder, width: int, sums: dict[str, str], looped: bool = False
) -> Iterator[None]:
    """What is written within runs in `width` lanes and reduces into `sums` of each lane, which are
    reduced into those from outside afterwards. Sums that are added to once start at -0.0, so that
    LLVM drops that addition; in a loop (`looped`) they start at 0.0, and the result may be 0.0
    where it would be -0.0."""
    cells = {name: builder.scalars[name] for name in sums}
    floats = looped and builder.wrapping is None
    with builder.scope(), builder.in_lanes(width):
        for name, op in sums.items():
            kind = cells[name].kind
            zero = floats and op == "+" and kind == NUMBER
            initial = builder.literal(0.0) if zero else builder.neutral(op, kind)
            builder.scalars[name] = builder.cell(kind, initial, True)
        yield
        totals = [builder.fold(op, builder.value(Var(name))) for name, op in sums.items()]
    for (name, op), total in zip(sums.items(), totals, strict=True):
        cell = cells[name]
        assert isinstance(cell, Cell)
        before = builder.read(cell)
        if floats and op == "+" and cell.kind == NUMBER:
            sum = builder.op(f"fadd nsz {builder.number} {before.text}, {total.text}")
            builder.write(cell, Value(NUMBER, sum))
        else:
            builder.write(cell, builder.binary(op, before, total))
