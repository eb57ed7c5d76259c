"""Collectives: instructions at which lanes wait for each other (PTX ISA, section 9.7.13)."""

import numpy as np

from .blocks import POISON
from .parse import Pair
from .values import LIFTED

FULL = 0xFFFFFFFF
WHOLE_WARP = ("ldmatrix", "movmatrix", "mma", "wmma")


def warp_bits(mask):
    """The lanes of each warp as one word."""
    return np.packbits(mask.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32).reshape(-1)


def members(blocks, instruction):
    """The member mask that each lane gives."""
    if instruction.opcode in WHOLE_WARP:
        return np.full(blocks.n, FULL, np.uint32)
    if instruction.opcode == "bar":
        return blocks.read(instruction.operands[0], "b32")
    return blocks.read(instruction.operands[-1], "b32")


def complete(blocks, instruction, waiting):
    """The lanes waiting here whose whole group has arrived."""
    if is_block_barrier(instruction):
        check_barrier(blocks, instruction)
        arrived = waiting.reshape(blocks.count, -1).sum(axis=1) == blocks.launch.threads
        return waiting & np.repeat(arrived, blocks.padded)
    if instruction.opcode == "activemask":
        return waiting
    named = members(blocks, instruction)
    if instruction.opcode in WHOLE_WARP:
        check_whole_warp(blocks, instruction, waiting)
        check_together(blocks, instruction, waiting)
    if waiting.all() and (named == FULL).all():
        return waiting
    own = (named >> blocks.lane) & np.uint32(1)
    if not own.all() and (outside := np.flatnonzero(waiting & (own == 0))).size:
        lane = outside[0]
        what = f"lane {blocks.lane[lane]} is not in its own mask {named[lane]:#010x}"
        raise blocks.fault(what, lane, instruction)
    needed = named & np.repeat(warp_bits(blocks.exists), 32)
    arrived = np.repeat(warp_bits(waiting), 32)
    ready = waiting & ((needed & ~arrived) == 0)
    check_same_mask(blocks, instruction, needed, ready)
    return ready


def check_whole_warp(blocks, instruction, waiting):
    exist = blocks.exists.reshape(-1, 32).all(axis=1)
    if (wrong := np.flatnonzero(waiting & ~np.repeat(exist, 32))).size:
        raise blocks.fault("a warp of fewer than 32 threads", wrong[0], instruction)


def check_together(blocks, instruction, waiting):
    """Faults for an .aligned instruction that only some lanes of a warp have reached."""
    came = waiting.reshape(-1, 32)
    apart = came.any(axis=1) & ~came.all(axis=1)
    if apart.any():
        warp = np.flatnonzero(apart)[0]
        here, absent = (32 * warp + np.argmax(lanes) for lanes in (came[warp], ~came[warp]))
        what = f"a warp in parts, without {blocks.describe(absent)}"
        raise blocks.fault(what, here, instruction)


def check_same_mask(blocks, instruction, needed, ready):
    """Faults unless all lanes that a mask names give the same mask (PTX ISA: else undefined
    behaviour)."""
    if (needed == FULL).all():
        return
    lanes = np.flatnonzero(ready)
    mine = needed[lanes]
    lowest = mine & (~mine + np.uint32(1))
    leader = blocks.warp_start[lanes] + np.log2(lowest.astype(np.float64)).astype(int)
    bit = (np.uint32(1) << blocks.lane[lanes]).astype(np.float64)
    agreeing = np.bincount(leader, bit, blocks.n)[leader]  # lanes with the same leader, as a mask
    if (wrong := np.flatnonzero(agreeing != mine)).size:
        lane = lanes[wrong[0]]
        warp = np.arange(blocks.warp_start[lane], blocks.warp_start[lane] + 32)
        named = (needed[lane] >> blocks.lane[warp] & 1).astype(bool)
        other = warp[named & (needed[warp] != needed[lane])][0] % 32
        what = f"mask {needed[lane]:#010x}, but lane {other} says another"
        raise blocks.fault(what, lane, instruction)


