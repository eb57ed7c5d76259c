"""How `jax.export` writes down the static part of a SparseArray that a program takes or returns."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax.export

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import Compressed, Dense, Format, Singleton
from sgap_jax.formats.stored import CheckedIndices, CheckedLevel, CheckedTranspose

_LEVELS: dict[str, Any] = {level.__name__: level for level in (Dense, Compressed, Singleton)}


def _written(static: tuple) -> bytes:
    shape, format = static
    levels = [[type(level).__name__, dataclasses.asdict(level)] for level in format.levels]
    return json.dumps([shape, levels, format.order]).encode()


def _read(text: bytes | bytearray) -> tuple:
    shape, levels, order = json.loads(bytes(text))
    made = tuple(_LEVELS[name](**fields) for name, fields in levels)
    return tuple(shape), Format(made, None if order is None else tuple(order))


def _of_children(aux_data: Any, children: Sequence[Any]) -> SparseArray:
    return SparseArray(*children, *aux_data)


# The names are part of exported programs.
for _tuple in (CheckedIndices, CheckedLevel, CheckedTranspose):
    jax.export.register_namedtuple_serialization(
        _tuple, serialized_name=f"sgap_jax.{_tuple.__name__}"
    )
jax.export.register_pytree_node_serialization(
    SparseArray,
    serialized_name="sgap_jax.SparseArray",
    serialize_auxdata=_written,
    deserialize_auxdata=_read,
    from_children=_of_children,
)
