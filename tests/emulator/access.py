"""Loads, stores, atomics and asynchronous copies (PTX ISA, section 9.7.9)."""

import numpy as np

from .blocks import LOCAL_WINDOW, SHARED_WINDOW
from .parse import Register, Vector
from .values import LIFTED, UNSIGNED, WIDTHS, lift, lower

SPACES = ("global", "shared", "local", "const", "param")
STRONG = ("relaxed", "acquire", "release", "acq_rel", "mmio")
CACHE_HINTS = (
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "volatile", "weak"),
    *("gpu", "cta", "sys", "cluster", "noftz"),
)
POISONED = 0xDE


def memory_modifiers(instruction):
    """The state-space and cache modifiers, on which no result depends."""
    return [
        modifier
        for modifier in instruction.modifiers
        if modifier.split("::")[0] in (*SPACES, *STRONG, *CACHE_HINTS)
        or (modifier.startswith(("L1::", "L2::")) and not modifier.endswith("cache_hint"))
    ]


def space_of(instruction):
    for modifier in instruction.modifiers:
        if modifier.split("::")[0] in SPACES:
            return modifier.split("::")[0]
    return "generic"


def vector_length(instruction):
    return next((int(m[1:]) for m in instruction.modifiers if m in ("v2", "v4", "v8")), 1)


def granules_of(entry):
    """The narrowest access to each space: races are tracked at that granularity."""
    granules = {"global": 16, "shared": 16}
    for instruction in entry.instructions:
        if instruction.opcode in ("ld", "st", "atom", "red"):
            width = WIDTHS[instruction.types[-1]]
        elif instruction.opcode == "wmma" and "mma" not in instruction.modifiers:
            width = WIDTHS[instruction.types[-1]]
        elif instruction.opcode == "cp":
            width = 4
        elif instruction.opcode == "ldmatrix":
            width = 2 if "trans" in instruction.modifiers else 4
        else:
            continue
        spaces = {
            "shared": ("shared", "global") if instruction.opcode == "cp" else ("shared",),
            "generic": ("shared", "global"),
            "global": ("global",),
            "const": ("global",),
        }
        for name in spaces.get(space_of(instruction), ()):
            granules[name] = min(granules[name], width)
    return granules


def load(blocks, instruction, active):
    instruction.allow(*memory_modifiers(instruction), "v2", "v4")
    space, kind, count = space_of(instruction), instruction.types[-1], vector_length(instruction)
    target, source = instruction.operands
    targets = target.parts if isinstance(target, Vector) else (target,)
    if space == "param":
        return load_parameter(blocks, instruction, active, targets, kind)
    width = WIDTHS[kind]
    shift = width.bit_length() - 1
    located = blocks.locate(space, source, width * count, active.lanes, instruction)
    for place, positions, lanes in located:
        blocks.check_written(place, positions, width * count, lanes, instruction)
        if place is blocks.shared:
            blocks.forbid_pending(positions, width * count, lanes, instruction)
        if not any(modifier in STRONG for modifier in instruction.modifiers):
            access = "load_constant" if "nc" in instruction.modifiers else "load"
            blocks.check_race(access, place, positions, width * count, lanes, instruction)
        words = place.view(UNSIGNED[width])
        first = positions >> shift
        for i, register in enumerate(targets):
            blocks.write_lanes(register, lift(words[first + i], kind), kind, lanes)


def load_parameter(blocks, instruction, active, targets, kind):
    parameters, width, address = blocks.launch.parameters, WIDTHS[kind], instruction.operands[1]
    # Usually all lanes have the same address.
    lanes = active.lanes if isinstance(address.base, Register) else active.lanes[:1]
    positions = blocks.addresses(address, lanes)
    if positions.min() < 0 or positions.max() + width * len(targets) > len(parameters):
        raise blocks.fault("out of bounds of the parameters", lanes[0], instruction)
    for i, register in enumerate(targets):
        where = positions[:, None] + np.arange(width) + i * width
        words = parameters[where].view(UNSIGNED[width]).reshape(-1)
        numbers = lift(np.ascontiguousarray(np.broadcast_to(words, active.count)), kind)
        blocks.write_lanes(register, numbers, kind, active.lanes)


