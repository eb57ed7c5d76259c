"""mma, ldmatrix and movmatrix, with the fragment layouts of the PTX ISA, section 9.7.14.

g = lane / 4 and t = lane % 4. Products and sums are computed in float64 and rounded once. A real
tensor core truncates in undocumented places, so compare with a bound, or use integers. wmma, whose
fragment layouts are undocumented, is in wmma.py.
"""

import re

import numpy as np

from .parse import Vector
from .values import LIFTED

ALIGNED = ("sync", "aligned")
G, T = np.arange(32) // 4, np.arange(32) % 4


def pieces(kind):
    """(elements in a register, type of the register)."""
    if kind in ("f16", "bf16"):
        return 2, kind + "x2"
    return 1, kind


def placement(matrix, register, element, kind):
    """(rows, columns) that the 32 lanes hold in an element of a register of a fragment."""
    packed = kind in ("f16", "bf16")
    low, high = register & 1, register >> 1
    if matrix == "a":
        return G + 8 * low, (2 * T + element + 8 * high) if packed else (T + 4 * high)
    if matrix == "b":
        return (2 * T + element + 8 * register if packed else T + 4 * register), G
    if packed:
        return G + 8 * register, 2 * T + element
    return G + 8 * high, 2 * T + low


def operand_numbers(blocks, register, kind):
    """A register's elements [warps, 32, elements] as float64."""
    count, packed = pieces(kind)
    if kind == "tf32":  # the low 13 bits are ignored
        words = blocks.read(register, "b32") & np.uint32(0xFFFFE000)
        numbers = words.view(np.float32)
    else:
        numbers = blocks.read(register, packed)
    return numbers.astype(np.float64).reshape(-1, 32, count)