def is_block_barrier(instruction):
    return instruction.opcode in ("bar", "barrier") and "warp" not in instruction.modifiers


def check_barrier(blocks, instruction):
    reduction = "red" in instruction.modifiers
    instruction.allow("sync", "aligned", "cta", "red", "popc", "and", "or")
    operands = instruction.operands[1:-1] if reduction else instruction.operands
    if len(operands) > 1 and operands[1].bits != blocks.launch.threads:
        raise NotImplementedError(f"a barrier for some threads of a block: {instruction}")


def barrier(blocks, instruction, active):
    if not is_block_barrier(instruction):
        named = blocks.read(instruction.operands[0], "b32")[active.lanes, None]
        with_lane = (named >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        met = blocks.met[active.lanes]
        blocks.met[active.lanes] = np.where(with_lane, blocks.launch.now, met)
        return
    together = np.unique(blocks.block[active.lanes])
    blocks.barrier_time[together] = blocks.launch.now
    if "red" in instruction.modifiers:
        holds = blocks.read(instruction.operands[-1], "pred") & blocks.exists
        total = np.repeat(holds.reshape(blocks.count, -1).sum(axis=1), blocks.padded)
        if "popc" in instruction.modifiers:
            blocks.write(instruction.operands[0], total.astype(np.uint32), "u32", active)
        else:
            every = "and" in instruction.modifiers
            result = total == blocks.launch.threads if every else total > 0
            blocks.write(instruction.operands[0], result, "pred", active)


def shuffle_sources(blocks, mode, amount, clamp):
    """(the lane that each lane reads, whether it is in range), by the ISA's pseudocode."""
    lane, amount, clamp = (x.astype(np.int64) for x in (blocks.lane, amount, clamp))
    segment, clamp, amount = (clamp >> 8) & 31, clamp & 31, amount & 31
    last, first = (lane & segment) | (clamp & ~segment), lane & segment
    if mode == "up":
        source = lane - amount
        inside = source >= last
    else:
        source = {
            "down": lane + amount,
            "bfly": lane ^ amount,
            "idx": first | (amount & ~segment),
        }[mode]
        inside = source <= last
    return np.where(inside, source, lane) + blocks.warp_start, inside


def shuffle_table(blocks, mode, amount, clamp, active):
    """shuffle_sources, cached if all lanes give the same amount and clamp."""
    amount, clamp = blocks.read(amount, "b32"), blocks.read(clamp, "b32")
    first = active.lanes[0]
    same = (amount == amount[first]) & (clamp == clamp[first]) | ~active.mask
    if not same.all():
        return shuffle_sources(blocks, mode, amount, clamp)
    key = mode, int(amount[first]), int(clamp[first])
    if key not in blocks.tables:
        everywhere = (np.full(blocks.n, x[first]) for x in (amount, clamp))
        blocks.tables[key] = shuffle_sources(blocks, mode, *everywhere)
    return blocks.tables[key]


def shuffle(blocks, instruction, active):
    """shfl.sync: reading from a lane outside of the group gives poison."""
    instruction.allow("sync", "up", "down", "bfly", "idx")
    target, operand, amount, clamp, mask = instruction.operands
    source, inside = shuffle_table(blocks, instruction.modifiers[1], amount, clamp, active)
    sent = blocks.read(operand, "b32")
    received = sent[source]
    named = blocks.read(mask, "b32")
    if not active.all or (named != FULL).any():
        taking_part = active.mask[source]
        taking_part &= ((named >> blocks.lane[source]) & np.uint32(1)).astype(bool)
        received = np.where(taking_part, received, np.uint32(POISON & FULL))
    value, predicate = target.parts if isinstance(target, Pair) else (target, None)
    blocks.write(value, received, "b32", active)
    if predicate:
        blocks.write(predicate, inside, "pred", active)


def group_bits(blocks, instruction, active, holds):
    """For each lane: which lanes of its group are among `holds`."""
    here = np.repeat(warp_bits(active.mask & holds), 32)
    return here & blocks.read(instruction.operands[-1], "b32")


def vote(blocks, instruction, active):
    instruction.allow("sync", "all", "any", "uni", "ballot")
    yes = group_bits(blocks, instruction, active, blocks.read(instruction.operands[1], "pred"))
    everybody = group_bits(blocks, instruction, active, np.ones(blocks.n, np.bool_))
    results = {
        "ballot": lambda: (yes, "b32"),
        "all": lambda: (yes == everybody, "pred"),
        "any": lambda: (yes != 0, "pred"),
        "uni": lambda: ((yes == 0) | (yes == everybody), "pred"),
    }
    result, kind = results[instruction.modifiers[1]]()
    blocks.write(instruction.operands[0], result, kind, active)


def active_mask(blocks, instruction, active):
    """activemask: the lanes that run this instruction together here; a GPU may report fewer."""
    instruction.allow()
    together = np.repeat(warp_bits(active.mask), 32)
    blocks.write(instruction.operands[0], together, "b32", active)


def match(blocks, instruction, active):
    """match.sync.any: the lanes with the same value; .all: all lanes, if all values are equal."""
    instruction.allow("sync", "any", "all")
    kind = instruction.types[-1]
    value = blocks.read(instruction.operands[1], kind)
    everybody = group_bits(blocks, instruction, active, np.ones(blocks.n, np.bool_))
    same = np.zeros(blocks.n, np.uint32)
    for other in range(32):
        equal = value[blocks.warp_start + other] == value
        same |= equal.astype(np.uint32) << np.uint32(other)
    same &= everybody
    target = instruction.operands[0]
    result, predicate = target.parts if isinstance(target, Pair) else (target, None)
    if "all" in instruction.modifiers:
        agree = same == everybody
        same = np.where(agree, everybody, np.uint32(0))
        if predicate:
            blocks.write(predicate, agree, "pred", active)
    blocks.write(result, same, "b32", active)


REDUCTIONS = {
    **{"add": np.add, "min": np.minimum, "max": np.maximum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
}


def reduce_(blocks, instruction, active):
    """redux.sync: one value reduced over the lanes of the group."""
    instruction.allow("sync", *REDUCTIONS)
    kind = instruction.types[-1]
    function = REDUCTIONS[next(m for m in instruction.modifiers if m in REDUCTIONS)]
    value = blocks.read(instruction.operands[1], kind)
    named = blocks.read(instruction.operands[2], "b32")
    result = np.zeros(blocks.n, LIFTED[kind])
    started = np.zeros(blocks.n, np.bool_)
    for other in range(32):
        source = blocks.warp_start + other
        taken = ((named >> np.uint32(other)) & np.uint32(1)).astype(bool) & active.mask[source]
        combined = np.where(started, function(result, value[source]), value[source])
        result = np.where(taken, combined, result)
        started |= taken
    blocks.write(instruction.operands[0], result, kind, active)


COLLECTIVES = {
    "bar": barrier,
    "barrier": barrier,
    "shfl": shuffle,
    "vote": vote,
    "activemask": active_mask,
    "match": match,
    "redux": reduce_,
}


def deadlock(blocks):
    """A Fault that says which lanes wait for which."""
    lane = np.flatnonzero(blocks.parked)[0]
    here = blocks.pc[lane]
    instruction = blocks.entry.instructions[here]
    if is_block_barrier(instruction):
        partners = blocks.block == blocks.block[lane]
    else:
        named = members(blocks, instruction)[lane]
        partners = (blocks.warp_start == blocks.warp_start[lane]) & (named >> blocks.lane & 1 == 1)
    absent = partners & blocks.exists & ~(blocks.parked & (blocks.pc == here))
    other = np.flatnonzero(absent)[0]
    if blocks.pc[other] == blocks.end:
        state = "has exited"
    else:
        state = f"waits at {blocks.entry.instructions[blocks.pc[other]]}"
    what = f"deadlock: it waits for {blocks.describe(other)}, which {state}"
    return blocks.fault(what, lane, instruction)
