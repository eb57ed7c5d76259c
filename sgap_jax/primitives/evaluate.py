"""evaluate: any expression of +, - and * over sparse and dense operands, in index notation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.compiler.notation.parse import Written, read
from sgap_jax.compiler.notation.spaces import in_order
from sgap_jax.compiler.transform.schedule import LoopSchedule
from sgap_jax.formats import checks
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import require_unbatched
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.primitives import evaluate_terms
from sgap_jax.primitives._define import check_schedule
from sgap_jax.primitives.einsum import einsum
from sgap_jax.primitives.evaluate_loops import Operands, check_loops
from sgap_jax.primitives.evaluate_pattern import (
    in_merged_format,
    merged_format,
    merges,
    pattern_of_result,
    result_format,
    stored_in_order,
)
from sgap_jax.primitives.evaluate_terms import terms_of
from sgap_jax.schedules import Reference, Schedule
from sgap_jax.schedules.schedule import ScheduleError


def evaluate(
    expression: str,
    /,
    *,
    format: Format | None = None,
    pattern: SparseArray | None = None,
    nse: int | None = None,
    schedule: Schedule | str | None = None,
    **operands: Any,
) -> Any:
    """An expression of +, - and * in index notation, over any sparse and dense operands; each term
    is summed over its indices that the result lacks.

        evaluate("y(i) = b(i) - A(i,j) * x(j)", A=A, b=b, x=x)        a residual
        evaluate("C(i,j) = A(i,j) + B(i,j) - D(i,j)", A=A, B=B, D=D)  a sum of any patterns
        evaluate("y(i) = A(i,j) * v(j)", A=A, v=v)                    with a sparse vector v
        evaluate("s = A(i,j) * B(j,k) * P(i,k)", A=A, B=B, P=P)       a sum over triangles

    A product has a value where all of its sparse factors store one, a sum where one of its terms
    has. Several sparse operands are merged in loops that are compiled for the formats (Kjolstad et
    al., 2017), on the CPU where llvmlite is installed and on CUDA; none is made dense.
    Differentiable to any order, forward and reverse, in dense operands and in the values of sparse
    ones, whose gradients are such expressions at their own entries. Under vmap a dense operand gets
    one more index; where values or structures are mapped, elements are computed in turn. Index
    arrays that were made under jit may hold anything: an entry that is not valid takes no part, and
    those of one coordinate are added up.

    Operands in formats that are not merged (COO, vectors and blocks), or in another order than the
    others, are converted to CSR, CSC or CSF first. One product with at most one sparse operand runs
    as `einsum` does. Plain JAX runs elsewhere, for other dtypes than the floats, int8,
    uint8, int32 and int64, where no order of the loops goes through all operands, and where traced
    index arrays turn out to be invalid: of each term one operand stays sparse, the others are made
    dense, and a zero that is not stored is multiplied like another.

    Args:
      expression: an assignment such as "y(i) = b(i) - A(i,j) * x(j)" (`compiler.parse` has the
        rules). += says the same as =. A(i,i) is the diagonal of a dense array or a matrix.
      format: of a sparse result. It has the structure of an operand that is a factor of every term
        in this format with the indices of the result, zeros included. Otherwise it stores the
        elements that some term reaches, which are found in the structures of the sparse operands:
        once, outside of the program, where these are concrete.
      pattern: a SparseArray of the result's shape; the result has its structure and format, and
        elements elsewhere are not computed. A result that was made once with `format` is a plan
        for others with the same structures, inside jit too.
      nse: with `format`, how many entries the result can store (static), as in
        `SparseArray.from_coordinates`: traced structures need one. The result is a matrix then, and
        may store zeros: all that one factor of each term stores, which has all of its indices.
        `overflow` of the result says how many did not fit, and `checked()` fails if any did not.
      schedule: a `compiler.Schedule` of this expression (names may differ), which may hold those of
        its gradients (`with_derivatives`): `Schedule(parse(expression, {"A": CSR}))` and its
        transformations. Formats are those of the operands and of a sparse result. None chooses;
        `Reference()` is plain JAX.
      operands: by name, SparseArrays or numeric arrays. Names of the parameters above are taken.

    Returns:
      A dense array, or with `format` or `pattern` a SparseArray, in the promoted dtype of all
      operands. Floats are summed in float32 at least, in an order that depends on shapes and
      formats alone where loops run, but on CUDA, where threads add up an outermost index that the
      output lacks, in none; integers wrap in their own dtype. Of bool operands * is and, + is or,
      as in NumPy. Elements that no entry reaches are 0.

    Raises:
      TypeError: expression is no str, schedule no Schedule, an operand no array, or a difference
        of bool operands.
      ScheduleError: a schedule of another expression or other formats, or whose loops would race.
      ImportError: a schedule for the CPU without llvmlite.
      ValueError: text that is not such an expression, or operands that do not fit it; traced
        structures without `nse`, or more entries than it or than int32 counts.
      NotImplementedError: more than 64 terms after multiplying out, more than 52 indices where
        plain JAX runs, the diagonal of a sparse
        tensor, a schedule without loops for the dtype, or inside jit a sparse result that is no
        matrix or has no bound.

    Source: Kjolstad et al., OOPSLA 2017, sections 2 and 5; Senanayake et al., OOPSLA 2020.
    """
    schedule = check_schedule("evaluate", schedule)
    asked = _Asked.of(expression, operands)
    inner = None if schedule is None else schedule._inner
    if inner is not None and not isinstance(inner, Reference | LoopSchedule):
        inner.check_expression(_merged(asked)[1])
        raise NotImplementedError(
            f"evaluate: {expression!r} has no kernel that obeys {schedule}; schedule=None, "
            "Reference() and a chain of transformations (compiler.Schedule) run"
        )
    if asked.dtype == jnp.bool_:
        # Sums of ones, which in float32 saturate and never wrap to zero.
        numbers = {
            name: x.astype("float32") if isinstance(x, SparseArray) else jnp.asarray(x, "float32")
            for name, x in operands.items()
        }
        found = evaluate(
            expression, format=format, pattern=pattern, nse=nse, schedule=schedule, **numbers
        )
        return found.astype(jnp.bool_)
    if format is None and pattern is None:
        if nse is not None:
            raise ValueError("evaluate: nse is of a sparse result; give its format")
        if asked.is_einsum and not isinstance(inner, LoopSchedule):
            return _by_einsum(asked, schedule)
        return _run(asked, schedule)
    if format is not None:
        format = result_format(format, len(asked.written.output.indices))
    wanted = _structure(asked, format, pattern, nse)
    merged, places = in_merged_format(wanted)
    asked = asked.at_entries_of(merged)
    # Traced structures in other formats stay what they are, which only plain JAX takes.
    values = _run(asked, schedule if merges(merged.format) else Reference())
    if places is not None:
        values = jnp.zeros(wanted.values.size, values.dtype).at[places].set(values)
    found = wanted.with_values(values.reshape(wanted.values.shape))
    return found if format in (None, found.format) else found.asformat(format)


def _run(asked: _Asked, schedule: Schedule | None) -> Any:
    """The dense result, or the flat values of a sparse one."""
    inner = None if schedule is None else schedule._inner
    assign: Assign | None = None
    if isinstance(inner, LoopSchedule):
        assign = asked.assign
        check_loops(assign, schedule, asked.dtype)
    elif inner is None:
        asked, assign = _merged(asked)
    if assign is None:
        return _in_plain(asked)
    return terms_of(assign.output, assign.products, asked.given(), schedule, asked.dtype)


class _Asked(NamedTuple):
    """A call of evaluate after its checks.

    Attributes:
      written: the expression as it was written.
      values: by the name of an access, a SparseArray or a dense array, in `dtype`.
      sizes: of each index.
      holder: the name of the access whose structure a sparse result has.
    """

    written: Written
    values: Mapping[str, Any]
    sizes: Mapping[IndexVar, int]
    dtype: Any
    holder: str | None = None

    @classmethod
    def of(cls, expression: str, operands: Mapping[str, Any]) -> _Asked:
        try:
            written = read(expression)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"evaluate: {error}") from None
        for name in written.operands:
            if name not in operands:
                raise ValueError(f"evaluate: no value for {name} of {expression!r}; give {name}=")
        if unknown := [name for name in operands if name not in written.operands]:
            raise ValueError(
                f"evaluate: {unknown[0]} is no operand of {expression!r}; there are "
                f"{', '.join(written.operands)}"
            )
        given = {name: _checked(name, operands[name]) for name in written.operands}
        values, sizes = dict[str, Any](), dict[IndexVar, int]()
        for access in written.accesses:
            name = access.tensor
            x = given[written.tensors[name]]
            spelled = written.diagonals.get(name, access.indices)
            shown = f"{written.tensors[name]}({','.join(map(str, spelled))})"
            if x.ndim != len(spelled):
                raise ValueError(
                    f"evaluate: {shown} is for {len(spelled)} dimensions, got {x.ndim}"
                )
            for index, size in zip(spelled, x.shape, strict=True):
                if sizes.setdefault(index, size) != size:
                    raise ValueError(
                        f"evaluate: index {index} of {expression!r} has sizes {sizes[index]} and "
                        f"{size}"
                    )
            values[name] = x if spelled == access.indices else _diagonal(x, spelled, shown)
        dtype = jnp.result_type(*(getattr(x, "values", x) for x in given.values()))
        if dtype == jnp.bool_ and any(term.negative for term in written.terms):
            raise TypeError(f"evaluate: {expression!r} subtracts, and all operands are bool")
        for index in written.output.indices:
            if index not in sizes:
                raise ValueError(
                    f"evaluate: no operand of {expression!r} has the index {index} of the result; "
                    "broadcast afterwards"
                )
        values = {name: x.astype(dtype) for name, x in values.items()}
        return cls(written, values, sizes, dtype)

    @property
    def sparse(self) -> list[Access]:
        return [x for x in self.written.accesses if isinstance(self.values[x.tensor], SparseArray)]

    @property
    def formats(self) -> dict[str, Format | None]:
        stored = {n: x for n, x in self.values.items() if isinstance(x, SparseArray)}
        return {name: A.format for name, A in stored.items()}

    @property
    def assign(self) -> Assign:
        output = None if self.holder is None else self.values[self.holder].format
        return self.written.assign(self.formats, output)

    def at_entries_of(self, wanted: SparseArray) -> _Asked:
        """The same with a result that has this structure, which is a factor of every term: that of
        an operand, or a pattern."""
        for access in self.written.shared:
            A = self.values[access.tensor]
            if isinstance(A, SparseArray) and _index_arrays(A) == _index_arrays(wanted):
                return self._replace(holder=access.tensor)
        written, pattern = self.written.at_pattern()
        ones = wanted.with_values(jnp.ones_like(wanted.values, dtype=self.dtype))
        values = {**self.values, pattern: ones}
        return self._replace(written=written, values=values, holder=pattern)

    @property
    def is_einsum(self) -> bool:
        """Whether there is one product, with at most one sparse operand, which is added."""
        term, *others = self.written.terms
        sparse = sum(isinstance(self.values[x.tensor], SparseArray) for x in term.factors)
        return not others and not term.negative and sparse <= 1

    def given(self) -> Operands:
        data, structures, numbers, checked = dict[str, Any](), list[tuple](), {}, True
        known: dict[tuple[int, ...], int] = {}
        for name, x in self.values.items():
            if not isinstance(x, SparseArray):
                data[name] = x
                continue
            data[name] = x.values.reshape(-1)
            numbers[name] = known.setdefault(_index_arrays(x), len(structures))
            if numbers[name] == len(structures):
                structures.append(tuple(tuple(level) for level in x.index_arrays))
            checked = checked and x.is_checked
        if self.holder is not None:
            numbers[self.written.output.tensor] = numbers[self.holder]
        return Operands(data, structures, numbers, self.sizes, checked)


def _index_arrays(A: SparseArray) -> tuple[Any, ...]:
    """What tells structures apart."""
    return (A.format, *map(id, jax.tree.leaves(A.index_arrays)))


def _structure(asked: _Asked, format: Format | None, pattern: Any, nse: int | None) -> SparseArray:
    """A SparseArray with the structure of the result."""
    output = asked.written.output
    shape = tuple(asked.sizes[index] for index in output.indices)
    if pattern is not None:
        if format is not None or nse is not None:
            raise ValueError("evaluate: give one of pattern and format (with nse)")
        if not isinstance(pattern, SparseArray):
            raise TypeError(
                f"evaluate: pattern must be a SparseArray, got {type(pattern).__name__}"
            )
        require_unbatched(pattern, "evaluate: pattern")
        if pattern.shape != shape:
            raise ValueError(f"evaluate: pattern has shape {pattern.shape}, and the result {shape}")
        return pattern
    assert format is not None
    if nse is not None:
        nse = checks.check_count(nse, "nse", "evaluate")
        checks.check_nnz(nse, "evaluate: nse")
    for access in asked.written.shared:
        A = asked.values[access.tensor]
        if isinstance(A, SparseArray) and A.format == format and nse is None:
            return A
    own = merged_format(format)
    return pattern_of_result(output, asked.written.terms, asked.values, asked.sizes, own, nse)


def _checked(name: str, x: Any) -> Any:
    if isinstance(x, SparseArray):
        require_unbatched(x, f"evaluate: {name}")
        return x
    if hasattr(x, "todense"):
        raise TypeError(
            f"evaluate: {name} must be a SparseArray or dense, got a {type(x).__name__}"
        )
    return jnp.asarray(x)


def _diagonal(x: Any, spelled: Sequence[IndexVar], shown: str) -> jax.Array:
    """A dense array with each index once, at equal coordinates where one was written twice."""
    if isinstance(x, SparseArray):
        if x.ndim != 2:
            raise NotImplementedError(
                f"evaluate: {shown}: diagonals are taken of dense arrays and of sparse matrices, "
                f"got a tensor in {x.format}"
            )
        return x.diagonal()
    letters = evaluate_terms.letters_of(dict.fromkeys(spelled))
    return jnp.einsum(f"{''.join(letters[i] for i in spelled)}->{''.join(letters.values())}", x)


def _by_einsum(asked: _Asked, schedule: Any) -> Any:
    """One product of at most one sparse operand, and the dense ones."""
    (term,), output = asked.written.terms, asked.written.output.indices
    letters = evaluate_terms.letters_of(asked.sizes)
    words = ["".join(letters[i] for i in x.indices) for x in term.factors]
    subscripts = f"{','.join(words)}->{''.join(letters[i] for i in output)}"
    values = [asked.values[x.tensor] for x in term.factors]
    if not asked.sparse:
        return _in_plain(asked)
    out = einsum(subscripts, *values, schedule=schedule)
    return out.todense() if isinstance(out, SparseArray) else out


def _in_plain(asked: _Asked) -> Any:
    """The expression in plain JAX, operands in any format."""
    written = asked.written
    holder = next((x for x in written.accesses if x.tensor == asked.holder), None)
    return evaluate_terms.plain(
        written.output, written.terms, asked.values, asked.sizes, asked.dtype, holder
    )


# The formats in which operands are merged.


def _merged(asked: _Asked) -> tuple[_Asked, Assign | None]:
    """The call with operands in formats that loops merge in one order, and its expression; None
    where there are none, and plain JAX runs."""
    kept: list[Access] = []
    levels = list(asked.written.output.indices)
    if asked.holder is not None:  # its order stays
        levels = [levels[mode] for mode in asked.values[asked.holder].format.modes]
    indices = [*levels, *(index for index in asked.sizes if index not in levels)]
    first = [x for x in asked.sparse if x.tensor == asked.holder]
    for access in (*first, *(x for x in asked.sparse if x not in first)):
        own = dataclasses.replace(access, format=asked.values[access.tensor].format)
        if (
            merges(asked.values[access.tensor].format)
            and in_order(indices, [*kept, own]) is not None
        ):
            kept.append(own)
    for order in (*_by_columns(asked, indices), in_order(indices, kept), indices):
        assert order is not None
        try:
            found = _converted(asked, order)
            assign = found.assign
            LoopSchedule(assign)
        except (ScheduleError, NotImplementedError, ValueError):
            continue  # no order of the loops, or a traced structure that does not convert
        return found, assign
    return asked, None


def _by_columns(asked: _Asked, indices: Sequence[IndexVar]) -> list[list[IndexVar]]:
    """An order in which the entries of a sparse vector say which columns of the matrices in CSR are
    read, for a product of these with a dense result; merging each row with the vector takes as many
    steps as there are rows times entries of the vector. CSR holds what it is by columns."""
    term, *others = asked.written.terms
    vectors = [x for x in asked.sparse if len(x.indices) == 1]
    if others or asked.holder is not None or len(vectors) != 1:
        return []
    (index,) = vectors[0].indices
    matrices = [x for x in asked.sparse if x not in vectors]
    inner = [x for x in matrices if x.indices[-1] == index]
    formats = {asked.values[x.tensor].format for x in matrices}
    if index in asked.written.output.indices or not inner or inner != matrices or formats != {CSR}:
        return []
    return [[index, *(i for i in indices if i != index)]]


def _converted(asked: _Asked, order: Sequence[IndexVar]) -> _Asked:
    """The call with all sparse operands in formats whose levels are in the order of the indices."""
    values = dict(asked.values)
    for access in asked.sparse:
        A = values[access.tensor]
        modes = tuple(sorted(range(A.ndim), key=lambda mode: order.index(access.indices[mode])))
        if not (merges(A.format) and A.format.modes == modes):
            values[access.tensor] = A.asformat(stored_in_order(modes))
    return asked._replace(values=values)
