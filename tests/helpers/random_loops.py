"""Random loops over lanes whose results are exact in any order: all values are small integers, in
float arrays too."""

import random

from compiled_loops import add, lanes, times

from sgap_jax.compiler.loop_ir.loopir import (
    Array,
    Binary,
    Float,
    For,
    Function,
    If,
    Int,
    Let,
    Load,
    Select,
    Set,
    Store,
    Var,
    While,
    Workspace,
)

SIZE = 16  # length of the inputs x (floats) and t (integers in [0, SIZE])


class Loops:
    """Random statements; each has an output of its own and also adds to a common one."""

    def __init__(self, seed, count):
        self.random = random.Random(seed)
        self.names = 0
        self.outputs, body = [], []
        for i in range(count):
            body += self.loop(i)
        self.function = Function(
            f"random_{seed}",
            (Array("x", "float32", SIZE), Array("t", "int32", SIZE)),
            (*self.outputs, Array("r", "float32", 4 * count, 0.0)),
            tuple(body),
        )

    def fresh(self):
        self.names += 1
        return f"v{self.names}"

    def pick(self, *choices):
        return self.random.choice(choices)

    def small(self, expr):
        return Binary("%", expr, Int(SIZE))

    def loop(self, i):
        n = self.pick(1, 3, 8, 16, 21, 40, 130)
        self.array, self.common, self.extent = f"y{i}", 4 * i, n
        self.ints, self.numbers, self.counters = [Var("e")], [], []
        self.mutable, self.sum = [], self.fresh()
        self.outputs.append(Array(self.array, "float32", 3 * n, 0.0))
        self.work = self.fresh()
        begin, end = (Int(0), Int(n)) if self.pick(True, False) else (Load("t", Int(1)), Int(n))
        body = [s for _ in range(self.pick(2, 4, 6)) for s in self.statement(2)]
        last = Store(self.array, self.place(), self.number(2))
        return [
            Let(self.sum, Float(0.0), mutable=True),
            Workspace(self.work, SIZE, fill=2.0),
            lanes(end, *body, last, begin=begin),
            Store("r", Int(self.common), Var(self.sum)),
        ]

    def place(self):
        """An index that no other lane uses."""
        twice = times(Var("e"), Int(2))
        return self.pick(twice, add(twice, Int(1)), add(Var("e"), Int(2 * self.extent)))

    def int(self, depth):
        if depth == 0:
            return self.pick(*self.ints, Int(self.random.randrange(6)), Load("t", Int(3)))
        a, b = self.int(depth - 1), self.int(depth - 1)
        return self.pick(
            add(a, b),
            times(a, Int(self.random.randrange(4))),
            times(self.small(a), self.small(b)),
            Binary(self.pick("min", "max"), a, b),
            Binary(self.pick("//", "%"), a, Int(self.pick(1, 2, 3, 4, 7))),
            Binary(self.pick("//", "%"), self.small(a), add(self.small(b), Int(1))),
            Load("t", self.small(a)),
            Select(self.test(depth - 1), a, b),
            self.small(a),
        )

    def number(self, depth):
        if depth == 0:
            return self.pick(
                *self.numbers, Float(float(self.random.randrange(5))), Load("x", Int(2))
            )
        a, b = self.number(depth - 1), self.number(depth - 1)
        return self.pick(
            Binary(self.pick("+", "-", "max", "min"), a, b),
            times(a, Float(2.0)),
            Load("x", self.small(self.int(depth - 1))),
            Load(self.work, self.small(self.int(depth - 1))),
            Select(self.test(depth - 1), a, b),
        )

    def test(self, depth):
        of = self.pick("int", "number")
        compare = Binary(
            self.pick("<", "<=", ">", ">=", "==", "!="),
            getattr(self, of)(depth),
            getattr(self, of)(depth),
        )
        if depth > 0 and self.pick(True, False):
            return Binary(self.pick("and", "or"), compare, self.test(depth - 1))
        return compare

    def block(self, depth):
        kept = list(self.ints), list(self.numbers), list(self.mutable)
        body = tuple(s for _ in range(self.pick(1, 2)) for s in self.statement(depth))
        self.ints, self.numbers, self.mutable = kept
        return body

    def statement(self, depth):
        kind = self.pick("int", "number", "mutable", "set", "sum", "if", "for", "while", "store")
        name = self.fresh()
        if kind == "int":
            made = [Let(name, self.int(2))]
            self.ints.append(Var(name))
        elif kind in ("number", "mutable") or (kind == "set" and not self.mutable):
            made = [Let(name, self.number(2), mutable=kind != "number")]
            self.numbers.append(Var(name))
            self.mutable += [name] if kind != "number" else []
        elif kind == "set":
            # Bounded: a variable that is set many times stays exact.
            value = Binary("min", self.number(2), Float(999.0))
            made = [Set(self.pick(*self.mutable), Binary("max", value, Float(-999.0)))]
        elif kind == "sum":
            made = [
                Set(self.sum, add(Var(self.sum), self.number(1))),
                Store(
                    "r", add(Int(self.common + 1), self.pick(Int(0), Int(1))), self.number(1), "+"
                ),
                Store("r", Int(self.common + 3), self.number(1), "max", self.pick(True, False)),
            ]
        elif kind == "store":
            made = [
                Store(self.array, self.place(), self.number(2), self.pick(None, None, "+", "max"))
            ]
        elif depth == 0:
            made = []
        elif kind == "if":
            made = [If(self.test(1), self.block(depth - 1), self.pick((), self.block(depth - 1)))]
        elif kind == "for":
            end = self.pick(Int(2), Binary("%", self.int(1), Int(4)))
            self.ints.append(Var(name))
            made = [For(name, Int(0), end, self.block(depth - 1), self.pick(1, 2))]
            self.ints.pop()
        else:
            end = self.pick(Int(2), Binary("%", self.int(1), Int(4)))
            step = Set(name, add(Var(name), Int(1)))
            made = [
                Let(name, Int(0), mutable=True),
                While(Binary("<", Var(name), end), (*self.block(depth - 1), step)),
            ]
        return made
