"""wmma of m8n32k16. Fragments are opaque in PTX, so this emulator has an arbitrary layout of its
own.

PTX ISA, section 9.7.14.4: all lanes give the same address and leading dimension; a matrix begins at
a multiple of 32 bytes (CUDA C++ Programming Guide, wmma), its rows at multiples of 16.
"""

import numpy as np

from .access import memory_modifiers, space_of
from .tensor_core import ALIGNED, operand_numbers, pieces
from .values import LIFTED, UNSIGNED, WIDTHS, lower

SHAPES = {"a": (8, 16), "b": (16, 32), "c": (8, 32), "d": (8, 32)}
# For f16 A has four copies in a warp, one in each quarter.
REGISTERS = {("a", "f16"): 8, ("a", "bf16"): 2, ("b", "f16"): 8, ("b", "bf16"): 8}
BASE, LEADING = 32, 16  # alignment in bytes of the start and of the leading dimension


def placement(matrix, register, element, kind, layout="row"):
    """(rows, columns) that the 32 lanes hold: strides differ between layouts, so that a kernel
    cannot guess the layout, and load and mma must agree on it."""
    rows, columns = SHAPES[matrix]
    place = (register * 32 + np.arange(32)) * pieces(kind)[0] + element
    place = place * {"row": 7, "col": 11}[layout] % (rows * columns)
    return place // columns, place % columns


def matrix_instruction(blocks, instruction, active):
    action, *_ = instruction.modifiers
    instruction.allow(
        *memory_modifiers(instruction), *ALIGNED, "row", "col", "m8n32k16", action, *SHAPES
    )
    if "m8n32k16" not in instruction.modifiers:
        raise NotImplementedError(f"shape of {instruction}")
    {"load": load_fragment, "mma": multiply, "store": store_fragment}[action](
        blocks, instruction, active
    )


def layouts(instruction):
    return [modifier for modifier in instruction.modifiers if modifier in ("row", "col")]


def registers(operand, matrix, kind, instruction):
    if len(operand.parts) != REGISTERS.get((matrix, kind), 8):
        raise NotImplementedError(f"operands of {instruction}")
    return operand.parts


def elements(blocks, instruction, address, leading, matrix, kind, active):
    """Yields (register, element, space, positions, lanes) for all elements of a fragment in
    memory."""
    width, lanes = WIDTHS[kind], active.lanes
    step = blocks.read(leading, "u32")[lanes].astype(np.int64) * width
    starts = blocks.addresses(address, lanes)
    for name, numbers in ("address", starts), ("leading dimension", step):
        others = numbers[np.searchsorted(lanes, blocks.warp_start[lanes])]
        if (wrong := np.flatnonzero(numbers != others)).size:
            what = f"{name} is not the one of lane 0"
            raise blocks.fault(what, lanes[wrong[0]], instruction)
    for name, numbers, unit in ("address", starts, BASE), ("leading dimension", step, LEADING):
        if (wrong := np.flatnonzero(numbers % unit)).size:
            what = f"misaligned {name}: {numbers[wrong[0]]:#x} is no multiple of {unit} bytes"
            raise blocks.fault(what, lanes[wrong[0]], instruction)
    lane, (layout,), space = blocks.lane[lanes], layouts(instruction), space_of(instruction)
    for register in range(REGISTERS.get((matrix, kind), 8)):
        for element in range(pieces(kind)[0]):
            # D has the same fragment for both layouts in memory.
            own = "row" if matrix == "d" else layout
            rows, columns = placement(matrix, register, element, kind, own)
            outer, inner = (rows, columns) if layout == "row" else (columns, rows)
            offsets = outer[lane] * step + inner[lane] * width
            ((place, positions, _),) = blocks.locate(
                space, address, width, lanes, instruction, offsets
            )
            yield register, element, place, positions, lanes


def load_fragment(blocks, instruction, active):
    """wmma.load of A or B."""
    matrix, kind = instruction.modifiers[1], instruction.types[-1]
    if (matrix, kind) not in REGISTERS:
        raise NotImplementedError(f"types of {instruction}")
    target, address, leading = instruction.operands
    parts, width = registers(target, matrix, kind, instruction), WIDTHS[kind]
    found = np.zeros((len(parts), active.count, pieces(kind)[0]), np.uint16)
    for register, element, place, positions, lanes in elements(
        blocks, instruction, address, leading, matrix, kind, active
    ):
        blocks.check_written(place, positions, width, lanes, instruction)
        if place is blocks.shared:
            blocks.forbid_pending(positions, width, lanes, instruction)
        blocks.check_race("load", place, positions, width, lanes, instruction)
        found[register, :, element] = place.view(UNSIGNED[width])[positions // width]
    for register, halves in zip(parts, found, strict=True):
        words = np.ascontiguousarray(halves).reshape(-1).view(np.uint32)
        blocks.write_lanes(register, words, "b32", active.lanes)


def store_fragment(blocks, instruction, active):
    """wmma.store of D in float32."""
    kind = instruction.types[-1]
    if kind != "f32":
        raise NotImplementedError(f"types of {instruction}")
    address, source, leading = instruction.operands
    parts, width = registers(source, "d", kind, instruction), WIDTHS[kind]
    for register, _, place, positions, lanes in elements(
        blocks, instruction, address, leading, "d", kind, active
    ):
        if place is blocks.shared:
            blocks.forbid_pending(positions, width, lanes, instruction)
        blocks.check_race("store", place, positions, width, lanes, instruction)
        words = lower(blocks.read(parts[register], kind), kind)[lanes]
        place.view(UNSIGNED[width])[positions // width] = words
        place.mark_written(positions, width)


def multiply(blocks, instruction, active):
    """wmma.mma: D = A B + C, float32 sums."""
    types = instruction.types
    kind = "f16" if types == ["f32", "f32"] else "bf16"
    if kind == "bf16" and types != ["f32", "bf16", "bf16", "f32"]:
        raise NotImplementedError(f"types of {instruction}")
    target, *sources = instruction.operands

    def gathered(operand, matrix, kind, layout):
        whole = np.zeros((blocks.n // 32, *SHAPES[matrix]))
        for i, register in enumerate(registers(operand, matrix, kind, instruction)):
            numbers = operand_numbers(blocks, register, kind)
            for element in range(numbers.shape[2]):
                rows, columns = placement(matrix, i, element, kind, layout)
                whole[:, rows, columns] = numbers[:, :, element]
        return whole

    (a, b, c), (a_layout, b_layout) = sources, layouts(instruction)
    result = gathered(a, "a", kind, a_layout) @ gathered(b, "b", kind, b_layout)
    result += gathered(c, "c", "f32", "row")
    for i, register in enumerate(registers(target, "d", "f32", instruction)):
        rows, columns = placement("d", i, 0, "f32")
        own = result[:, rows, columns].astype(LIFTED["f32"]).reshape(-1)
        blocks.write(register, own, "f32", active)
