"""The GCN over several processes, of one device or two each: losses of one device, a process that
dies, and a resumed run."""

import contextlib
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.sparse

from sgap_jax import SparseArray, parallel

for package in ("optax", "orbax.checkpoint"):
    pytest.importorskip(package)

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "distributed_gcn"
sys.path.insert(0, str(FOLDER))  # train.py imports graphs.py


def _module(name):
    # Under names of their own: other examples have a train.py, too.
    spec = importlib.util.spec_from_file_location(f"distributed_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


graphs, launch, train = _module("graphs"), _module("launch"), _module("train")


def metrics(run):
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def of_one_device(recipe, scale, epochs):
    """The metrics of each epoch, with a SparseArray of the matrix that SciPy has normalized."""
    size, rows = graphs.rmat(scale)
    matrix = (rows(0, size) + scipy.sparse.eye_array(size)).tocsr()
    matrix.data[:] = 1
    factor = scipy.sparse.diags_array(matrix.sum(1) ** -0.5)
    graph = SparseArray.from_scipy((factor @ matrix @ factor).tocsr().astype(np.float32))
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    data = train.inputs(recipe, parallel.partition(graph, mesh, "x"))
    data = jax.tree.map(lambda x: np.asarray(x)[0], data)
    state, found = train.started(recipe), []
    for _ in range(epochs):
        state, line = train.step(state, graph, data, recipe=recipe)
        found.append({name: float(x) for name, x in line.items()})
    return found


def test_one_of_four_dies_the_others_say_so_and_two_go_on_with_the_losses_of_one_device(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    # XLA takes half of each process, which are six on the cores of one machine.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    recipe, scale = train.Recipe(features=16, classes=4), 8
    options = ["--rmat", str(scale), "--features", "16", "--classes", "4", "--every", "2"]
    options += ["--run", str(tmp_path), "--timeout", "20"]
    four, out = launch.start(4, 1, [*options, "--epochs", "1000"]), io.StringIO()
    statuses = []
    # What has not ended by itself so long after the others is ended by a signal.
    waiting = threading.Thread(target=lambda: statuses.extend(launch.wait(four, 150, out)))
    waiting.start()
    # The second checkpoint begins when the first is on disk.
    until = time.monotonic() + 300
    while len(metrics(tmp_path)) < 5 and waiting.is_alive() and time.monotonic() < until:
        time.sleep(0.05)
    four[2].kill()
    waiting.join()
    assert [bool(status) for status in statuses] == [True] * 4, (statuses, out.getvalue())
    assert launch.ended(statuses[2]) == "ended by SIGKILL", out.getvalue()
    assert statuses[0] == statuses[1] == statuses[3] == train.LOST, (statuses, out.getvalue())
    assert out.getvalue().count("another process has ended") == 3, out.getvalue()
    before = metrics(tmp_path)
    assert [line["epoch"] for line in before] == list(range(1, len(before) + 1))

    epochs = len(before) + 2
    two, out = launch.start(2, 2, [*options, "--epochs", str(epochs)]), io.StringIO()
    assert launch.wait(two, 150, out) == [0, 0], out.getvalue()
    held = [
        re.search(rf"process {i}: ([\d,]+) of ([\d,]+) entries", out.getvalue()) for i in (0, 1)
    ]
    mine, whole = ([int(x[i].replace(",", "")) for x in held] for i in (1, 2))
    assert sum(mine) == whole[0] == whole[1] and min(mine) > 0
    after = metrics(tmp_path)[len(before) :]
    first = after[0]["epoch"]
    assert f"epoch {first - 1}: resumed" in out.getvalue()
    assert 2 < first <= len(before) + 1 and first % 2 == 1
    assert [line["epoch"] for line in after] == list(range(first, epochs + 1))
    expected = of_one_device(recipe, scale, epochs)
    for line in before + after:
        for name, value in expected[line["epoch"] - 1].items():
            bound = dict(rtol=1e-4) if name == "loss" else dict(atol=2 / 2**scale)
            np.testing.assert_allclose(line[name], value, **bound, err_msg=str(line))
    assert expected[-1]["loss"] < expected[0]["loss"]


def test_the_processes_end_with_the_one_that_started_them(tmp_path):
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    run = f"import launch; launch.TRAIN = {str(sleeper)!r}; launch.main(['--processes', '2'])"
    command = [sys.executable, "-c", run]
    with subprocess.Popen(command, cwd=FOLDER, stdout=subprocess.PIPE, text=True) as launched:
        started = [int(launched.stdout.readline().split()[1]) for _ in range(2)]
        launched.terminate()
    assert launched.returncode
    assert not running(started)


def running(processes):
    """Those that have not ended, which are killed."""
    found = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            found.append(process)
    return found


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_while_processes_start_ends_those_that_have(number, tmp_path):
    """It comes inside the constructor of the third."""
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(600)")
    run = f"""
import os, signal, subprocess, launch

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        print(self.pid, flush=True)
        if command[-1] == "2":
            os.kill(os.getpid(), signal.{number})

subprocess.Popen, launch.TRAIN = Popen, {str(tmp_path / "sleeper.py")!r}
launch.main(["--processes", "4"])
"""
    launched = subprocess.run([sys.executable, "-c", run], cwd=FOLDER, capture_output=True)
    started = [int(line) for line in launched.stdout.split()]
    assert launched.returncode and not running(started) and len(started) in (3, 4)
    assert b"Traceback" not in launched.stderr, launched.stderr.decode()


def test_processes_end_where_a_later_one_does_not_start(tmp_path, monkeypatch):
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(launch, "TRAIN", tmp_path / "sleeper.py")
    popen, started = subprocess.Popen, []

    def one_alone(*args, **options):
        if started:
            raise BlockingIOError("no more processes")
        started.append(popen(*args, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", one_alone)
    with pytest.raises(BlockingIOError):
        launch.start(2, 1, [])
    assert not running([each.pid for each in started if each.returncode is None])


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_process_prints_is_read_to_its_end(closed, tmp_path, monkeypatch):
    """Also bytes that are no text, and where nobody reads it further: a full pipe stops it."""
    writer = tmp_path / "writer.py"
    writer.write_text("import sys; sys.stdout.buffer.write(b'a \\xff\\n' + 9999 * b'b' + b'\\nc')")
    monkeypatch.setattr(launch, "TRAIN", writer)
    out, (process,) = io.StringIO(), launch.start(1, 1, [])
    if closed:
        out.close()
    try:
        launch._copied(3, process, out)
        assert process.wait() == 0 and not process.stdout.read()
    finally:
        process.kill()
    if not closed:
        assert out.getvalue() == "[3] a \\xff\n[3] " + 9999 * "b" + "\n[3] c"


def test_rows_of_graphs_are_those_of_the_whole(tmp_path):
    size, rows = graphs.rmat(6)
    whole = rows(0, size)
    assert size == 64 and (whole != whole.T).nnz == 0 and whole.nnz > 4 * size
    assert (rows(10, 30) != whole[10:30]).nnz == 0
    scipy.sparse.save_npz(tmp_path / "a.npz", whole)
    count, stored = graphs.stored(tmp_path / "a.npz")
    assert count == size and (stored(10, 30) != whole[10:30]).nnz == 0
    vertices = np.arange(2**9, dtype=np.int32)
    assert len(set(graphs._scattered(vertices, 9).tolist())) == 2**9


@pytest.mark.parametrize("kind", ["own", "gloo", "caused"])
def test_errors_of_the_network_in_any_form_are_a_lost_process(kind, monkeypatch):
    def fail(scale):
        if kind == "caused":
            try:
                raise jax.errors.JaxRuntimeError("INTERNAL: closed by peer")
            except jax.errors.JaxRuntimeError as error:
                raise RuntimeError("no checkpoint") from error
        raise ValueError("Gloo AllGather failed" if kind == "gloo" else "scale: too large")

    def end(message, status):
        raise SystemExit(status)

    monkeypatch.setattr(train.graphs, "rmat", fail)
    monkeypatch.setattr(train, "_end", end)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SystemExit) as ended:
        train.main(["--rmat", "4"])
    assert ended.value.code == (1 if kind == "own" else train.LOST)


def test_command_line_errors_are_sentences(tmp_path, capsys):
    scipy.sparse.save_npz(tmp_path / "wide.npz", scipy.sparse.csr_array((2, 3)))
    for name, words in (
        ("wide.npz", "expected a square matrix, got [2, 3]"),
        ("absent.npz", "No such file"),
    ):
        with pytest.raises(SystemExit):
            train.main(["--graph", str(tmp_path / name)])
        assert words in capsys.readouterr().err
