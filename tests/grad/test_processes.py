"""A matrix in parts over several processes, which JAX joins on loopback: each with two devices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

SCRIPT = Path(__file__).parents[1] / "helpers" / "one_of_processes.py"


def a_free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.tier("all")
def test_two_processes_compute_what_one_device_does(tmp_path):
    """GCN and graph attention forward and backward, attention of a sequence, rows of a file."""
    rng = np.random.default_rng(0)
    A = scipy.sparse.random_array((203, 203), density=0.03, rng=rng).tocsr()
    scipy.sparse.save_npz(tmp_path / "a.npz", A)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, SCRIPT, str(a_free_port()), "2"]
    started = [
        subprocess.Popen(
            [*command, str(rank), tmp_path / "a.npz"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        found = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "".join(x[1] for x in found)
    for rank, (out, _) in enumerate(found):
        row = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
        assert row["rank"] == rank and row["difference"] < 1e-10, row
        # To all go the row of B that all need; of attention the query that sees all, and no key,
        # since of four parts the owner sends no more without.
        assert row["to_all"] == [[1, 0, 0, 0], [], [1, 0, 0, 0]] and row["sent"] == [5, 4, 4, 2]
        assert 2 * row["here"] == row["all"]  # half of the entries are here, and no more
    messages = [json.loads(out.splitlines()[-1])["message"] for out, _ in found]
    assert "expected one for each of [0, 1]" in messages[0] and "got none for 0" in messages[0]
    assert "the processes of parts [0, 1] have none" in messages[1]
