"""The FFI targets of the native library, and what programs pass to each.

Exported programs name a target and carry its attributes, and they run with later versions of the
package: these names and types do not change. golden/ffi.txt has, for each target, its stages (where
it has several), the attributes with their types, and the types of operands and results.
"""

import re
from functools import partial

import jax
import numpy as np
import pytest
from kernel_results import all_cases

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSR,
    CVS,
    OctetTile,
    SparseArray,
    aggregate,
    einsum,
    gsddmm,
    gspmm,
    sddmm,
    select,
    sparse_attention,
    spgemm,
    spmm,
)
from sgap_jax.launch import launch
from sgap_jax.launch.cache import Cubin
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.primitives.regrow import regrow
from sgap_jax.primitives.top_k import top_k_of_indexer
from sgap_jax.primitives.triangular_solve import incomplete_lu, triangular_solve
from sgap_jax.runtime.native import native
from sgap_jax.schedules.machine import Machine, on_machine

CALL = re.compile(
    r"custom_call @(sgap_\w+)\(.*?\) \{.*mhlo\.backend_config = \{(.*)\}, operand_layouts.*\} : "
    r"\((.*)\) -> (.*)"
)
ATTRIBUTE = re.compile(r'(\w+) = (?:(true|false)|(")|dense<.*?> : (\w+<\w+>)|\S+ : (\w+))')
TYPE = re.compile(r"tensor<((?:\d+x)*)(\w+)>")


def attributes(text):
    """Name and type of each attribute of a call."""
    for name, flag, quote, array, number in ATTRIBUTE.findall(text):
        yield f"{name}: {array or number or (flag and 'bool') or (quote and 'string')}"


def types(text):
    """Element types with a colon for each dimension: f32[::] is one of three dimensions."""
    return ", ".join(f"{kind}[{':' * sizes.count('x')}]" for sizes, kind in TYPE.findall(text))


def calls_of(function, *operands):
    """(target, description) of each FFI call in a program."""
    program = jax.jit(function).lower(*operands).as_text()
    for target, given, operands, results in CALL.findall(program):
        named = ", ".join(sorted(attributes(given)))
        yield target, f"  {{{named}}} ({types(operands)}) -> {types(results)}"


