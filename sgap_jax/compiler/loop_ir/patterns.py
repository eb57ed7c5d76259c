"""Traversal of the loop IR, and queries: gathers of a loop, loops of sums, pure expressions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sgap_jax.compiler.loop_ir.loopir import (
    Binary,
    Comment,
    Expr,
    For,
    Let,
    Load,
    Search,
    Set,
    Stmt,
    Var,
)


def statements(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """Each statement, followed by the statements inside it."""
    for statement in body:
        yield statement
        for field in ("body", "then", "otherwise"):
            yield from statements(getattr(statement, field, ()))


@functools.cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """The names of the fields of a kind of IR node; None if `kind` is no dataclass."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def parts(node: Any) -> Iterator[Any]:
    """A statement or an expression, followed by all nodes inside it."""
    if isinstance(node, tuple):
        for child in node:
            yield from parts(child)
    elif (names := _fields(node.__class__)) is not None:
        yield node
        for name in names:
            yield from parts(getattr(node, name))


def pure(expr: Expr) -> bool:
    """Whether an expression reads no memory and does not divide, so that it may be evaluated
    anywhere."""
    return not any(
        isinstance(part, (Load, Search)) or (isinstance(part, Binary) and part.op in ("//", "%"))
        for part in parts(expr)
    )


def replaced(node: Any, old: Expr, new: Expr) -> Any:
    """`node` with every occurrence of `old` replaced by `new`."""
    if node == old:
        return new
    changed = {}
    for name in _fields(node.__class__) or ():
        before = getattr(node, name)
        if (after := replaced(before, old, new)) is not before:
            changed[name] = after
    return dataclasses.replace(node, **changed) if changed else node


def only_sums(loop: For) -> bool:
    """Whether the body of a loop only defines constants and updates scalars."""
    return all(
        isinstance(s, (Set, Comment)) or (isinstance(s, Let) and not s.mutable) for s in loop.body
    )


@functools.lru_cache(maxsize=64)  # called again for each copy of a loop that is printed
def gathers(loop: For) -> Mapping[Load, Load]:
    """Maps each gather of the body to the load that decides its place: B[crd[p] * n] to crd[p], p
    the loop's variable.

    Scalars that the body defines are substituted, so that only scalars from outside are left.
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