def store(blocks, instruction, active):
    instruction.allow(*memory_modifiers(instruction), "v2", "v4")
    space, kind, count = space_of(instruction), instruction.types[-1], vector_length(instruction)
    target, source = instruction.operands
    if space == "param":
        return  # an argument of a call, which is checked at the call itself
    sources = source.parts if isinstance(source, Vector) else (source,)
    width = WIDTHS[kind]
    shift = width.bit_length() - 1
    located = blocks.locate(space, target, width * count, active.lanes, instruction)
    for place, positions, lanes in located:
        if place is blocks.shared:
            blocks.forbid_pending(positions, width * count, lanes, instruction)
        strong = any(modifier in STRONG for modifier in instruction.modifiers)
        access = "update" if strong else "store"
        blocks.check_race(access, place, positions, width * count, lanes, instruction)
        words = place.view(UNSIGNED[width])
        first = positions >> shift
        for i, register in enumerate(sources):
            words[first + i] = lower(blocks.read(register, kind), kind)[lanes]
        place.mark_written(positions, width * count)


def exchange(old, operands):
    return operands[0]


def compare_and_swap(old, operands):
    return np.where(old == operands[0], operands[1], old)


def wrapping_increment(old, operands):
    return np.where(old >= operands[0], 0, old + np.uint32(1)).astype(old.dtype)


def wrapping_decrement(old, operands):
    wrap = (old == 0) | (old > operands[0])
    return np.where(wrap, operands[0], old - np.uint32(1)).astype(old.dtype)


UPDATES = {
    "add": lambda old, operands: old + operands[0],
    "min": lambda old, operands: np.fmin(old, operands[0]),
    "max": lambda old, operands: np.fmax(old, operands[0]),
    "and": lambda old, operands: old & operands[0],
    "or": lambda old, operands: old | operands[0],
    "xor": lambda old, operands: old ^ operands[0],
    "exch": exchange,
    "cas": compare_and_swap,
    "inc": wrapping_increment,
    "dec": wrapping_decrement,
}
# Updates that NumPy can accumulate in place, if the old value is not needed.
IN_PLACE = {"add": np.add, "min": np.minimum, "max": np.maximum}


def atomic(blocks, instruction, active):
    """atom and red: lanes that update the same address do so in lane order."""
    instruction.allow(*memory_modifiers(instruction), *UPDATES, "v2", "v4")
    space, kind, count = space_of(instruction), instruction.types[-1], vector_length(instruction)
    operation = next(name for name in instruction.modifiers if name in UPDATES)
    wanted, target, *sources = (
        (Register("_"), *instruction.operands)
        if instruction.opcode == "red"
        else instruction.operands
    )
    results = wanted.parts if isinstance(wanted, Vector) else (wanted,) * count
    parts = [s.parts if isinstance(s, Vector) else (s,) for s in sources]
    width = WIDTHS[kind]
    located = blocks.locate(space, target, width * count, active.lanes, instruction)
    for place, positions, lanes in located:
        blocks.check_written(place, positions, width * count, lanes, instruction)
        blocks.check_race("update", place, positions, width * count, lanes, instruction)
        for i in range(count):
            words = (positions >> (width.bit_length() - 1)) + i
            operands = [lower(blocks.read(part[i], kind), kind)[lanes] for part in parts]
            old = update(place, words, operands, operation, kind, results[i].name != "_")
            blocks.write_lanes(results[i], lift(old, kind), kind, lanes)


def update(place, words, operands, operation, kind, wanted):
    """Returns the old bits at each word; `place` gets the new ones."""
    memory = place.view(UNSIGNED[WIDTHS[kind]])
    if not wanted and operation in IN_PLACE and LIFTED[kind] and "bf16" not in kind:
        numbers = lift(operands[0], kind)
        pieces = len(numbers) // len(words)
        where = words if pieces == 1 else (words[:, None] * pieces + np.arange(pieces)).reshape(-1)
        IN_PLACE[operation].at(place.view(LIFTED[kind]), where, numbers)
        return memory[words]
    old, turn = np.empty_like(operands[0]), turns(words)
    for now in range(int(turn.max()) + 1):
        mine = np.flatnonzero(turn == now)
        old[mine] = memory[words[mine]]
        lifted = [lift(operand[mine], kind) for operand in operands]
        memory[words[mine]] = lower(UPDATES[operation](lift(old[mine], kind), lifted), kind)
    return old


