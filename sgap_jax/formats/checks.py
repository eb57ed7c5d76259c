"""Validation of arguments, of concrete (NumPy) index arrays and of values. A ValueError names the
argument, what was expected and what was given.

Everything is vectorised; a check of 10 million entries costs a few passes over the arrays.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Rational, Real
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

INT32_MAX = 2**31 - 1


def is_zero(x: Any) -> bool:
    """Whether x is a 0 of Python or NumPy: Python's sum() begins with it, and A + 0 is A."""
    return isinstance(x, int | float | complex | np.number) and x == 0


def is_traced(*arrays: Any) -> bool:
    """True if any argument is a tracer, so that its contents cannot be looked at."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def check_concrete(x: Any, name: str, what: str, instead: str) -> None:
    """ValueError if x is or contains a tracer; `instead` says what to write."""
    if is_traced(*jax.tree.leaves(x)):
        raise ValueError(f"{what}: {name}: expected a concrete value, got a tracer; {instead}")


def check_callable(function: Any, example: Sequence, what: str, advice: str = "") -> None:
    """ValueError unless a function can be called with as many arguments as the example has, where
    its signature is known. `advice` is for one that needs four, as a mask_mod of FlexAttention."""
    if not callable(function):
        raise ValueError(f"{what}, got a {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions in C
        return
    try:
        signature.bind(*example)
    except TypeError:
        needed = [p for p in signature.parameters.values() if p.default is p.empty]
        advised = advice if len(needed) == 4 else ""
        raise ValueError(f"{what}, got one of {signature}{advised}") from None


def no_attribute(module: str, instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module: names that others have, and what there is in their place."""

    def refuse(name: str) -> NoReturn:
        advice = f": the nearest is {instead[name]}" if name in instead else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{advice}")

    return refuse


def check_flag(flag: Any, name: str, what: str) -> bool:
    """`flag` as a bool, which must be static."""
    if isinstance(flag, str):  # of which "no" would be true
        raise ValueError(f"{what}: {name}: expected True or False, got {flag!r}")
    if not isinstance(flag, bool):
        check_concrete(flag, name, what, f"under jax.jit name it in static_argnames, {name!r}")
    return bool(flag)


def check_count(count: Any, name: str, what: str, least: int = 0) -> int:
    """`count` as an int, which must be static: how much a result can store, for example. TypeError
    unless it is an integer, ValueError if it is less than `least`."""
    check_concrete(count, name, what, "it says how much the result can store")
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(f"{what}: {name} must be an integer, got {count!r}")
    if count.__index__() < least:
        bound = "not be negative" if least == 0 else f"be at least {least}"
        raise ValueError(f"{what}: {name} must {bound}, got {count}")
    return int(count.__index__())


def as_array(x: Any) -> Any:
    """x as an array: JAX arrays are unchanged, a list that contains tracers becomes a JAX array,
    and all else a NumPy array, so that the dtype is not narrowed."""
    if isinstance(x, jax.Array):
        return x
    return (jnp if is_traced(*jax.tree.leaves(x)) else np).asarray(x)


