"""Passes over the loop IR."""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.loop_ir.arithmetic import names_in
from sgap_jax.compiler.loop_ir.loopir import (
    For,
    GroupReduce,
    If,
    Int,
    Let,
    Mma,
    MmaStore,
    SegReduce,
    Set,
    Stmt,
    Store,
    While,
)
from sgap_jax.compiler.loop_ir.mma import integers

Body = tuple[Stmt, ...]


def without_unused(body: Body) -> Body:
    """Dead code elimination: removes scalars that nothing else reads, and blocks without effect."""
    used: set[str] = set()
    while True:
        more = used | _used(body, used)
        if more == used:
            return _kept(body, used)
        used = more


def copies(body: Body) -> int:
    """The largest number of copies of one statement after unrolling."""
    most = 1
    for statement in body:
        match statement:
            case For(begin=Int(begin), end=Int(end), unit="unroll"):
                most = max(most, (end - begin) * copies(statement.body))
            case For() | While():
                most = max(most, copies(statement.body))
            case If():
                most = max(most, copies(statement.then), copies(statement.otherwise))
    return most


def _used(body: Body, used: set[str]) -> set[str]:
    found: set[str] = set()
    for statement in body:
        match statement:
            case Let(name, value) | Set(name, value):
                if name in used:
                    found |= names_in(value)
            case For():
                inside = _used(statement.body, used)
                if inside or _acts(statement.body, used):
                    found |= inside | names_in(statement.begin) | names_in(statement.end)
            case While():
                if _acts(statement.body, used):
                    found |= names_in(statement.condition) | _used(statement.body, used)
            case If():
                found |= _used(statement.then, used) | _used(statement.otherwise, used)
                if _acts(statement.then, used) or _acts(statement.otherwise, used):
                    found |= names_in(statement.condition)
            case Store() | GroupReduce() | SegReduce():
                found |= names_in(statement.index) | names_in(statement.value)
            case Mma() | MmaStore():
                found |= {name for expr in integers(statement) for name in names_in(expr)}
    return found


def _acts(body: Body, used: set[str]) -> bool:
    """Whether a block stores, or sets a scalar that is used."""
    for statement in body:
        match statement:
            case Store() | GroupReduce() | SegReduce() | Mma() | MmaStore():
                return True
            case Set(name):
                if name in used:
                    return True
            case For() | While():
                if _acts(statement.body, used):
                    return True
            case If():
                if _acts(statement.then, used) or _acts(statement.otherwise, used):
                    return True
    return False


def _kept(body: Body, used: set[str]) -> Body:
    kept: list[Stmt] = []
    for statement in body:
        match statement:
            case Let(name) | Set(name):
                if name in used:
                    kept.append(statement)
            case For() | While():
                if _acts(statement.body, used):
                    kept.append(dataclasses.replace(statement, body=_kept(statement.body, used)))
            case If():
                then, otherwise = _kept(statement.then, used), _kept(statement.otherwise, used)
                if _acts(then, used) or _acts(otherwise, used):
                    kept.append(If(statement.condition, then, otherwise))
            case _:
                kept.append(statement)
    return tuple(kept)
