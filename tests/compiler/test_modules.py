"""The compiler's modules import each other one way, those that only name a type included."""

import ast
import graphlib
import pathlib

import pytest

from sgap_jax import compiler

FILES = sorted(pathlib.Path(compiler.__file__).parent.glob("*.py"))


def imported(path):
    """Modules of the compiler, wherever in the file the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module="sgap_jax.compiler", names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=str(module)) if module.startswith("sgap_jax.compiler."):
                found.add(module.rpartition(".")[2])
    return found


def test_no_module_imports_one_that_imports_it():
    graph = {path.stem: imported(path) for path in FILES if path.stem != "__init__"}
    order = [*graphlib.TopologicalSorter(graph).static_order()]
    assert set(order) == set(graph)
    # The arrows are there: one more, from the ground to the top, closes a circle.
    graph["expr"].add("schedule")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()
