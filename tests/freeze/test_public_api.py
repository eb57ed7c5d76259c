"""The public names and their signatures, as golden/public_api.txt has them.

Annotations are left out: versions of Python print them differently. What is compared of a
parameter is its name, its kind (positional, keyword only, ...) and its default.
"""

import dataclasses
import functools
import inspect
import types

import pytest

pytest.importorskip("flax")

import flax.linen

import sgap_jax
from sgap_jax import compiler, linalg, masks, nn, parallel, select
from sgap_jax.compiler import presets
from sgap_jax.nn import linen

MODULES = (sgap_jax, masks, select, parallel, linalg, nn, linen, compiler)
# docs/api.md documents these of the module of presets, which imports more.
PRESETS = ("cpu", "cpu_entries", "cpu_fibers", "cpu_workspace", "spmm_point")

OPERATORS = {
    f"__{name}__"
    for name in (
        *("add", "sub", "mul", "truediv", "matmul", "pow", "radd", "rsub", "rmul", "rtruediv"),
        *("rmatmul", "rpow", "neg", "pos", "abs", "call", "getitem", "setitem", "array"),
        *("len", "iter", "contains", "bool", "lt"),
    )
}
# Flax gives these to every linen module.
OF_LINEN = {"parent", "name", "scope"}


class Shown:
    """A default that is shown by its name: its own text has an address, or a module."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


def shown(default):
    if isinstance(default, type):
        return Shown(default.__name__)
    if callable(default) and hasattr(default, "__name__"):
        return Shown(f"<function {default.__name__}>")
    return default


def signature(function, left_out=()):
    """The parameters of a function, without their annotations."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=parameter.empty, default=shown(parameter.default))
        if parameter.default is not parameter.empty
        else parameter.replace(annotation=parameter.empty)
        for parameter in found.parameters.values()
        if parameter.name not in left_out
    ]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


def public_names(module):
    """name -> object, without the modules that importing it left there."""
    if module is presets:
        return {name: getattr(presets, name) for name in PRESETS}
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def is_ours(kind):
    return kind.__module__.split(".")[0] == "sgap_jax"


def bases(kind):
    """The names of the public classes that a class derives from, and the nearest one of Python's
    own or of Flax."""
    public = {id(value) for module in MODULES for value in public_names(module).values()}
    above = kind.__mro__[1:-1]
    others = [base for base in above if base.__module__.split(".")[0] in ("builtins", "flax")][:1]
    return [base.__name__ for base in above if id(base) in public or base in others]


def member(kind, name, value):
    """A line for a member of a class."""
    if isinstance(value, property | functools.cached_property):
        return f"{name}: property"
    if isinstance(value, classmethod):
        return f"{name}{signature(getattr(kind, name))}: class method"
    if isinstance(value, staticmethod):
        return f"{name}{signature(getattr(kind, name))}: static method"
    if inspect.isroutine(value):
        return f"{name}{signature(value)}"
    return f"{name} = {shown(value)!r}"


def class_lines(name, kind):
    hidden = OF_LINEN if issubclass(kind, flax.linen.Module) else set()
    members = {}
    for base in reversed([base for base in kind.__mro__ if is_ours(base)]):
        members |= vars(base)
    derives = f" of {', '.join(bases(kind))}" if bases(kind) else ""
    yield f"class {name}{derives}"
    if "__init__" in members:
        yield f"  {name}{signature(kind.__init__, {'self', *hidden})}"
    fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    arguments = inspect.signature(kind.__init__).parameters if "__init__" in members else ()
    if more := [field for field in fields if field not in arguments]:
        yield f"  fields beside its arguments: {', '.join(more)}"
    for key, value in sorted(members.items()):
        if key in OPERATORS or not (key.startswith("_") or key in hidden or key in fields):
            yield f"  {member(kind, key, value)}"


def lines(module):
    yield f"# {module.__name__}"
    for name, value in public_names(module).items():
        if isinstance(value, type):
            yield from class_lines(name, value)
        else:
            yield f"{name}{signature(value)}" if callable(value) else f"{name} = {value!r}"
    yield ""


def test_public_names_and_signatures(golden):
    found = [line for module in (*MODULES, presets) for line in lines(module)]
    golden.text("public_api.txt", "\n".join(found))
