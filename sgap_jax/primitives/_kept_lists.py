"""Work lists that a structure keeps (`prepare`) on their way to the launches that take them.

They are the last operands of a primitive, after its index arrays, named by the static parameter
`lists`. `define` takes them off before a rule of the primitive sees its operands. Two of the rules
need them: the lowering to CUDA, which looks here before it makes a list (_row_pieces.py), and
derivatives, which bind other primitives on the same index arrays: there `bind` puts them on again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jax.extend.core import Primitive

from sgap_jax.formats.stored import ListKey, PreparedTranspose
from sgap_jax.launch.row_pieces import FIELDS, WorkList

# Primitives that take lists, or whose derivatives do.
_TAKING: set[Primitive] = set()
# The index arrays and lists of the rule that runs.
_kept: ContextVar[tuple[tuple, tuple, tuple[ListKey, ...]]] = ContextVar("kept", default=((),) * 3)
_asked: ContextVar[dict[ListKey, None] | None] = ContextVar("asked", default=None)


def lists_of(A: Any) -> tuple[tuple, dict[str, Any]]:
    """The lists that a CSR or CVS array keeps, and the parameter that names them. ValueError for
    leaves that something else has put there and that no launch could take."""
    found = A.transposed
    if not isinstance(found, PreparedTranspose) or not A.is_checked:
        return (), {}
    keys, lists = found.keys, found.lists
    if len(keys) != len(lists):
        raise ValueError(
            f"SparseArray: lists of pieces: expected {len(keys)}, one for each key, "
            f"got {len(lists)}"
        )
    for (_, _, rows, capacity, chunk, least), x in zip(keys, lists, strict=True):
        size = FIELDS * WorkList(rows, capacity, chunk, least or None).elements
        dtype, shape = getattr(x, "dtype", type(x).__name__), list(getattr(x, "shape", ()))
        if dtype != "int32" or shape != [size]:
            raise ValueError(
                f"SparseArray: lists of pieces: expected int32 [{size}], got {dtype} {shape}"
            )
    return (lists, {"lists": keys}) if keys else ((), {})


def taken_off(operands: Sequence, params: dict) -> tuple[Sequence, Sequence, dict]:
    """Operands without lists, the lists, and the parameters without their names."""
    if not params.get("lists"):
        return operands, (), params
    count = len(operands) - len(params["lists"])
    rest = {name: x for name, x in params.items() if name != "lists"}
    return operands[:count], operands[count:], rest


def without_lists(function: Callable) -> Callable:
    """A function of operands and parameters that sees no lists."""

    def run(*operands: Any, **params: Any) -> Any:
        own, _, params = taken_off(operands, params)
        return function(*own, **params)

    return run


def takes_lists(primitive: Primitive) -> None:
    _TAKING.add(primitive)


@contextmanager
def keeping(arrays: Sequence, lists: Sequence, params: dict) -> Iterator[None]:
    """While a rule runs on these index arrays, of which these are the lists that `params` name."""
    token = _kept.set((tuple(arrays), tuple(lists), params.get("lists", ())))
    try:
        yield
    finally:
        _kept.reset(token)


def put_on(primitive: Primitive, operands: tuple, params: dict) -> tuple[tuple, dict]:
    """Operands and parameters of a call that a rule binds, with the lists of the rule's index
    arrays, if these are the call's."""
    arrays, lists, keys = _kept.get()
    if not keys or primitive not in _TAKING or "lists" in params:
        return operands, params
    own = operands[-len(arrays) :]
    if len(own) < len(arrays) or any(a is not b for a, b in zip(own, arrays, strict=True)):
        return operands, params
    return (*operands, *lists), params | {"lists": keys}


@contextmanager
def asked() -> Iterator[dict[ListKey, None]]:
    """Collects the keys of lists by which the launches that are lowered walk their structures."""
    found: dict[ListKey, None] = {}
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


def kept_list(work: WorkList, offsets: Any, group: int) -> Any:
    """The list of these sizes that is an operand of the call that is being lowered, or None;
    `offsets` are lowered: one of the call's index arrays, or made of them."""
    arrays, lists, keys = _kept.get()
    axis = next((i for i, x in enumerate(arrays[:3:2]) if x is offsets), None)
    if axis is None:
        return None
    key = (axis, group, work.rows, work.capacity, work.chunk, work.least or 0)
    if (collected := _asked.get()) is not None:
        collected[key] = None
    return dict(zip(keys, lists, strict=True)).get(key)
