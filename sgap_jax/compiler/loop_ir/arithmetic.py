"""Constructors of loop IR expressions that fold constants, and queries of expressions."""

from __future__ import annotations

from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, Float, Int, Load, Search, Select, Var

ZERO, ONE = Int(0), Int(1)


def add(left: Expr, right: Expr) -> Expr:
    match left, right:
        case Int(a), Int(b):
            return Int(a + b)
        case Int(0), other:
            return other
        case other, Int(0):
            return other
        case Binary("+", other, Int(a)), Int(b):
            return add(other, Int(a + b))
    return Binary("+", left, right)


def subtract(left: Expr, right: Expr) -> Expr:
    match left, right:
        case Int(a), Int(b):
            return Int(a - b)
        case other, Int(0):
            return other
    return Binary("-", left, right)


def multiply(left: Expr, right: Expr) -> Expr:
    match left, right:
        case Int(a), Int(b):
            return Int(a * b)
        case (Int(0), _) | (_, Int(0)):
            return ZERO
        case (Int(1), other) | (other, Int(1)):
            return other
    return Binary("*", left, right)


def divide(left: Expr, size: int) -> Expr:
    """left // size, rounded down."""
    if isinstance(left, Int):
        return Int(left.value // size)
    return left if size == 1 else Binary("//", left, Int(size))


def modulo(left: Expr, size: int) -> Expr:
    if isinstance(left, Int):
        return Int(left.value % size)
    return ZERO if size == 1 else Binary("%", left, Int(size))


def ceil_divide(left: Expr, size: int) -> Expr:
    return divide(add(left, Int(size - 1)), size)


def least(left: Expr, right: Expr) -> Expr:
    match left, right:
        case Int(a), Int(b):
            return Int(min(a, b))
    return left if left == right else Binary("min", left, right)


def greatest(left: Expr, right: Expr) -> Expr:
    match left, right:
        case Int(a), Int(b):
            return Int(max(a, b))
    return left if left == right else Binary("max", left, right)


def both(left: Expr | None, right: Expr | None) -> Expr | None:
    """The conjunction of truth values; None is true."""
    if left is None or right is None:
        return right if left is None else left
    return Binary("and", left, right)


def linear(coordinates: list[Expr], extents: list[int]) -> Expr:
    """The position of an element in an array in row-major order."""
    place: Expr = ZERO
    for coordinate, extent in zip(coordinates, extents, strict=True):
        place = add(multiply(place, Int(extent)), coordinate)
    return place


def children(expr: Expr) -> tuple[Expr, ...]:
    match expr:
        case Int() | Float() | Var():
            return ()
        case Load():
            return (expr.index,)
        case Binary():
            return (expr.left, expr.right)
        case Select():
            return (expr.condition, expr.true, expr.false)
        case Search():
            return (expr.low, expr.high, expr.target)


def reads_memory(expr: Expr) -> bool:
    return isinstance(expr, Load | Search) or any(map(reads_memory, children(expr)))


def names_in(expr: Expr) -> set[str]:
    if isinstance(expr, Var):
        return {expr.name}
    return {name for child in children(expr) for name in names_in(child)}
