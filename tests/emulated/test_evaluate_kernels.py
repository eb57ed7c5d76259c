"""evaluate on CUDA: merge loops as launches, in derivatives and for index arrays that nobody
checked, run by the emulator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import EACH_ARCHITECTURE, has_turn, require_nvrtc, resources
from emulated_launch import Counted, emulate
from unchecked_structures import KINDS, spoiled

from sgap_jax import (
    CSC,
    CSF,
    CSR,
    Compressed,
    Format,
    Reference,
    ScheduleError,
    SparseArray,
    evaluate,
)
from sgap_jax.compiler import Schedule, parse, presets_cuda
from sgap_jax.schedules.emulated import Emulated

VECTOR = Format((Compressed,))
SIZES = {"i": 9, "j": 6, "k": 5}
SPARSE = {
    "A": CSR,
    "B": CSR,
    "D": CSR,
    "E": CSF(2),
    "Q": CSC,
    "T": CSF(3),
    "u": VECTOR,
    "v": VECTOR,
}
# Each expression, and what jax.numpy has for it.
CASES = {
    "y(i) = b(i) - A(i,j) * x(j)": lambda A, b, x: b - A @ x,
    "C(i,j) = A(i,j) + B(i,j) - E(i,j)": lambda A, B, E: A + B - E,
    "C(i,j) = A(i,j) * B(i,j)": lambda A, B: A * B,
    "y(i) = A(i,j) * v(j)": lambda A, v: A @ v,
    "C(i,k) = A(i,j) * D(j,k)": lambda A, D: A @ D,
    "y(i) = u(i) - E(i,j) * v(j)": lambda u, E, v: u - E @ v,
    "s = A(i,j) * B(i,j)": lambda A, B: jnp.sum(A * B),
    "C(i,j) = T(i,j,k) * D(j,k) + A(i,j)": lambda T, D, A: jnp.einsum("ijk,jk->ij", T, D) + A,
}
SPARSE_RESULTS = {
    "C(i,j) = A(i,j) + B(i,j)": lambda A, B: A + B,
    "C(i,k) = A(i,j) * D(j,k)": lambda A, D: A @ D,
    "y(i) = E(i,j) * v(j)": lambda E, v: E @ v,
}


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def operands(text, dtype="float32"):
    """Integers, so that sums have no rounding; sparse ones and the same dense."""
    right, words = text.split("=")[1], dict(A="ij", B="ij", E="ij", D="jk", Q="ij", T="ijk")
    words |= dict(u="i", v="j", b="i", x="j")
    dense = {}
    for n, (name, word) in enumerate(words.items()):
        random, shape = np.random.default_rng(n), [SIZES[index] for index in word]
        x = random.integers(1, 4, shape) * (random.random(shape) < (0.4 if name in SPARSE else 2))
        if f"{name}(" in right:
            dense[name] = x.astype(dtype)
    made = lambda n, x: (
        SparseArray.from_dense(x, format=SPARSE[n]) if n in SPARSE else jnp.asarray(x)
    )
    return {n: made(n, x) for n, x in dense.items()}, dense


def test_schedules():
    """A thread for each coordinate, or for each tile of merged ones; atomic where it is summed."""
    said = lambda text, **formats: str(
        presets_cuda.merged(parse(text, formats), dict(i=5000, j=100, block=7))
    )
    rows = said("C(i,j) = A(i,j) + B(i,j)", A=CSR, B=CSR)
    assert "split(i, block, thread, 256)" in rows and "GPUThread, NoRaces" in rows
    tiles = said("C(i,j) = A(i,j) + B(i,j)", A=CSF(2), B=CSR)
    assert "split(i, tile, within, 8) and split(tile, block, thread, 256)" in tiles
    total = said("s = A(block,j) * B(block,j)", A=CSR, B=CSR)
    assert "split(block, block_, thread, 32)" in total and "GPUThread, Atomics" in total
    with pytest.raises(ScheduleError, match="no loop that threads could share"):
        presets_cuda.merged(parse("s = a - b", {}), {})


@pytest.mark.parametrize("text", CASES)
def test_values(text):
    counted = Counted(seed=1)
    given, dense = operands(text)
    found = evaluate(text, **given, schedule=Emulated(counted))
    np.testing.assert_array_equal(found, CASES[text](**dense))
    assert len(counted.kernels) == 1, counted.kernels


def test_dtypes():
    text = "C(i,j) = A(i,j) + B(i,j) - E(i,j)"
    for dtype in ("float64", "bfloat16", "int32", "int8"):
        given, dense = operands(text, dtype)
        found = evaluate(text, **given, schedule=Emulated(emulate))
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.float64(found), np.float64(CASES[text](**dense)))


@pytest.mark.parametrize("arch", EACH_ARCHITECTURE)
def test_no_kernel_spills(arch):
    """Of these and of their gradients, which are such expressions too."""
    sources = []

    def keep(call, inputs, outputs):
        sources.append(call.source)
        return [np.zeros(shape, dtype) for shape, dtype in outputs]

    def gradient(text, dtype):
        given, _ = operands(text, dtype)
        name, A = next((n, x) for n, x in given.items() if isinstance(x, SparseArray))
        of = lambda v: evaluate(
            text, **given | {name: A.with_values(v)}, schedule=Emulated(keep)
        ).sum()
        jax.grad(of)(A.values)

    for i, text in enumerate(CASES):
        if has_turn(i, arch):
            gradient(text, ("float32", "float64", "bfloat16", "float16")[i % 4])
    assert len(sources) >= 4
    for source in sources:
        assert resources(source, arch)[1:] == (0, 0), source


@pytest.mark.parametrize("text", SPARSE_RESULTS)
def test_sparse_results(text):
    given, dense = operands(text)
    format = VECTOR if text[0] == "y" else CSR
    counted = Counted()
    found = evaluate(text, **given, format=format, schedule=Emulated(counted))
    np.testing.assert_array_equal(found.todense(), SPARSE_RESULTS[text](**dense))
    assert len(counted.kernels) == 1 and found.format == format


def test_derivatives_and_maps():
    text = "y(i) = b(i) - A(i,j) * x(j) + B(i,j) * v(j)"
    given, _ = operands(text)
    values = {n: x.values if isinstance(x, SparseArray) else x for n, x in given.items()}

    def of(schedule):
        def loss(values):
            own = {
                n: x.with_values(values[n]) if isinstance(x, SparseArray) else values[n]
                for n, x in given.items()
            }
            return jnp.sum(evaluate(text, **own, schedule=schedule) ** 2)

        many = jnp.stack([given["x"], 2 * given["x"]])
        mapped = jax.vmap(lambda x: evaluate(text, **given | {"x": x}, schedule=schedule))(many)
        return jax.jit(jax.value_and_grad(loss))(values), mapped

    counted = Counted()
    jax.tree.map(np.testing.assert_array_equal, of(Emulated(counted)), of(Reference()))
    assert len(counted.kernels) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_unchecked_structures(kind):
    """Launches where the arrays are valid, else plain JAX."""
    arrays, counted = spoiled(CSR, (6, 5), kind, 3)[0], Counted()
    B = SparseArray.from_dense(np.arange(30.0).reshape(6, 5) % 4)

    def total(values, arrays, schedule=None):
        A = SparseArray.from_arrays(values, *arrays, shape=(6, 5))
        return evaluate("C(i,j) = A(i,j) + B(i,j)", A=A, B=B, schedule=schedule), A.todense()

    values = np.arange(1.0, len(arrays[1]) + 1)
    found, dense = jax.jit(functools.partial(total, schedule=Emulated(counted)))(values, arrays)
    np.testing.assert_array_equal(found, dense + B.todense())
    assert bool(counted.kernels) or kind != "valid"


def test_a_schedule_of_the_caller():
    given, dense = operands("C(i,j) = A(i,j) + B(i,j)")
    tiles = Schedule(parse("C(i,j) = A(i,j) + B(i,j)", {"A": CSR, "B": CSR}))
    tiles = tiles.split("i", "b", "t", 4).parallelize("b", "GPUBlock", "NoRaces")
    tiles = tiles.parallelize("t", "GPUThread", "NoRaces")
    counted = Counted()
    found = evaluate("C(i,j) = A(i,j) + B(i,j)", **given, schedule=Emulated(counted, tiles))
    np.testing.assert_array_equal(found, dense["A"] + dense["B"])
    assert len(counted.kernels) == 1


def test_it_lowers_to_a_launch(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    given, _ = operands("C(i,j) = A(i,j) + B(i,j)")

    def text(**how):
        f = jax.jit(lambda given: evaluate("C(i,j) = A(i,j) + B(i,j)", **given, **how))
        return f.trace(given).lower(lowering_platforms=("cuda",)).as_text()

    assert text().count("custom_call @sgap_launch_v1") == 1 and ".text.evaluate" in text()
    assert ".text.evaluate" not in text(schedule=Reference())
