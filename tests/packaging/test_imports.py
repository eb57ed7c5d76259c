"""Which file imports which: no schedule is reached again from what it imports."""

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "sgap_jax.schedules"


def imported(path):
    """Files of the package that one imports, in functions and for types alone too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            found |= {f"{PACKAGE}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module != "sgap_jax", f"{path}: by whole names"
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_schedules_import_in_one_direction():
    files = {f"{PACKAGE}.{p.stem}": p for p in (ROOT / "sgap_jax/schedules").glob("[!_]*.py")}
    graph = {name: imported(path) for name, path in files.items()}
    through = {x for found in graph.values() for x in found if x.startswith(PACKAGE)} - set(files)
    assert not through, "a class through the package's __init__ hides which file it is in"
    graph = {name: found & set(files) for name, found in graph.items()}
    assert sum(map(len, graph.values())) > len(files)
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the files of a circle
