"""Prints the loop IR as C: for reading, and to compile as a second oracle of the loop IR (with
-fwrapv, where its values are integers)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, Function, Stmt
from sgap_jax.compiler.loop_ir.mma import declared
from sgap_jax.compiler.loop_ir.widths import integer

# Definitions that the text needs to compile as C99. A maximum is NaN if one side is.
PRELUDE = """\
#include <math.h>
#include <stdbool.h>
static inline long long max(long long x, long long y) { return x > y ? x : y; }
static inline long long min(long long x, long long y) { return x < y ? x : y; }
static inline double greater(double x, double y) { return x > y || x != x ? x : y; }
static inline double less(double x, double y) { return x < y || x != x ? x : y; }
#define fmax greater
#define fmin less
static inline long long search(const int* array, long long low, long long high, long long target) {
  while (high - low > 1) {
    long long middle = low + (high - low) / 2;
    if (array[middle] <= target) low = middle; else high = middle;
  }
  return low;
}
"""

BINDING = {"or": 1, "and": 2, "==": 3, "!=": 3, "<": 4, "<=": 4, ">": 4, ">=": 4}
BINDING |= {"+": 5, "-": 5, "*": 6, "//": 6, "%": 6}
SPELLING = {"or": "||", "and": "&&", "//": "/"}
TRUTHS = ("or", "and", "==", "!=", "<", "<=", ">", ">=")
INTEGER, NUMBER, TRUTH = "integer", "number", "truth"
INDENT, WIDTH = "  ", 100


def print_c(function: Function) -> str:
    """The function as C; parallel loops are serial ones with their unit as a comment."""
    text = CText(function)
    starts = [
        f"// {array.name} starts as {array.fill:g}"
        for array in function.outputs
        if array.fill is not None
    ]
    body = text.block((*map(loopir.Comment, starts), *function.body))
    return "\n".join([text.signature(f"void {function.name}"), *body, "}", ""])


def headline(function: Function, statement: Stmt, kinds: Mapping[str, str] | None = None) -> str:
    """The first line of a statement's text, for messages; `kinds`: of the scalars in it."""
    text = CText(function)
    text.kinds.update(kinds or {})
    return next(iter(text.lines(statement))).strip().removesuffix(" {")


