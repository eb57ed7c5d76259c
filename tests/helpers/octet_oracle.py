"""SpMM with column vectors on tensor cores: operands, kernel runs and the oracle."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from battery import cast
from emulated_launch import emulate
from spmm_oracle import oracle

from sgap_jax import Problem
from sgap_jax.launch.spmm import launch_plan, merge_plan, work_of
from sgap_jax.primitives._row_pieces import work_list


def tf32(x):
    """x rounded to 10 bits of mantissa, to nearest, ties away from zero; float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), near, np.asarray(x, np.float32))


def octet_oracle(case, dtype, B, values=None):
    """The exact product of the operands as tensor cores round them (float32 to tf32), and the bound
    of spmm_oracle."""
    values = case.values if values is None else values
    if dtype == "float32":
        values, B = tf32(values), tf32(B)
    return oracle(case, dtype, B, values=values)


def longest_first(offsets):
    return np.argsort(-np.diff(offsets), kind="stable").astype(np.int32)


def octet_product(arrays, case, tile, dtype, B, values=None, change=None, **where):
    """Runs the kernel; returns C [batch, m, n]. values [Bv, vectors, V] and B [Bb, k, n] are
    rounded first."""
    offsets, indices, own = arrays
    values, B = cast(own[None] if values is None else values, dtype), cast(B, dtype)
    batch = max(values.shape[0], B.shape[0])
    problem = Problem(
        "spmm",
        case.shape,
        own.size,
        B.shape[2],
        batch,
        dtype,
        f"CVS({tile.vector_length})",
        "cuda",
    )
    call = launch_plan(problem, tile, (values.shape[0], B.shape[0]))
    call = call if change is None else change(call)
    out = np.dtype(getattr(ml_dtypes, dtype, dtype))
    results = [((batch, case.shape[0], B.shape[2]), out)]
    if (work := work_of(problem, tile)) is not None:
        made = np.asarray(work_list(work, jnp.asarray(offsets)))
        sums = (batch, work.places, tile.vector_length, B.shape[2]), np.float32
        C, sums = emulate(call, (values, made, indices, B), [*results, sums], **where)
        return emulate(merge_plan(problem, tile), (sums, made, C), results)[0]
    order = longest_first(offsets) if tile.swizzle else np.zeros(0, np.int32)
    return emulate(call, (values, offsets, indices, order, B), results, **where)[0]
