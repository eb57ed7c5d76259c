"""Attention of long column vectors, which kernels with vectors of 32 and 64 bytes take in groups of
rows, against the same entries row by row."""

import numpy as np
import pytest
from battery import cast
from native_call import kernel_isas, run

HEADS, KEY_HEADS, KEYS = 4, 2, 150
NONE = np.zeros((1, 0), np.float32)


def structure(rows, length, rng):
    """Some columns are stored twice, or do not exist: nobody has checked a traced structure. Those
    of one block row follow each other, and are read where they lie."""
    blocks = -(-rows // length)
    counts = rng.integers(3, 140, blocks)
    counts[:1] = 0
    columns = [rng.choice(KEYS, count) for count in counts]
    columns[1] = np.arange(7, 7 + counts[1])
    columns[-1][:3] = (KEYS, -1, 2**31 - 1)
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    row_columns = [columns[i // length] for i in range(rows)]
    row_offsets = np.append(0, np.cumsum([len(x) for x in row_columns])).astype(np.int32)
    entry = [
        (offsets[i // length] + np.arange(len(x))) * length + i % length
        for i, x in enumerate(row_columns)
    ]
    index = lambda parts: np.concatenate(parts).astype(np.int32)  # noqa: E731
    return (offsets, index(columns)), (row_offsets, index(row_columns)), index(entry)


def both_ways(structure, length, given, bias, terms, rows, dtype, isa, chunk, forward=None):
    """out, lse, and the gradients in q, k, v, the bias, the slopes and the table: those of the
    results `forward`, of which one bit in a narrow dtype counts, else of its own."""
    offsets, columns = structure
    q, k, v, dout, dlse, sinks, lengths = given
    wide = dlse.dtype
    more = dict(softcap=3.0, kept=3 * 2**30, keep_scale=4 / 3) if terms else {}
    version = "v2" if terms else "v1"
    common = dict(vector_length=length, scale=0.25, is_causal=True, pack=True, **more)
    results = [(dout.shape, q.dtype), (q.shape[:3], wide)]
    attributes = common | dict(chunk_nonzeros=chunk, key_pieces=1)
    operands = (q, k, v, bias, sinks, lengths, *terms, offsets, columns)
    own = run(f"sgap_attention_cvs_{version}", operands, results, attributes, isa)
    out, lse = forward or own
    shapes = [(x.shape, x.dtype) for x in (q, k, v)]
    shapes += [((2, HEADS, len(columns) * length), wide)]
    shapes += [((2, HEADS, 1), wide), ((2, HEADS, 8), wide)] if terms else []
    attributes = common | dict(wrt_bias=True, pieces=2)
    operands = (dout, dlse, q, k, v, bias, lengths, out, lse, *terms, offsets, columns)
    gradients = run(f"sgap_attention_backward_cvs_{version}", operands, shapes, attributes, isa)
    return own, [np.asarray(x, np.float64) for x in (*own, *gradients)]


@pytest.mark.parametrize("isa", kernel_isas())
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("length", "rows", "width", "value_width"),
    [(16, 70, 16, 48), (56, 100, 80, 48), (64, 130, 64, 64), (100, 190, 208, 80)],
)
def test_as_row_by_row(length, rows, width, value_width, dtype, isa):
    rng = np.random.default_rng(length)
    wide = np.dtype("float64" if dtype == "float64" else "float32")
    normal = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    vectors, entries, places = structure(rows, length, rng)
    given = (
        *(cast(normal(2, rows, HEADS, width), dtype),),
        *(cast(normal(2, KEYS, KEY_HEADS, n), dtype) for n in (width, value_width)),
        cast(normal(2, rows, HEADS, value_width), dtype),
        normal(2, rows, HEADS).astype(wide),
        normal(1, HEADS).astype(wide),
        np.int32([[110], [KEYS]]),
    )
    terms = (
        normal(1, HEADS, 1).astype(wide),
        normal(1, HEADS, 8).astype(wide),
        *(rng.integers(0, 2, (2, n)).astype(np.int32) for n in (rows, KEYS)),
        np.int32([[7]]),
        rng.integers(0, 2**32, (1, HEADS, 2)).astype(np.uint32),
    )
    bias = normal(1, HEADS, len(vectors[1]) * length).astype(wide)
    for own, chunk in (((), 10**6), (terms, 32 * length)):
        options = dict(terms=own, rows=rows, dtype=dtype, isa=isa)
        forward, want = both_ways(entries, 1, given, bias[..., places], chunk=10**6, **options)
        _, got = both_ways(vectors, length, given, bias, chunk=chunk, forward=forward, **options)
        got[5] = got[5][..., places]
        assert np.isfinite(want[1]).any() and all(np.abs(x).max() > 0 for x in want[2:])
        tolerance = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 2e-2}[dtype]
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dbias"), got, want, strict=False):
            finite = np.isfinite(b)
            np.testing.assert_array_equal(np.isfinite(a), finite, err_msg=name)
            size = np.abs(b[finite]).max()
            narrow = 2e-5 if dtype == "bfloat16" and name in ("lse", "dbias") else tolerance
            np.testing.assert_allclose(
                a[finite], b[finite], rtol=tolerance, atol=narrow * size, err_msg=name
            )
        for a, b in zip(got[6:], want[6:], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
