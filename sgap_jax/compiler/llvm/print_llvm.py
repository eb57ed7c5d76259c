"""The loop IR as LLVM IR for a CPU: a module with a kernel for each phase of a function.

A phase is a CPUThread loop at the top level of the function, or the statements between two of them.
To fill an output is a phase too. Each kernel is

    void kernel(void* const* arrays, int64 first, int64 last)

which runs the iterations [first, last) of its loop (other statements are one iteration). Iterations
run in any order, on any thread; phases run one after another.
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.llvm import stream_fill
from sgap_jax.compiler.llvm.builder import Builder
from sgap_jax.compiler.llvm.instructions import INDEX, METADATA, Value
from sgap_jax.compiler.llvm.loops import STRATEGIES
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

_FILLED = 1 << 14  # elements that one iteration of a fill stores


@dataclasses.dataclass(frozen=True)
class Module:
    """LLVM IR and how to call it.

    Attributes:
      text: the IR.
      kernels: their symbols, in the order of the phases.
      iterations: how many each phase has.
      scratch_bytes: memory that each call of a kernel has to itself; if it is not zero, the last of
        `arrays` points to it.
    """

    text: str
    kernels: tuple[str, ...]
    iterations: tuple[int, ...]
    scratch_bytes: int


@dataclasses.dataclass(frozen=True)
class _Phase:
    scalars: tuple[Stmt, ...]  # which the iterations read
    body: tuple[Stmt, ...]
    loop: For | None = None  # whose body it is, if it is one

    @property
    def iterations(self) -> int:
        match self.loop:
            case None:
                return 1
            case For(begin=Int(0), end=Int(end), step=1):
                return end
            case For(begin=begin, end=end):
                raise ValueError(f"llvm: a loop of threads has constant bounds, got {begin}, {end}")


def print_llvm(function: Function, vector_bytes: int = 64) -> Module:
    """LLVM IR for `function`, with vectors of `vector_bytes`.

    Products and sums are fused where the CPU can. A sum over a CPUVector loop has an accumulator in
    each lane, or up to four where the extent is found at run time; so may have a loop in it that
    only sums up. All other sums keep their order.

    Raises:
      NotImplementedError: statements of GPU groups; a 16-bit output of a float64 accumulator.
    """
    phases = [*_fills(function), *_phases(function)]
    kernels = tuple(f"{function.name}_{i}" for i in range(len(phases)))
    texts, declared, scratch = [], set(), 0
    for kernel, phase in zip(kernels, phases, strict=True):
        builder = Builder(function, vector_bytes, STRATEGIES)
        texts.append(_kernel(builder, function, kernel, phase))
        declared |= builder.declared
        scratch = max(scratch, builder.scratch)
    iterations = tuple(phase.iterations for phase in phases)
    arrays = ", ".join(f"{a.name}: {a.dtype}[{a.size}]" for a in _arrays(function))
    counts = ", ".join(map(str, iterations))
    heading = f"; {function.name}({arrays})\n; iterations: {counts}; scratch: {scratch} bytes\n"
    attributes = (
        f'attributes #0 = {{ nounwind "prefer-vector-width"="{8 * vector_bytes}" '
        f'"no-trapping-math"="true" }}\n{METADATA}'
    )
    text = "\n".join([heading, *texts, *sorted(declared), "", attributes])
    return Module(text, kernels, iterations, scratch)


def _arrays(function: Function) -> tuple[loopir.Array, ...]:
    return (*function.inputs, *function.outputs)


def _fills(function: Function) -> list[_Phase]:
    """A phase for each output that has an initial value."""
    phases = []
    for output in function.outputs:
        if output.fill is None or output.size == 0:
            continue
        begin = Binary("*", Var("block"), Int(_FILLED))
        length = Binary("min", Binary("-", Int(output.size), Var("begin")), Int(_FILLED))
        element = Store(output.name, Var("e"), Float(output.fill))
        end = Binary("+", Var("begin"), length)
        elements = For("e", Var("begin"), end, (element,), unit=loopir.CPU_VECTOR)
        body = (Let("begin", begin), elements)
        blocks = Int(-(-output.size // _FILLED))
        phases.append(_Phase((), body, For("block", Int(0), blocks, body, unit=loopir.CPU_THREAD)))
    return phases


def _phases(function: Function) -> list[_Phase]:
    """The phases of the body. Each computes the scalars of the function again. Where one of them
    changes, or there is a workspace of the whole function, there is one phase."""
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


def _kernel(builder: Builder, function: Function, symbol: str, phase: _Phase) -> str:
    """The kernel of a phase, and the function with the body, which the kernel calls: of that one's
    parameters LLVM knows that none points into another's array."""
    for statement in phase.scalars:
        builder.statement(statement)
    if phase.loop is None:
        builder.statements(phase.body)
    else:
        first, last = (Value(INDEX, builder.as_index(f"%{name}")) for name in ("first", "last"))
        builder.count(phase.loop.var, first, last, 1, lambda: builder.statements(phase.body))
    start: list[str] = []
    if builder.streamed is not None:
        start = stream_fill.page_check(builder, builder.streamed, phase.iterations)
        builder.emit("fence seq_cst")  # other threads see the stores that bypass the caches
    builder.emit("ret void")
    inputs = {array.name for array in function.inputs}
    parameters = [
        f'ptr noalias {"readonly " if array.name in inputs else ""}%"{array.name}"'
        for array in _arrays(function)
    ]
    if builder.scratch:
        parameters.append("ptr noalias %scratch")
    body = "\n".join([*builder.slots, *start, *builder.lines])
    lines = [
        f"define internal void @{symbol}.body({', '.join(parameters)}, i64 %first, i64 %last) "
        f"noinline #0 {{\nentry:\n{body}\n}}",
        f"define void @{symbol}(ptr %arrays, i64 %first, i64 %last) #0 {{",
    ]
    for i in range(len(parameters)):
        lines.append(f"  %at{i} = getelementptr ptr, ptr %arrays, i64 {i}")
        lines.append(f"  %array{i} = load ptr, ptr %at{i}")
    pointers = "".join(f"ptr %array{i}, " for i in range(len(parameters)))
    lines.append(f"  call void @{symbol}.body({pointers}i64 %first, i64 %last)")
    return "\n".join([*lines, "  ret void", "}\n"])
