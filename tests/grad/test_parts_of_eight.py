"""Operations on a matrix in eight parts: values and gradients against those of the whole matrix."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parts_calls import cases, cuts_of

SCRIPT = Path(__file__).parents[1] / "helpers" / "parts_calls.py"


@pytest.fixture(scope="module")
def rows(request):
    """What the script prints for the cases that this session runs."""
    items = [item for item in request.session.items if item.function is test_values_and_gradients]
    mine = dict.fromkeys(item.callspec.params["case"] for item in items)
    found = subprocess.run(
        [sys.executable, SCRIPT, *mine],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.tier("test")
@pytest.mark.parametrize("case", cases())
def test_values_and_gradients(case, rows):
    mine = [row for row in rows if row["name"] == case]
    assert [row["cut"] for row in mine] == list(cuts_of(case))
    for row in mine:
        assert row["difference"] < 1e-12, row
