"""`AttentionShapes`, the sizes and options of an attention call, and the launch arguments that all
attention kernels share."""

from __future__ import annotations

import dataclasses
import struct

from sgap_jax.launch.kernel_call import TYPES
from sgap_jax.schedules.attention import AttentionTile
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import GRID_Y


@dataclasses.dataclass(frozen=True)
class AttentionShapes:
    """Sizes and options of an attention call that `Problem` does not have.

    Attributes:
      heads, key_heads: number of heads of q and out, and of k and v; key_heads divides heads.
      value_depth: features of a head of v.
      batch: number of sequences in the results.
      many: which of "q", "k", "v", "bias", "sinks", "lengths", "dout", "delta", "lse" have a
        leading axis of `batch`; the sequences share the others.
      bias: None if there is none, "shared" for one for all heads, "heads" for one for each head.
      sinks, lengths: whether the call has them.
      is_causal: entries (i, j) with j > i are masked.
    """

    heads: int
    key_heads: int
    value_depth: int
    batch: int = 1
    many: frozenset[str] = frozenset()
    bias: str | None = None
    sinks: bool = False
    lengths: bool = False
    is_causal: bool = False

    @property
    def flags(self) -> int:
        """The bits of enum AttentionFlag in cuda/attention/attention.cuh, in the same order."""
        bits = [
            self.is_causal,
            self.bias is not None,
            self.bias == "heads",
            self.sinks,
            self.lengths,
        ]
        names = ("q", "k", "v", "bias", "sinks", "lengths", "dout", "delta", "lse")
        return sum(1 << i for i, bit in enumerate([*bits, *(n in self.many for n in names)]) if bit)


@dataclasses.dataclass(frozen=True)
class AttentionTerms:
    """What a call has beside: terms that depend on the places of entries, and dropout
    (cuda/attention/attention_terms.cuh). Kernels on CUDA cores have them, for rows that are whole.

    Attributes:
      present: which of `TERM_ARRAYS` the call has, "segments" for those of queries and keys.
      many: which of "slopes", "table", "query_segments", "key_segments", "offset" and "seeds" have
        a leading axis of the batch.
      softcap: of scores; 0 for none.
      range: the numbers of a row of the table.
      kept, factor: how many of 2^32 random numbers keep an entry, and what those are multiplied by.
    """

    present: frozenset[str]
    many: frozenset[str] = frozenset()
    softcap: float = 0.0
    range: int = 0
    kept: int = 0
    factor: float = 0.0

    @property
    def flags(self) -> int:
        """The bits of enum TermFlag, in the same order."""
        bits = [name in self.present for name in ("slopes", "table", "segments", "offset", "seeds")]
        bits += [name in self.many for name in TERM_ARRAYS]
        return sum(1 << i for i, bit in enumerate(bits) if bit)

    @property
    def scalars(self) -> tuple[int, ...]:
        """The kernels' arguments after all others."""
        return _bits(self.softcap), _bits(self.factor), self.range, self.kept, self.flags


TERM_ARRAYS = ("slopes", "table", "query_segments", "key_segments", "offset", "seeds")


def term_pointers(wide: str) -> list[str]:
    """The C++ types of `TERM_ARRAYS`."""
    return [wide, wide, "int", "int", "int", "unsigned"]


def _bits(number: float) -> int:
    """A float64 as an int64."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def checked(problem: Problem, schedule: AttentionTile, shapes: AttentionShapes) -> int:
    """Checks that the schedule takes the problem; returns V, 1 for formats without vectors."""
    schedule.check_depth(shapes.value_depth)
    if shapes.heads > GRID_Y:
        raise NotImplementedError(f"attention: a launch has up to {GRID_Y} heads")
    return problem.vector_length or 1


def types(problem: Problem) -> tuple[str, str]:
    """The C++ types of the operands and of their accumulators."""
    return TYPES[problem.dtype], "double" if problem.dtype == "float64" else "float"


def scalars(problem: Problem, shapes: AttentionShapes, scale: float) -> tuple[int, ...]:
    """The kernels' arguments after the pointers."""
    (m, keys), length = problem.shape, problem.vector_length or 1
    return (
        m,
        keys,
        shapes.heads,
        shapes.key_heads,
        problem.n,
        shapes.value_depth,
        problem.nnz // length,
        shapes.batch,
        _bits(scale),
        shapes.flags,
    )