def turns(words):
    """For each lane: how many earlier lanes have the same word."""
    order = np.argsort(words, kind="stable")
    ordered = words[order]
    starts = np.r_[True, ordered[1:] != ordered[:-1]]
    index = np.arange(len(words))
    turn = np.empty(len(words), np.int64)
    turn[order] = index - np.maximum.accumulate(np.where(starts, index, 0))
    return turn


def copy_async(blocks, instruction, active):
    """cp.async: the destination is poison from the issue to the wait that covers the copy."""
    instruction.allow(
        *memory_modifiers(instruction), "async", "commit_group", "wait_group", "wait_all"
    )
    if "commit_group" in instruction.modifiers:
        blocks.copy_group[active.lanes] += 1
    elif "wait_group" in instruction.modifiers:
        finish_copies(blocks, instruction, active, kept=instruction.operands[0].bits)
    elif "wait_all" in instruction.modifiers:
        blocks.copy_group[active.lanes] += 1
        finish_copies(blocks, instruction, active, kept=0)
    else:
        start_copy(blocks, instruction, active)


def start_copy(blocks, instruction, active):
    target, source, size, *rest = instruction.operands
    width, lanes = size.bits, active.lanes
    if len(rest) > 1 or width not in (4, 8, 16):
        raise NotImplementedError(f"operands of {instruction}")
    used = blocks.read(rest[0], "u32")[lanes] if rest else np.full(len(lanes), width)
    if (used > width).any():
        lane = lanes[np.flatnonzero(used > width)[0]]
        raise blocks.fault(f"more than {width} bytes to copy", lane, instruction)
    reading = lanes[used > 0]
    origin = np.zeros(blocks.n, np.int64)
    for place, positions, sublanes in blocks.locate("global", source, width, reading, instruction):
        blocks.check_race("load", place, positions, width, sublanes, instruction)
        origin[sublanes] = positions
    for place, positions, _ in blocks.locate("shared", target, width, lanes, instruction):
        blocks.forbid_pending(positions, width, lanes, instruction)
        blocks.check_race("store", place, positions, width, lanes, instruction)
        place.bytes[positions[:, None] + np.arange(width)] = POISONED
        place.mark_written(positions, width)
        group = blocks.copy_group[lanes]
        blocks.copies.append((lanes, group, positions, origin[lanes], used.astype(int), width))


def finish_copies(blocks, instruction, active, kept):
    """Completes the copies of all but the last `kept` groups of each active lane."""
    pending, source = [], blocks.launch.memory.space.bytes
    for lanes, group, positions, origin, used, width in blocks.copies:
        done = active.mask[lanes] & (group < blocks.copy_group[lanes] - kept)
        if done.any():
            where = positions[done]
            offsets = np.arange(width)
            copied = offsets < used[done, None]
            values = source[np.where(copied, origin[done, None] + offsets, 0)]
            blocks.shared.bytes[where[:, None] + offsets] = np.where(copied, values, 0)
            # The copy is performed now, whatever barriers have passed since its issue.
            blocks.check_race("store", blocks.shared, where, width, lanes[done], instruction)
        left = ~done
        if left.any():
            rest = (part[left] for part in (lanes, group, positions, origin, used))
            pending.append((*rest, width))
    blocks.copies = pending


def prefetch(blocks, instruction, active):
    instruction.allow(*memory_modifiers(instruction), "L1", "L2")


def convert_address(blocks, instruction, active):
    """cvta: between the generic window of a state space and the space itself."""
    instruction.allow(*memory_modifiers(instruction), "to")
    start = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space_of(instruction), 0)
    kind = instruction.types[-1]
    addresses = blocks.read(instruction.operands[1], kind)
    shift = np.array(start, addresses.dtype)
    moved = addresses - shift if "to" in instruction.modifiers else addresses + shift
    blocks.write(instruction.operands[0], moved, kind, active)
