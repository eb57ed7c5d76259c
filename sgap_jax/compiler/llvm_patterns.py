"""What loops sum up, what they gather, and what may be evaluated where it is not needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from sgap_jax.compiler.llvm_code import NotVector
from sgap_jax.compiler.loopir import (
    CPU_VECTOR,
    Binary,
    Comment,
    Expr,
    Float,
    For,
    Int,
    Let,
    Load,
    Search,
    Set,
    Stmt,
    Store,
    Var,
    Workspace,
)


def parts(node: Any) -> Iterator[Any]:
    """A statement or an expression and all that it is made of."""
    if isinstance(node, tuple):
        for child in node:
            yield from parts(child)
    elif dataclasses.is_dataclass(node):
        yield node
        for field in dataclasses.fields(node):
            yield from parts(getattr(node, field.name))


def pure(expr: Expr) -> bool:
    """It reads no memory and does not divide: to evaluate it is harmless."""
    return not any(
        isinstance(part, (Load, Search)) or (isinstance(part, Binary) and part.op in ("//", "%"))
        for part in parts(expr)
    )


def replaced(node: Any, old: Expr, new: Expr) -> Any:
    """`node` with `new` wherever `old` is in it."""
    if node == old:
        return new
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node
    fields = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
    return dataclasses.replace(node, **{n: replaced(v, old, new) for n, v in fields.items()})


def only_sums(loop: For) -> bool:
    """Its body has nothing but constants and the scalars that it adds to."""
    return all(
        isinstance(s, (Set, Comment)) or (isinstance(s, Let) and not s.mutable) for s in loop.body
    )


def sums_apart(loop: For) -> tuple[tuple[Stmt, ...], Let, For, Store] | None:
    """What a loop over lanes does if each stores a sum over lanes of its own: constants, the sum,
    its loop and the store; or None."""
    match loop.body:
        case (*lets, Let(name, Float(), True) as start, For() as inner, Store() as store):
            plain = all(isinstance(s, Let) and not s.mutable for s in lets)
            summed = inner.unit == CPU_VECTOR and only_sums(inner) and not gathers(inner)
            if plain and summed and (store.value, store.op) == (Var(name), None):
                return tuple(lets), start, inner, store
    return None


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


def gathers(loop: For) -> dict[Load, Load]:
    """Loads of the body at a place that another load, at the loop's variable, decides: that one.

    Scalars of the body are put in, so that only those of outside are left.
    """
    lets: list[tuple[Var, Expr]] = []
    found: dict[Load, Load] = {}
    for statement in loop.body:
        value = getattr(statement, "value", None)
        for name, of in reversed(lets):
            value = replaced(value, name, of)
        for load in parts(value):
            if isinstance(load, Load):
                for inner in parts(load.index):
                    if isinstance(inner, Load) and Var(loop.var) in parts(inner.index):
                        found[load] = inner
        if isinstance(statement, Let) and value is not None:
            lets.append((Var(statement.name), value))
    return found


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