def programs():
    """(function, operands): each operation and format once, and what has targets of its own."""
    seen = set()
    for name, (function, operands) in all_cases("float32").found.items():
        kind = re.sub(r"\(\d+\)|, [nd]=\d+|, (narrow|wide) heads|, small chunks", "", name)
        if kind not in seen:
            seen.add(kind)
            yield function, operands
    made = lambda *arrays: SparseArray.from_arrays(*arrays, shape=(2, 3))
    arrays = (np.ones(3, np.float32), np.int32([0, 1, 3]), np.int32([1, 0, 2]))
    yield lambda *arrays: made(*arrays).checked().row_offsets, arrays
    yield lambda *arrays: made(*arrays).transposed, arrays
    with on_machine(Machine(cores=2)):
        many = (np.ones(48, np.float32), np.int32([0, 24, 48]), np.arange(48, dtype=np.int32) % 3)
        x = np.ones((2, 40), np.float32)
        yield lambda *arrays: spmm(made(*arrays), x, transpose=True), many
    coordinates = SparseArray.from_dense(np.ones((2, 3), np.float32), format=COO)
    yield lambda A: A.checked().values, (coordinates,)
    octets = dict(schedule=OctetTile(8, tile_n=32, tile_k=64))
    attention = lambda q, A: sparse_attention(q, q, q, A, **octets).sum()
    A = SparseArray.from_dense(np.ones((8, 8), jax.numpy.bfloat16), format=CVS(8))
    yield jax.grad(attention), (np.ones((8, 1, 8), jax.numpy.bfloat16), A)
    blocks = SparseArray.from_dense(np.ones((256, 16), np.float32), format=BCSR(1, 16))
    in_blocks = lambda q, k, A: sparse_attention(q, k, k, A).sum()
    yield jax.grad(in_blocks), (*(np.ones((n, 1, 8), np.float32) for n in (256, 16)), blocks)
    terms = dict(softcap=2.0, segment_ids=np.zeros(3, int), dropout_rate=0.5, dropout_rng=0)
    with_terms = lambda q, slopes, table, A: sparse_attention(
        q, q, q, A, alibi_slopes=slopes, relative_bias=table, query_offset=1, **terms
    ).sum()
    wide = [np.ones(s, np.float32) for s in ((3, 1, 8), (1,), (5,))]
    square = SparseArray.from_dense(np.ones((3, 3), np.float32))
    yield jax.grad(with_terms, (0, 1, 2)), (*wide, square)
    B = np.ones((8, 3), jax.numpy.bfloat16)
    yield lambda A, B: sddmm(A, B, B, **octets).values, (A, B)
    for transpose in (False, True):
        product = partial(spmm, transpose=transpose, schedule=OctetTile(8))
        yield product, (A, B)
    yield lambda x: select.top_k(x, 2).column_indices, (np.ones((2, 3), np.float32),)
    for format in (CSR, CSC):
        dense = lambda x, f=format: SparseArray.from_dense(x, nse=4, format=f).values
        yield dense, (np.ones((2, 3), np.float32),)
    yield lambda x: select.threshold(x, 0.5, nse=4).values, (np.ones((2, 3), np.float32),)
    keep = lambda rows, columns: rows == columns
    reached = lambda q: select.threshold((q, q), 0.5, nse=4, keep=keep).column_indices
    yield reached, (np.ones((3, 2), np.float32),)
    yield lambda x: select.top_p(x, 0.5, most=2).column_indices, (np.ones((2, 3), np.float32),)
    indexer = [np.ones(s, np.float32) for s in ((2, 1, 4), (3, 4), (2, 1))]
    yield partial(top_k_of_indexer, k=2), (*indexer, np.int32([1, 3]))
    # Matrix tiles take more than 16 rows.
    indexer = [np.ones(s, jax.numpy.bfloat16) for s in ((17, 1, 16), (3, 16), (17, 1))]
    with on_machine(Machine(matrix_tiles=True)):
        yield partial(top_k_of_indexer, k=2), (*indexer, np.full(17, 3, np.int32))
    yield regrow, (*arrays[1:], arrays[0], np.ones((2, 3), np.float32), np.float32(0.5))
    X, V = np.ones((3, 4), np.float32), np.ones((3, 4), np.float32)
    for reduce in ("sum", "max"):
        messages = lambda X, V, *arrays, r=reduce: gspmm(made(*arrays), X, values=V, reduce=r)
        yield messages, (X, V, *arrays)
    for reduce in ("sum", "max"):
        yield partial(aggregate, reduce=reduce), (square, np.ones((9, 4), np.float32))
    of_edges = lambda X, *arrays: gsddmm(made(*arrays), X[:2], X, reduce=None)
    yield of_edges, (X, *arrays)
    solve = partial(triangular_solve, lower=True, unit_diagonal=False)
    yield solve, (*arrays[1:], arrays[0], np.ones((2, 4), np.float32))
    yield partial(incomplete_lu, n=2), (*arrays[1:], arrays[0])
    S = SparseArray.from_dense(np.ones((3, 2), np.float32))
    yield lambda *arrays: spgemm(made(*arrays), S, nse=4).values, arrays
    factors = (np.ones(3, np.float32), np.ones((3, 5), np.float32))
    yield lambda *x: einsum("ij,j,jr->ir", *x), (made(*arrays), *factors)
    unchecked = lambda x, B, *arrays: einsum("ij,j,jr->ir", made(*arrays), x, B)
    yield unchecked, (*factors, *arrays)


# Other names of targets above, of programs that were exported by earlier versions.
OLD_NAMES = {
    "sgap_gspmm_pick_csr_v1",
    "sgap_gspmm_pick_to_x_csr_v1",
    "sgap_gspmm_pick_to_values_csr_v1",
}


def described(stages):
    return f" in stages {', '.join(stages)}" if isinstance(stages, dict) else ""


def test_targets_and_what_they_are_given(golden):
    pytest.importorskip("llvmlite")  # einsum calls its target only where it compiles
    found = {}
    for function, operands in programs():
        for target, description in calls_of(function, *operands):
            found.setdefault(target, set()).add(description)
    assert native.targets().keys() - found.keys() == OLD_NAMES, (
        "targets that `programs` never calls"
    )
    lines = []
    for target, stages in sorted(native.targets().items()):
        lines += [f"cpu {target}{described(stages)}", *sorted(found.pop(target, ["  an old name"]))]
    assert not found, "a call of a target that the native library does not have"
    for target, stages in sorted(native.cuda_targets().items()):
        lines.append(f"CUDA {target}{described(stages)}")
    call = KernelCall("source", "kernel", (5, 2), (64,), scalars=(3,), zero=(0,))
    for name, value in sorted(launch.call_attributes(call, Cubin("kernel", b"code")).items()):
        kind = f"{value.dtype}[{value.shape}]" if isinstance(value, np.ndarray) else value
        lines.append(f"  {name}: {type(value).__name__} {kind!s}")
    golden.text("ffi.txt", "\n".join(lines) + "\n")
