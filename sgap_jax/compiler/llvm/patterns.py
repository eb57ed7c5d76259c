"""Loops whose sums may be in lanes, for LLVM IR."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

from sgap_jax.compiler.llvm.instructions import NotVector
from sgap_jax.compiler.loop_ir.arithmetic import names_in
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_VECTOR,
    Binary,
    Expr,
    Float,
    For,
    Int,
    Let,
    Load,
    Set,
    Stmt,
    Store,
    Var,
    Workspace,
)
from sgap_jax.compiler.loop_ir.patterns import gathers, only_sums, parts


@dataclasses.dataclass(frozen=True)
class Apart:
    """What a loop does if each iteration stores a sum over lanes of its own: constants, the sum,
    which starts as `start` and is reduced by `op`, its loop and the store."""

    lets: tuple[Stmt, ...]
    start: Let
    op: str
    inner: For
    store: Store


def sums_apart(loop: For) -> Apart | None:
    match loop.body:
        case (*lets, Let(name, Float(), True) as start, For() as inner, Store() as store):
            plain = all(isinstance(s, Let) and not s.mutable for s in lets)
            summed = inner.unit == CPU_VECTOR and only_sums(inner) and not gathers(inner)
            if plain and summed and (store.value, store.op) == (Var(name), None):
                with contextlib.suppress(NotVector):
                    sums = lane_sums(inner)
                    if list(sums) == [name]:
                        return Apart(tuple(lets), start, sums[name], inner, store)
    return None


def factored(loop: For, name: str) -> tuple[For, Expr | None]:
    """A loop that sums up products, without the factors that all of them share; and these."""
    own = {loop.var} | {s.name for s in loop.body if isinstance(s, Let)}
    sums = [s for s in loop.body if isinstance(s, Set)]
    match sums:
        case [Set(same, Binary("+", Var(total), product)) as sum] if same == total == name:
            factors = _factors(product)
            shared = [f for f in factors if own.isdisjoint(names_in(f))]
            if shared and len(shared) < len(factors):
                term = functools.reduce(_product, (f for f in factors if f not in shared))
                new = dataclasses.replace(sum, value=Binary("+", Var(name), term))
                body = tuple(new if s is sum else s for s in loop.body)
                return dataclasses.replace(loop, body=body), functools.reduce(_product, shared)
    return loop, None


def _factors(product: Expr) -> list[Expr]:
    match product:
        case Binary("*", left, right):
            return [*_factors(left), *_factors(right)]
    return [product]


def _product(left: Expr, right: Expr) -> Expr:
    return Binary("*", left, right)


def overwrites(statement: Stmt | None, workspace: Workspace) -> bool:
    """A loop that gives each element a value, and reads none before."""
    match statement:
        case For(var, Int(0), Int(end), (*before, Store(array, Var(place), value, None)), step=1):
            others = [*before, value]
            return (
                (array, place, end) == (workspace.name, var, workspace.size)
                and all(isinstance(s, Let) for s in before)
                and not any(isinstance(x, Load) and x.array == array for x in parts(tuple(others)))
            )
    return False


def lane_sums(loop: For) -> dict[str, str]:
    """The operation by which the body reduces into each scalar from outside.

    Such a scalar occurs as `s = s op value` and nowhere else: each lane may have one of its own.
    """
    nodes = list(parts(loop.body))
    own = {node.name for node in nodes if isinstance(node, Let)}
    sums: dict[str, str] = {}
    uses: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, Set) and node.name not in own:
            match node.value:
                case Binary("+" | "max" | "min" as op, Var(name), _) if name == node.name:
                    pass
                case Binary("+" | "max" | "min" as op, _, Var(name)) if name == node.name:
                    pass
                case _:
                    raise NotVector
            if sums.setdefault(name, op) != op:
                raise NotVector
            uses[name] = uses.get(name, 0) + 1
    for name, count in uses.items():
        if sum(isinstance(node, Var) and node.name == name for node in nodes) != count:
            raise NotVector
    return sums
