"""The loop IR as LLVM IR for a CPU.

A function is cut into phases: a CPUThread loop at its top level, or the statements between two of
them. Filling an output is a phase too. Each phase is

    void kernel(void* const* arrays, int64 begin, int64 end)

which runs the iterations [begin, end) of its loop (of other statements there is one iteration).
Iterations come in any order, on any thread; phases come one after another.
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.llvm.instructions import INT, Value
from sgap_jax.compiler.llvm.memory import Elements
from sgap_jax.compiler.llvm.stream_fill import Fills
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.loopir import (
    Binary,
    Comment,
    Float,
    For,
    Function,
    Int,
    Let,
    Load,
    Set,
    Stmt,
    Store,
    Var,
    Workspace,
)
from sgap_jax.compiler.loop_ir.patterns import parts

_FILL = 1 << 14  # elements of an iteration

# Workspaces up to here are on the stack of a thread, which others use as well.
_STACK_BYTES = 32 << 10


@dataclasses.dataclass(frozen=True)
class Module:
    """LLVM IR and how to call it.

    Attributes:
      text: of the whole module.
      kernels: symbols, in the order of the phases.
      iterations: of each phase.
      scratch_bytes: memory that each call of a phase needs to itself; `arrays` ends with it where
        it is not zero.
    """

    text: str
    kernels: tuple[str, ...]
    iterations: tuple[int, ...]
    scratch_bytes: int


@dataclasses.dataclass(frozen=True)
class _Phase:
    scalars: tuple[Stmt, ...]  # that the iterations read
    body: tuple[Stmt, ...]
    loop: For | None = None  # whose body that is


def print_llvm(function: Function, vector_bytes: int = 64) -> Module:
    """LLVM IR for `function`, with vectors of `vector_bytes`.

    Products and sums are fused where the CPU can. The lanes of a CPUVector loop each have their
    part of a sum over it, or up to four where its extent is found at run time; so may a loop in it
    that only sums up. All others keep their order.

    Raises:
      NotImplementedError: statements of GPU groups; a 16-bit output of a float64 accumulator.
    """
    kernels, texts, declared, scratch = [], [], set(), 0
    phases = [*_fills(function), *_phases(function)]
    for i, phase in enumerate(phases):
        kernels.append(f"{function.name}_{i}")
        writer = _Writer(function, vector_bytes)
        texts.append(writer.kernel(kernels[-1], phase))
        declared |= writer.declared
        scratch = max(scratch, writer.scratch)
    iterations = tuple(1 if phase.loop is None else _extent(phase.loop) for phase in phases)
    arrays = ", ".join(f"{a.name}: {a.dtype}[{a.size}]" for a in _arrays(function))
    counts = ", ".join(map(str, iterations))
    heading = f"; {function.name}({arrays})\n; iterations: {counts}; scratch: {scratch} bytes\n"
    attributes = (
        f'attributes #0 = {{ nounwind "prefer-vector-width"="{8 * vector_bytes}" '
        '"no-trapping-math"="true" }\n!0 = distinct !{!0, !1}\n!1 = !{!"llvm.loop.unroll.full"}\n'
        '!2 = distinct !{!2, !3}\n!3 = !{!"llvm.loop.unroll.disable"}\n!4 = !{i32 1}\n'
    )
    text = "\n".join([heading, *texts, *sorted(declared), "", attributes])
    return Module(text, tuple(kernels), iterations, scratch)


def _extent(loop: For) -> int:
    match loop:
        case For(begin=Int(0), end=Int(end), step=1):
            return end
    raise ValueError(f"llvm: a loop of threads has constant bounds, got {loop.begin}, {loop.end}")


def _arrays(function: Function) -> tuple[loopir.Array, ...]:
    return (*function.inputs, *function.outputs)


def _fills(function: Function) -> list[_Phase]:
    phases = []
    for output in function.outputs:
        if output.fill is None or output.size == 0:
            continue
        begin = Binary("*", Var("block"), Int(_FILL))
        length = Binary("min", Binary("-", Int(output.size), Var("begin")), Int(_FILL))
        element = Store(output.name, Var("e"), Float(output.fill))
        elements = For(
            "e",
            Var("begin"),
            Binary("+", Var("begin"), length),
            (element,),
            unit=loopir.CPU_VECTOR,
        )
        body = (Let("begin", begin), elements)
        blocks = Int(-(-output.size // _FILL))
        phases.append(_Phase((), body, For("block", Int(0), blocks, body, unit=loopir.CPU_THREAD)))
    return phases


def _phases(function: Function) -> list[_Phase]:
    """Scalars that do not change are computed again by each phase; with those that do, or a
    workspace of the whole function, there is one phase."""
    body, outputs = function.body, {output.name for output in function.outputs}
    for statement in body:
        match statement:
            case Set() | Workspace() | Let(mutable=True):
                return [_Phase((), body)]
            case Let(value=value):
                if any(isinstance(part, Load) and part.array in outputs for part in parts(value)):
                    return [_Phase((), body)]
    phases: list[_Phase] = []
    scalars: tuple[Stmt, ...] = ()
    serial: tuple[Stmt, ...] = ()
    for statement in body:
        match statement:
            case Let() | Comment():
                scalars += (statement,)
            case For(unit=loopir.CPU_THREAD):
                if serial:
                    phases.append(_Phase(scalars, serial))
                phases.append(_Phase(scalars, statement.body, statement))
                serial = ()
            case _:
                serial += (statement,)
    return [*phases, _Phase(scalars, serial)] if serial else phases


class _Writer(Fills):
    def __init__(self, function: Function, vector_bytes: int) -> None:
        super().__init__(function.index, function.accumulator, vector_bytes)
        self.function = function
        self.scratch = 0
        self._stack = 0

    def place_workspace(self, size: int) -> str:
        bytes = size * self.number_bytes
        if self._stack + bytes <= _STACK_BYTES:
            self._stack += bytes
            return self.slot("i32" if self.number == "i8" else self.number, max(size, 1))
        at = self.scratch
        self.scratch += -(-bytes // 64) * 64
        return self.op(f"getelementptr i8, ptr %scratch, i64 {at}")

    def kernel(self, symbol: str, phase: _Phase) -> str:
        arrays = _arrays(self.function)
        self.arrays = {
            a.name: Elements(f'%"{a.name}"', a.dtype, a.size, a.is_index, a.parts) for a in arrays
        }
        for statement in phase.scalars:
            self.statement(statement)
        if phase.loop is None:
            self.statements(phase.body)
        else:
            first, last = (Value(INT, self.as_index(f"%{name}")) for name in ("first", "last"))
            self.count(phase.loop.var, first, last, 1, lambda: self.statements(phase.body))
        asked: list[str] = []
        if self.streamed is not None:
            asked = self.asked(self.streamed, 1 if phase.loop is None else _extent(phase.loop))
            self.emit("fence seq_cst")  # others see what is on its way
        self.emit("ret void")
        inputs = {array.name for array in self.function.inputs}
        parameters = [
            f'ptr noalias {"readonly " if array.name in inputs else ""}%"{array.name}"'
            for array in arrays
        ]
        if self.scratch:
            parameters.append("ptr noalias %scratch")
        body = "\n".join([*self.slots, *asked, *self.lines])
        inner = (
            f"define internal void @{symbol}.body({', '.join(parameters)}, i64 %first, i64 %last) "
            f"noinline #0 {{\nentry:\n{body}\n}}\n"
        )
        return inner + self._entry(symbol, len(parameters))

    def _entry(self, symbol: str, count: int) -> str:
        """The pointers of the table, of which none reaches into another's array."""
        lines = [f"define void @{symbol}(ptr %arrays, i64 %first, i64 %last) #0 {{"]
        for i in range(count):
            lines.append(f"  %at{i} = getelementptr ptr, ptr %arrays, i64 {i}")
            lines.append(f"  %array{i} = load ptr, ptr %at{i}")
        pointers = "".join(f"ptr %array{i}, " for i in range(count))
        lines.append(f"  call void @{symbol}.body({pointers}i64 %first, i64 %last)")
        return "\n".join([*lines, "  ret void", "}\n"])