class CText:
    """Expressions and statements of one function as C. Printers of other languages override the
    methods that differ."""

    c_types = {"float32": "float", "float64": "double", "float16": "_Float16"}
    c_types |= {"bfloat16": "__bf16", "int32": "int", "int64": "long long"}
    c_types |= {"int8": "signed char", "uint8": "unsigned char"}

    def __init__(self, function: Function):
        self.function = function
        self.integer = "int" if function.index == "int32" else "long long"
        self.number = self.c_types[function.accumulator]
        arrays = (*function.inputs, *function.outputs)
        self.dtypes = {array.name: array.dtype for array in arrays}
        self.indices = {array.name for array in arrays if array.is_index}
        self.wraps = function.accumulator in loopir.INTEGERS
        self.kinds: dict[str, str] = {}  # of scalars

    def parameters(self) -> list[str]:
        return [
            *(f"const {self.c_types[array.dtype]}* {array.name}" for array in self.function.inputs),
            *(f"{self.c_types[array.dtype]}* {array.name}" for array in self.function.outputs),
        ]

    def signature(self, name: str) -> str:
        parameters = self.parameters()
        line = f"{name}({', '.join(parameters)}) {{"
        if len(line) <= WIDTH:
            return line
        each = ",\n".join(2 * INDENT + parameter for parameter in parameters)
        return f"{name}(\n{each}) {{"

    # Expressions

    def kind(self, expr: Expr) -> str:
        match expr:
            case loopir.Float():
                return NUMBER
            case loopir.Var(name):
                return self.kinds.get(name, INTEGER)
            case loopir.Load(array, _):
                return INTEGER if array in self.indices else NUMBER
            case Binary(op, left, _):
                return TRUTH if op in TRUTHS else self.kind(left)
            case loopir.Select(_, true, _):
                return self.kind(true)
        return INTEGER

    def type(self, kind: str) -> str:
        return {INTEGER: self.integer, NUMBER: self.number, TRUTH: "bool"}[kind]

    def expr(self, expr: Expr, binding: int = 0) -> str:
        """The text, in parentheses where its operator binds less than the one around it."""
        match expr:
            case loopir.Int(value):
                return str(value)
            case loopir.Float(value):
                return self.literal(value)
            case loopir.Var(name):
                return name
            case loopir.Load(array, index):
                return self.load(array, self.expr(index))
            case Binary("max" | "min" as op, left, right):
                return self.extremum(op, self.kind(expr), self.expr(left), self.expr(right))
            case Binary(op, left, right):
                mine, symbol = BINDING[op], SPELLING.get(op, op)
                first, second = self.expr(left, mine), self.expr(right, mine + 1)
                if self.integer != "int" and isinstance(left, loopir.Int):
                    first += "LL"  # other operands are 64 bits wide already
                text = f"{first} {symbol} {second}"
                if "char" in self.number and self.kind(expr) == NUMBER:  # C promotes it to int
                    return f"({self.number})({text})"
                # Beside those that C needs, parentheses for && in ||, of which compilers warn, and
                # for && and || inside another of them.
                return f"({text})" if mine < binding or (binding in (1, 2) and mine < 3) else text
            case loopir.Select(condition, true, false):
                text = f"{self.expr(condition, 1)} ? {self.expr(true, 1)} : {self.expr(false, 1)}"
                return f"({text})" if binding else text
            case loopir.Search(array, low, high, target):
                return self.search(array, *map(self.expr, (low, high, target)))
        raise TypeError(f"not an expression of the loop IR: {expr!r}")

    def literal(self, value: float) -> str:
        if self.wraps:
            number = integer(value, self.function.accumulator)
            suffix = "LL" if self.function.accumulator == "int64" else ""
            # -2147483648 in C negates 2147483648, which no int holds: n < 0 is (n + 1) - 1.
            negative = f"({number + 1}{suffix} - 1)"
            return negative if number < 0 else f"{number}{suffix}"
        if math.isnan(value):
            return "NAN"
        if math.isinf(value):
            return "INFINITY" if value > 0 else "-INFINITY"
        return f"{value!r}{'f' if self.number == 'float' else ''}"

    def load(self, array: str, index: str) -> str:
        """The load, cast to the accumulator's or the index dtype, so that products are formed
        there."""
        dtype = self.dtypes.get(array, self.function.accumulator)
        wide = self.function.index if array in self.indices else self.function.accumulator
        text = f"{array}[{index}]"
        return text if dtype == wide else self.widened(text, dtype)

    def widened(self, text: str, dtype: str) -> str:
        return f"({self.integer if dtype == 'int32' else self.number}){text}"

    def extremum(self, op: str, kind: str, left: str, right: str) -> str:
        return f"{'f' if kind == NUMBER and not self.wraps else ''}{op}({left}, {right})"

    def search(self, array: str, low: str, high: str, target: str) -> str:
        return f"search({array}, {low}, {high}, {target})"

    # Statements

    def block(self, statements: Sequence[Stmt]) -> list[str]:
        return [INDENT + line for line in self.inner(statements)]

    def inner(self, statements: Sequence[Stmt]) -> Iterator[str]:
        for statement in statements:
            yield from self.lines(statement)

    def lines(self, statement: Stmt) -> Iterator[str]:
        match statement:
            case loopir.Let(name, value, mutable):
                kind = self.kinds[name] = self.kind(value)
                const = "" if mutable else "const "
                yield f"{const}{self.type(kind)} {name} = {self.expr(value)};"
            case loopir.Set(name, value):
                yield self.set(name, value)
            case loopir.Workspace(name, size, fill):
                yield from self.workspace(name, size, fill)
            case loopir.For():
                yield from self.loop(statement)
            case loopir.While(condition, body):
                yield f"while ({self.expr(condition)}) {{"
                yield from [*self.block(body), "}"]
            case loopir.If(condition, then, otherwise):
                yield f"if ({self.expr(condition)}) {{"
                yield from self.block(then)
                match otherwise:
                    case ():
                        yield "}"
                    case (loopir.If() as other,):
                        head, *rest = self.lines(other)
                        yield from [f"}} else {head}", *rest]
                    case _:
                        yield from ["} else {", *self.block(otherwise), "}"]
            case loopir.Store():
                yield self.store(statement)
            case loopir.GroupReduce():
                named = {"+": "Add", "max": "Max", "min": "Min"}[statement.op]
                name = f"atomic{named}Group" if statement.atomic else f"{named.lower()}Group"
                yield self.collective(name, statement)
            case loopir.SegReduce():
                named = {"+": "Reduce", "max": "Max", "min": "Min"}[statement.op]
                yield self.collective(f"seg{named}Group", statement)
            case loopir.Mma() | loopir.MmaStore():
                sides = " x ".join(map(str, statement.shape))
                yield f"// {sides}, by a warp on tensor cores"
                yield from self.lines(declared(statement))
            case loopir.Comment(text):
                yield f"// {text.removeprefix('// ')}"
            case _:
                raise TypeError(f"not a statement of the loop IR: {statement!r}")

    def set(self, name: str, value: Expr) -> str:
        match value:
            case Binary("+" | "*" | "-" as op, loopir.Var(same), step) if same == name:
                return f"{name} {op}= {self.expr(step)};"
        return f"{name} = {self.expr(value)};"

    def workspace(self, name: str, size: int, fill: float | None) -> Iterator[str]:
        self.dtypes[name] = self.function.accumulator
        if fill is None:
            yield f"{self.number} {name}[{size}];"
            return
        if fill == 0 and (self.wraps or math.copysign(1, fill) > 0):
            yield f"{self.number} {name}[{size}] = {{0}};"
            return
        yield f"{self.number} {name}[{size}];"
        yield f"for (int at = 0; at < {size}; at++) {name}[at] = {self.literal(fill)};"

    def loop(self, loop: loopir.For) -> Iterator[str]:
        note = f"  // {loop.unit}" if loop.unit else ""
        yield f"{self.loop_head(loop)} {{{note}"
        yield from [*self.block(loop.body), "}"]

    def loop_head(self, loop: loopir.For) -> str:
        self.kinds[loop.var] = INTEGER
        step = f"{loop.var}++" if loop.step == 1 else f"{loop.var} += {loop.step}"
        begin, end = self.expr(loop.begin), self.expr(loop.end, 5)
        return f"for ({self.integer} {loop.var} = {begin}; {loop.var} < {end}; {step})"

    def store(self, store: loopir.Store) -> str:
        place = f"{store.array}[{self.expr(store.index)}]"
        value = self.expr(store.value)
        note = "  // atomic" if store.atomic else ""
        if store.op in ("max", "min"):
            return f"{place} = {self.extremum(store.op, NUMBER, place, value)};{note}"
        return f"{place} {store.op or ''}= {value};{note}"

    def collective(self, name: str, statement: loopir.GroupReduce | loopir.SegReduce) -> str:
        index, value = self.expr(statement.index), self.expr(statement.value)
        return f"{name}<{statement.size}>({statement.array}, {index}, {value});"
