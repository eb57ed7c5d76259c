"""How machine code is cached, called, and refused."""

import os
import subprocess
import sys
import threading

import compiled_loops as loops
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_loops import call
from compiled_operands import K, M, matrix, own_cache, random_values, wide  # noqa: F401

from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_THREAD,
    Array,
    Float,
    For,
    Function,
    Int,
    Load,
    Store,
    Var,
    Workspace,
)
from sgap_jax.launch.cache import CubinCache

pytest.importorskip("llvmlite")


def test_two_threads_at_once():
    """Two threads compile and call concurrently; one program runs from both."""
    operands, A, _ = matrix(300, 200, "float32", 0.05)
    results, errors = {}, []

    def work(worker):
        try:
            for n in (24, 24 + worker):
                B = random_values(n, (200, n), "float32")
                f = loops.spmm(300, 200, n, operands[1].size, "float32")
                for _ in range(5):
                    (C,) = call(f, *operands, B.ravel(), chunk=8, work=1 << 30)
                    results[worker, n] = np.asarray(C).reshape(300, n) - A @ wide(B)
        except Exception as error:  # the test reports it; else it ends with the thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(w,)) for w in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(results) == 4 and max(np.abs(r).max() for r in results.values()) < 1e-4


def test_machine_code_is_kept(tmp_path, monkeypatch):
    """A second process compiles nothing; a damaged file is compiled again."""
    f = loops.spmv(M, K, 100, "float32")
    key = llvm.compile(f, CubinCache(tmp_path))
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith(key)
    program = (
        "import sys, compiled_loops as loops\n"
        "from sgap_jax.compiler.llvm import machine_code as llvm\n"
        "from sgap_jax.launch.cache import CubinCache\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "def no(text): raise SystemExit('compiled again')\n"
        "llvm._machine_code = no\n"
        f"f = loops.spmv({M}, {K}, 100, 'float32')\n"
        "print(llvm.compile(f, CubinCache(Path(sys.argv[1]))))\n"
        "ones = np.ones(100, np.float32)\n"
        f"pos = np.minimum(3 * np.arange({M} + 1), 100).astype(np.int32)\n"
        f"y, = loops.call(f, pos, np.zeros(100, np.int32), ones, np.ones({K}, np.float32))\n"
        "print(int(np.asarray(y).sum()))\n"
    )
    environment = dict(os.environ, SGAP_CACHE_DIR=str(tmp_path), JAX_PLATFORMS="cpu")
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == [key, "100"], run.stderr
    kept.write_bytes(kept.read_bytes()[:-9])
    monkeypatch.setattr(llvm, "_engines", {})
    assert llvm.compile(f, CubinCache(tmp_path)) == key
    assert len(kept.read_bytes()) > 1000


def ffi(key, sizes, results, **attributes):
    call = jax.ffi.ffi_call(llvm.TARGET, [jax.ShapeDtypeStruct((r,), jnp.float32) for r in results])
    attributes = {"chunk": np.int64(0), "work": np.int64(0)} | attributes
    return jax.block_until_ready(
        call(*(jnp.zeros(s, jnp.float32) for s in sizes), key=key, **attributes)
    )


def test_calls_that_are_refused():
    with pytest.raises(Exception, match=r"not in this process.*Lower the same.*schedule=Reference"):
        ffi("0" * 64, [1], [1])
    body = (
        For("i", Int(0), Int(4), (Store("y", Var("i"), Load("x", Var("i"))),), unit=CPU_THREAD),
    )
    f = Function("copy", (Array("x", "float32", 4),), (Array("y", "float32", 4),), body)
    key = llvm.compile(f)
    with pytest.raises(Exception, match="array 0: expected 16 bytes, got 20"):
        ffi(key, [5], [4])
    with pytest.raises(Exception, match="array 1: expected 16 bytes, got 12"):
        ffi(key, [4], [3])
    with pytest.raises(Exception, match="expected 2 arrays, got 3"):
        ffi(key, [4, 4], [4])
    with pytest.raises(Exception, match="chunk: expected >= 0, got -1"):
        ffi(key, [4], [4], chunk=np.int64(-1))
    huge = Workspace("w", 1 << 55)
    f = Function(
        "huge",
        (),
        (Array("y", "float32", 1),),
        (For("i", Int(0), Int(1), (huge, Store("y", Int(0), Load("w", Int(5)))), unit=CPU_THREAD),),
        index="int64",
    )
    with pytest.raises(Exception, match="no memory for workspaces of"):
        call(f)


def test_a_cpu_without_float16(monkeypatch):
    binding, _, _ = llvm._host()
    f = loops.spmv(2, 2, 1, "float16")
    monkeypatch.setattr(binding, "get_host_cpu_features", dict)
    if llvm._host()[1].triple.startswith("x86_64"):
        with pytest.raises(NotImplementedError, match="does not convert float16"):
            llvm.compile(f, CubinCache(None))


def test_without_llvmlite(monkeypatch):
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    llvm._host.cache_clear()
    f = Function("alone", (), (Array("y", "float32", 1),), (Store("y", Int(0), Float(1.0)),))
    try:
        with pytest.raises(ImportError, match=r"pip install 'sgap_jax\[compiler\]'"):
            llvm.call_attributes(f)
    finally:
        llvm._host.cache_clear()
