"""Every ```python block of README.md and docs/ runs, and prints the ```text block below it.

The blocks of one page share a namespace and run in a process of their own, as a reader would run
them: no settings of this test suite apply, except that two CPU devices exist. Recipes, and the
notebooks of examples/notebooks, share a process.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?^```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
SEPARATOR = "-- end of block --"


def script_and_outputs(page: str) -> tuple[str, list[str | None]]:
    """The blocks as one script, each on its own lines of the page, and what each should print."""
    lines = [""] * (page.count("\n") + 1)
    outputs = []
    for block in BLOCK.finditer(page):
        start = page.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[start : start + len(code)] = code
        lines[start + len(code)] = f"print({SEPARATOR!r})"  # on the line of the closing fence
        outputs.append(block.group(2))
    return "\n".join(lines), outputs


def printed_by(scripts: dict[str, str], folder: Path) -> list[str]:
    """What the blocks print, of scripts that run one after the other, each in its own namespace."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for name in ("JAX_ENABLE_X64", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        environment.pop(name, None)
    runs = (
        f"exec(compile({script!r}, {name!r}, 'exec'), {{'__name__': '__main__'}})\n"
        for name, script in scripts.items()
    )
    result = subprocess.run(
        [sys.executable, "-"],
        input="".join(runs),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300 * len(scripts),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split(SEPARATOR + "\n")[:-1]


@pytest.mark.seconds(all=150)  # every page
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path):
    script, outputs = script_and_outputs(page.read_text())
    if not outputs:
        pytest.skip("no python block on this page")
    printed = printed_by({page.name: script}, tmp_path)
    for number, (got, expected) in enumerate(zip(printed, outputs, strict=True), start=1):
        if expected is not None:
            assert got == expected, f"python block {number} of {page.name}"


@pytest.mark.tier("all")
def test_recipes_print_what_they_say_and_notebooks_run(tmp_path):
    scripts, blocks = {}, []
    for page in RECIPES:
        text = page.read_text()
        assert text.count("\n") < 70 and "What is won:" in text, page.name
        scripts[page.name], outputs = script_and_outputs(text)
        blocks += [(page.name, output) for output in outputs]
    for notebook in NOTEBOOKS:
        cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
        assert not any(c["outputs"] or c["execution_count"] for c in cells), "clear its outputs"
        scripts[notebook.name] = "\n".join(
            f"{''.join(c['source'])}\nprint({SEPARATOR!r})" for c in cells
        )
        blocks += [(notebook.name, None)] * len(cells)
    assert len(RECIPES) >= 8 and len(NOTEBOOKS) >= 2
    for got, (name, expected) in zip(printed_by(scripts, tmp_path), blocks, strict=True):
        assert expected in (None, got), f"{name}: {got}"


def test_a_wrong_output_would_be_noticed():
    script, outputs = script_and_outputs(
        "# A\n\n```python\nx = 1\nprint(x)\n```\n\n```text\n2\n```\n"
    )
    assert script.splitlines()[3:5] == ["x = 1", "print(x)"]
    assert outputs == ["2\n"]
