"""The meaning of the statements for tensor cores as loops, for the C text and the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

from sgap_jax.compiler.loop_ir.arithmetic import ZERO, add, multiply
from sgap_jax.compiler.loop_ir.loopir import (
    Binary,
    Expr,
    For,
    Int,
    Load,
    Matrix,
    Mma,
    MmaStore,
    Side,
    Stmt,
    Store,
    Var,
)


def declared(statement: Mma | MmaStore) -> For:
    """Loops that compute the same, element by element."""
    r, c = map(Var, statement.loops[:2])
    place = add(multiply(r, Int(statement.shape[1])), c)
    body: Stmt
    if isinstance(statement, Mma):
        s = statement.loops[2]
        left, right = statement.left, statement.right
        product = Binary(
            "*",
            Load(left.array, _element(left, r, Var(s))),
            Load(right.array, _element(right, Var(s), c)),
        )
        body = For(s, ZERO, statement.depth, (Store(statement.tile, place, product, "+"),))
    else:
        index = _element(statement.target, r, c)
        value: Expr = Load(statement.tile, place)
        if statement.scale is not None:
            place = _within(statement.target, r, c)
            value = Binary("*", Load(statement.scale, add(statement.offset, place)), value)
        body = Store(statement.target.array, index, value, statement.op, statement.atomic)
    columns = For(statement.loops[1], ZERO, statement.columns, (body,))
    return For(statement.loops[0], ZERO, Int(statement.shape[0]), (columns,))


def integers(statement: Mma | MmaStore) -> Iterator[Expr]:
    """The integer expressions of a statement."""
    yield statement.columns
    matrices: tuple[Matrix, ...]
    if isinstance(statement, Mma):
        yield statement.depth
        matrices = (statement.left, statement.right)
    else:
        yield statement.offset
        matrices = (statement.target,)
    for matrix in matrices:
        yield from (matrix.rows.first, matrix.columns.first, matrix.offset)


def _element(matrix: Matrix, row: Expr, column: Expr) -> Expr:
    return add(matrix.offset, _within(matrix, row, column))


def _within(matrix: Matrix, row: Expr, column: Expr) -> Expr:
    return add(_number(matrix.rows, row), _number(matrix.columns, column))


def _number(side: Side, x: Expr) -> Expr:
    at = add(side.first, x)
    return multiply(at if side.gather is None else Load(side.gather, at), Int(side.stride))