def check_shape(shape: Any, what: str) -> tuple[int, ...]:
    """`shape` as a tuple of Python ints that int32 indices can address."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if not sizes or min(sizes) < 0:
        raise ValueError(f"{what}: shape: expected a tuple of non-negative integers, got {shape!r}")
    if max(sizes) > INT32_MAX:
        raise NotImplementedError(
            f"{what}: shape: index arrays are int32, so sizes go up to {INT32_MAX}, got {sizes}"
        )
    return sizes


def check_nnz(nnz: Any, what: str) -> None:
    if not export.is_symbolic_dim(nnz) and nnz > INT32_MAX:
        raise NotImplementedError(
            f"{what}: index arrays are int32, so nnz goes up to {INT32_MAX}, got {nnz}"
        )


def check_numeric(dtype: Any, what: str, name: str = "values") -> None:
    """ValueError unless the dtype is numeric (ml_dtypes' too) or bool: strings, objects, dates and
    PRNG keys are refused."""
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        raise ValueError(f"{what}: {name}: expected a numeric or bool dtype, got {dtype}")
    if dtype in (np.longdouble, np.clongdouble) and np.dtype(dtype).itemsize > 8:
        raise ValueError(f"{what}: {name}: expected a dtype that JAX has, got {dtype}")


def check_values(values: Any, nnz: int | None, what: str, block: tuple[int, ...] = ()) -> Any:
    """`values` as an array (traced or NumPy) of a numeric dtype and of shape [nnz, *block]."""
    try:
        values = as_array(values)
    except ValueError as error:
        raise ValueError(f"{what}: values: expected an array, got {error}") from None
    check_numeric(values.dtype, what)
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if values.shape != (values.shape[:1] if nnz is None else (nnz,)) + block:
        expected = ", ".join(map(str, ("nnz" if nnz is None else nnz, *block)))
        hint = "; map over a batch with jax.vmap" if values.ndim > 1 + len(block) else ""
        found = list(values.shape)
        raise ValueError(f"{what}: values: expected shape [{expected}], got {found}{hint}")
    return values


def to_jax_values(values: Any, dtype: Any, what: str) -> jax.Array:
    """`values` as a JAX array of `dtype` (None: its own dtype, canonicalized), copied if it was a
    NumPy array.

    Raises ValueError if the cast would lose an imaginary part or wrap integers.
    """
    if dtype is not None:
        try:
            dtype = jnp.dtype(dtype)
        except TypeError as error:
            raise ValueError(f"{what}: dtype: expected a dtype, got {dtype!r} ({error})") from None
        check_numeric(dtype, what, "dtype")
    target = jax.dtypes.canonicalize_dtype(values.dtype if dtype is None else dtype)
    if jnp.issubdtype(values.dtype, jnp.complexfloating) and not jnp.issubdtype(
        target, jnp.complexfloating
    ):
        raise ValueError(f"{what}: dtype: complex values do not fit {target}; pass a complex dtype")
    narrows = jnp.issubdtype(values.dtype, jnp.integer) and jnp.issubdtype(target, jnp.integer)
    if narrows and values.dtype != target and values.size and not is_traced(values):
        low, high = int(values.min()), int(values.max())
        limits: Any = jnp.iinfo(target)  # type: ignore[no-untyped-call]
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{what}: values: expected integers that fit {target}, got {low} .. {high}; "
                "pass dtype=float32 or enable x64"
            )
    if isinstance(values, jax.Array):
        return values.astype(target)
    return to_device(np.array(values, dtype=target))


def to_device(array: np.ndarray) -> jax.Array:
    """A NumPy array, to which nobody writes later, as a JAX array: without a mesh nothing is
    compiled, as it is by jnp.array for each new shape."""
    if jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(array)
    return jnp.array(array)


def check_indices(indices: Any, name: str, ndim: int, what: str) -> Any:
    """`indices` as an integer array of `ndim` dimensions: a NumPy array, or a tracer as it is."""
    try:
        indices = as_array(indices)
    except ValueError as error:
        raise ValueError(f"{what}: {name}: expected an array, got {error}") from None
    if not is_traced(indices):
        indices = np.asarray(indices)
        if indices.size == 0 and indices.dtype == np.float64:  # np.asarray([]) is float64
            indices = indices.astype(np.int32)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"{what}: {name}: expected an integer dtype, got {indices.dtype}")
    if indices.ndim != ndim:
        raise ValueError(f"{what}: {name}: expected {ndim}-d, got shape {list(indices.shape)}")
    return indices


def saturated(integers: Any) -> jax.Array:
    """Integers of any width, NumPy or traced, as int32: clipped to -1 .. INT32_MAX, where a cast
    would wrap. So an index that is out of range stays out of range, and an offset or a length that
    is too large stays too large."""
    integers = as_array(integers)
    unsigned = jnp.issubdtype(integers.dtype, jnp.unsignedinteger)
    if integers.dtype.itemsize > 4 or (unsigned and integers.dtype.itemsize == 4):
        # NumPy arrays are clipped by NumPy: without x64, jnp.asarray would wrap them first.
        clip: Any = jnp.clip if isinstance(integers, jax.Array) else np.clip
        integers = clip(integers, 0 if unsigned else -1, INT32_MAX)
    return jnp.asarray(integers, jnp.int32)


def check_share(share: Any, name: str, op: str, most: float = 1) -> Any:
    """`share`, as a float if it is a number of Python; ValueError unless it is a real number from 0
    to `most`, or a traced scalar, whose value nobody knows yet."""
    array, traced = hasattr(share, "dtype"), is_traced(share)
    if traced and share.shape != ():
        raise ValueError(f"{op}: {name}: expected a scalar, got shape {list(share.shape)}")
    if array:
        kinds = (jnp.floating, jnp.integer)
        real = jnp.shape(share) == () and any(jnp.issubdtype(share.dtype, kind) for kind in kinds)
    else:
        real = isinstance(share, Real | Decimal) and not isinstance(share, bool)
    if traced and real:
        return share
    try:
        number = float(share) if real else math.nan
    except (OverflowError, ValueError):  # of a long integer, which repr may refuse; of Decimal
        number = math.nan
    if not 0 <= number <= most:
        expected = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
        large = isinstance(share, Rational) and number != number
        got = "one that no float holds" if large and real else repr(share)
        raise ValueError(f"{op}: {name}: expected a number {expected}, got {got}")
    return share if array else number


def check_range(indices: np.ndarray, size: int, name: str, what: str) -> None:
    """ValueError unless every index is in 0 .. size-1; it names the first that is not."""
    if indices.size == 0:
        return
    if int(indices.min()) >= 0 and int(indices.max()) < size:
        return
    position = int(np.flatnonzero((indices < 0) | (indices >= size))[0])
    expected = f"0 .. {size - 1}" if size else "none (the dimension has size 0)"
    raise ValueError(
        f"{what}: {name}[{position}]: expected an index in {expected}, got {indices[position]}"
    )


def check_offsets(offsets: np.ndarray, rows: int, nnz: int, name: str, what: str) -> None:
    """ValueError unless offsets [rows + 1] start at 0, never fall and end at nnz at most."""
    if offsets.shape != (rows + 1,):
        raise ValueError(f"{what}: {name}: expected shape [{rows + 1}], got {list(offsets.shape)}")
    if offsets[0] != 0:
        raise ValueError(f"{what}: {name}[0]: expected 0, got {offsets[0]}")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        row = int(falls[0])
        raise ValueError(
            f"{what}: {name}[{row + 1}]: expected at least {name}[{row}] = {offsets[row]}, "
            f"got {offsets[row + 1]}"
        )
    if offsets[-1] > nnz:
        raise ValueError(
            f"{what}: {name}[{rows}]: expected at most nnz = {nnz}, got {offsets[-1]}, "
            f"{offsets[-1] - nnz} more than fit"
        )


def first_unsorted(offsets: np.ndarray, indices: np.ndarray) -> int:
    """The first position whose index is not above its predecessor in the same segment, or -1.

    Both arrays are concrete. Padding, the entries from offsets[-1] on, is not looked at.
    """
    nnz = int(offsets[-1])
    if nnz < 2:
        return -1
    bad = indices[1:nnz] <= indices[: nnz - 1]
    starts = offsets[1:-1]
    bad[starts[(starts > 0) & (starts < nnz)] - 1] = False
    # argmax on booleans stops at the first True.
    position = int(bad.argmax())
    return position + 1 if bad[position] else -1


def check_compressed(
    offsets: np.ndarray,
    indices: np.ndarray,
    shape: Sequence[int],
    names: tuple[str, str],
    what: str,
) -> None:
    """Checks one compressed level: offsets [shape[0] + 1], and indices in 0 .. shape[1]-1 that rise
    strictly within each segment. Indices of padding are arbitrary."""
    check_offsets(offsets, shape[0], indices.shape[0], names[0], what)
    check_range(indices[: int(offsets[-1])], shape[1], names[1], what)
    position = first_unsorted(offsets, indices)
    if position >= 0:
        row = int(np.searchsorted(offsets, position, side="right")) - 1
        raise ValueError(
            f"{what}: {names[1]}[{position}]: expected more than {indices[position - 1]} "
            f"(sorted, no duplicates within segment {row}), got {indices[position]}; "
            "SparseArray.from_scipy and from_coordinates sort and sum, and "
            "graphs.from_edges(..., duplicates='keep') keeps each (a bag of words with repeats)"
        )


def density(nnz: int, shape: tuple[int, ...]) -> float:
    """nnz over the size of the dense array; 0 for an empty shape."""
    total = math.prod(shape)
    return nnz / total if total else 0.0


def check_limit(limit: Any, name: str, what: str) -> float:
    """`limit` as a float; ValueError unless it is a number of at least 1."""
    try:
        number = float(limit)
    except (TypeError, ValueError):
        number = 0.0
    except OverflowError:  # of an integer that no float holds
        number = math.copysign(math.inf, 1 if limit > 0 else -1)
    if not number >= 1:
        raise ValueError(f"{what}: {name}: expected a number of at least 1, got {limit!r}")
    return number


def check_scalar(scalar: Any, what: str) -> Any:
    """`scalar`; ValueError unless it is a numeric scalar of Python or NumPy, or a 0-d array (traced
    or not)."""
    number = isinstance(scalar, (bool, int, float, complex))
    if not number:
        shape, dtype = getattr(scalar, "shape", None), getattr(scalar, "dtype", None)
        if shape != () or dtype is None:
            got = type(scalar).__name__ if shape is None else f"shape {shape}"
            raise ValueError(
                f"{what}: x: expected a scalar or a dense array, got {got}; A.with_values takes a "
                "number for each entry"
            )
        check_numeric(dtype, what, "x")
    return scalar
