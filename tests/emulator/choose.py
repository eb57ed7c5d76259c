"""Moves, comparisons and selections (PTX ISA, sections 9.7.6, 9.7.7 and 9.7.9)."""

import numpy as np

from .arithmetic import flush
from .parse import Pair, Vector
from .values import UNSIGNED, WIDTHS, is_float, lower


def move(blocks, instruction, active):
    """mov, with packing `{a, b} -> d` and unpacking `a -> {d, e}`."""
    instruction.allow()
    kind = instruction.types[-1]
    target, source = instruction.operands
    vector = next((o for o in instruction.operands if isinstance(o, Vector)), None)
    if vector is None:
        blocks.write(target, blocks.read(source, kind), kind, active)
        return
    part = f"b{8 * WIDTHS[kind] // len(vector.parts)}"
    if vector is source:
        parts = [lower(blocks.read(operand, part), part) for operand in source.parts]
        packed = np.ascontiguousarray(np.stack(parts, axis=1))
        blocks.write(
            target, packed.view(UNSIGNED[WIDTHS[kind]]).reshape(-1), f"b{8 * WIDTHS[kind]}", active
        )
    else:
        whole = np.ascontiguousarray(blocks.read(source, f"b{8 * WIDTHS[kind]}"))
        split = whole.view(UNSIGNED[WIDTHS[part]]).reshape(len(whole), -1)
        for i, operand in enumerate(target.parts):
            blocks.write(operand, split[:, i], part, active)


COMPARISONS = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal},
    **{"hi": np.greater, "hs": np.greater_equal},
}
COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compare(name, x, y):
    if x.dtype.kind != "f":
        return COMPARISONS[name](x, y)
    unordered = np.isnan(x) | np.isnan(y)
    if name in ("num", "nan"):
        return unordered if name == "nan" else ~unordered
    if name[-1] == "u" and name[:-1] in COMPARISONS:
        return COMPARISONS[name[:-1]](x, y) | unordered
    return COMPARISONS[name](x, y) & ~unordered


def comparison(blocks, instruction):
    """The comparison of setp and set, combined with a predicate by .and, .or, .xor."""
    name, *modifiers = instruction.modifiers
    instruction.allow(name, "ftz", *COMBINATIONS)
    kind = instruction.types[-1]
    x, y = (blocks.read(operand, kind) for operand in instruction.operands[1:3])
    if "ftz" in modifiers:
        x, y = flush(x), flush(y)
    return compare(name, x, y)


def set_predicate(blocks, instruction, active):
    result = comparison(blocks, instruction)
    target = instruction.operands[0]
    parts = target.parts if isinstance(target, Pair) else (target,)
    if instruction.types[-1].endswith("x2"):
        results = [result[0::2], result[1::2]]
    else:
        results = [result, ~result]
    combine = next((COMBINATIONS[m] for m in instruction.modifiers if m in COMBINATIONS), None)
    if combine:
        third = blocks.read(instruction.operands[3], "pred")
        results = [combine(result, third) for result in results]
    for operand, result in zip(parts, results, strict=False):
        blocks.write(operand, result, "pred", active)


def set_number(blocks, instruction, active):
    """set: 1.0 or all ones where the comparison holds."""
    result = comparison(blocks, instruction)
    target, source = instruction.types[-2:]
    if len(instruction.operands) > 3:
        raise NotImplementedError(f"operands of {instruction}")
    if is_float(target):
        number = result.astype(np.float32)
    elif source.endswith("x2"):
        number = (result.astype(np.uint16) * np.uint16(0xFFFF)).view(np.uint32)
    else:
        number = result.astype(UNSIGNED[WIDTHS[target]]) * ~UNSIGNED[WIDTHS[target]](0)
    blocks.write(instruction.operands[0], number, target if is_float(target) else "b32", active)


def select(blocks, instruction, active):
    """selp (by a predicate) and slct (by the sign of the third operand)."""
    target, x, y, chooser = instruction.operands
    kind = instruction.types[0]
    if instruction.opcode == "selp":
        first = blocks.read(chooser, "pred")
    else:
        first = blocks.read(chooser, instruction.types[1]) >= 0
    x, y = (lower(blocks.read(operand, kind), kind) for operand in (x, y))
    blocks.write(target, np.where(first, x, y), "b" + str(8 * WIDTHS[kind]), active)


def logic(function):
    """and, or, xor, not; also of predicates."""

    def run(blocks, instruction, active):
        instruction.allow()
        kind = instruction.types[-1]
        operands = (blocks.read(operand, kind) for operand in instruction.operands[1:])
        blocks.write(instruction.operands[0], function(*operands), kind, active)

    return run
