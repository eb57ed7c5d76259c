"""mypy, and pyright where it is installed, on a file of what users write."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "helpers" / "typed_uses.py"
ROOT = FILE.parents[2]


def wrong_lines():
    lines = FILE.read_text().splitlines()
    return [i for i, line in enumerate(lines, 1) if line.endswith("# error")]


def refused(command, pattern):
    """The lines of the file in which a checker finds errors."""
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = [int(n) for n in re.findall(pattern, run.stdout)]
    assert found or not run.returncode, run.stdout + run.stderr
    return sorted(set(found)), run.stdout


@pytest.mark.tier("all")
def test_mypy_takes_what_users_write_and_refuses_what_is_wrong():
    pytest.importorskip("mypy")
    # Errors inside the package are those of `make lint`.
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--no-error-summary",
        str(FILE),
    ]
    found, told = refused(command, r"typed_uses\.py:(\d+): error")
    assert found == wrong_lines(), told


@pytest.mark.tier("all")
def test_pyright_takes_what_users_write_and_refuses_what_is_wrong(tmp_path):
    # basedpyright is pyright with a node.js that pip installs.
    checker = shutil.which("pyright") or shutil.which("basedpyright")
    if checker is None:
        pytest.skip("pyright is not installed")
    settings = tmp_path / "pyrightconfig.json"
    own = {"include": [str(FILE)], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    settings.write_text(json.dumps(own))
    command = [checker, "-p", str(settings), "--pythonpath", sys.executable, "--level", "error"]
    found, told = refused(command, r"typed_uses\.py:(\d+):\d+ - error")
    assert found == wrong_lines(), told
