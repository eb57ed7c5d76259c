"""Conversions and plans that several peers share."""

import functools
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse as jsparse

from benchmarks import machine
from benchmarks.problems import Unavailable

MAX_BYTES = 4 << 30  # of intermediates; a peer that needs more does not apply
MAX_DENSE_BYTES = 1 << 30  # of a dense form of A: larger ones are too slow to time


def limit(nbytes: float, what: str, most: float = MAX_BYTES) -> None:
    if nbytes > most:
        raise Unavailable(f"{what} would take {nbytes / 2**30:.1f} GiB")


def aligned(shape, dtype=np.float32) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, as JAX's and torch's own are."""
    size, each = int(np.prod(shape)), np.dtype(dtype).itemsize
    raw = np.empty(size + 64 // each - 1, dtype)
    skip = (-raw.ctypes.data % 64) // each
    return raw[skip : skip + size].reshape(shape)


def rows_of(A) -> np.ndarray:
    return np.repeat(np.arange(A.shape[0], dtype=np.int32), np.diff(A.indptr))


def ready(function, *operands):
    """A call of a jitted JAX function on operands that are arguments, so that no constant is
    folded."""
    return lambda: jax.block_until_ready(function(*operands))


def bcsr(A):
    arrays = (jnp.asarray(A.data), jnp.asarray(A.indices), jnp.asarray(A.indptr))
    return jsparse.BCSR(arrays, shape=A.shape, indices_sorted=True, unique_indices=True)


def bcoo_indices(A):
    return jnp.stack([jnp.asarray(rows_of(A)), jnp.asarray(A.indices)], axis=1)


def bcoo(A):
    arrays = (jnp.asarray(A.data), bcoo_indices(A))
    return jsparse.BCOO(arrays, shape=A.shape, indices_sorted=True, unique_indices=True)


def dense_of(A):
    limit(4 * A.shape[0] * A.shape[1], "the dense matrix", MAX_DENSE_BYTES)
    return jnp.asarray(A.toarray())


@functools.cache
def torch_module():
    import torch

    torch.set_num_threads(machine.threads())
    warnings.filterwarnings("ignore", message=".*(beta state|invariant checks).*")
    return torch


def torch_csr(A, dtype="int32"):
    torch = torch_module()
    index = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in (A.indptr, A.indices)]
    return torch.sparse_csr_tensor(*index, torch.from_numpy(A.data), A.shape)


def fastest(*variants):
    """The fastest variant in a few calls; chosen as part of the plan."""
    times = []
    for call in variants:
        once = []
        for _ in range(6):
            start = time.perf_counter()
            call()
            once.append(time.perf_counter() - start)
        times.append(sorted(once[1:])[1])
    return variants[int(np.argmin(times))]
