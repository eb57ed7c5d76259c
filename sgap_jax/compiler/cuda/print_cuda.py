"""Prints the loop IR as one CUDA kernel, and makes its launch plan.

Sizes are constants of the text, so a compiled kernel is cached by its content, as all others are
(launch/launch.py), and its grid never depends on the contents of an array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sgap_jax.compiler.cuda.print_mma import TileText
from sgap_jax.compiler.cuda.units import GPU, Units
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.loopir import GPU_THREAD, Array, Expr, Function, Stmt
from sgap_jax.compiler.loop_ir.patterns import statements
from sgap_jax.compiler.loop_ir.print_c import INDENT, INTEGER, NUMBER, CText, headline
from sgap_jax.compiler.loop_ir.widths import integer
from sgap_jax.launch.kernel_call import TENSOR_CORES, TYPES, KernelCall

# Names that variables may not have: words of C++ that are identifiers in Python, and names that the
# text of a kernel uses.
RESERVED = frozenset(
    """
    alignas alignof and_eq asm atomicAdd auto bitand bitor blockIdx bool case catch char compl const
    const_cast constexpr decltype default delete do double dynamic_cast enum explicit export extern
    false float friend goto inline int long max min mutable namespace new noexcept not_eq nullptr
    operator or_eq private protected public register reinterpret_cast sgap short signed sizeof
    static static_assert static_cast struct switch template this threadIdx throw true typedef typeid
    typename union unsigned using virtual void volatile wchar_t xor xor_eq
    """.split()
)
COMBINE = {"+": "sgap::Add", "max": "sgap::Greater", "min": "sgap::Less"}
INTEGER_COMBINE = {"+": "sgap::WrappedAdd", "max": "sgap::GreaterInteger"}
INTEGER_COMBINE |= {"min": "sgap::LessInteger"}
WRAPPED = {"+": "sgap::WrappedSum", "-": "sgap::WrappedDifference", "*": "sgap::WrappedProduct"}


def launch_plan(function: Function) -> KernelCall:
    """The launch plan of a function. Its operands are the inputs, then an array full of the initial
    value for each output of `initial_values`; its results are the outputs, in order, with the sizes
    of `padded_sizes`.

    Raises:
      NotImplementedError: the function is not one launch: see `print_cuda`.
      ValueError: see `print_cuda`.
    """
    text = CudaText(function)
    return KernelCall(
        source=text.source(),
        kernel=function.name,
        grid=(text.units.blocks, 1, 1),
        block=(text.units.threads, 1, 1),
        zero=tuple(i for i, array in enumerate(function.outputs) if array.fill == 0),
        in_place=tuple(
            (len(function.inputs) + i, function.outputs.index(array))
            for i, array in enumerate(initial_values(function))
        ),
        requires=TENSOR_CORES if text.tile else "",
    )


def initial_values(function: Function) -> dict[Array, float]:
    """The outputs whose initial value is not zero, and that value."""
    fills = {array: array.fill for array in function.outputs if array.fill}
    whole = {array for array in fills if array.dtype in loopir.INTEGERS}
    return {x: integer(fill, x.dtype) if x in whole else fill for x, fill in fills.items()}


def padded_sizes(function: Function) -> tuple[int, ...]:
    """The padded size of each output, in elements. Outputs of 8-bit integers with atomic updates
    are padded to whole words of 32 bits, because an atomic update takes such a word."""
    atomic = any(
        isinstance(s, loopir.SegReduce) or getattr(s, "atomic", False)
        for s in statements(function.body)
    )
    each = 4 if atomic and function.accumulator in ("int8", "uint8") else 1
    return tuple(-(-array.size // each) * each for array in function.outputs)


def print_cuda(function: Function) -> str:
    """The function as CUDA C++ with the kernel `function.name`.

    A loop of GPUBlock is the grid, loops of GPUWarp and GPUThread are the threads of a block; all
    loops of a unit have the same extent. With tensor cores there is no loop of threads: all lanes
    of a warp execute the same statements. An output whose initial value is not zero has two
    pointers to the same memory, as an operand and as a result of the launch.

    Raises:
      NotImplementedError: no loop of blocks, or more than one; loops of a unit with different
        extents; a store outside of the loops of threads; a workspace that threads share; a unit of
        the CPU; tiles of tensor cores that leave too few registers, or beside loops of threads.
      ValueError: more threads than a block may have, a group that does not divide them, an update
        of an array that is narrower than the accumulator, or a name that is a word of C++.
    """
    return CudaText(function).source()


class CudaText(CText):
    c_types = CText.c_types | TYPES

    def __init__(self, function: Function):
        super().__init__(function)
        self.combine = INTEGER_COMBINE if self.wraps else COMBINE
        mmas = [s for s in statements(function.body) if isinstance(s, loopir.Mma)]
        self.units = Units(function, whole_warps=bool(mmas))
        for name in (function.name, *self.dtypes, *_names(function)):
            if name in RESERVED:
                raise ValueError(f"{function.name}: {name} is a word of CUDA C++, not a name")
        self.paths: dict[str, list[str]] = {}  # scalar -> units of the loops around its Let
        self.tile: TileText | None = None
        if mmas:
            if GPU_THREAD in self.units.extents or len(mmas) > 1:
                raise self.refuse(mmas[-1], "tensor cores beside others, or a loop of threads")
            self.tile = TileText(self, mmas[0], self.units.warps)

    def source(self) -> str:
        blocks = f", {self.tile.blocks}" if self.tile else ""
        bounds = f"__launch_bounds__({self.units.threads}{blocks})"
        head = self.signature(f'extern "C" __global__ void {bounds} {self.function.name}')
        body = "\n".join(self.block(self.function.body))
        integers = "loops_integers.cuh" if self.wraps else "loops.cuh"
        header = "loops_octet.cuh" if self.tile else integers
        return f'#include "{header}"\n\n{head}\n{body}\n}}\n'

    def parameters(self) -> list[str]:
        own = [parameter.replace("* ", "* __restrict__ ") for parameter in super().parameters()]
        twice = [
            f"const {self.c_types[x.dtype]}* /* {x.name} */" for x in initial_values(self.function)
        ]
        count = len(self.function.inputs)
        return [*own[:count], *twice, *own[count:]]

    def refuse(self, statement: Stmt, why: str) -> NotImplementedError:
        where = headline(self.function, statement, self.kinds)
        return NotImplementedError(f"{self.function.name}: {why}, at `{where}`")

    # Expressions

    def expr(self, expr: Expr, binding: int = 0) -> str:
        match expr:
            case loopir.Binary("+" | "-" | "*" as op, left, right) if self.is_wrapped(expr):
                return f"{WRAPPED[op]}({self.expr(left)}, {self.expr(right)})"
        return super().expr(expr, binding)

    def is_wrapped(self, expr: Expr) -> bool:
        return self.wraps and self.kind(expr) == NUMBER

    def literal(self, value: float) -> str:
        if "char" in self.number:  # a literal is an int, which templates distinguish from char
            return f"({self.number}){super().literal(value)}"
        if self.wraps or math.isfinite(value):
            return super().literal(value)
        double = {math.inf: "0x7ff0000000000000", -math.inf: "0xfff0000000000000"}
        single = {math.inf: "0x7f800000", -math.inf: "0xff800000"}
        if self.number == "double":
            return f"__longlong_as_double({double.get(value, '0x7ff8000000000000')})"
        return f"__int_as_float({single.get(value, '0x7fc00000')})"

    def widened(self, text: str, dtype: str) -> str:
        if dtype == "int32":
            return super().widened(text, dtype)
        wide = f"sgap::Widen({text})" if dtype in ("float16", "bfloat16") else text
        return f"double({wide})" if self.number == "double" else wide

    def extremum(self, op: str, kind: str, left: str, right: str) -> str:
        if kind == NUMBER:
            return f"{self.combine[op]}()({left}, {right})"
        if self.integer == "int":
            return f"{op}({left}, {right})"
        return f"{op}(({self.integer})({left}), ({self.integer})({right}))"  # literals are int

    def search(self, array: str, low: str, high: str, target: str) -> str:
        return f"sgap::Search<{self.integer}>({array}, {low}, {high}, {target})"

    # Statements

    def inner(self, statements: Sequence[Stmt]) -> Iterator[str]:
        for i, statement in enumerate(statements):
            match statement:
                case loopir.For(unit=unit) if unit in GPU:
                    lines = self.unit_loop(statement)
                    last = i + 1 == len(statements)
                    yield from lines if last else ["{", *(INDENT + line for line in lines), "}"]
                case _:
                    yield from self.lines(statement)

    def unit_loop(self, loop: loopir.For) -> Iterator[str]:
        unit, extent = loop.unit or "", loopir.extent(loop)
        if not self.units.fits(loop):
            raise self.refuse(loop, f"a loop of {unit} that is not where one can be")
        self.kinds[loop.var] = INTEGER
        if not extent:
            yield f"// no {loop.var}"
            return
        with self.units.inside(unit):
            body = list(self.inner(loop.body))
        yield f"const {self.integer} {loop.var} = {self.units.index(unit)};"
        if self.units.idle(loop):
            body = [f"if ({loop.var} < {extent}) {{", *(INDENT + line for line in body), "}"]
        yield from body

    def loop_head(self, loop: loopir.For) -> str:
        if loop.unit not in (None, "unroll"):
            raise self.refuse(loop, f"a loop of {loop.unit} on a GPU")
        return super().loop_head(loop)

    def loop(self, loop: loopir.For) -> Iterator[str]:
        head = self.loop_head(loop)
        if loop.unit == "unroll":
            yield "#pragma unroll"
        yield f"{head} {{"
        yield from [*self.block(loop.body), "}"]

    def lines(self, statement: Stmt) -> Iterator[str]:
        match statement:
            case loopir.Let(name):
                self.paths[name] = [*self.units.path]
            case loopir.Mma() | loopir.MmaStore():
                if self.tile is None or statement.tile != self.tile.mma.tile:
                    raise self.refuse(statement, "a tile that nothing adds to")
                if not self.units.innermost:
                    raise self.refuse(statement, "a tile that warps share")
                return iter([self.tile.line(statement)])
        return super().lines(statement)

    def set(self, name: str, value: Expr) -> str:
        if self.paths.get(name) != self.units.path:
            raise ValueError(f"{self.function.name}: {name} is of outside of a parallel loop")
        return (
            f"{name} = {self.expr(value)};" if self.is_wrapped(value) else super().set(name, value)
        )

    def workspace(self, name: str, size: int, fill: float | None) -> Iterator[str]:
        if not self.units.innermost:
            statement = loopir.Workspace(name, size, fill)
            raise self.refuse(statement, "a workspace that threads share")
        if self.tile is not None and name == self.tile.mma.tile:
            return iter([f"{self.tile.type} {name};"])
        return super().workspace(name, size, fill)

    def store(self, store: loopir.Store) -> str:
        own = store.array not in self.results
        self.check_update(store, store.op is not None and not own)
        place, value = f"{store.array}[{self.expr(store.index)}]", self.expr(store.value)
        if store.atomic and not own:
            if store.op == "+" and not self.wraps:
                return f"atomicAdd(&{place}, {value});"
            if store.op is None:
                raise ValueError(f"{self.function.name}: an atomic store without op to {place}")
            return f"sgap::Atomically<{self.combine[store.op]}>::Update(&{place}, {value});"
        if store.op is None and self.dtypes[store.array] in ("float16", "bfloat16"):
            return f"sgap::Narrow({value}, {place});"
        if store.op in ("max", "min") or store.op and self.wraps:
            return f"{place} = {self.extremum(store.op, NUMBER, place, value)};"
        return f"{place} {store.op or ''}= {value};"

    def collective(self, name: str, reduce: loopir.GroupReduce | loopir.SegReduce) -> str:
        if reduce.array not in self.results:
            raise self.refuse(reduce, "a group that adds to a workspace")
        self.check_update(reduce, True)
        size, combine = reduce.size, self.combine[reduce.op]
        threads = self.units.extents.get(GPU_THREAD, 1)
        if threads % size:
            raise ValueError(f"{self.function.name}: groups of {size} in {threads} threads")
        index, value = self.expr(reduce.index), self.expr(reduce.value)
        if isinstance(reduce, loopir.SegReduce):
            kinds = f"{combine}, {size}, {self.integer}, {self.number}"
            return f"sgap::SegReduce<{kinds}>({reduce.array}, {index}, {value});"
        access = "" if reduce.atomic else f", sgap::Alone<{combine}>"
        return f"sgap::GroupReduce<{combine}, {size}{access}>(&{reduce.array}[{index}], {value});"

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(array.name for array in self.function.outputs)

    def check_update(
        self, statement: loopir.Store | loopir.GroupReduce | loopir.SegReduce, updates: bool
    ) -> None:
        if not self.units.innermost or self.tile:
            raise self.refuse(statement, "a store beside the loops of threads")
        if updates and self.dtypes[statement.array] != self.function.accumulator:
            raise ValueError(
                f"{self.function.name}: an update of {statement.array}, which is "
                f"{self.dtypes[statement.array]}; expected {self.function.accumulator}"
            )


def _names(function: Function) -> Iterator[str]:
    """The names of scalars, workspaces and loop variables."""
    for statement in statements(function.body):
        match statement:
            case loopir.Let(name=name) | loopir.Workspace(name=name) | loopir.For(var=name):
                yield name
