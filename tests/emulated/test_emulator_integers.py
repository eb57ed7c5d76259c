"""Integer instructions of the emulator, through inline PTX, against Python's integers."""

import numpy as np
import pytest
from one_instruction import LANES, one_instruction, words


def signed(word, width):
    word &= (1 << width) - 1
    return word - (1 << width) if word >> (width - 1) else word


def permuted_bytes(a, b, selector):
    octets = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        octet = octets[nibble & 7]
        result |= ((0xFF if octet & 0x80 else 0) if nibble & 8 else octet) << 8 * i
    return result


def extracted(a, start, length, width, is_signed):
    start, length = start & 255, length & 255
    field = (a & (1 << width) - 1) >> start & (1 << length) - 1
    if is_signed and length:
        top = min(start + length - 1, width - 1)
        if a >> top & 1:
            for i in range(width):
                if i >= length or start + i > width - 1:
                    field |= 1 << i
    return field


def inserted(a, b, start, length, width):
    start, length = start & 255, length & 255
    for i in range(length):
        if start + i < width:
            b = b & ~(1 << start + i) | (a >> i & 1) << start + i
    return b


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0


def funnel(high, low, amount, left):
    both = high << 32 | low
    return both << amount >> 32 if left else both >> amount


INTEGERS = [
    ("add.s32", "int32", 2, "int32", lambda a, b: a + b),
    ("sub.u64", "uint64", 2, "uint64", lambda a, b: a - b),
    ("mul.lo.s32", "int32", 2, "int32", lambda a, b: a * b),
    ("mul.hi.s32", "int32", 2, "int32", lambda a, b: a * b >> 32),
    ("mul.hi.u32", "uint32", 2, "uint32", lambda a, b: a * b >> 32),
    ("mul.hi.s64", "int64", 2, "int64", lambda a, b: a * b >> 64),
    ("mul.hi.u64", "uint64", 2, "uint64", lambda a, b: a * b >> 64),
    ("mul.wide.s32", "int32", 2, "int64", lambda a, b: a * b),
    ("mul.wide.u32", "uint32", 2, "uint64", lambda a, b: a * b),
    ("mul.wide.u16", "uint16", 2, "uint32", lambda a, b: a * b),
    ("mad.lo.s32", "int32", 3, "int32", lambda a, b, c: a * b + c),
    ("mad.hi.u32", "uint32", 3, "uint32", lambda a, b, c: (a * b >> 32) + c),
    ("neg.s32", "int32", 1, "int32", lambda a: -a),
    ("abs.s64", "int64", 1, "int64", abs),
    ("min.s32", "int32", 2, "int32", min),
    ("max.u32", "uint32", 2, "uint32", max),
    ("and.b32", "uint32", 2, "uint32", lambda a, b: a & b),
    ("or.b64", "uint64", 2, "uint64", lambda a, b: a | b),
    ("xor.b32", "uint32", 2, "uint32", lambda a, b: a ^ b),
    ("not.b32", "uint32", 1, "uint32", lambda a: ~a),
    ("popc.b32", "uint32", 1, "uint32", lambda a: a.bit_count()),
    ("popc.b64", "uint64", 1, "uint32", lambda a: a.bit_count()),
    ("clz.b32", "uint32", 1, "uint32", lambda a: 32 - a.bit_length()),
    ("clz.b64", "uint64", 1, "uint32", lambda a: 64 - a.bit_length()),
    ("brev.b32", "uint32", 1, "uint32", lambda a: int(f"{a:032b}"[::-1], 2)),
    ("brev.b64", "uint64", 1, "uint64", lambda a: int(f"{a:064b}"[::-1], 2)),
    ("bfind.u32", "uint32", 1, "uint32", lambda a: a.bit_length() - 1),
    ("bfind.s32", "int32", 1, "uint32", lambda a: (~a if a < 0 else a).bit_length() - 1),
    ("shl.b32", "uint32", 2, "uint32", lambda a, b: a << b if b < 32 else 0),
    ("shr.u32", "uint32", 2, "uint32", lambda a, b: a >> b if b < 32 else 0),
    ("shr.s32 $0, $1, $2;", "int32", 2, "int32", lambda a, b: a >> min(b & 0xFFFFFFFF, 31)),
    ("shf.l.wrap.b32", "uint32", 3, "uint32", lambda a, b, c: funnel(b, a, c & 31, True)),
    ("shf.r.wrap.b32", "uint32", 3, "uint32", lambda a, b, c: funnel(b, a, c & 31, False)),
    ("shf.l.clamp.b32", "uint32", 3, "uint32", lambda a, b, c: funnel(b, a, min(c, 32), True)),
    ("shf.r.clamp.b32", "uint32", 3, "uint32", lambda a, b, c: funnel(b, a, min(c, 32), False)),
    ("prmt.b32", "uint32", 3, "uint32", permuted_bytes),
    ("bfe.u32", "uint32", 3, "uint32", lambda a, b, c: extracted(a, b, c, 32, False)),
    ("bfe.s32", "int32", 3, "int32", lambda a, b, c: extracted(a, b, c, 32, True)),
    ("bfi.b32", "uint32", 4, "uint32", lambda a, b, c, d: inserted(a, b, c, d, 32)),
    (
        *("lop3.b32 $0, $1, $2, $3, 0x96;", "uint32", 3, "uint32"),
        lambda a, b, c: a ^ b ^ c,
    ),
    (
        *("lop3.b32 $0, $1, $2, $3, 0xCA;", "uint32", 3, "uint32"),
        lambda a, b, c: a & b | ~a & c,
    ),
    ("slct.s32.s32", "int32", 3, "int32", lambda a, b, c: a if c >= 0 else b),
    ("cvt.s64.s32", "int32", 1, "int64", lambda a: a),
    ("cvt.u16.u32", "uint32", 1, "uint16", lambda a: a),
    ("cvt.s8.s32 t, $1; cvt.s32.s8 $0, t;", "int32", 1, "int32", lambda a: signed(a, 8)),
    ("cvt.sat.s16.s32 t, $1; cvt.s32.s16 $0, t;", "int32", 1, "int32", None),
    ("div.s32", "int32", 2, "int32", quotient),
    ("rem.s32", "int32", 2, "int32", lambda a, b: a - b * quotient(a, b)),
    ("div.u64", "uint64", 2, "uint64", quotient),
]


@pytest.mark.parametrize("case", INTEGERS, ids=[case[0] for case in INTEGERS])
def test_integers(launch, case):
    instruction, dtype, count, result, reference = case
    if reference is None:
        reference = lambda a: max(-(1 << 15), min((1 << 15) - 1, a))
    if " t," in instruction:
        instruction = "{ .reg .b16 t; " + instruction + " }"
    inputs = [words(dtype, seed) for seed in range(count)]
    if instruction.startswith(("div", "rem")):
        inputs[1] = np.where(inputs[1] == 0, np.dtype(dtype).type(3), inputs[1])
    computed = one_instruction(launch, instruction, inputs, result)
    width = 8 * np.dtype(result).itemsize
    expected = [reference(*(int(x[i]) for x in inputs)) for i in range(LANES)]
    if result.startswith("u"):
        expected = [number & (1 << width) - 1 for number in expected]
    else:
        expected = [signed(number, width) for number in expected]
    np.testing.assert_array_equal(computed, np.array(expected, result))
