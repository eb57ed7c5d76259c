"""The scheduler: lanes at the lowest program counter run next; lanes at a collective wait for their
partners."""

import numpy as np

from .access import atomic, convert_address, copy_async, load, prefetch, store
from .arithmetic import OPERATIONS, arithmetic, multiply_or_wide
from .bitwise import count_bits, extract_field, find_highest_bit, insert_field, shift
from .blocks import Active
from .choose import logic, move, select, set_number, set_predicate
from .convert import convert
from .tensor_core import MATRICES
from .warp import COLLECTIVES, complete, deadlock
from .wmma import matrix_instruction


def nothing(blocks, instruction, active):
    """Fences and hints do nothing: the race check does not model them."""


def trap(blocks, instruction, active):
    raise blocks.fault("trap", active.lanes[0], instruction)


def call(blocks, instruction, active):
    if any(getattr(operand, "name", "") == "__assertfail" for operand in instruction.operands):
        raise blocks.fault("an assertion does not hold", active.lanes[0], instruction)
    raise NotImplementedError(f"PTX instruction {instruction}")


PER_LANE = {
    **dict.fromkeys(OPERATIONS, arithmetic),
    **dict.fromkeys(("mul", "mad"), multiply_or_wide),
    **dict.fromkeys(("popc", "clz"), count_bits),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("selp", "slct"), select),
    "and": logic(np.bitwise_and),
    "or": logic(np.bitwise_or),
    "xor": logic(np.bitwise_xor),
    "not": logic(np.invert),
    "bfind": find_highest_bit,
    "bfe": extract_field,
    "bfi": insert_field,
    "mov": move,
    "setp": set_predicate,
    "set": set_number,
}
GATHERING = {**COLLECTIVES, **MATRICES, "wmma": matrix_instruction}
HANDLERS = {
    **PER_LANE,
    **GATHERING,
    **dict.fromkeys(("atom", "red"), atomic),
    **dict.fromkeys(("membar", "fence", "nanosleep"), nothing),
    "cvt": convert,
    "cvta": convert_address,
    "ld": load,
    "st": store,
    "cp": copy_async,
    "prefetch": prefetch,
    "prefetchu": prefetch,
    "trap": trap,
    "call": call,
}


def execute(blocks):
    while True:
        runnable = np.where(blocks.parked, blocks.end, blocks.pc)
        here = int(runnable.min())
        if here == blocks.end:
            if blocks.parked.any():
                raise deadlock(blocks)
            return
        mask = runnable == here
        others = runnable[~mask]
        run_together(blocks, Active(mask), here, int(others.min()) if others.size else blocks.end)


def run_together(blocks, active, here, merge):
    """Runs lanes that are all at `here` until they diverge, wait, or reach `merge`, where other
    lanes are.

    blocks.pc is up to date again when this returns.
    """
    code, launch = blocks.entry.instructions, blocks.launch
    while here < merge:
        instruction = code[here]
        launch.tick(here)
        acting = active
        if instruction.guard is not None:
            acting = active.where(blocks.read(instruction.guard, "pred"))
        opcode = instruction.opcode
        if blocks.clock is not None and opcode not in GATHERING:
            blocks.clock.issue(here, instruction, active)  # lanes that the guard switches off too
        if acting.count == 0:
            here += 1
        elif opcode == "bra":
            target = blocks.entry.labels[instruction.operands[0].name]
            if acting.count < active.count:
                blocks.pc[active.mask] = here + 1
                blocks.pc[acting.mask] = target
                return
            here = target
        elif opcode == "brx":
            blocks.pc[active.mask] = here + 1
            branch_by_index(blocks, instruction, acting)
            return
        elif opcode in ("ret", "exit"):
            blocks.pc[active.mask] = here + 1
            blocks.pc[acting.mask] = blocks.end
            return
        elif opcode in GATHERING:
            if not gather(blocks, instruction, active, acting, here):
                return
            here += 1
        else:
            handler_of(instruction)(blocks, instruction, acting)
            here += 1
    blocks.pc[active.mask] = here


def branch_by_index(blocks, instruction, active):
    index, table = instruction.operands
    targets = [blocks.entry.labels[label] for label in blocks.entry.tables[table.name]]
    chosen = blocks.read(index, "u32")[active.lanes]
    if (beyond := np.flatnonzero(chosen >= len(targets))).size:
        raise blocks.fault("index beyond the table", active.lanes[beyond[0]], instruction)
    blocks.pc[active.lanes] = np.array(targets)[chosen]


def handler_of(instruction):
    if instruction.opcode not in HANDLERS:
        raise NotImplementedError(f"PTX instruction {instruction}")
    return HANDLERS[instruction.opcode]


def gather(blocks, instruction, active, acting, here):
    """Runs a collective for the groups that are complete. Returns True if no lane has to wait."""
    waiting = acting.mask | (blocks.parked & (blocks.pc == here))
    ready = complete(blocks, instruction, waiting)
    together = acting if np.array_equal(ready, acting.mask) else Active(ready)
    if together.count:
        if blocks.clock is not None:
            blocks.clock.issue(here, instruction, together)
        handler_of(instruction)(blocks, instruction, together)
    if together is acting and not (blocks.parked & (blocks.pc == here)).any():
        return True
    blocks.pc[active.mask] = here + 1
    blocks.pc[waiting] = here
    blocks.pc[ready] = here + 1
    blocks.parked[waiting] = ~ready[waiting]
    return False
