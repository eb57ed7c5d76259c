"""What XLA's GPU compiler makes of each operation: launches, command buffers, copies, sorts and
collectives."""

import functools
import importlib
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import jax
import jax.extend
import pytest
import result_cache

import sgap_jax

pytestmark = pytest.mark.tier("all")

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PLUGIN = pathlib.Path(sys.prefix) / "xla-gpu" / os.environ.get("SGAP_XLA", "cuda13")
OTHERS = ("sm_80", "sm_100")
# Of those that take XLA seconds none: docs/gpu_compile.md says when they were compiled.
A_FEW = ("spmm", "spmm by nonzeros", "spmm vectors", "sddmm vectors", "attention vectors", "top_k")
A_FEW += ("attention with terms", "spmm by nonzeros, skewed", "gspmm max, skewed")
A_FEW += ("gspmm max, forward mode", "evaluate", "evaluate at a pattern")

# Launches of a program: forward, and forward and backward. Under vmap, scan, shard_map and a mesh
# it has the same ones: a batch is one launch, and the steps of a scan share theirs.
LAUNCHES = {
    "spmm": (1, 3),
    "spmm bfloat16": (1, 3),
    "spmm transpose": (1, 3),
    "spmm 4 columns": (1, 3),
    "spmm by nonzeros": (1, 3),
    "spmm vectors": (1, 3),
    "spmm vectors float32": (1, 3),
    "spmm blocks": (1, 3),
    "spmv": (1, 3),
    "sddmm": (1, 3),
    "sddmm weighted": (1, 4),
    "sddmm vectors": (1, 3),
    "sparse_softmax": (1, 2),
    "sparse_softmax vectors": (1, 2),
    "row_sum": (1, 2),
    "row_max": (1, 4),
    "gspmm max": (1, 3),
    "gspmm mean": (2, 4),
    "gsddmm": (1, 3),
    "attention": (1, 3),
    "attention vectors": (1, 3),
    "attention with terms": (1, 3),
    "attention in three steps": (3, 8),
    "einsum": (1, 4),
    "einsum with a schedule": (1, 3),
    "spgemm": (1, 3),
    "spgemm in a capacity": (3, 5),
    "top_k": (2, 2),
    "top_p": (5, 5),
    "threshold": (2, 2),
    "from_dense": (2, 2),
    "gspmm edge vectors": (1, 3),
    "gspmm edge vectors, sub": (2, 4),
    "gspmm edge vectors, max": (1, 1),
    "gsddmm edge vectors": (1, 3),
    "gsddmm edge vectors, add": (1, 3),
    "aggregate": (1, 2),
    "aggregate max": (1, 2),
    "row_max edge vectors": (1, 4),
    "sparse_softmax edge vectors": (1, 2),
    "spmm, made inside": (1, 9),  # three for each of two digits of the columns
    "spmm in pieces": (2, 5),
    "spmm in pieces, vectors": (2, 4),
    "spmm by nonzeros, skewed": (1, 3),
    "gspmm max, skewed": (2, 5),
    "gspmm max, forward mode": (2, 4),
    "attention in pieces": (2, 7),
    "attention in pieces, vectors": (2, 5),
    "spmm in pieces, prepared": (2, 5),
    "attention in pieces, vectors, prepared": (2, 5),
    "evaluate": (1, 3),
    "evaluate at a pattern": (1, 3),
    "triangular_solve": (0, 1),
    "ilu": (0, 0),
}
COLLECTIVES = {
    "spmm, columns": ({}, {"all-reduce": 1}),  # the gradient of the values is a sum over devices
    "sddmm, summed features": ({"all-reduce": 1}, {"all-reduce": 1}),
    "gspmm max, columns": ({}, {"all-reduce": 1}),
    "gspmm mean, columns": ({}, {"all-reduce": 1}),
    "gsddmm, batch": ({}, {}),
    "sparse_softmax, batch": ({}, {}),
    "row_sum, batch": ({}, {}),
    "row_max, batch": ({}, {}),
    "attention, heads": ({}, {}),
    "attention, batch": ({}, {}),
    "einsum, an index of the result": ({}, {"all-reduce": 1}),
}
# Without a launch on CUDA: they are made of other primitives there, or are plain JAX.
PLAIN_PRIMITIVES = {"attention_tangent", "einsum_unchecked", "top_k_of_indexer", "zero_product"}
# Called where `reached` and `nonzero` are lowered, which makes their launches.
WITHIN = {"bitmap_of_mask", "bitmap_of_scores", "bitmap_entries"}
# A batch of these is computed in turn, or in plain JAX: with `jit` alone they may take collectives.
IN_TURN = ("evaluate", "evaluate at a pattern", "triangular_solve", "ilu")
# Scatters in plain JAX: XLA copies the zeros that they begin with.
PLAIN = ("spgemm", "spgemm in a capacity", "top_k", "top_p", "attention in pieces", *IN_TURN)
PLAIN += ("spmm, made inside", "threshold", "from_dense")
# The same, of two index arrays of the transpose of blocks; in a scan XLA takes the zeros out of it.
SCATTERS = {"spmm blocks": 2}


