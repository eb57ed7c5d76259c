"""JAX's own tests of sparse products, pointed at ours.

They come from a checkout of jax that SGAP_JAX_SOURCE names (of the version installed, or near it).
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

# file -> the tests of it that multiply a 2-D CSR or BCSR matrix
SELECTED = {
    "sparse_test.py": "csr_matvec or csr_matmat or csr_matmul_ad",
    "sparse_bcoo_bcsr_test.py": "bcsr_matmul",
}


@pytest.mark.parametrize("file", SELECTED)
def test_jax_sparse(file):
    source = os.environ.get("SGAP_JAX_SOURCE")
    if source is None:
        pytest.skip("SGAP_JAX_SOURCE does not name a checkout of jax")
    path = pathlib.Path(source) / "tests" / file
    here = pathlib.Path(__file__).parent
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(path), "-q", "-n0", "-p", "no:cacheprovider"),
            *("-p", "jax_sparse_with_our_products", "-k", SELECTED[file]),
        ],
        capture_output=True,
        text=True,
        cwd=path.parent,
        env={
            **os.environ,
            "PYTHONPATH": str(here),
            "XLA_FLAGS": "",
            "JAX_ENABLE_X64": "1",
            "JAX_NUM_GENERATED_CASES": "200",
        },
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", run.stdout)[1])
    kernel = int(re.search(r"products: (\d+) kernel", run.stdout)[1])
    assert passed >= 40 and kernel >= 40, run.stdout[-2000:]
