"""Bit instructions: fields, shifts, counts, permutations (PTX ISA, sections 9.7.1 and 9.7.8)."""

import numpy as np

from .values import UNSIGNED, WIDTHS


def bit_rows(x):
    """The bits of each word [lanes, bits], the most significant bit first."""
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)[:, ::-1]
    return np.unpackbits(octets, axis=1)


def reverse_bits(instruction, kind, x):
    octets = np.packbits(bit_rows(x)[:, ::-1], axis=1)[:, ::-1]
    return np.ascontiguousarray(octets).view(x.dtype).reshape(-1)


def leading_zeros(x):
    rows = bit_rows(x)
    return np.where(rows.any(1), rows.argmax(1), rows.shape[1]).astype(np.uint32)


def count_bits(blocks, instruction, active):
    """popc, clz: the result is always 32 bits wide."""
    instruction.allow()
    x = blocks.read(instruction.operands[1], "b" + instruction.types[-1][1:])
    count = bit_rows(x).sum(1) if instruction.opcode == "popc" else leading_zeros(x)
    blocks.write(instruction.operands[0], count.astype(np.uint32), "u32", active)


def find_highest_bit(blocks, instruction, active):
    """bfind: the position of the highest bit that differs from the sign bit; all ones if there is
    none."""
    instruction.allow("shiftamt")
    x = blocks.read(instruction.operands[1], instruction.types[-1])
    x = np.where(x < 0, ~x, x) if x.dtype.kind == "i" else x
    zeros, width = leading_zeros(x), 8 * x.itemsize
    found = zeros if "shiftamt" in instruction.modifiers else np.uint32(width - 1) - zeros
    found = np.where(zeros == width, np.uint32(0xFFFFFFFF), found)
    blocks.write(instruction.operands[0], found.astype(np.uint32), "u32", active)


def low_mask(length, dtype):
    """A word with `length` low bits set; all bits from the word's width on."""
    width = 8 * np.dtype(dtype).itemsize
    ones = (np.ones(1, dtype) << np.minimum(length, width - 1).astype(dtype)) - dtype(1)
    return np.where(length >= width, ~dtype(0), ones)


def extract_field(blocks, instruction, active):
    """bfe.{u,s}{32,64}."""
    kind = instruction.types[-1]
    dtype, width = UNSIGNED[WIDTHS[kind]], 8 * WIDTHS[kind]
    x = blocks.read(instruction.operands[1], "b" + kind[1:])
    start, length = (blocks.read(o, "u32") & np.uint32(0xFF) for o in instruction.operands[2:])
    field = np.where(start < width, x >> np.minimum(start, width - 1).astype(dtype), dtype(0))
    if kind[0] == "s":
        length = np.minimum(length, np.where(start < width, width - start, 0))
    mask = low_mask(length, dtype)
    result = field & mask
    if kind[0] == "s":
        asked = blocks.read(instruction.operands[3], "u32") & np.uint32(0xFF)
        top = np.minimum(start.astype(np.int64) + asked - 1, width - 1).clip(0).astype(dtype)
        negative = ((x >> top) & dtype(1)).astype(bool) & (asked > 0)
        result = np.where(negative, result | ~mask, result)
    blocks.write(instruction.operands[0], result, "b" + kind[1:], active)


def insert_field(blocks, instruction, active):
    """bfi: the low bits of a, `length` of them, into b at `start`."""
    kind = instruction.types[-1]
    dtype, width = UNSIGNED[WIDTHS[kind]], 8 * WIDTHS[kind]
    x, base = (blocks.read(operand, kind) for operand in instruction.operands[1:3])
    start, length = (blocks.read(o, "u32") & np.uint32(0xFF) for o in instruction.operands[3:])
    shift = np.minimum(start, width - 1).astype(dtype)
    mask = np.where(start < width, low_mask(length, dtype) << shift, dtype(0))
    result = (base & ~mask) | ((x << shift) & mask)
    blocks.write(instruction.operands[0], result, kind, active)


def shift(blocks, instruction, active):
    """shl, shr: amounts are clamped at the width."""
    kind = instruction.types[-1]
    x = blocks.read(instruction.operands[1], kind)
    amount = blocks.read(instruction.operands[2], "u32")
    width = 8 * x.itemsize
    within = np.minimum(amount, width - 1).astype(x.dtype)
    result = x << within if instruction.opcode == "shl" else x >> within
    arithmetic = instruction.opcode == "shr" and x.dtype.kind == "i"
    if not arithmetic and (amount >= width).any():
        result = np.where(amount < width, result, x.dtype.type(0))
    blocks.write(instruction.operands[0], result, kind, active)


def funnel_shift(instruction, kind, low, high, amount):
    unlimited = "wrap" in instruction.modifiers
    amount = amount & np.uint32(31) if unlimited else np.minimum(amount, np.uint32(32))
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    if "l" in instruction.modifiers:
        # In two shifts, since NumPy shifts 64-bit words by at most 63.
        return ((both << amount.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return (both >> amount.astype(np.uint64)).astype(np.uint32)


def permute_bytes(instruction, kind, low, high, selector):
    octets = np.stack([low, high], axis=1).view(np.uint8)
    result = np.zeros(len(low), np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        octet = np.take_along_axis(octets, (nibble & 7).astype(np.int64)[:, None], 1)[:, 0]
        octet = np.where(nibble & 8, np.where(octet & 0x80, 0xFF, 0), octet)
        result |= octet.astype(np.uint32) << np.uint32(8 * i)
    return result


def lookup_logic(instruction, kind, a, b, c, table):
    """lop3: bit (4 a + 2 b + c) of the table."""
    result, table = np.zeros_like(a), int(table[0])
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


WORD_OPERATIONS = {
    "brev": (reverse_bits, ()),
    "shf": (funnel_shift, ("l", "r", "wrap", "clamp")),
    "prmt": (permute_bytes, ()),
    "lop3": (lookup_logic, ()),
}
