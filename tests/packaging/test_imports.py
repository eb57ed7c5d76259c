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
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_schedules_import_in_one_direction():
    files = {f"{PACKAGE}.{p.stem}": p for p in (ROOT / "sgap_jax/schedules").glob("[!_]*.py")}
    graph = {name: imported(path) & set(files) for name, path in files.items()}
    assert sum(map(len, graph.values())) > len(files)
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the files of a circle
