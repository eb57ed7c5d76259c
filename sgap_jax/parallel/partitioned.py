"""`PartitionedArray`: a sparse matrix whose rows are spread over the devices of a mesh axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import is_traced, is_zero
from sgap_jax.formats.levels import Format
from sgap_jax.formats.structure import whole
from sgap_jax.parallel.exchange import Exchange
from sgap_jax.parallel.part import Cover, GlobalRows, Part, Share
from sgap_jax.parallel.plan import explanation
from sgap_jax.parallel.second_axis import Costs, summed_bytes
from sgap_jax.primitives._define import OPS_IN_PARTS, accumulator


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "own",
        "foreign",
        "merged",
        "table_places",
        "table_names",
        "sends",
        "row_places",
        "column_places",
        "cover",
        "share",
        "global_rows",
    ),
    meta_fields=("shape", "mesh", "axis", "second", "exchange", "entries", "row_bounds", "given"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class PartitionedArray:
    """A sparse matrix [m, k] in parts; `partition` and `from_parts` make it.

    Each device of the mesh axis has the rows of one part, as two matrices: of the columns that are
    its own, and of those that other parts own. A dense operand is in parts too: [parts, rows, n],
    on each device the rows of its own columns (`to_parts`), and so is a result, whose rows are
    those of its part (`from_parts`). A pytree: values and index arrays are leaves, split over the
    axis. Two are equal if they are one object, as SparseArrays are.

    Attributes:
      own, foreign: SparseArrays whose leaves have a leading axis for the parts, in CSR, CVS or
        BCSR. The columns of `foreign` are places in the buffer that a part receives.
      merged: the structure of both together, for operations on whole rows; its values say where an
        entry (a vector, a block) is among those of `own` and then of `foreign`.
      table_places, table_names: for each column of `merged` its place among own and then received
        rows of a dense operand, and its column in the order of the parts.
      sends: which of its rows a part sends, message after message.
      row_places, column_places: where row i of the result, or of a dense operand, is among the
        rows of all parts.
      shape, mesh, axis: of the matrix, and what it is spread over.
      exchange: what travels.
      entries: stored entries of each part.
      row_bounds: where the rows of each part begin, and where those of the last one end.
      given: whether the rows are in the given order.
      cover: what travels for products instead of `exchange` where that is less; else None.
      second: another axis of the mesh, whose devices divide the columns of dense operands, or share
        the messages of a product; None where it is not used.
      share: what each of its devices multiplies and receives then; None where that never sends
        less than dividing the columns.
      global_rows: what attention does instead where the queries of some rows travel, and their keys
        do not; else None.
    """

    own: SparseArray
    foreign: SparseArray
    merged: SparseArray
    table_places: jax.Array
    table_names: jax.Array
    sends: jax.Array
    row_places: jax.Array
    column_places: jax.Array
    shape: tuple[int, int]
    mesh: Mesh
    axis: str
    exchange: Exchange
    entries: tuple[int, ...]
    row_bounds: tuple[int, ...]
    given: bool
    cover: Cover | None = None
    second: str | None = None
    share: Share | None = None
    global_rows: GlobalRows | None = None

    # Set by operations.py, which imports this file.
    _products: ClassVar[Callable[..., jax.Array]]

    @property
    def parts(self) -> int:
        return len(self.entries)

    @property
    def dtype(self) -> Any:
        return self.own.dtype

    @property
    def ndim(self) -> int:
        return 2

    @property
    def nnz(self) -> int:
        """Stored entries of all parts."""
        return sum(self.entries)

    @property
    def format(self) -> Format:
        """CSR, CVS(V) or BCSR(r, c): of the parts."""
        return self.own.format

    @property
    def values(self) -> tuple[jax.Array, jax.Array]:
        """The values of all parts, of own and of foreign columns: each [parts, entries], or
        [parts, vectors, V] and [parts, blocks, r, c]."""
        return self.own.values, self.foreign.values

    def with_values(self, values: tuple[Any, Any]) -> PartitionedArray:
        """The same structure with other `values`. Those that other parts multiply (`cover`) travel
        to them, once: one number for each such entry."""
        if not isinstance(values, tuple | list) or len(values) != 2:
            raise ValueError(
                "PartitionedArray.with_values: expected values of own and of foreign entries, as "
                f"A.values, got {type(values).__name__}; "
                "parallel.partition spreads those of the whole matrix"
            )
        given = tuple(map(jnp.asarray, values))
        for x, mine, whose in zip(given, self.values, ("own", "foreign"), strict=True):
            self._check_devices("PartitionedArray.with_values: a value", x)
            if x.shape != mine.shape:
                raise ValueError(
                    f"PartitionedArray.with_values: expected {mine.shape} of {whose} columns, got "
                    f"{x.shape}"
                )
        found = self._with_values_of_parts(given)
        if self.cover is None:
            return found
        of_others = found._on_each(lambda part: part.values_of_others(part.foreign.values))
        return found._with_values_of_others(of_others)

    def _filled(self, fill: Callable[[jax.Array], jax.Array]) -> PartitionedArray:
        """With fill(values) as the values: of ones ones, and the same wherever an entry is."""
        found = self._with_values_of_parts(map(fill, self.values))
        if self.cover is None:
            return found
        return found._with_values_of_others(fill(self.cover.out.values))

    def _with_values_of_parts(self, values: Iterable[Any]) -> PartitionedArray:
        own, foreign = (
            dataclasses.replace(A, values=x)
            for A, x in zip((self.own, self.foreign), values, strict=True)
        )
        return dataclasses.replace(self, own=own, foreign=foreign)

    def _with_values_of_others(self, values: jax.Array) -> PartitionedArray:
        assert self.cover is not None
        out = dataclasses.replace(self.cover.out, values=values)
        return dataclasses.replace(self, cover=dataclasses.replace(self.cover, out=out))

    def to_parts(self, B: Any, *, transpose: bool = False) -> jax.Array:
        """[k, ...] -> [parts, rows, ...], split over the axis: the dense operand of a product, or
        with `transpose` [m, ...] that of one with A^T. Padding is zero."""
        B = jnp.asarray(B)
        size = self.shape[0 if transpose else 1]
        if B.ndim < 1 or B.shape[0] != size:
            raise ValueError(
                f"PartitionedArray.to_parts: expected [{size}, ...], got {list(B.shape)}"
            )
        places, rows = self._layout(not transpose)
        out = jnp.zeros((self.parts * rows, *B.shape[1:]), B.dtype).at[places].set(whole(B))
        return self._split(out.reshape(self.parts, rows, *B.shape[1:]))

    def from_parts(self, C: Any, *, transpose: bool = False) -> jax.Array:
        """[parts, rows, ...] -> [m, ...]: the result of a product, or with `transpose` [k, ...],
        that of one with A^T."""
        places, rows = self._layout(transpose)
        C = jnp.asarray(C)
        if C.ndim < 2 or C.shape[:2] != (self.parts, rows):
            raise ValueError(
                f"PartitionedArray.from_parts: expected [{self.parts}, {rows}, ...], got "
                f"{list(C.shape)}"
            )
        return whole(C).reshape(self.parts * rows, *C.shape[2:])[places]

    __array_ufunc__ = None  # of NumPy's arrays, x @ A and x * A are the ones here
    __array_priority__ = 100

    def __matmul__(self, B: Any) -> jax.Array:
        """A @ B: `parallel.spmm(A, B)`; of a vector [k], a vector [m]."""
        if np.ndim(B) == 1:
            return self._products(jnp.asarray(B)[:, None])[:, 0]
        return self._products(B)

    def __rmatmul__(self, B: Any) -> jax.Array:
        """B @ A = (A^T B^T)^T for a dense B [r, m], or a vector [m]."""
        m = self.shape[0]
        if np.ndim(B) not in (1, 2):
            raise ValueError(
                f"B @ PartitionedArray: B: expected [r, {m}] or [{m}], got {list(np.shape(B))}; "
                "parallel.spmm(A, X, transpose=True) takes an X in parts"
            )
        if np.ndim(B) == 1:
            return self._products(jnp.asarray(B)[:, None], transpose=True)[:, 0]
        return self._products(jnp.asarray(B).T, transpose=True).T

    def __mul__(self, x: Any) -> PartitionedArray:
        """A * x for a scalar x; `with_values` takes other values."""
        return self._scaled("A * x", x, lambda v: v * x)

    __rmul__ = __mul__

    def __truediv__(self, x: Any) -> PartitionedArray:
        """A / x for a scalar x."""
        return self._scaled("A / x", x, lambda v: v / x)

    def __neg__(self) -> PartitionedArray:
        return self._scaled("-A", 0, lambda v: -v)

    def __add__(self, other: Any) -> PartitionedArray:
        """A + B of one structure: B is A with other values, as `with_values` and arithmetic make
        it, so its index arrays are the same arrays. Inside `jit` two arguments have none in common:
        pass A, and B's `values`. Of scalars 0 alone is taken, which leaves A; TypeError else."""
        return self._entry_by_entry("+", other, jnp.add)

    __radd__ = __add__  # sum([A, B]) begins with 0

    def __sub__(self, other: Any) -> PartitionedArray:
        """A - B, as A + B."""
        return self._entry_by_entry("-", other, jnp.subtract)

    def __rsub__(self, other: Any) -> PartitionedArray:
        return (-self)._entry_by_entry("-", other, jnp.add)

    def _entry_by_entry(self, sign: str, other: Any, of: Callable) -> PartitionedArray:
        if is_zero(other):
            return self
        if isinstance(other, PartitionedArray) and self._index_arrays_are_those_of(other):
            pairs = zip(self.values, other.values, strict=True)
            own, foreign = (of(x, y) for x, y in pairs)
            return self.with_values((own, foreign))
        got = "other ones" if isinstance(other, PartitionedArray) else type(other).__name__
        raise TypeError(
            f"PartitionedArray: A {sign} B: expected 0, or a B of A's structure, with the same "
            f"index arrays, as A.with_values makes it (in jit, of the argument A), got {got}; of "
            f"other structures, parallel.partition(A {sign} B, mesh, axis) of the whole matrices, "
            f"or A @ X {sign} B @ X"
        )

    def _index_arrays_are_those_of(self, other: PartitionedArray) -> bool:
        bare = [A._filled(_no_values) for A in (self, other)]
        mine, theirs = map(jax.tree.leaves, bare)
        of_each: list[Any] = [jax.tree.structure(A) for A in bare]
        same = of_each[0] == of_each[1]
        return same and all(x is y for x, y in zip(mine, theirs, strict=True))

    def _scaled(self, op: str, x: Any, of: Callable[[jax.Array], jax.Array]) -> PartitionedArray:
        if np.ndim(x):
            raise TypeError(
                f"PartitionedArray: {op}: expected a scalar, got {list(np.shape(x))}; "
                "A.with_values((own, foreign)) takes other values, as A.values has them"
            )
        own, foreign = self.values
        return self.with_values((of(own), of(foreign)))

    def astype(self, dtype: Any) -> PartitionedArray:
        """The same matrix with values in another dtype."""
        return self._filled(lambda x: x.astype(dtype))

    def __copy__(self) -> PartitionedArray:
        return self

    def __deepcopy__(self, memo: Any) -> PartitionedArray:
        return self

    def __reduce__(self) -> tuple:
        """Pickles the arrays of all parts and the devices' numbers: a process that has these
        devices restores the plan and needs not find it again."""
        leaves = jax.tree.leaves(self)
        if is_traced(*leaves) or not all(x.is_fully_addressable for x in leaves):
            raise TypeError(
                "PartitionedArray: only arrays with a value, on devices of one process, can be "
                "pickled; parallel.from_parts makes the matrix from what each process has"
            )
        devices = np.vectorize(lambda device: device.id, otypes=[int])(self.mesh.devices)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mesh = devices, self.mesh.axis_names, self.mesh.axis_types
        specs = [tuple(getattr(x.sharding, "spec", ())) for x in leaves]
        return _restored, ({**fields, "mesh": mesh}, specs)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        # Without this, np.asarray(A) would be an object array that holds A.
        raise TypeError(
            f"PartitionedArray is no dense array: {_INSTEAD['todense']} is; sgap_jax.parallel has "
            f"{', '.join(OPS_IN_PARTS)}"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _INSTEAD:
                raise AttributeError(f"PartitionedArray.{name}: the nearest is {_INSTEAD[name]}")
            return object.__getattribute__(self, name)  # raises the property's error, or Python's

    def __repr__(self) -> str:
        m, k = self.shape
        second = "" if self.second is None else f" and {self.second!r}"
        return (
            f"PartitionedArray([{m}, {k}], {self.dtype}, {sum(self.entries)} entries in "
            f"{self.parts} parts over {self.axis!r}{second})"
        )

    def choose(self, n: int = 1, dtype: Any = jnp.float32) -> str:
        """How a product with n columns uses the second axis of c devices: what sends less.

            columns   s(n / c) ceil(n / c) b
            copies    s / c n b + 2 (c - 1) / c rows n b'

        are the bytes of the busiest device: s rows are sent where the second axis is not used, of
        b bytes a number, for n columns those of `cover` where that is less, and the rows of a
        part's result are summed in b' bytes a number by an all-reduce over the axis. Both do 1 / c
        of the work on each device. Where c divides n, columns send less; copies where the parts
        need many rows and n is small, or little more than a multiple of c. The results of
        `columns` are split over the axis, those of `copies` are whole. Counts are those of the
        plans, with their padding.

        Returns:
          "columns" or "copies".

        Raises ValueError if there is no second axis.

        Source: the 1.5D algorithms with replication of Bharadwaj, Buluc and Demmel (arXiv
        2203.07673), with the messages of a plan in place of whole blocks.
        """
        return self._costs(n, dtype).choice

    def _costs(self, n: int, dtype: Any) -> Costs:
        if self.second is None:
            raise ValueError(
                "PartitionedArray.choose: there is no second axis; "
                "parallel.partition(A, mesh, axis, second=...) names one"
            )
        copies = self.mesh.shape[self.second]
        each = -(-n // copies)

        def of(columns: int) -> int:
            exchange, size = self._sends_of(columns, dtype)
            return exchange.sent * columns * size

        shared = None
        if self.share is not None:
            wide = accumulator(jnp.result_type(self.dtype, dtype)).itemsize
            shared = self.share.exchange.sent * n * np.dtype(dtype).itemsize
            shared += summed_bytes(copies, self.own.shape[0] * n, wide)
        return Costs(of(n), of(each), shared)

    def explain(self, n: int = 1, dtype: Any = jnp.float32) -> str:
        """What one product with n columns sends between devices, and what an all-gather of the
        dense operand would. A gradient with respect to the operand sends as much, the other way.
        With a second axis also what each way to use it would send, which one `choose` takes, and
        what an all-gather over all devices of both axes would. Where queries of global rows travel,
        what attention sends, of n numbers of a key and its value together."""
        exchange, columns, size = self._taken(n, dtype)
        notes = []
        if self.cover is not None and exchange is self.cover.exchange:
            alone = self.exchange.sent * columns * np.dtype(dtype).itemsize
            values = self.cover.values.sent * np.dtype(self.dtype).itemsize
            notes += [f"of rows of B alone        {alone:>14,} bytes"]
            notes += [f"and when values change     {values:>13,} bytes"]
        if self.second is not None:
            costs = self._costs(n, dtype)
            shared = "never less" if costs.copies is None else f"{costs.copies:>14,} bytes"
            devices = self.mesh.shape[self.second]
            notes += [
                f"over {devices} devices along {self.second!r}: {costs.choice}",
                f"  not used                {costs.alone:>14,} bytes",
                f"  columns                 {costs.columns:>14,} bytes",
                f"  copies, sum included    {shared:>14}",
            ]
            every = self.parts * devices  # as if each had a part of its own
            rows = (every - 1) * -(-self.shape[1] // every)
            of_all = rows * n * np.dtype(dtype).itemsize
            notes += [f"  an all-gather over {every:>4} {of_all:>14,} bytes"]
        if self.global_rows is not None:
            some = self.global_rows
            rows = some.exchange.sent + some.queries.sent
            notes += [
                f"of attention              {rows * columns * size:>14,} bytes; rows whose queries "
                f"go to all parts: {sum(some.queries.to_all):,}"
            ]
        everything = n * np.dtype(dtype).itemsize
        return explanation(exchange, self.entries, self.shape[1], columns, size, notes, everything)

    def plot(self, n: int = 1, dtype: Any = jnp.float32, ax: Any = None) -> Any:
        """A picture of what one product with n columns sends: from each device (down) to each
        other (across), in bytes without padding.

        Args:
          ax: Matplotlib axes; None makes a new figure.

        Returns:
          The axes. Raises ImportError without Matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            what = "PartitionedArray.plot needs Matplotlib: pip install matplotlib"
            raise ImportError(what) from error
        exchange, columns, size = self._taken(n, dtype)
        ax = Figure(figsize=(5, 4), layout="constrained").subplots() if ax is None else ax
        needed = exchange.needed_of_others.T
        image = ax.imshow(needed * columns * size, vmin=0, interpolation="nearest")
        ax.figure.colorbar(image, ax=ax, label="bytes")
        ax.set(xlabel="to device", ylabel="from device", title=f"{exchange.how}, {columns} columns")
        return ax

    def _taken(self, n: int, dtype: Any) -> tuple[Exchange, int, int]:
        """(what a device sends in a product with n columns, the columns of it, the bytes of a
        number), as `choose` uses the second axis if there is one."""
        columns = n
        if self.second is not None:
            if self.share is not None and self.choose(n, dtype) == "copies":
                return self.share.exchange, n, np.dtype(dtype).itemsize
            columns = -(-n // self.mesh.shape[self.second])
        exchange, size = self._sends_of(columns, dtype)
        return exchange, columns, size

    def _sends_of(self, n: int, dtype: Any) -> tuple[Exchange, int]:
        """What a product with n columns of a dtype sends, and the bytes of a number of it."""
        if self.cover is not None and self._covered(n, dtype):
            return self.cover.exchange, jnp.result_type(self.dtype, dtype).itemsize
        return self.exchange, np.dtype(dtype).itemsize

    def _covered(self, n: int, dtype: Any) -> bool:
        """Whether a product with n columns of a dtype sends the rows of `cover`: if that is less
        over all devices, the values included that travel when they change."""
        if self.cover is None:
            return False
        result = jnp.result_type(self.dtype, dtype).itemsize
        rows = self.cover.exchange.total * n * result
        values = self.cover.values.total * np.dtype(self.dtype).itemsize
        return rows + values < self.exchange.total * n * np.dtype(dtype).itemsize

    def _check_devices(self, what: str, x: Any) -> None:
        """Raises an error if an operand, of which `what` says whose, is on the devices of another
        mesh, as far as that is known."""
        if isinstance(x, jax.core.Tracer):
            other = jax.typeof(x).sharding.mesh
            if other.empty or dict(other.shape) == dict(self.mesh.shape):
                return
        elif isinstance(x, jax.Array):
            if not x.committed or x.sharding.device_set == set(self.mesh.devices.flat):
                return
            other = getattr(x.sharding, "mesh", x.sharding)
        else:
            return
        there = f"jax.NamedSharding(A.mesh, jax.P({self.axis!r}))"
        raise ValueError(
            f"{what} is on the devices of {_named(other)}, the matrix in parts on those of "
            f"{_named(self.mesh)}; jax.device_put(x, {there}) moves an array in parts, and "
            "parallel.partition(..., mesh, axis) makes parts on a mesh"
        )

    def _layout(self, of_columns: bool) -> tuple[jax.Array, int]:
        """(the places, the rows of a part) of dense operands or of results."""
        if of_columns:
            return self.column_places, self.own.shape[1]
        return self.row_places, self.own.shape[0]

    def _split(self, x: jax.Array, spec: Any = None) -> jax.Array:
        """x split as `spec` says, or without one along its first dimension, over the parts."""
        explicit = AxisType.Explicit in self.mesh.axis_types
        put = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
        return put(x, NamedSharding(self.mesh, jax.P(self.axis) if spec is None else spec))

    def _on_each(
        self,
        function: Callable,
        *operands: Any,
        shared: tuple = (),
        specs: tuple | None = None,
        out_specs: Any = None,
        columns: Any = None,
    ) -> Any:
        """Runs function(part, *operands, *shared) on each device, with its `Part`.

        `operands` are arrays [parts, ...], of which it gets its own without that axis, and so are
        the results. `shared` arrays it gets whole. With `columns`, other axes of the mesh, operands
        [parts, rows, n] are split by columns over those, and results as `out_specs` says. With
        `specs`, of operands and of shared arrays, and `out_specs` it gets pieces as those say, with
        all their axes, and so are the results.
        """

        def local(part: Part, operands: tuple, shared: tuple) -> Any:
            part = jax.tree.map(lambda x: x[0], part)
            if part.share is not None:
                share = jax.tree.map(lambda x: x[0], part.share)
                part = dataclasses.replace(part, share=share)
            if specs is not None:
                return function(part, *operands, *shared)
            own = jax.tree.map(lambda x: x[0], operands)
            return jax.tree.map(lambda x: x[None], function(part, *own, *shared))

        context = jax.sharding.get_abstract_mesh()
        if not context.empty and dict(context.shape) != dict(self.mesh.shape):
            raise ValueError(
                f"a matrix in parts on {_named(self.mesh)} under jax.set_mesh of "
                f"{_named(context)}; expected that of its own mesh, A.mesh"
            )
        fields = [field.name for field in dataclasses.fields(Part)]
        part = Part(**{name: getattr(self, name) for name in fields})
        first = jax.P(self.axis)
        specs_of: dict[str, Any] = {
            name: first for name in fields if isinstance(getattr(part, name), _DATA)
        }
        if self.share is not None:
            specs_of["share"] = jax.P(self.axis, self.second)
        whole = jax.tree.map(lambda _: jax.P(), shared)
        each = tuple(self._columns_spec(x, columns) for x in operands)
        each, whole = (each, whole) if specs is None else specs
        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(dataclasses.replace(part, **specs_of), each, whole),
            out_specs=first if out_specs is None else out_specs,
        )
        split = partial(jax.tree.map, self._split)
        return run(part, split(operands, each), split(shared, whole))

    def _columns_spec(self, x: Any, columns: Any) -> jax.P:
        """Of an array [parts, rows, n] over the parts and, by its columns, over those axes."""
        return jax.P(self.axis, None, columns) if columns and x.ndim == 3 else jax.P(self.axis)

    def _columns_axis(self, x: jax.Array) -> Any:
        """The axes of the mesh that split the columns of an operand [parts, rows, n]: the second
        one, or without one those that split it already, as far as that is known: of arrays with a
        value, and under explicit axes."""
        if self.second is not None:
            return self.second
        known = x if not isinstance(x, jax.core.Tracer) else jax.typeof(x)
        sharding = getattr(known, "sharding", None)
        if not isinstance(sharding, NamedSharding) or len(sharding.spec) < 3:
            return None
        axes = sharding.spec[2]
        names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        sizes = {name: self.mesh.shape.get(name) for name in names}
        mine = sizes == {name: sharding.mesh.shape[name] for name in names}
        return names if names and mine and self.axis not in names else None


def _restored(fields: dict[str, Any], specs: list[tuple]) -> PartitionedArray:
    """What `PartitionedArray.__reduce__` pickled, on the devices with the same numbers."""
    numbers, names, types = fields["mesh"]
    here = {device.id: device for device in jax.devices()}
    missing = [int(i) for i in numbers.flat if i not in here]
    if missing:
        raise ValueError(
            f"PartitionedArray: pickled on devices {list(map(int, numbers.flat))}, of which "
            f"{missing} are not here; parallel.partition makes parts on a mesh of {len(here)}"
        )
    devices = np.vectorize(here.__getitem__, otypes=[object])(numbers)
    mesh = Mesh(devices, names, axis_types=types)
    leaves, tree = jax.tree.flatten(PartitionedArray(**{**fields, "mesh": mesh}))
    shardings = [NamedSharding(mesh, jax.P(*spec)) for spec in specs]
    return jax.tree.unflatten(tree, jax.device_put(leaves, shardings))


def _no_values(values: Any) -> Any:
    return None


def _named(mesh: Any) -> str:
    """A mesh by its axes and their sizes; another sharding by its text."""
    shape = getattr(mesh, "shape", None)
    return f"a mesh {dict(shape)}" if shape else str(mesh)


_BY_A_TRANSPOSE = (
    "parallel.spmm(A, X, transpose=True), the product with A^T; parallel.partition(whole.T, ...) "
    "makes parts of the transpose"
)
_ONE_BY_ONE = "A.with_values((f(own), f(foreign))) of own, foreign = A.values"
_INSTEAD = {
    "T": _BY_A_TRANSPOSE,
    "transpose": _BY_A_TRANSPOSE,
    "data": "A.values",
    "dot": "A @ B",
    "max": "parallel.row_max(A)",
    "mean": "parallel.row_sum(A) / A.shape[1]",
    "multiply": _ONE_BY_ONE,
    "sum": "parallel.row_sum(A); of columns, jnp.ones(A.shape[0], A.dtype) @ A",
    "toarray": "A @ jnp.eye(A.shape[1], dtype=A.dtype)",
    "todense": "A @ jnp.eye(A.shape[1], dtype=A.dtype)",
}
"""Names that matrices have elsewhere, and what to write for them."""

_DATA = (SparseArray, jax.Array, Cover, GlobalRows)