@functools.cache
def compiled(arch):
    """A finished process of compile.py, in which alone the CUDA plugin is."""
    folder = result_cache.folder()
    path = [PLUGIN, HERE, ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "SGAP_CACHE_DIR": "" if folder is None else str(folder / "cubins"),
    }
    return subprocess.run(
        [sys.executable, HERE / "compile.py", arch, *(() if arch == "sm_90" else A_FEW)],
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=540,
    )


def found(arch):
    if not any(PLUGIN.glob("jax_cuda*_plugin-*.dist-info")):
        pytest.skip("JAX's CUDA plugin is not installed: make test-gpu-compile does so")
    process = compiled(arch)
    assert process.returncode == 0, process.stderr[-6000:]
    return json.loads(process.stdout)


def group(arch):
    """One process compiles all programs for an architecture, so one worker has their tests."""
    return pytest.mark.xdist_group(f"xla_gpu {arch}")


@group("sm_90")
@pytest.mark.seconds(all=60)  # the first compiles all
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_program(name):
    of, in_two_ways = found("sm_90")["programs"][name], found("sm_90")["in_two_ways"]
    forward, gradient = LAUNCHES[name]
    expected = {way: gradient for way in of} | {"forward": forward}
    assert {way: one["launches"] for way, one in of.items()} == expected
    for none in ("apart", "sorts"):
        assert {way: one[none] for way, one in of.items()} == dict.fromkeys(of, 0), none
    assert len(of) == (2 if name in in_two_ways else 6)
    if name not in PLAIN:  # a scan copies its counter
        copies = {way: one["copies"] for way, one in of.items() if one["copies"]}
        if (
            "-jax-" in PLUGIN.name and "scan" in of
        ):  # an earlier JAX copies what a step takes in thunks of their own
            copies["scan"] = 1 + SCATTERS.get(name, 0)
        assert copies == ({} if name in in_two_ways else {"scan": 1 + SCATTERS.get(name, 0)})
    inside = {way: one["collectives"] for way, one in of.items() if one["collectives"]}
    assert set(inside) <= ({"mesh"} if name in IN_TURN else set())


@group("sm_90")
def test_the_table_has_every_program():
    assert set(found("sm_90")["programs"]) == set(LAUNCHES)


def test_every_public_operation_is_in_a_program():
    """Those of the package's primitives; a plan is made outside of programs."""
    public = {
        name
        for name, value in vars(sgap_jax).items()
        if getattr(value, "__module__", "").startswith("sgap_jax.primitives") and name[0] != "_"
    }
    words = set(re.findall(r"\w+", (HERE / "programs.py").read_text()))
    assert len(public) > 12 and public - words == {"spgemm_plan"}


@group("sm_90")
def test_every_primitive_is_in_a_program():
    """Also those of gradients, except of what has no launch on CUDA."""
    every = {
        value.name
        for module in pkgutil.iter_modules(sgap_jax.primitives.__path__, "sgap_jax.primitives.")
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, jax.extend.core.Primitive)
    }
    assert len(every) > 20
    assert every - set(found("sm_90")["primitives"]) == PLAIN_PRIMITIVES | WITHIN


@group("sm_90")
def test_collectives_of_split_operands():
    """As on the CPU (tests/grad/test_partitioned.py): `COLLECTIVES` forward, and with gradients."""
    assert found("sm_90")["collectives"] == {
        name: {"forward": forward, "gradient": gradient}
        for name, (forward, gradient) in COLLECTIVES.items()
    }


@group("sm_90")
def test_a_donated_parameter_is_updated_in_place():
    """XLA may update one parameter before a launch that still reads it, which then has a copy."""
    for name, of in found("sm_90")["donated"].items():
        assert of["aliased"] == of["operands"] and of["copies"] <= 1, name


@group("sm_90")
def test_parts_multiply_while_rows_travel():
    """The product with own columns is started before the end of the exchange, or of its last round:
    XLA starts a round when the one before it has ended."""
    at_once, rounds = found("sm_90")["parts"]
    assert at_once == ["all-to-all-start", "custom-call", "all-to-all-done", "custom-call"]
    last = ["collective-permute-start", "custom-call", "collective-permute-done", "custom-call"]
    assert rounds[-4:] == last
    assert found("sm_90")["scattered"] == ["reduce-scatter"]


@group("sm_90")
def test_instantiate_refuses_a_wrong_launch():
    expected = "sgap_launch: block: expected 1 to 1024 threads, got 2048 x 1 x 1"
    assert expected in found("sm_90")["refused"]


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=group(arch)) for arch in OTHERS])
@pytest.mark.parametrize("name", A_FEW)
def test_a_program_on_another_gpu(name, arch):
    of = found(arch)["programs"][name]
    assert (of["forward"]["launches"], of["gradient"]["launches"]) == LAUNCHES[name]
    assert of["forward"]["apart"] == of["gradient"]["apart"] == 0