def gather(blocks, operand, matrix, kind, shape):
    whole = np.zeros((blocks.n // 32, *shape))
    for i, register in enumerate(operand.parts):
        numbers = operand_numbers(blocks, register, kind)
        for element in range(numbers.shape[2]):
            rows, columns = placement(matrix, i, element, kind)
            whole[:, rows, columns] = numbers[:, :, element]
    return whole


def multiply_accumulate(blocks, instruction, active):
    """mma.sync: D = A B + C of one warp."""
    if "m8n8k4" in instruction.modifiers:
        return multiply_octets(blocks, instruction, active)
    shape = next((m for m in instruction.modifiers if re.fullmatch(r"m16n8k(4|8|16)", m)), None)
    instruction.allow(*ALIGNED, "row", "col", shape)
    kinds = instruction.types
    if shape is None or kinds[1] not in ("f16", "bf16", "tf32") or kinds[1] != kinds[2]:
        raise NotImplementedError(f"shape or types of {instruction}")
    k = int(shape.removeprefix("m16n8k"))
    target, a, b, c = instruction.operands
    if len(a.parts) * pieces(kinds[1])[0] * 32 != 16 * k:
        raise NotImplementedError(f"operands of {instruction}")
    a = gather(blocks, a, "a", kinds[1], (16, k))
    b = gather(blocks, b, "b", kinds[2], (k, 8))
    c = gather(blocks, c, "c", kinds[3], (16, 8))
    result = a @ b + c
    count, packed = pieces(kinds[0])
    for i, register in enumerate(target.parts):
        own = np.empty((blocks.n // 32, 32, count), LIFTED[kinds[0]])
        for element in range(count):
            rows, columns = placement("c", i, element, kinds[0])
            own[:, :, element] = result[:, rows, columns]
        blocks.write(register, own.reshape(-1), packed, active)


def octet_placement(matrix, layout, i):
    """(rows, columns) that the 32 lanes hold in element i of a fragment of m8n8k4."""
    lane = np.arange(32)
    own, half = lane % 4, lane // 16 * 4
    if matrix == "c":
        return (lane & 1) + (i & 2) + half, (i & 4) + (lane & 2) + (i & 1)
    along, across = (own + half, i + 0 * lane) if layout == "k" else (i + half, own)
    return (along, across) if matrix == "a" else (across, along)


def multiply_octets(blocks, instruction, active):
    """mma.m8n8k4: four products; product q belongs to lanes 4 q to 4 q + 3 and 4 q + 16 to 4 q +
    19."""
    instruction.allow(*ALIGNED, "row", "col", "m8n8k4")
    if instruction.types != ["f32", "f16", "f16", "f32"]:
        raise NotImplementedError(f"types of {instruction}")
    a_layout, b_layout = (m for m in instruction.modifiers if m in ("row", "col"))
    target, a, b, c = instruction.operands
    if [len(x.parts) for x in (target, a, b, c)] != [8, 2, 2, 8]:
        raise NotImplementedError(f"operands of {instruction}")
    octet = np.arange(32) % 16 // 4
    # A row of A, or a column of B, in one lane: consecutive elements are along k.
    layouts = {"a": "k" if a_layout == "row" else "", "b": "k" if b_layout == "col" else ""}

    def gathered(operand, matrix, kind, shape):
        whole = np.zeros((blocks.n // 32, 4, *shape))
        count = pieces(kind)[0]
        for i, register in enumerate(operand.parts):
            numbers = operand_numbers(blocks, register, kind)
            for element in range(count):
                place = octet_placement(matrix, layouts.get(matrix), count * i + element)
                whole[:, octet, *place] = numbers[:, :, element]
        return whole

    result = gathered(a, "a", "f16", (8, 4)) @ gathered(b, "b", "f16", (4, 8))
    result += gathered(c, "c", "f32", (8, 8))
    for i, register in enumerate(target.parts):
        own = result[:, octet, *octet_placement("c", None, i)].astype(np.float32)
        blocks.write(register, own.reshape(-1), "f32", active)


def load_matrices(blocks, instruction, active):
    """ldmatrix: lane 8 i + r has the address of row r of matrix i; lane l gets elements 2 t and
    2 t + 1 of row g (with .trans: of column g)."""
    instruction.allow(*ALIGNED, "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    count = next((int(m[1]) for m in instruction.modifiers if m in ("x1", "x2", "x4")), 1)
    target, source = instruction.operands
    targets = target.parts if isinstance(target, Vector) else (target,)
    giving = active.lanes[blocks.lane[active.lanes] < 8 * count]
    rows = np.zeros(blocks.n, np.int64)
    ((place, positions, _),) = blocks.locate("shared", source, 16, giving, instruction)
    rows[giving] = positions
    # The ISA does not say which lane reads: the one that gives the address, or the one that gets
    # the data.
    blocks.check_race("load", place, positions, 16, giving, instruction)
    lanes = active.lanes
    start, g, t = blocks.warp_start[lanes], blocks.lane[lanes] // 4, blocks.lane[lanes] % 4
    for i, register in enumerate(targets):
        if "trans" in instruction.modifiers:
            halves = [rows[start + 8 * i + 2 * t + k] + 2 * g for k in (0, 1)]
            width = 2
        else:
            halves = [rows[start + 8 * i + g] + 4 * t]
            width = 4
        words = []
        for positions in halves:
            blocks.check_written(place, positions, width, lanes, instruction)
            blocks.forbid_pending(positions, width, lanes, instruction)
            blocks.check_race("load", place, positions, width, lanes, instruction)
            words.append(place.view(LIFTED[f"b{8 * width}"])[positions // width].astype(np.uint32))
        word = words[0] | words[1] << np.uint32(16) if len(words) == 2 else words[0]
        blocks.write_lanes(register, word, "b32", lanes)


def transpose_matrix(blocks, instruction, active):
    """movmatrix: the 8 x 8 matrix of 16-bit elements that the warp holds, transposed."""
    instruction.allow(*ALIGNED, "m8n8", "trans")
    target, source = instruction.operands
    halves = np.ascontiguousarray(blocks.read(source, "b32")).view(np.uint16)
    matrices = halves.reshape(-1, 8, 8)  # row g of a warp: lanes 4 g to 4 g + 3, two halves each
    turned = np.ascontiguousarray(matrices.transpose(0, 2, 1))
    blocks.write(target, turned.reshape(-1).view(np.uint32), "b32", active)


MATRICES = {
    "mma": multiply_accumulate,
    "ldmatrix": load_matrices,
    "movmatrix": transpose_matrix,
}
