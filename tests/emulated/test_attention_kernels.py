"""The kernels of fused attention, run by the emulator, against float64 loops."""

import dataclasses

import numpy as np
import pytest
from battery import BATTERY, cast, rounded
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from tolerance import DTYPES
from vector_cases import encoded

from sgap_jax import CVS, Problem
from sgap_jax.runtime.attention_cuda import (
    AttentionShapes,
    forward_plan,
    keys_backward_plan,
    rows_backward_plan,
)
from sgap_jax.schedules.attention_tile import AttentionTile

EIGHT = AttentionTile(8)
TILES = [AttentionTile(32), AttentionTile(8, 4), AttentionTile(16, 8)]
ROUGH = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 3e-2, "float16": 4e-3}


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


@dataclasses.dataclass(frozen=True)
class Setting:
    """One call: sizes beside the case, and what there is of bias, sinks, lengths."""

    length: int = 1
    depth: int = 8
    value_depth: int = 8
    heads: int = 2
    key_heads: int = 1
    batch: int = 2
    dtype: str = "float32"
    bias: str | None = None
    sinks: bool = False
    lengths: bool = False
    is_causal: bool = False
    shared: tuple = ()  # operands with a batch of 1


class Attention:
    """The operands of a setting on a case of the battery."""

    def __init__(self, case, setting):
        self.of, rng = setting, np.random.default_rng(3)
        offsets, indices, values = encoded(case, setting.length)[0]
        self.offsets, self.indices = offsets, indices
        (self.m, self.keys), self.vectors = case.shape, len(indices)
        self.blocks = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        of = setting

        def draw(name, *shape):
            lead = 1 if name in of.shared else of.batch
            return rounded(rng.standard_normal((lead, *shape)), of.dtype)

        self.q = draw("q", self.m, of.heads, of.depth)
        self.k = draw("k", self.keys, of.key_heads, of.depth)
        self.v = draw("v", self.keys, of.key_heads, of.value_depth)
        self.dout = draw("dout", self.m, of.heads, of.value_depth)
        heads = of.heads if of.bias == "heads" else 1
        self.bias = draw("bias", heads, self.vectors, of.length) if of.bias else np.zeros((1, 0))
        self.bias[..., ::5, :] = -np.inf if of.bias else 0
        self.sinks = draw("sinks", of.heads) if of.sinks else np.zeros((1, 0))
        lead = 1 if "lengths" in of.shared else of.batch
        ends = rng.integers(0, self.keys + 1, (lead, 1)).astype(np.int32)
        self.lengths = ends if of.lengths else np.zeros((1, 0), np.int32)
        self.scale = 0.4
        order = np.lexsort((self.blocks, self.indices[: len(self.blocks)]))
        self.column_offsets = np.concatenate(
            [[0], np.cumsum(np.bincount(self.indices[: len(order)], minlength=self.keys))]
        ).astype(np.int32)
        padding = self.vectors - len(order)
        self.permutation = np.pad(order, (0, padding)).astype(np.int32)
        self.row_indices = np.pad(self.blocks[order], (0, padding)).astype(np.int32)

    def oracle(self):
        """out, lse, delta, dq, dk, dv, dbias; row by row in float64."""
        of, group = self.of, self.of.heads // self.of.key_heads
        at = lambda x, b: x[b % len(x)]
        out = np.zeros((of.batch, self.m, of.heads, of.value_depth))
        lse = np.full((of.batch, self.m, of.heads), -np.inf)
        delta = np.zeros(lse.shape)
        dq, dk, dv = (np.zeros((of.batch, *x.shape[1:])) for x in (self.q, self.k, self.v))
        dbias = np.zeros((of.batch, of.heads, self.vectors, of.length))
        for b, h, i in np.ndindex(of.batch, of.heads, self.m):
            p = np.arange(self.offsets[i // of.length], self.offsets[i // of.length + 1])
            j = self.indices[p]
            kept = (j <= i) if of.is_causal else np.ones(len(j), bool)
            kept &= (j < at(self.lengths, b)[0]) if of.lengths else True
            q, k, v = at(self.q, b)[i, h], *(at(x, b)[j, h // group] for x in (self.k, self.v))
            s = self.scale * k @ q
            if of.bias:
                s = s + at(self.bias, b)[h if of.bias == "heads" else 0, p, i % of.length]
            s = np.where(kept, s, -np.inf)
            terms = np.append(s, at(self.sinks, b)[h]) if of.sinks else s
            if not np.isfinite(terms).any():
                continue
            lse[b, i, h] = np.logaddexp.reduce(terms)
            weights = np.exp(s - lse[b, i, h])
            out[b, i, h] = weights @ v
            g = at(self.dout, b)[i, h]
            delta[b, i, h] = g @ out[b, i, h] - 0.3
            ds = weights * (v @ g - delta[b, i, h])
            dbias[b, h, p, i % of.length] = ds
            dq[b, i, h] = self.scale * ds @ k
            np.add.at(dk[b, :, h // group], j, self.scale * ds[:, None] * q)
            np.add.at(dv[b, :, h // group], j, weights[:, None] * g)
        return out, lse, delta, dq, dk, dv, dbias

    def run(self, tile, **where):
        """out, lse, dq, dbias, dk, dv of the kernels."""
        of, wide = self.of, "float64" if self.of.dtype == "float64" else "float32"
        problem = Problem(
            "attention",
            (self.m, self.keys),
            self.vectors * of.length,
            n=of.depth,
            batch=of.batch * of.heads,
            dtype=of.dtype,
            format="CSR" if of.length == 1 else str(CVS(of.length)),
            platform="cuda",
        )
        names = ("q", "k", "v", "bias", "sinks", "lengths", "dout", "delta", "lse")
        shapes = AttentionShapes(
            of.heads,
            of.key_heads,
            of.value_depth,
            of.batch,
            frozenset(set(names) - set(of.shared)) if of.batch > 1 else frozenset(),
            of.bias,
            of.sinks,
            of.lengths,
            of.is_causal,
        )
        q, k, v, dout = (cast(x, of.dtype) for x in (self.q, self.k, self.v, self.dout))
        bias, sinks = self.bias.astype(wide), self.sinks.astype(wide)
        _, lse, delta, *_ = self.oracle()
        structure = (self.offsets, self.indices)
        call = forward_plan(problem, tile, shapes, self.scale)
        rows = ((of.batch, self.m, of.heads), wide)
        outputs = [((*rows[0], of.value_depth), q.dtype), rows]
        given = (q, k, v, bias, sinks, self.lengths, *structure)
        results = [*emulate(call, given, outputs, **where)]
        given = (dout, delta.astype(wide), q, k, v, bias, self.lengths, lse.astype(wide))
        call = rows_backward_plan(problem, tile, shapes, self.scale, of.bias is not None)
        stored = (of.batch, of.heads, self.vectors, of.length) if of.bias else (1, 0)
        outputs = [((of.batch, *q.shape[1:]), q.dtype), (stored, wide)]
        results += emulate(call, (*given, *structure), outputs, **where)
        call = keys_backward_plan(problem, tile, shapes, self.scale)
        outputs = [((of.batch, *x.shape[1:]), q.dtype) for x in (k, v)]
        transposed = (self.column_offsets, self.row_indices, self.permutation)
        return results + emulate(call, (*given, *transposed), outputs, **where)


def check(name, setting, tile=EIGHT, **where):
    attention = Attention(BATTERY[name], setting)
    out, lse, _, dq, dk, dv, dbias = attention.oracle()
    got = attention.run(tile, **where)
    expected = [out, lse, dq, dbias if setting.bias else np.zeros((1, 0)), dk, dv]
    for label, a, b in zip(("out", "lse", "dq", "dbias", "dk", "dv"), got, expected, strict=True):
        a, rough = np.asarray(a).astype(np.float64), ROUGH[setting.dtype]
        size = max(1.0, np.abs(np.where(np.isfinite(b), b, 0)).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=rough, atol=rough * size, err_msg=label)


@pytest.mark.parametrize("name", [n for n in BATTERY if "heavy" not in n and n != "skewed"])
def test_the_battery(name):
    i = list(BATTERY).index(name)
    settings = (
        Setting(),
        Setting(length=4, depth=5, value_depth=3, dtype="float64"),
        Setting(length=8, depth=16, value_depth=4, dtype="bfloat16", key_heads=2),
        Setting(length=2, depth=3, value_depth=9, dtype="float16"),
    )
    check(name, settings[i % 4])
    check(name, settings[(i + 1) % 4])


@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize(
    "given",
    [
        dict(bias="heads"),
        dict(bias="shared", lengths=True),
        dict(sinks=True),
        dict(is_causal=True),
        dict(is_causal=True, bias="heads", sinks=True, lengths=True),
    ],
    ids=str,
)
def test_bias_sinks_and_masks(given, length):
    check("every_length", Setting(length=length, **given))
    check("padded", Setting(length=length, **given, heads=3, key_heads=3))


@pytest.mark.parametrize("shared", ["q", "k", "v", "bias", "sinks", "lengths", "dout"])
def test_operands_shared_by_sequences(shared):
    setting = Setting(length=2, bias="heads", sinks=True, lengths=True, shared=(shared,), batch=3)
    check("empty_rows_at_both_ends", setting)


@pytest.mark.parametrize(
    "tile", [AttentionTile(32), AttentionTile(8, 4), AttentionTile(16, 8)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lanes_and_shares(tile, dtype):
    check(
        "every_length", Setting(dtype=dtype, bias="heads", depth=17, value_depth=33, batch=1), tile
    )
    check("full", Setting(length=32, dtype=dtype, depth=64, value_depth=40, batch=1), tile)


OCTETS = [AttentionTile(8, octet=True), AttentionTile(16, 4, octet=True)]


@pytest.mark.parametrize("tile", OCTETS, ids=str)
@pytest.mark.parametrize("length", [8, 16, 32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_octets(dtype, length, tile):
    of = Setting(length, dtype=dtype, batch=1)
    i = length // 8 + (dtype == "float16")
    for name in ("every_length", "padded", "no_entries", "full", "wide", "one_column")[i % 2 :: 2]:
        check(name, dataclasses.replace(of, heads=4, depth=16, value_depth=8), tile)
    every = dict(bias="heads", sinks=True, lengths=True, is_causal=True, batch=2)
    check("every_length", dataclasses.replace(of, depth=7, value_depth=70, **every), tile)
    of = dataclasses.replace(of, depth=72, value_depth=64, heads=2, key_heads=2, bias="shared")
    check("padded", of, tile)


def test_what_is_masked_is_not_read():
    """NaN in keys and values that no entry names, and behind masks."""
    case, setting = BATTERY["every_length"], Setting(length=4, is_causal=True, lengths=True)
    attention = Attention(case, setting)
    attention.lengths[:] = 20
    clean = attention.run(EIGHT)
    expected = attention.oracle()
    attention.oracle = lambda: expected  # lse and delta, for the gradients
    for x in (attention.k, attention.v):
        x[:, 20:] = np.nan
    for a, b in zip(clean, attention.run(EIGHT), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        ("attention.cuh", "own[i] * mine + other[i] * theirs", "own[i] + other[i]"),
        ("attention.cuh", "(step * kShare + share) * kAtOnce", "step * kAtOnce"),
        ("attention.cuh", "Size(column) <= row + r", "Size(column) < row + r"),
        ("attention.cuh", "numbers[i] *= factor;", ""),
        (
            "attention.cuh",
            "Size head = blockIdx.y, key_head = head /",
            "Size head = blockIdx.y, key_head = 0 *",
        ),
        ("attention.cuh", "Size(p + a) * kLength + part + r", "Size(p + a) * kLength + part"),
        ("attention.cuh", "return Has(kHasLengths) ?", "return false ?"),
        ("attention_backward.cuh", "kept ? p * (dp - delta)", "kept ? p * dp"),
        ("attention_backward.cuh", "permutation[(entry + a) / kLength]", "(entry + a) / kLength"),
        ("attention_backward.cuh", "column <= rows[a]", "true"),
        ("attention_backward.cuh", "MergeShares<kGroup, kShare, kBlock>(of_value, AddAll());", ""),
        ("attention_backward.cuh", "entry += kShare * kAtOnce", "entry += kAtOnce"),
        ("attention_octet.cuh", "g / 2 * 4 + g % 2 + 2 * i, last", "g + 8 * i, last"),
        ("attention_octet.cuh", "p + 4 * t + i", "p + 4 * i + t"),
        ("attention_octet.cuh", "sums[i][2 + e] *= factor;", ""),
        ("attention_octet.cuh", "p += kWarps * 16", "p += 16"),
        ("attention_octet.cuh", "i % kOfHead * 8 + 2 * t;", "2 * t;"),
        (
            "attention_octet.cuh",
            "TransposeMatrix(PackPair<T>(s[2], s[3]))",
            "PackPair<T>(s[2], s[3])",
        ),
        ("attention_octet.cuh", "Size(column) < end ? column", "true ? column"),
        ("mma.cuh", "0x7632", "0x5410"),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, planted):
    of_octets = header in ("attention_octet.cuh", "mma.cuh")
    setting = Setting(length=4, bias="heads", lengths=True, is_causal=True, heads=4, key_heads=2)
    if of_octets:
        setting = dataclasses.replace(setting, length=16, dtype="float16", value_depth=65)

    tile = AttentionTile(8, 2 if of_octets else 4, of_octets)

    def once():
        check("every_length", setting, tile)
        if of_octets:  # many steps for each warp
            check("wide", dataclasses.replace(setting, is_causal=False), tile)

    planted(header, right, wrong, once)
