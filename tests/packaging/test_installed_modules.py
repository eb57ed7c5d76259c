"""When make installs again: an editable install finds by path the modules that it was made with."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "again"), [("sgap_jax/__init__.py", False), ("sgap_jax/gone.py", True)]
)
def test_a_module_that_has_gone_is_installed_again(module, again, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("no make")
    stamps = tmp_path / "stamps"
    stamps.mkdir()
    for name in ("venv", "build-tools"):
        (stamps / name).touch()
    (stamps / "package").write_text(f"{module}\n")
    words = ["make", "-n", f"VENV={tmp_path}", f"{stamps}/package"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ("install --quiet --no-deps --no-build-isolation --editable" in said) == again
    if again:  # and the stamp lists what is there then
        assert f"find sgap_jax -name '*.py' ! -name '* *' > {stamps}/package" in said
