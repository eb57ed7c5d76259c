"""What stands over the body of a loop: its unit, and how far it goes."""

from sgap_jax.compiler.loop_ir.arithmetic import ZERO, divide, modulo
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_VECTOR,
    GPU_THREAD,
    GPU_WARP,
    Binary,
    Expr,
    For,
    Int,
    Var,
)
from sgap_jax.compiler.lowering.derived_variables import Recovery
from sgap_jax.compiler.lowering.ranges import Range, Ranges, Scope
from sgap_jax.compiler.notation.cin import Body, Forall, Split, Where
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.schedules.schedule import ScheduleError

WARP = 32


class Heads:
    def __init__(self, ranges: Ranges, recovery: Recovery):
        self.ranges, self.recovery = ranges, recovery
        self.threads: tuple[IndexVar, Expr, int] | None = None  # warps and threads in one loop

    def of(self, loop: Forall, scope: Scope, inner: Scope) -> For | None:
        """The loop without its body; None where it is one with the loop of the warps."""
        var, extent = loop.var, self.ranges.of(loop.var, scope)
        if self.threads is not None and self.threads[0] == var:
            _, thread, count = self.threads
            self.recovery.define(var, modulo(thread, count), inner)
            self._beyond(var, extent, inner)
            return None
        unit = loop.unit or ("unroll" if loop.unroll else None)
        name = self.recovery.fresh(var.name)
        inner.known[var] = Var(name)
        if unit is None or unit == CPU_VECTOR and extent.exact is None:
            return For(name, extent.low, extent.high, (), unit=unit)
        if extent.bound is None or (unit == "unroll" and extent.exact is None):
            raise ScheduleError(
                f"{var} ({unit}): the extent of this loop is known at run time only; split it, and "
                "take the loop of constant extent"
            )
        if unit == GPU_WARP and (joined := self._join_threads(loop, extent, inner)) is not None:
            return joined
        self._beyond(var, extent, inner)
        return For(name, ZERO, Int(extent.bound), (), unit=unit)

    def _beyond(self, var: IndexVar, extent: Range, inner: Scope) -> None:
        """The loop goes on to what is known statically: the rest is out of range. Whole tiles out
        of range are left to the guard of what they tile."""
        match self.ranges.relations.source(var):
            case Split(outer=outer) if outer == var and extent.low == ZERO:
                return
        if extent.exact is None:
            self.recovery.only_if(var, Binary("<", inner.known[var], extent.high), inner)

    def _join_threads(self, loop: Forall, extent: Range, inner: Scope) -> For | None:
        """Warps are tiles (Sgap, section 5.1): where they are not of 32 threads, warps and threads
        are one loop of threads."""
        thread = _thread_loop(loop.body)
        if thread is None or extent.bound is None:
            return None
        count = self.ranges.of(thread, inner).bound
        if count is None or count == WARP:
            return None
        name = self.recovery.fresh("thread")
        self.threads = (thread, Var(name), count)
        del inner.known[loop.var]
        self.recovery.names.discard(loop.var.name)
        self.recovery.define(loop.var, divide(Var(name), count), inner)
        self._beyond(loop.var, extent, inner)
        return For(name, ZERO, Int(extent.bound * count), (), unit=GPU_THREAD)


def _thread_loop(body: Body) -> IndexVar | None:
    match body:
        case Forall(var, inside, unit):
            return var if unit == GPU_THREAD else _thread_loop(inside)
        case Where():
            return _thread_loop(body.consumer) or _thread_loop(body.producer)
    return None
