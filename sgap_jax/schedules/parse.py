"""Schedules from text: the inverse of str()."""

import ast
import re
from fractions import Fraction

from sgap_jax.schedules.atomic import TUNABLES, AtomicParallelism
from sgap_jax.schedules.attention_tile import AttentionTile
from sgap_jax.schedules.cpu import CpuTile
from sgap_jax.schedules.octet import OctetTile
from sgap_jax.schedules.paper_octet import PaperOctetTile
from sgap_jax.schedules.schedule import Reference, Schedule, ScheduleError
from sgap_jax.schedules.subwarp import SubwarpTile
from sgap_jax.schedules.unfused import Unfused
from sgap_jax.schedules.warp import WarpTile

_NUMBER = r"[0-9]+(?:/[0-9]+)?"
_POINT = re.compile(
    rf"\{{\s*<\s*({_NUMBER})\s*(nnz|row)\s*,\s*({_NUMBER})\s*col\s*>\s*,\s*([0-9]+)\s*\}}"
    rf"((?:[\s,]+\w+={_NUMBER})*)"
)
_CALLS: dict[str, type[Schedule]] = {
    "AttentionTile": AttentionTile,
    "CpuTile": CpuTile,
    "OctetTile": OctetTile,
    "PaperOctetTile": PaperOctetTile,
    "Reference": Reference,
    "SubwarpTile": SubwarpTile,
    "WarpTile": WarpTile,
    "Unfused": Unfused,
}


def parse(text: str) -> Schedule:
    """The schedule that prints as `text`; ScheduleError where none does."""
    match = _POINT.fullmatch(text.strip())
    if match is None:
        return _parse_call(text)
    data, kind, col, group, rest = match.groups()
    given = re.findall(r"(\w+)=([0-9/]+)", rest)
    fields = dict(given)
    if len(fields) < len(given):
        raise ScheduleError(f"a tunable twice in {text!r}")
    unknown = sorted(set(fields) - set(TUNABLES))
    if unknown:
        raise ScheduleError(
            f"no tunable {unknown[0]!r} in {text!r}; there are {', '.join(TUNABLES)}"
        )
    words = {kind: data, "col": col, "group": group, **fields}
    numbers: dict = {name: _number(word, text) for name, word in words.items()}
    return AtomicParallelism(**numbers)


def _number(word: str, text: str) -> int | Fraction:
    try:
        value = Fraction(word)
    except ZeroDivisionError:
        raise ScheduleError(f"{word} in {text!r} is not a number") from None
    return value.numerator if value.denominator == 1 else value


def _parse_call(text: str) -> Schedule:
    """CpuTile(columns=64, nonzeros=8192), Reference(): keyword arguments that are constants."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            fields = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
            return _CALLS[call.func.id](**fields)
    except ScheduleError:
        raise
    except (SyntaxError, KeyError, TypeError, ValueError):
        pass  # no such class, field or constant: the same message
    raise ScheduleError(
        f"{text!r} is not a schedule; expected a point such as {{<1/8 row, 4 col>, 8}}, "
        f"or one of {', '.join(_CALLS)} with named fields, such as CpuTile(columns=64)"
    )
