"""`PartitionedArray`: a sparse matrix whose rows are spread over the devices of a mesh axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from sgap_jax.formats import checks
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.levels import CSR
from sgap_jax.formats.structure import whole
from sgap_jax.parallel.plan import Exchange, bounds_of, cut, explanation
from sgap_jax.primitives.spmm import spmm as local_spmm
from sgap_jax.schedules import Schedule


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("own", "foreign", "sends", "row_places", "column_places"),
    meta_fields=("shape", "mesh", "axis", "exchange", "entries"),
)
@dataclasses.dataclass(frozen=True)
class PartitionedArray:
    """A sparse matrix [m, k] in parts; `partition` makes it.

    Each device of the mesh axis has the rows of one part, as two matrices: of the columns that are
    its own, and of those that other parts own. A dense operand is in parts too: [parts, rows, n],
    on each device the rows of its own columns (`to_parts`), and so is a result, whose rows are
    those of its part (`from_parts`). A pytree: values and index arrays are leaves, split over the
    axis.

    Attributes:
      own, foreign: SparseArrays whose leaves have a leading axis for the parts. The columns of
        `foreign` are places in the buffer that a part receives.
      sends: for each message, which of its rows a part sends.
      row_places, column_places: where row i of the result, or of a dense operand, is among the
        rows of all parts.
      shape, mesh, axis: of the matrix, and what it is spread over.
      exchange: what travels.
      entries: stored entries of each part.
    """

    own: SparseArray
    foreign: SparseArray
    sends: tuple[jax.Array, ...]
    row_places: jax.Array
    column_places: jax.Array
    shape: tuple[int, int]
    mesh: Mesh
    axis: str
    exchange: Exchange
    entries: tuple[int, ...]

    @property
    def parts(self) -> int:
        return len(self.entries)

    @property
    def dtype(self) -> Any:
        return self.own.dtype

    @property
    def values(self) -> tuple[jax.Array, jax.Array]:
        """The values of all parts, of own and of foreign columns: each [parts, entries]."""
        return self.own.values, self.foreign.values

    def with_values(self, values: tuple[Any, Any]) -> PartitionedArray:
        """The same structure with other `values`."""
        own, foreign = (
            dataclasses.replace(A, values=jnp.asarray(x))
            for A, x in zip((self.own, self.foreign), values, strict=True)
        )
        if own.values.shape != self.own.values.shape:
            raise ValueError(
                f"PartitionedArray.with_values: expected {self.own.values.shape} of own columns, "
                f"got {own.values.shape}"
            )
        if foreign.values.shape != self.foreign.values.shape:
            raise ValueError(
                f"PartitionedArray.with_values: expected {self.foreign.values.shape} of foreign "
                f"columns, got {foreign.values.shape}"
            )
        return dataclasses.replace(self, own=own, foreign=foreign)

    def to_parts(self, B: Any, *, transpose: bool = False) -> jax.Array:
        """[k, n] -> [parts, rows, n], split over the axis: the dense operand of a product, or with
        `transpose` [m, n] that of one with A^T. Padding is zero."""
        B = jnp.asarray(B)
        size = self.shape[0 if transpose else 1]
        if B.ndim != 2 or B.shape[0] != size:
            raise ValueError(
                f"PartitionedArray.to_parts: expected [{size}, n], got {list(B.shape)}"
            )
        places, rows = self._layout(not transpose)
        out = jnp.zeros((self.parts * rows, B.shape[1]), B.dtype).at[places].set(whole(B))
        return self._split(out.reshape(self.parts, rows, B.shape[1]))

    def from_parts(self, C: Any, *, transpose: bool = False) -> jax.Array:
        """[parts, rows, n] -> [m, n]: the result of a product, or with `transpose` [k, n], that of
        one with A^T."""
        places, rows = self._layout(transpose)
        C = self._checked("from_parts", C, rows)
        return whole(C).reshape(self.parts * rows, C.shape[2])[places]

    def __matmul__(self, B: Any) -> jax.Array:
        return spmm(self, B)

    def __repr__(self) -> str:
        m, k = self.shape
        return (
            f"PartitionedArray([{m}, {k}], {self.dtype}, {sum(self.entries)} entries in "
            f"{self.parts} parts over {self.axis!r})"
        )

    def explain(self, n: int = 1, dtype: Any = jnp.float32) -> str:
        """What one product with n columns sends between devices, and what an all-gather of the
        dense operand would."""
        columns = self._layout(True)[1]
        return explanation(self.exchange, self.entries, columns, n, np.dtype(dtype).itemsize)

    def _layout(self, of_columns: bool) -> tuple[jax.Array, int]:
        """(the places, the rows of a part) of dense operands or of results."""
        if of_columns:
            return self.column_places, self.own.shape[1]
        return self.row_places, self.own.shape[0]

    def _checked(self, op: str, x: Any, rows: int) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim != 3 or x.shape[:2] != (self.parts, rows):
            raise ValueError(
                f"PartitionedArray.{op}: expected [{self.parts}, {rows}, n], got {list(x.shape)}"
            )
        return x

    def _split(self, x: jax.Array) -> jax.Array:
        explicit = AxisType.Explicit in self.mesh.axis_types
        put = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
        return put(x, NamedSharding(self.mesh, jax.P(self.axis)))


def partition(
    A: SparseArray,
    mesh: Mesh,
    axis: str,
    *,
    rows: str | Sequence[int] = "balanced",
    order: str | Callable[[SparseArray], Any] = "given",
) -> PartitionedArray:
    """Spreads the rows of a sparse matrix over the devices along an axis of a mesh.

    Part p has a range of rows. Of a square matrix (a graph) it owns the same range of columns, so
    that a result is the next product's operand; of another one the columns are spread evenly. A
    product sends only those rows of the dense operand that another part has entries for, each once
    to each part, by all_to_all or by rounds of ppermute, whichever sends less with its padding.

    Args:
      A: sparse [m, k] with a concrete structure and concrete values, in any format; entries with
        equal coordinates are summed.
      mesh, axis: the mesh, and the name of the axis whose devices get a part each.
      rows: "balanced" by entries, "even", or the number of rows of each part, in all m.
      order: "given", or a function of A that gives a permutation of its rows, part by part: row
        order[i] comes i-th. Of a square matrix the columns are permuted likewise.

    Returns:
      A `PartitionedArray` in A's dtype. `to_parts` and `from_parts` have the given order of rows.

    Raises:
      TypeError: A is not a SparseArray, or mesh not a Mesh.
      ValueError: A is not a concrete matrix, no such axis, rows or order that do not fit.

    Source: the 1D distribution of CAGNET (Tripathy et al., SC 2020), of which only the rows travel
    that are needed.
    """
    if not isinstance(A, SparseArray):
        raise TypeError(f"partition: A must be a SparseArray, got {type(A).__name__}")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"partition: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if axis not in mesh.axis_names:
        raise ValueError(f"partition: axis: expected one of {list(mesh.axis_names)}, got {axis!r}")
    if A.ndim != 2 or checks.is_traced(*jax.tree.leaves(A)):
        raise ValueError("partition: expected a concrete matrix; call it outside jit")
    parts, (m, k) = mesh.shape[axis], A.shape
    matrix = A.to_scipy().tocsr()
    permutation = np.arange(m) if isinstance(order, str) and order == "given" else None
    if permutation is None:
        if isinstance(order, str):
            raise ValueError(f"partition: order: expected 'given' or a function, got {order!r}")
        permutation = np.asarray(order(A))
        if permutation.shape != (m,) or not np.array_equal(np.sort(permutation), np.arange(m)):
            raise ValueError(f"partition: order: expected a permutation of 0 .. {m - 1}")
        matrix = matrix[permutation]
        matrix = matrix[:, permutation] if m == k else matrix
    matrix = matrix.tocsr()
    matrix.sum_duplicates()
    row_bounds = bounds_of(rows, np.diff(matrix.indptr), parts)
    square = m == k
    column_bounds = row_bounds if square else bounds_of("even", np.zeros(k), parts)
    found = cut(matrix.indptr, matrix.indices, matrix.data, row_bounds, column_bounds)
    split = NamedSharding(mesh, jax.P(axis))

    def stacked(each: list, columns: int) -> SparseArray:
        arrays = [
            SparseArray.from_arrays(*array, shape=(found.rows, columns), format=CSR)
            for array in each
        ]
        stack = lambda *x: jax.device_put(np.stack([np.asarray(y) for y in x]), split)  # noqa: E731
        return jax.tree.map(stack, *arrays)

    return PartitionedArray(
        own=stacked(found.own, found.columns),
        foreign=stacked(found.foreign, max(found.exchange.received, 1)),
        sends=tuple(jax.device_put(send, split) for send in found.sends),
        row_places=_places(row_bounds, found.rows, permutation, mesh),
        column_places=_places(
            column_bounds, found.columns, permutation if square else np.arange(k), mesh
        ),
        shape=(m, k),
        mesh=mesh,
        axis=axis,
        exchange=found.exchange,
        entries=tuple(np.diff(matrix.indptr[row_bounds]).tolist()),
    )


def _places(bounds: np.ndarray, padded: int, permutation: np.ndarray, mesh: Mesh) -> jax.Array:
    """Where each row is among the padded rows of all parts."""
    position = np.arange(len(permutation))
    part = np.searchsorted(bounds, position, side="right") - 1
    places = np.zeros(len(permutation), np.int32)
    places[permutation] = part * padded + position - bounds[part]
    return jax.device_put(places, NamedSharding(mesh, jax.P()))


def spmm(
    A: PartitionedArray, B: Any, *, transpose: bool = False, schedule: Schedule | None = None
) -> jax.Array:
    """The product of a matrix in parts with a dense one: C = A B, or C = A^T B with `transpose`.

        C[i, j] = sum over the stored entries (i, l) of A[i, l] B[l, j]

    Every device multiplies its own columns, receives the rows of B that its foreign columns name,
    and adds their product. With `transpose` partial sums travel the other way. Differentiable to
    any order in `A.values` and B: the exchange of a gradient is the transposed one, and sends as
    much.

    Args:
      A: [m, k] in parts.
      B: in parts, [parts, rows, n] as `A.to_parts(B)`; or [k, n] ([m, n] with `transpose`), which
        is put in parts first and the result back, at the cost of moving both.
      transpose: multiply by A^T.
      schedule: of the products on each device; None lets `choose_schedule` pick.

    Returns:
      C, in parts if B is, [parts, rows, n]; else [m, n] ([k, n] with `transpose`). Own and foreign
      columns are summed as in `sgap_jax.spmm`, each rounded once, and added in the result's dtype:
      the order of the sum is another one than on one device, the same at each call.

    Raises:
      TypeError: A is not a PartitionedArray; a SparseArray goes to `sgap_jax.spmm`.
      ValueError: B has the wrong shape.
    """
    if not isinstance(A, PartitionedArray):
        raise TypeError(
            f"parallel.spmm: A must be a PartitionedArray, got {type(A).__name__}; "
            "sgap_jax.spmm takes a SparseArray, parallel.partition spreads it"
        )
    transpose = check_flag(transpose, "transpose", "parallel.spmm")
    if jnp.ndim(B) != 3:
        C = spmm(A, A.to_parts(B, transpose=transpose), transpose=transpose, schedule=schedule)
        return A.from_parts(C, transpose=transpose)
    _, rows = A._layout(not transpose)
    B = A._checked("spmm", B, rows)
    product = partial(_product, A, schedule=schedule)
    if not transpose:
        return product(B)
    shape = (A.parts, A.own.shape[1], B.shape[2])
    given = jax.ShapeDtypeStruct(shape, jnp.result_type(A.dtype, B))  # type: ignore[no-untyped-call]
    (C,) = jax.linear_transpose(product, given)(B.astype(given.dtype))
    return C


def _product(A: PartitionedArray, B: jax.Array, schedule: Schedule | None) -> jax.Array:
    def local(own: SparseArray, foreign: SparseArray, sends: tuple, B: jax.Array) -> jax.Array:
        own, foreign, sends, B = jax.tree.map(lambda x: x[0], (own, foreign, sends, B))
        C = local_spmm(own, B, schedule=schedule)
        if sends:
            received = _received(A.exchange, A.axis, sends, B)
            C = C + local_spmm(foreign, received, schedule=schedule)
        return C[None]

    spec = jax.P(A.axis)
    over = jax.shard_map(local, mesh=A.mesh, in_specs=(spec,) * 4, out_specs=spec)
    return over(A.own, A.foreign, A.sends, A._split(B))


def _received(exchange: Exchange, axis: str, sends: tuple, B: jax.Array) -> jax.Array:
    """[received, n]: the rows that the other parts send to this one."""
    if exchange.width:
        (rows,) = sends
        found = jax.lax.all_to_all(B[rows], axis, 0, 0)
        return found.reshape(-1, B.shape[1])
    count = len(exchange.needed)
    return jnp.concatenate(
        [
            jax.lax.ppermute(B[rows], axis, [(p, (p + shift) % count) for p in range(count)])
            for (shift, _), rows in zip(exchange.shifts, sends, strict=True)
        ]
    )
