"""Fused attention and its gradients in octet tiles, run by the emulator, against float64 loops."""

import dataclasses

import numpy as np
import pytest
from attention_cases import Attention, Setting, check
from battery import BATTERY, from_row_lengths
from cuda_sources import require_nvrtc
from emulator import Fault

from sgap_jax.schedules.attention import AttentionTile

ONE, FOUR = AttentionTile(8, octet=True), AttentionTile(16, 4, octet=True)
BACKWARD = ("rows", "keys")


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


@pytest.mark.parametrize("length", [8, 16, 32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_octets(dtype, length):
    of = Setting(length, dtype=dtype, batch=1)
    i = 2 * (8, 16, 32).index(length) + (dtype == "float16")
    tile, other = (ONE, FOUR)[:: 1 if i % 2 else -1]
    for name in ("every_length", "full", "no_entries", "padded", "wide", "one_column")[i % 3 :: 3]:
        # A warp's keys are in two tiles, and the causal diagonal crosses either.
        given = dict(depth=16, is_causal=name in ("every_length", "full"))
        check(name, dataclasses.replace(of, heads=4, **given), tile)
    if i in (0, 3, 4):
        every = dict(bias="heads", sinks=True, lengths=True, is_causal=True, batch=2)
        check("every_length", dataclasses.replace(of, depth=7, value_depth=70, **every), other)
    else:
        # Features that fill their units of 32 and 64, and features that do not.
        wide = dict(depth=64 if i == 1 else 72, value_depth=64, key_heads=2, bias="shared")
        check("padded", dataclasses.replace(of, **wide), tile)


@pytest.mark.tier("test")
@pytest.mark.parametrize("tile", [ONE, AttentionTile(8, 16, octet=True)], ids=str)
def test_gradients_of_keys_in_several_windows(tile):
    """38 block rows, with 32 in a window; 16 warps share rows forward, 8 share keys."""
    setting = Setting(8, 16, 16, heads=4, key_heads=2, batch=1, dtype="float16", bias="heads")
    check("tall", setting, tile, BACKWARD)


def test_gradients_of_the_widest_heads():
    check("full", Setting(16, 128, 128, batch=1, dtype="bfloat16"), FOUR, BACKWARD)
    of = Setting(8, 90, 33, dtype="float16", lengths=True, shared=("k", "dout"))
    check("full", of, ONE, BACKWARD)


def test_wide_values():
    """Values are loaded after the scores where registers do not hold them beside the keys."""
    check("padded", Setting(16, 40, 130, batch=1, dtype="float16"), FOUR, ("forward",))


def test_a_vector_that_is_stored_twice():
    """Traced structures may have duplicates: each copy is an entry of its own."""
    attention = Attention(BATTERY["every_length"], Setting(8, batch=1, dtype="float16"))
    assert attention.offsets[3] - attention.offsets[2] > 4
    attention.indices[attention.offsets[2] : attention.offsets[2] + 4] = 5
    attention.transpose()
    attention.check(ONE, BACKWARD)
    attention.check(FOUR, BACKWARD)


def test_block_rows_of_a_key_that_do_not_ascend():
    """A traced transpose may hold anything: block row 7 behind the window of block row 40 is not a
    reason to look at that window for ever."""
    attention = Attention(BATTERY["every_length"], Setting(8, batch=1, dtype="float16"))
    assert (attention.column_offsets[1:9] > attention.column_offsets[:8]).any()
    attention.row_indices[:] = 7
    attention.row_indices[attention.column_offsets[:-1]] = 40
    attention.run(ONE, ("keys",), step_limit=20_000)


@pytest.mark.parametrize(("operand", "odd"), [("q", np.nan), ("dout", np.inf)])
def test_what_is_not_finite_reaches_the_keys_of_its_row_alone(operand, odd):
    case, setting = BATTERY["every_length"], Setting(8, batch=1, dtype="float16", key_heads=2)
    attention = Attention(case, setting)
    expected = attention.oracle()
    attention.oracle = lambda: expected  # lse and delta
    clean = attention.run(FOUR, ("keys",))
    at = np.random.default_rng(0).integers(0, 8)
    getattr(attention, operand)[0, 3, :, at] = odd
    stored = np.zeros(attention.keys, bool)
    stored[attention.indices[: attention.offsets[1]]] = True
    assert stored.any() and not stored.all()
    for name, x in attention.run(FOUR, ("keys",)).items():
        np.testing.assert_array_equal(x[0, ~stored], clean[name][0, ~stored], err_msg=name)
        assert np.isnan(x[0, stored]).all(), name


@pytest.mark.parametrize("odd", [("k", "v"), ("q", "dout")], ids="-".join)
def test_what_is_not_finite_in_row_0_stays_where_it_is_stored(odd):
    """An absent vector could read row 0 by mistake."""
    attention = Attention(BATTERY["every_length"], Setting(8, batch=1, dtype="float16"))
    clean, expected = attention.run(ONE), attention.oracle()
    attention.oracle = lambda: expected
    for name, number in zip(odd, (np.nan, np.inf), strict=True):
        getattr(attention, name)[:, 0] = number
    blocks = np.split(attention.indices, attention.offsets[1:-1])
    block_0 = np.isin(np.arange(attention.keys), blocks[0])
    if odd == ("k", "v"):
        keys = np.arange(attention.keys) == 0
        rows = np.repeat([0 in block for block in blocks], 8)[: attention.m]
    else:
        keys, rows = block_0, np.arange(attention.m) == 0
    assert not rows.all() and not keys.all()
    results = attention.run(ONE)
    for name in ("out", "lse", "dq", "dk", "dv"):
        x, free = results[name], ~(keys if name in ("dk", "dv") else rows)
        np.testing.assert_array_equal(x[0, free], clean[name][0, free], err_msg=name)


@pytest.mark.parametrize("kernel", ["forward", "rows", "keys"])
def test_a_far_row_is_not_a_near_one(kernel):
    """Row 2^28 of 8 float16 is 2^32 bytes away: in 32 bits this would be 0, where there is
    memory."""
    heads = 1 if kernel == "keys" else 2
    one = from_row_lengths("one", 9, [1] + 7 * [0])
    attention = Attention(one, Setting(8, heads=heads, batch=1, dtype="float16"))
    expected = attention.oracle()
    attention.oracle = lambda: expected
    if kernel == "keys":
        attention.m, attention.row_indices[:] = 2**28 + 8, 2**25
    else:
        attention.keys, attention.indices[:] = 2**28 + 1, 2**28
    with pytest.raises(Fault, match=r"attention_octet_operands.*out of bounds.* 0x1001"):
        attention.run(ONE, (kernel,))


def test_keys_beyond_a_length_are_not_read():
    attention = Attention(BATTERY["every_length"], Setting(16, lengths=True, dtype="float16"))
    attention.lengths[:] = 20
    clean, expected = attention.run(ONE), attention.oracle()
    attention.oracle = lambda: expected
    for x in (attention.k, attention.v):
        x[:, 20:] = np.nan
    for name, x in attention.run(ONE).items():
        np.testing.assert_array_equal(x, clean[name])


@pytest.mark.parametrize(
    ("header", "right", "wrong"),
    [
        ("attention_octet_operands.cuh", "g / 2 * 4 + g % 2 + 2 * i)", "g + 8 * i)"),
        ("attention_octet_operands.cuh", "found, 4 * t + i", "found, 4 * i + t"),
        ("attention_octet.cuh", "sums[i][2 + e] *= factor;", ""),
        ("attention_octet.cuh", "p += kWarps * 16", "p += 16"),
        ("attention_octet.cuh", "entry + i % kOfHead * 8", "entry"),
        (
            "attention_octet.cuh",
            "TransposeMatrix(PackPair<T>(s[2], s[3]))",
            "PackPair<T>(s[2], s[3])",
        ),
        ("attention_octet_operands.cuh", "unsigned(found) < end ? found", "true ? found"),
        ("attention_octet.cuh", "bias[j / 2 * 2 * kLength + j % 2]", "bias[j % 2]"),
        ("attention_octet.cuh", "Indices(row + 1)", "Indices(row)"),
        ("attention_octet.cuh", "all = columns.All()", "all = true"),
        ("mma.cuh", "0x7632", "0x5410"),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, planted):
    setting = Setting(16, 8, 65, 4, 2, 2, "float16", "heads", lengths=True, is_causal=True)
    tile = AttentionTile(8, 2, octet=True)

    def once():
        check("every_length", setting, tile, ("forward",))
        # many steps for each warp
        check("wide", dataclasses.replace(setting, is_causal=False), tile, ("forward",))

    planted(header, right, wrong, once)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("dp = kept ? s * (dp - delta)", "dp = kept ? s * dp"),
        ("TransposeMatrix(PackPair<T>(x[2], x[3]))", "PackPair<T>(x[2], x[3])"),
        (".at[s % 2 * 2 + j % 2]", ".at[s % 2 * 2 + j / 2]"),
        ("odd ? own[j + 1] : own[j], given", "own[j], given"),
        ("MergeShares<32, kShare, kBlock>(own, AddAll());", ""),
        ("part + j / 2 * 2 * kLength + j % 2", "part + j % 2"),
        ("dbias + (batch * call.heads + head)", "dbias + batch * call.heads"),
        ("p += kWarps * 16", "p += 16"),
    ],
)
def test_planted_bugs_by_rows_are_caught(right, wrong, planted):
    setting = Setting(16, batch=1, dtype="float16", bias="heads")
    once = lambda: check("wide", setting, FOUR, ("rows",))  # noqa: E731
    planted("attention_octet_backward.cuh", right, wrong, once)


TALL = dict(name="tall", tile=ONE)


@pytest.mark.parametrize(
    ("right", "wrong", "of"),
    [
        ("left.at[i] += __popc(own[i]);", "left.at[i] += __popc(own[i]) + 1;", TALL),
        ("low + share * each", "low", TALL | dict(tile=FOUR)),
        ("stop = low + (share + 1) * each;", "", TALL | dict(tile=FOUR)),
        ("if (g >= 4) bit =", "if (false) bit =", TALL),
        ("(lists.stored[i][j % 2] >> bit & 1)", "true", {}),
        ("rows[j / 2] >= from", "rows[j / 2] > from", {}),
        ("__popc(lists.stored[tile][j % 2] >> bit)", "0", {}),
        ("permutation[at]", "at", {}),
        ("2 * t + 8 * i + g % 2", "2 * t + 8 * i", {}),
        ("first + 8 * i + j % 2 : 0", "first + j % 2 : 0", {}),
        (
            "call.End(lengths, batch) < call.keys ? call.End(lengths, batch) : call.keys",
            "call.End(lengths, batch)",
            dict(lengths=True, batch=2),
        ),
        ("Index(row) : -1", "Index(row) - part : -1", dict(length=32)),
    ],
)
def test_planted_bugs_by_keys_are_caught(right, wrong, of, planted):
    of = dict(name="every_length", tile=ONE, length=8, batch=1) | of
    name, tile = of.pop("name"), of.pop("tile")
    setting = Setting(dtype="float16", bias="heads", is_causal=True, **of)
    once = lambda: check(name, setting, tile, ("keys",))  # noqa: E731
    planted("attention_octet_keys.cuh", right, wrong, once)


@pytest.mark.parametrize(
    ("header", "right", "wrong", "test"),
    [
        (
            "attention_octet_operands.cuh",
            "(kAll || columns[i] >= 0) &&",
            "",
            lambda: test_what_is_not_finite_in_row_0_stays_where_it_is_stored(("k", "v")),
        ),
        (
            "types.cuh",
            "mul.wide.u32 %0, %1, %2;",
            "{.reg .u32 x; mul.lo.u32 x, %1, %2; cvt.u64.u32 %0, x;}",
            lambda: test_a_far_row_is_not_a_near_one("keys"),
        ),
        (
            "attention_octet_keys.cuh",
            "limit = 1;",
            "break;",
            test_a_vector_that_is_stored_twice,
        ),
        (
            "attention_octet_keys.cuh",
            "if (__any_sync(~0u, finite != 0)) ClearRows(query, cotangent, lse);",
            "",
            lambda: test_what_is_not_finite_reaches_the_keys_of_its_row_alone("q", np.nan),
        ),
        (
            "attention_octet_keys.cuh",
            "wrong |= __shfl_xor_sync(~0u, wrong, distance);",
            "",
            lambda: test_what_is_not_finite_reaches_the_keys_of_its_row_alone("dout", np.inf),
        ),
    ],
)
def test_planted_bugs_of_odd_cases_are_caught(header, right, wrong, test, planted):
    planted(header, right, wrong, test)
