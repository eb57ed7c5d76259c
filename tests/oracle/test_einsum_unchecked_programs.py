"""The programs of einsum over unchecked structures: which structures are checked at run time, under
vmap, scan and schedules, and that no index value crashes the process."""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from unchecked_einsum import Case, every, near
from unchecked_structures import KINDS

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, SparseArray, einsum, evaluate
from sgap_jax.compiler import Schedule, assign
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.schedules.emulated import Emulated

loops = pytest.mark.skipif(not llvm.available(), reason="no llvmlite")


def run_of(case, **options):
    return jax.jit(lambda v, a, d: case.call(v, *d, arrays=a, **options))


@loops
def test_only_what_nobody_checked_is_mended():
    """Structures that count as checked are looked at, in one program and once; the loops are the
    same."""
    case = Case("ij,j,jr->ir", CSR, "valid")
    text = run_of(case).lower(*case.given()).as_text()
    A = SparseArray.from_arrays(case.values, *case.arrays, shape=case.shape)
    assert A.is_checked
    checked = jax.jit(lambda A, *d: einsum(case.subscripts, A, *d)).lower(A, *case.given()[2])
    keys = [set(re.findall(r'key = "(\w+)"', t)) for t in (text, checked.as_text())]
    assert keys[0] == keys[1] and len(keys[0]) == 1
    assert "stablehlo.case" in text and "stablehlo.case" not in checked.as_text()
    for each in (text, checked.as_text()):
        assert each.count("custom_call @sgap_check_levels_v1") == 1


def changed(A, kind):
    """A with index arrays that something put in the place of those that were checked."""
    arrays = jax.tree.leaves(A.index_arrays)
    if kind == "doubled":  # as psum on two devices
        new = [2 * x for x in arrays]
    else:
        rng, most = np.random.default_rng(0), np.iinfo(np.int32).max
        new = [rng.integers(-most, most, x.shape).astype(np.int32) for x in arrays]
    found = jax.tree.unflatten(jax.tree.structure(A.index_arrays), new)
    return dataclasses.replace(A, index_arrays=found)


@loops
@pytest.mark.parametrize("kind", ["doubled", "wild"])
@pytest.mark.parametrize("name", ["CSR", "COO", "CVS(4)", "CSF(3)"])
def test_changed_arrays_that_count_as_checked_are_refused(name, kind):
    """By loops of one sparse operand and of two, forward and backward; and unchanged ones run."""
    format, rng = FORMATS[name], np.random.default_rng(1)
    shape = (40, 24, 16)[: 3 if name == "CSF(3)" else 2]
    x = rng.standard_normal(shape) * (rng.random(shape) < 0.2)
    A = SparseArray.from_dense(x.astype(np.float32), format=format)
    y = jnp.ones(shape[1], jnp.float32)
    letters = "ijk"[: len(shape)]
    loss = lambda A: einsum(f"{letters},j,jr->ir", A, y, y[:, None]).sum()
    calls = [loss, jax.jit(loss), jax.jit(jax.grad(lambda v, A: loss(A.with_values(v))))]
    calls[2] = lambda A, run=calls[2]: run(A.values, A)
    if name in ("CSR", "CSF(3)"):  # other formats are converted, which looks at them
        own = ",".join(letters)
        text = f"y(i) = A({own}) * B({own})"
        calls.append(jax.jit(lambda A: evaluate(text, A=A, B=A)))
    bad = changed(A, kind)
    assert bad.is_checked
    for call in calls:
        jax.block_until_ready(call(A))
        with pytest.raises(Exception, match=r"not those that were checked.*from_arrays"):
            jax.block_until_ready(call(bad))


@loops
@pytest.mark.parametrize("format", [CSR, COO, CSF(2)], ids=str)
def test_each_of_a_batch_is_looked_at(format):
    """vmap and scan over malformed structures of all kinds."""
    cases = every("ij,j,jr->ir", format)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(case.given() for case in cases))
    one = lambda given: cases[0].call(given[0], *given[2], arrays=given[1])
    found = jax.jit(jax.vmap(one))(list(stacked))
    _, again = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, one(x)), 0, x))(list(stacked))
    for n, case in enumerate(cases):
        near(found[n], case.wanted(), KINDS[n])
        near(again[n], case.wanted(), KINDS[n])


