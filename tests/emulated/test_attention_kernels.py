"""The kernels of fused attention, run by the emulator, against float64 loops."""

import numpy as np
import pytest
from attention_cases import Attention, Setting
from attention_cases import check as check_case
from battery import BATTERY, from_row_lengths
from cuda_sources import require_nvrtc
from emulator import Fault
from tolerance import DTYPES

from sgap_jax.schedules.attention import AttentionTile

EIGHT = AttentionTile(8)


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def check(name, setting, tile=EIGHT):
    check_case(name, setting, tile)


@pytest.mark.tier("test")
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


@pytest.mark.seconds(test=5)
@pytest.mark.parametrize("shared", ["q", "k", "v", "bias", "sinks", "lengths", "dout"])
def test_operands_shared_by_sequences(shared):
    bias = "shared" if shared in ("lengths", "dout") else "heads"  # of heads, not of sequences
    setting = Setting(length=2, bias=bias, sinks=True, lengths=True, shared=(shared,), batch=3)
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


def test_what_is_masked_is_not_read():
    """NaN in keys and values that no entry names, and at masked entries."""
    case, setting = BATTERY["every_length"], Setting(length=4, is_causal=True, lengths=True)
    attention = Attention(case, setting)
    attention.lengths[:] = 20
    clean = attention.run(EIGHT)
    expected = attention.oracle()
    attention.oracle = lambda: expected  # lse and delta, for the gradients
    for x in (attention.k, attention.v):
        x[:, 20:] = np.nan
    for name, a in attention.run(EIGHT).items():
        np.testing.assert_array_equal(a, clean[name])


@pytest.mark.parametrize("kernel", ["forward", "rows", "keys"])
def test_a_far_row_is_not_a_near_one(kernel):
    """Row 2^28 of 8 float16 is 2^32 bytes away: in 32 bits this would be 0, where there is
    memory."""
    one = from_row_lengths("one", 9, [1] + 7 * [0])
    attention = Attention(one, Setting(heads=1, batch=1, dtype="float16"))
    expected = attention.oracle()
    attention.oracle = lambda: expected
    if kernel == "keys":
        attention.m, attention.row_indices[:] = 2**28 + 8, 2**28
    else:
        attention.keys, attention.indices[:] = 2**28 + 1, 2**28
    with pytest.raises(Fault, match="out of bounds.* 0x1001"):
        attention.run(EIGHT, (kernel,))


@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        ("attention.cuh", "own[i] * mine + other[i] * theirs", "own[i] + other[i]"),
        ("attention.cuh", "(step * kShare + share) * kAtOnce", "step * kAtOnce"),
        ("attention.cuh", "return Size(column) <= row;", "return Size(column) < row;"),
        ("attention.cuh", "values[i] *= factor;", ""),
        (
            "attention.cuh",
            "Size head = blockIdx.y, key_head = head /",
            "Size head = blockIdx.y, key_head = 0 *",
        ),
        ("attention.cuh", "Size(p + a) * kLength + part + r", "Size(p + a) * kLength + part"),
        ("attention.cuh", "return Has(kHasLengths) ?", "return false ?"),
        ("attention_backward.cuh", "kept ? p * (dp - delta)", "kept ? p * dp"),
        ("attention_backward.cuh", "permutation[(entry + a) / kLength]", "(entry + a) / kLength"),
        ("attention_backward.cuh", "of_head.Sees(rows[a], Index(column))", "true"),
        ("attention_backward.cuh", "MergeShares<kGroup, kShare, kBlock>(of_value, AddAll());", ""),
        ("attention_backward.cuh", "entry += kShare * kAtOnce", "entry += kAtOnce"),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, planted):
    setting = Setting(length=4, bias="heads", lengths=True, is_causal=True, heads=4, key_heads=2)
    planted(header, right, wrong, lambda: check("every_length", setting, AttentionTile(8, 4)))
