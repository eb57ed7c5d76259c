"""Every ```python block of README.md and docs/ runs, and prints the ```text block below it.

The blocks of one page share a namespace and run in a process of their own, as a reader would run
them: no settings of this test suite apply, except that two CPU devices exist.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path):
    script, outputs = script_and_outputs(page.read_text())
    if not outputs:
        pytest.skip("no python block on this page")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for name in ("JAX_ENABLE_X64", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        environment.pop(name, None)
    run = f"exec(compile({script!r}, {page.name!r}, 'exec'))"
    result = subprocess.run(
        [sys.executable, "-c", run],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    printed = result.stdout.split(SEPARATOR + "\n")[:-1]
    for number, (got, expected) in enumerate(zip(printed, outputs, strict=True), start=1):
        if expected is not None:
            assert got == expected, f"python block {number} of {page.name}"


def test_a_wrong_output_would_be_noticed():
    script, outputs = script_and_outputs(
        "# A\n\n```python\nx = 1\nprint(x)\n```\n\n```text\n2\n```\n"
    )
    assert script.splitlines()[3:5] == ["x = 1", "print(x)"]
    assert outputs == ["2\n"]