@loops
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_that_wants_order(kind):
    """The schedule searches in the coordinates, which are sorted for it."""
    expression = assign("ij,jr->ir", {"A": CSR})
    chain = Schedule(expression).split("j", "j0", "j1", 4).reorder("i", "j0", "j1", "r")
    case = Case("ij,jr->ir", CSR, kind)
    near(run_of(case, schedule=chain)(*case.given()), case.wanted(), kind)


@loops
@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_share_entries(kind):
    """The threads search for their rows in the offsets."""
    from sgap_jax.compiler.presets import cpu_entries

    case = Case("ij,j->i", CSR, kind)
    chain = cpu_entries(assign("ij,j->i", {"A": CSR}), entries=8)
    near(run_of(case, schedule=chain)(*case.given()), case.wanted(), kind)


@pytest.mark.parametrize("grouped", [False, True])
def test_cuda_emulated(grouped):
    """The launches are those of a GPU; the index arrays are checked or put in order before."""
    require_nvrtc()
    chain = Schedule(assign("ij,j->i", {"A": CSR}))
    if grouped:
        chain = chain.fuse("i", "j", "f").pos("f", "p", "A").split("p", "block", "lane", 64)
        chain = chain.precompute("A B", (), (), "product")
        chain = chain.parallelize("block", "GPUBlock", "IgnoreRaces")
        chain = chain.parallelize("lane", "GPUThread", "Atomics").group("lane", 32, "Segment")
    else:
        chain = chain.split("i", "block", "row", 32).parallelize("block", "GPUBlock", "NoRaces")
        chain = chain.parallelize("row", "GPUThread", "NoRaces")
    cases = every("ij,j->i", CSR)
    call = run_of(cases[0], schedule=Emulated(emulate, chain))
    for kind, case in zip(KINDS, cases, strict=True):
        near(call(*case.given()), case.wanted(), kind)


@loops
def test_sharded_over_devices():
    case = Case("ij,j,jr->ir", CSR, "wild")
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    spread = jax.shard_map(
        lambda v, a, d: case.call(v, *d, arrays=a),
        mesh=mesh,
        in_specs=(P(), P(), [P(), P(None, "d")]),
        out_specs=P(None, "d"),
    )
    near(jax.jit(spread)(*case.given()), case.wanted(), "wild")


FORMATS = {"CSR": CSR, "CSC": CSC, "COO": COO, "CVS(4)": CVS(4), "BCSR(2, 4)": BCSR(2, 4)}
FORMATS |= {"CSF(3)": CSF(3), "tensor COO": COO}


@pytest.mark.parametrize("name", FORMATS)
def test_no_number_ends_the_process(name):
    """Thousands of large values in every index array, in a process of its own: a crash is a
    failure."""
    script = f"""
        import jax, jax.numpy as jnp, numpy as np
        from unchecked_einsum import SIZES, Case
        from test_einsum_unchecked_programs import FORMATS

        SIZES.update(i=300, j=200, k=20, r=33)
        subscripts = {"ijk,jr,kr->ir" if "CSF" in name or "tensor" in name else "ij,j,jr->ir"!r}
        case = Case(subscripts, FORMATS[{name!r}], "valid")
        values, arrays, dense = case.given()
        rng = np.random.default_rng(0)
        limits = np.iinfo(np.int32)

        def loss(values, dense, arrays):
            return jnp.sum(case.call(values, *dense, arrays=arrays) ** 2)

        for run in (jax.jit(loss), jax.jit(jax.grad(loss, argnums=(0, 1)))):
            for spread in (1 << 4, 1 << 9, 1 << 16, limits.max):
                wild = [rng.integers(-spread, spread, a.shape).astype(np.int32) for a in arrays]
                jax.block_until_ready(run(jnp.ones_like(values), dense, wild))
        print("alive")
    """
    folders = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    environment["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stdout == "alive\n", run.stderr[-2000:]
