"""The arguments of transformations as a caller writes them: converts them to variables and
accesses, and prints the call for an error message."""

from __future__ import annotations

from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar, Tensor
from sgap_jax.schedules.schedule import ScheduleError

Var = IndexVar | str
Vars = Var | tuple[Var, ...]


def variable(var: Var) -> IndexVar:
    if not isinstance(var, str | IndexVar):
        raise ScheduleError(f"expected variables or their names, got {var!r}")
    return IndexVar(var) if isinstance(var, str) else var


def variables(given: Vars) -> tuple[IndexVar, ...]:
    return tuple(map(variable, given)) if isinstance(given, tuple) else (variable(given),)


def access_of(expression: Assign, access: Access | Tensor | str) -> Access:
    """The access that an argument stands for; it may be an access or the name of an operand."""
    if isinstance(access, Access):
        return access
    if not isinstance(access, str | Tensor):
        raise ScheduleError(f"expected an access or the name of an operand, got {access!r}")
    name = access if isinstance(access, str) else access.name
    factors = [access for access in expression.accesses if access.tensor == name]
    if not factors:
        there = ", ".join(access.tensor for access in expression.accesses)
        raise ScheduleError(f"{name} is not an argument of the expression; there are {there}")
    return factors[0]


def written(name: str, arguments: tuple) -> str:
    return f"{name}({', '.join(map(_word, arguments))})"


def _word(argument: object) -> str:
    if isinstance(argument, tuple):
        return f"({', '.join(map(_word, argument))})"
    return argument.name if isinstance(argument, Tensor) else str(argument)
