"""Operands for tests of generated machine code, and a fixture with a compilation cache of its
own."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from sgap_jax.compiler.llvm import machine_code as llvm

M, K, PADDING = 41, 29, 5


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """A fresh compilation cache, so that each run compiles what it tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGAP_CACHE_DIR", str(tmp_path_factory.mktemp("code")))
        llvm._user_cache.cache_clear()
        yield
    llvm._user_cache.cache_clear()


def random_values(seed, size, dtype):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(size)).astype(dtype)


def wide(x):
    return np.asarray(x).astype(np.float64)


def matrix(m, k, dtype, density=0.3):
    """A2_pos, A2_crd and A_vals of a matrix with empty rows, and with padding whose columns are out
    of range; and dense A, dense |A| and the number of entries in each row."""
    rng = np.random.default_rng(m + k)
    dense = scipy.sparse.random(m, k, density, format="csr", random_state=rng)
    if m > 8:
        dense = scipy.sparse.diags(np.arange(m) % 7 != 3, dtype=float) @ dense
        dense = scipy.sparse.csr_matrix(dense)
        dense.eliminate_zeros()
    values = random_values(1, dense.nnz + PADDING, dtype)
    dense.sort_indices()
    dense.data = wide(values)[: dense.nnz]
    crd = np.concatenate([dense.indices, np.full(PADDING, 1 << 30)]).astype(np.int32)
    return (dense.indptr.astype(np.int32), crd, values), dense.toarray(), np.diff(dense.indptr)
