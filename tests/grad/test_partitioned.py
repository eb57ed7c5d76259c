"""Plain jit over eight devices: collectives, values and gradients against a table."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from differentiable_ops import close, normal
from jax import export
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_calls import cases

from sgap_jax import CVS, CpuTile, OctetTile, sddmm, spmm, spmv

CASES = cases()
SCRIPT = Path(__file__).parents[1] / "helpers" / "partitioned_calls.py"
ESSENTIAL = ("spmm, columns", "sddmm, summed features", "attention, batch and heads")


@pytest.fixture(scope="module")
def rows(request):
    """What the script prints for the cases that this session runs, by case."""
    mine = [item.callspec.params["case"] for item in request.session.items if _asks(item)]
    found = subprocess.run(
        [sys.executable, SCRIPT, *dict.fromkeys(mine)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def _asks(item):
    return item.function in (test_essential_collectives, test_collectives)


def held(case, rows):
    mine, table = [row for row in rows if row["name"] == case], CASES[case]
    assert len(mine) == 2 * len(table.kinds)
    for row in mine:
        assert row["difference"] < 1e-12, row
        if table.forward is None:
            continue
        if row["way"] == "forward":
            assert row["collectives"] == table.forward, row
            assert row["split"] == [table.split], row
        for name, count in row["collectives"].items():
            assert count <= {**table.forward, **table.gradient}.get(name, 0), row


# One worker has all of them, and so the script runs once.
of_the_script = pytest.mark.xdist_group("partitioned")


@of_the_script
@pytest.mark.parametrize("case", ESSENTIAL)
@pytest.mark.seconds(all=60)
def test_essential_collectives(case, rows):
    held(case, rows)


@of_the_script
@pytest.mark.tier("test")
@pytest.mark.parametrize("case", [case for case in CASES if case not in ESSENTIAL])
def test_collectives(case, rows):
    held(case, rows)


A = array(BATTERY["skewed"], jnp.float64)


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def columns(mesh, x):
    return jax.device_put(x, NamedSharding(mesh, P(None, "x")))


def text_of(function, *arrays):
    return jax.jit(function).lower(*arrays).compile().as_text()


def test_scan_remat_and_vmap_of_a_split_product(mesh):
    def step(B, _):
        B = jnp.tanh(spmm(A, jax.vmap(lambda b: spmv(A, b), 1, 1)(B), transpose=True))
        return B, B.sum()

    loss = lambda B: jax.lax.scan(jax.checkpoint(step), B, None, length=3)[0].sum()
    B = 0.1 * normal(A.shape[1], 6)
    close(jax.jit(jax.grad(loss))(columns(mesh, B)), jax.grad(loss)(B))
    text = text_of(jax.grad(loss), columns(mesh, B))
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)


def test_sums_over_devices_are_rounded_once(mesh):
    """bfloat16 features over two devices: the sum of both parts in float32, and one rounding."""
    X, Y = (normal(n, 64).astype(jnp.bfloat16) for n in A.shape)
    exact = sddmm(A, *(x.astype(jnp.float32) for x in (X, Y))).values
    got = jax.jit(lambda X, Y: sddmm(A, X, Y).values)(columns(mesh, X), columns(mesh, Y))
    assert got.dtype == jnp.bfloat16
    ulps = np.abs(np.asarray(got, np.float32) - np.asarray(exact, np.float32))
    # Half a unit in the last place of bfloat16, and the order of a sum in float32.
    assert (ulps <= np.abs(np.asarray(exact)) * 2.0**-8 + 1e-4).all()


def test_an_export_of_a_split_program_holds_the_kernels_alone(mesh):
    B = normal(A.shape[1], 6)
    allowed = [export.DisabledSafetyCheck.custom_call("sgap_spmm_csr_v1")]
    given = jax.device_put(A, NamedSharding(mesh, P())), columns(mesh, B)
    exported = export.export(jax.jit(lambda A, B: A @ B), disabled_checks=allowed)(*given)
    assert exported.nr_devices == 2 and "CustomSPMDPartitioning" not in exported.mlir_module()
    restored = export.deserialize(exported.serialize())
    close(jax.jit(restored.call)(*given), A @ B)


def test_a_program_for_more_devices_than_the_process_has():
    """Nothing stands for the devices of the program: operands are gathered, as a warning says."""
    mesh = AbstractMesh((64,), ("x",))
    B = jax.ShapeDtypeStruct((A.shape[1], 64), A.dtype, sharding=NamedSharding(mesh, P(None, "x")))
    traced = jax.jit(lambda B: A @ B).trace(B)
    with pytest.warns(RuntimeWarning, match="xla_force_host_platform_device_count=64"):
        text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "CustomSPMDPartitioning" not in text and "sgap_spmm_csr_v1" in text


def test_a_program_of_one_device_lowers_to_the_kernel_alone():
    B = normal(A.shape[1], 6)
    text = jax.jit(lambda A, B: A @ B).lower(A, B).as_text()
    assert "CustomSPMDPartitioning" not in text and "sgap_spmm_csr_v1" in text


def test_errors_are_those_of_one_device(mesh):
    B = columns(mesh, normal(A.shape[1], 6))
    with pytest.raises(NotImplementedError, match="spmm: no kernel for dtype int32"):
        jax.jit(lambda B: spmm(A.astype(jnp.int32), B, schedule=CpuTile()))(B.astype(jnp.int32))
    with pytest.raises(NotImplementedError, match="runs on column vectors"):
        jax.jit(lambda B: spmm(A, B, schedule=OctetTile(tile_n=32, tile_k=64)))(B)


def test_a_schedule_that_the_parts_cannot_obey_runs_whole(mesh):
    """Octets are of bfloat16, and partial sums are in float32: the features are not split."""
    vectors = A.asformat(CVS(8)).astype(jnp.bfloat16)
    X, Y = (columns(mesh, normal(n, 64).astype(jnp.bfloat16)) for n in A.shape)
    run = lambda X, Y: sddmm(vectors, X, Y, schedule=OctetTile(tile_n=32, tile_k=64)).values
    text = text_of(run, X, Y)
    assert "all-gather" in text and "all-reduce" not in text and "octet" in text
    close(jax.jit(run)(X, Y), run(*map(np.asarray, (X, Y))))


def test_programs_of_other_calls_have_another_text(mesh):
    """By its text JAX's persistent cache knows a program, where it is told to ignore pointers."""
    B = columns(mesh, normal(A.shape[1], 64))

    def text(**options):
        found = jax.jit(lambda B: spmm(A, B, **options)).lower(B).as_text()
        assert "CustomSPMDPartitioning" in found
        return re.sub(r'backend_config = "\d+"', "", found)

    assert text() == text() != text(schedule=CpuTile(columns=16))
