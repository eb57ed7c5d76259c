"""Machine code in memory is owned by the programs that run it, and freed when no program is
left."""

import gc
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_operands import own_cache  # noqa: F401

from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_THREAD,
    Array,
    Binary,
    Float,
    For,
    Function,
    Int,
    Load,
    Store,
    Var,
)

pytest.importorskip("llvmlite")


def plus(n):
    """y[i] = x[i] + n."""
    body = (Store("y", Var("i"), Binary("+", Load("x", Var("i")), Float(float(n)))),)
    loop = For("i", Int(0), Int(4), body, unit=CPU_THREAD)
    return Function("plus", (Array("x", "float32", 4),), (Array("y", "float32", 4),), (loop,))


def program(n):
    """A jitted function that names the kernel, as einsum's programs do."""

    @jax.jit
    def run(x):
        call = jax.ffi.ffi_call(llvm.TARGET, jax.ShapeDtypeStruct((4,), jnp.float32))
        return call(x, **llvm.call_attributes(plus(n)))

    return run


def check(run, n):
    np.testing.assert_array_equal(run(jnp.ones(4, jnp.float32)), np.full(4, 1 + n, np.float32))


def test_executables_keep_their_code_and_nothing_else_does(monkeypatch):
    monkeypatch.setenv("SGAP_COMPILED_IN_MEMORY", "4")
    gc.collect()
    before = llvm.in_memory()
    runs = [program(n) for n in range(12)]
    for n, run in enumerate(runs):
        check(run, n)
    held = llvm.in_memory()
    assert held >= 12  # each is held by an executable
    for n, run in enumerate(runs):
        check(run, n)
    del run, runs
    jax.clear_caches()
    gc.collect()
    assert llvm.in_memory() <= min(held - 8, before + 4)
    again = program(3)  # from the disk cache, or still in memory
    check(again, 3)


def test_a_program_of_more_kernels_than_are_kept(monkeypatch):
    """All kernels are lowered before XLA loads the first."""
    monkeypatch.setenv("SGAP_COMPILED_IN_MEMORY", "2")

    @jax.jit
    def run(x):
        for n in range(20, 40):
            call = jax.ffi.ffi_call(llvm.TARGET, jax.ShapeDtypeStruct((4,), jnp.float32))
            x = call(x, **llvm.call_attributes(plus(n)))
        return x

    np.testing.assert_array_equal(
        run(jnp.zeros(4, jnp.float32)), np.full(4, sum(range(20, 40)), np.float32)
    )


def test_kernels_that_no_program_takes_are_bounded_too(monkeypatch):
    monkeypatch.setenv("SGAP_COMPILED_IN_MEMORY", "1")
    gc.collect()
    before = llvm.in_memory()
    for n in range(100, 140):
        llvm.compile(plus(n))
    assert llvm.in_memory() <= before + llvm._WAITING


def test_a_setting_that_is_no_number(monkeypatch):
    monkeypatch.setenv("SGAP_COMPILED_IN_MEMORY", "many")
    with pytest.raises(ValueError, match="SGAP_COMPILED_IN_MEMORY: expected a number.*'many'"):
        llvm.compile(plus(1000))


def test_a_thousand_shapes(tmp_path):
    """In a process of its own, whose memory is measured: the first program works to the end."""
    script = """
        import gc, resource
        import test_memory as t
        from sgap_jax.compiler.llvm import machine_code as llvm

        def megabytes():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize() >> 20

        first = t.program(0)
        t.check(first, 0)
        most, middle = 0, None
        for n in range(1, 1001):
            llvm.compile(t.plus(n))
            if n % 20 == 0:  # XLA takes most of the time
                t.check(t.program(n), n)
            most = max(most, llvm.in_memory())
            if n == 500:
                gc.collect()
                middle = megabytes()
        gc.collect()
        t.check(first, 0)
        print(most, megabytes() - middle)
    """
    environment = dict(os.environ, SGAP_CACHE_DIR=str(tmp_path), JAX_PLATFORMS="cpu")
    environment["SGAP_COMPILED_IN_MEMORY"] = "16"
    environment["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(__file__), *filter(None, sys.path)]
    )
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    most, grown = map(int, run.stdout.split())
    assert most <= 16 * (llvm._WAITING + 1) + 100 and grown < 20, run.stdout
