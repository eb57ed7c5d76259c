"""Routing of tokens to experts: a structure made of the expert that each token is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import ArrayLike

from sgap_jax.formats import checks, structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import BCSR, CSR, Format, require_stored
from sgap_jax.primitives._define import as_numbers
from sgap_jax.primitives.spmm import spmm


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("dispatch", "assignment", "offsets", "starts", "dropped"),
    meta_fields=("choices", "block"),
)
@dataclass(frozen=True, eq=False)
class Routing:
    """Tokens in the order of their experts, each expert's padded to blocks: see `route`.

    Attributes:
      dispatch: CSR [rows, tokens] of float32 ones: row r stores the token that is in it, and
        nothing if it is padding. `rows` is static, a multiple of `block`.
      assignment: int32 [tokens * choices]: which of the flattened experts entry p of `dispatch`
        belongs to; those of its padding are arbitrary.
      offsets: int32 [experts + 1]: expert e has the entries offsets[e] .. offsets[e + 1] - 1.
      starts: int32 [experts + 1]: expert e has the rows starts[e] .. starts[e + 1] - 1, multiples
        of `block`.
      dropped: int32 []: how many choices of an existing expert a `capacity` left out.
      choices, block: experts per token, or None for experts [tokens]; rows of a block.
    """

    dispatch: SparseArray
    assignment: jax.Array
    offsets: jax.Array
    starts: jax.Array
    dropped: jax.Array
    choices: int | None
    block: int

    def gather(self, x: ArrayLike) -> jax.Array:
        """[rows, d] of x [tokens, d]: the token of each row, zeros in padding. Differentiable; no
        scatter in either direction."""
        x = as_numbers("Routing.gather", "x", x)
        return spmm(self.dispatch.astype(x.dtype), x)

    def combine(self, y: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
        """[tokens, d] of y [rows, d]: the sum of the rows of each token, times its weights
        [tokens, choices] ([tokens] if the experts were that); None are ones.

            out[t] = sum over choices c of weights[t, c] y[row of (t, c)]

        A choice that was dropped, or of no expert, adds nothing. Summed in float32 at least, in the
        promoted dtype of y and weights. Differentiable in both.
        """
        what = "Routing.combine"
        y = as_numbers(what, "y", y)
        if weights is None:
            return spmm(self.dispatch.astype(y.dtype), y, transpose=True)
        weights = as_numbers(what, "weights", weights)
        tokens = self.dispatch.shape[1]
        shape = (tokens,) if self.choices is None else (tokens, self.choices)
        if weights.shape != shape:
            raise ValueError(
                f"{what}: weights must have shape {list(shape)}, got {list(weights.shape)}"
            )
        values = weights.reshape(-1)[self.assignment]
        return spmm(self.dispatch.with_values(values), y, transpose=True)

    def topology(self, columns: int, *, width: int = 1) -> SparseArray:
        """The blocks of (rows x experts): BCSR(block, width) of shape [rows, experts * columns],
        where expert e has the columns e columns .. (e + 1) columns - 1, in the rows of its tokens.

        With stacked weights W1, W2 [experts * columns, d] the layer of all experts is

            spmm(act(sddmm(topology, x, W1)), W2)        x = gather(tokens)

        The values are ones. Fewer blocks may be in use than are stored; the rest is padding.
        ValueError if `width` does not divide `columns`.
        """
        what = "Routing.topology"
        columns = checks.check_count(columns, "columns", what)
        width = checks.check_count(width, "width", what)
        if width < 1 or columns % width:
            raise ValueError(f"{what}: width must divide {columns} columns, got {width}")
        format = require_stored(BCSR(self.block, width), 2, what)
        checks.check_nnz(self.dispatch.shape[0] * columns, what)
        return _topology(self.starts, self.dispatch.shape[0], columns, format)


@partial(jax.jit, static_argnames=("rows", "columns", "format"), inline=True)
def _topology(starts: jax.Array, rows: int, columns: int, format: Format) -> SparseArray:
    block, width = format.block_shape
    experts, per_row, down = starts.shape[0] - 1, columns // width, rows // block
    expert = structure.segment_of_entry(starts // block, down)
    used = starts[-1] // block
    offsets = jnp.minimum(structure.positions(down + 1), used) * per_row
    indices = (expert[:, None] * per_row + structure.positions(per_row)[None]).reshape(-1)
    transposed = structure.transpose_structure(offsets, indices, experts * per_row)
    return SparseArray(
        values=jnp.ones((down * per_row, block, width), jnp.float32),
        **structure.as_fields(((), (offsets, indices)), transposed, checked=True),
        shape=(rows, experts * columns),
        format=format,
    )


def route(
    expert_of_token: ArrayLike, experts: int, *, block: int = 16, capacity: int | None = None
) -> Routing:
    """Sorts tokens by their experts, as block-sparse mixtures of experts need it.

        rows of expert e = those (t, c) with expert_of_token[t, c] = e, ascending, then padding up
                           to a multiple of `block`

    Works inside jit: the number of rows is static, the greatest that any choice can need,
    tokens * choices + min(experts, tokens * choices) (block - 1) rounded down to blocks. A stable
    counting sort, on the CPU and on CUDA in linear time.

    Args:
      expert_of_token: integers [tokens] or [tokens, choices], traced or not. A token whose expert
        is not in 0 .. experts - 1 goes nowhere. Batches: `jax.vmap`.
      experts: how many there are, static.
      block: rows of a block.
      capacity: at most so many tokens for each expert, static; the first ones are kept, in the
        order of the flattened choices, and `dropped` counts the others. None: no token is dropped.

    Returns:
      A `Routing`: `gather` brings tokens in this order, `topology` is the block-sparse structure of
      what experts compute, `combine` adds up the results of each token.

    Raises:
      ValueError: wrong shapes, no experts, or a negative size. TypeError: not integers.

    Source: MegaBlocks (Gale et al., MLSys 2023), sections 4 and 5.2 (dropless routing, padding to
    blocks, the topology); Switch Transformer (Fedus et al., 2022), section 2.2 (capacity).
    """
    what = "select.route"
    experts = checks.check_count(experts, "experts", what, 1)
    block = checks.check_count(block, "block", what, 1)
    if capacity is not None:
        capacity = min(checks.check_count(capacity, "capacity", what), checks.INT32_MAX)
    given = checks.as_array(expert_of_token)
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(f"{what}: expert_of_token must be integers, got {given.dtype}")
    if given.ndim not in (1, 2):
        raise ValueError(
            f"{what}: expert_of_token must have shape [tokens] or [tokens, choices], got "
            f"{list(given.shape)}; a batch is a vmap"
        )
    symbolic = export.is_symbolic_dim(given.size)
    rows = given.size + (experts if symbolic else min(experts, given.size)) * (block - 1)
    if capacity is not None:
        most = experts * -(-capacity // block) * block
        rows = most if symbolic else min(rows, most)
    checks.check_nnz(rows, what)
    return _routed(
        checks.saturated(given), experts=experts, block=block, capacity=capacity, rows=rows
    )


@structure.in_auto_axes
@partial(jax.jit, static_argnames=("experts", "block", "capacity", "rows"), inline=True)
def _routed(
    chosen: jax.Array, *, experts: int, block: int, capacity: int | None, rows: int
) -> Routing:
    tokens, choices = chosen.shape[0], None if chosen.ndim == 1 else chosen.shape[1]
    count, rows = chosen.size, rows // block * block
    once = jnp.asarray([0, count], jnp.int32)
    offsets, _, assignment = structure.transpose_structure(once, chosen.reshape(-1), experts)
    lengths = jnp.diff(offsets)
    dropped = jnp.zeros((), jnp.int32)
    if capacity is not None:
        place = structure.positions(count)
        first = offsets[structure.segment_of_entry(offsets, count)]
        kept = (place - first < capacity) & (place < offsets[-1])
        # Those that are kept come first, in their order.
        order = structure.transpose_structure(once, kept.astype(jnp.int32) - 1, 1)[2]
        assignment, lengths = assignment[order], jnp.minimum(lengths, capacity)
        dropped = offsets[-1] - jnp.sum(lengths, dtype=jnp.int32)
        offsets = _from_zero(lengths)
    starts = _from_zero(-(-lengths // block) * block)
    # Entries before each row: those of the experts before, and of the own the rows before.
    row = structure.positions(rows + 1)
    expert = structure.segment_of_entry(starts, rows + 1)
    row_offsets = offsets[expert] + jnp.minimum(row - starts[expert], lengths[expert])
    columns = assignment // (choices or 1)
    transposed = structure.transpose_structure(row_offsets, columns, tokens)
    dispatch = SparseArray(
        values=jnp.ones(count, jnp.float32),
        **structure.as_fields(((), (row_offsets, columns)), transposed, checked=True),
        shape=(rows, tokens),
        format=CSR,
    )
    return Routing(dispatch, assignment, offsets, starts, dropped, choices, block)


def _from_zero(lengths: jax.Array) -> jax.Array:
    """[n + 1]: the sums of the lengths before each."""
    return jnp.append(0, jnp.cumsum(lengths, dtype=jnp.int32)).astype(jnp.int32)
