"""The state of blocks that run together: registers, program counters, memory."""

from functools import cached_property

import numpy as np

from .memory import Memory, all_flags
from .parse import Address, Fault, Immediate, Register, Symbol
from .shadow import Shadow
from .values import SIGNED, UNSIGNED, WIDTHS, bits, lift, lower

# Where shared and local memory begin in the generic address space; global addresses map to
# themselves.
SHARED_WINDOW, LOCAL_WINDOW, WINDOW_MASK = 1 << 44, 2 << 44, (1 << 44) - 1
POISON = 0x7FFD7FFD7FFD7FFD  # any part of it is NaN in float types, and a large integer


class Active:
    """A set of lanes."""

    def __init__(self, mask):
        self.mask = mask
        self.count = int(np.count_nonzero(mask))
        self.all = self.count == len(mask)

    @cached_property
    def lanes(self):
        return np.flatnonzero(self.mask)

    def where(self, condition):
        return self if self.all and condition.all() else Active(self.mask & condition)


class Blocks:
    """Lanes of the blocks `numbers`, ascending, of a launch; blocks are padded to whole warps."""

    def __init__(self, launch, numbers):
        count = len(numbers)
        self.launch, self.entry, self.count = launch, launch.entry, count
        self.padded = launch.padded
        self.n = count * self.padded
        self.block = np.repeat(np.arange(count), self.padded)
        within = np.tile(np.arange(self.padded), count)
        number = np.asarray(numbers)[self.block]
        self.identity = (number * self.padded + within + 1).astype(np.int32)
        self.exists = within < launch.threads
        self.lane = (within % 32).astype(np.uint32)
        self.warp_start = np.arange(self.n) - self.lane
        self.thread_xyz = launch.thread_coordinates(within)
        self.block_xyz = launch.block_coordinates(number)
        # Tables that depend on the lane only are shared with later blocks.
        self.registers, self._specials, self.tables = {}, {}, launch.tables.setdefault(count, {})
        self.end = len(self.entry.instructions)
        self.pc = np.where(self.exists, 0, self.end)
        self.parked = np.zeros(self.n, np.bool_)
        self.shared = launch.shared_layout.allocate(count)
        granule = launch.granules["shared"]
        self.shared.shadow = Shadow(len(self.shared.bytes), granule)
        for space in (self.shared, launch.memory.space):
            space.shadow.ordered = self.ordered
        self.barrier_time = np.full(count, -1, np.int32)
        self.met = np.full((self.n, 32), -1, np.int32)  # met[t, l]: when t last synced with lane l
        self.copies, self.copy_group = [], np.zeros(self.n, np.int64)
        self.clock = launch.timeline.begin(self) if launch.timeline is not None else None

    @cached_property
    def local(self):
        return self.launch.local_layout.allocate(self.n)

    # Registers

    def storage(self, name):
        if name not in self.registers:
            width = self.entry.registers[name]
            self.registers[name] = (
                np.full(self.n, POISON & ((1 << 8 * width) - 1), UNSIGNED[width])
                if width
                else np.zeros(self.n, np.bool_)
            )
        return self.registers[name]

    def read(self, operand, kind):
        """Values of type `kind`, one for each lane (two for packed types); read-only."""
        if isinstance(operand, Register):
            name = operand.name
            if name not in self.entry.registers:
                return lift(self._special(name).astype(UNSIGNED[WIDTHS[kind]]), kind)
            stored = self.storage(name)
            if kind == "pred":
                return ~stored if operand.negated else stored
            width = WIDTHS[kind]
            if stored.itemsize != width:
                stored = stored.astype(UNSIGNED[width])
            return lift(stored, kind)
        key = operand, kind
        if key not in self.tables:
            self.tables[key] = self._constant(operand, kind)
        return self.tables[key]

    def _constant(self, operand, kind):
        if isinstance(operand, Symbol):
            return np.full(self.n, self._address_of(operand), UNSIGNED[WIDTHS[kind]])
        if kind == "pred":
            return np.full(self.n, bool(operand.bits))
        value = bits(operand.bits if operand.real is None else operand.real, kind)
        if kind.endswith("x2") and operand.real is not None:
            raise NotImplementedError(f"a decimal literal of type {kind}")
        return lift(np.repeat(value, self.n), kind)

    def _address_of(self, symbol):
        if symbol.name not in self.launch.addresses:
            raise NotImplementedError(f"PTX symbol {symbol.name}")
        return self.launch.addresses[symbol.name] + symbol.offset

    def write(self, operand, numbers, kind, active):
        """Sets a register in the active lanes; a wider register is zero- or sign-extended."""
        if operand.name == "_":
            return
        stored = self.storage(operand.name)
        if kind != "pred":
            numbers = lower(numbers, kind)
            if stored.itemsize > numbers.itemsize and kind[0] == "s":
                numbers = numbers.view(SIGNED[numbers.itemsize])
        if active.all:
            stored[:] = numbers
        else:
            # copyto's own casting would not sign-extend a signed value first.
            np.copyto(stored, numbers.astype(stored.dtype, copy=False), where=active.mask)

    def write_lanes(self, operand, numbers, kind, lanes):
        """As `write`, for values of some lanes only."""
        if operand.name == "_":
            return
        stored, numbers = self.storage(operand.name), lower(numbers, kind)
        if stored.itemsize > numbers.itemsize and kind[0] == "s":
            numbers = numbers.view(SIGNED[numbers.itemsize])
        stored[lanes if len(lanes) < self.n else slice(None)] = numbers

    def _special(self, name):
        if name not in self._specials:
            self._specials[name] = np.broadcast_to(self._special_value(name), self.n)
        return self._specials[name]

    def _special_value(self, name):
        register, _, axis = name.partition(".")
        if axis:
            values = {
                "%tid": self.thread_xyz,
                "%ctaid": self.block_xyz,
                "%ntid": self.launch.block,
                "%nctaid": self.launch.grid,
            }
            if register not in values:
                raise NotImplementedError(f"PTX register {name}")
            return np.asarray(values[register]["xyz".index(axis)], np.uint32)
        one = np.uint32(1) << self.lane
        values = {
            "%laneid": self.lane,
            "%warpid": self.warp_start % self.padded // 32,
            "%nwarpid": self.padded // 32,
            "%lanemask_eq": one,
            "%lanemask_lt": one - np.uint32(1),
            "%lanemask_le": one | (one - np.uint32(1)),
            "%lanemask_gt": ~(one | (one - np.uint32(1))),
            "%lanemask_ge": ~(one - np.uint32(1)),
            "%dynamic_smem_size": self.launch.shared_bytes,
            "WARP_SZ": 32,
        }
        if name not in values:
            raise NotImplementedError(f"PTX register {name}")
        return np.asarray(values[name], np.uint32)

    # Memory

    def addresses(self, operand, lanes):
        """The addresses of `[base + offset]` in the given lanes."""
        assert isinstance(operand, Address)
        base = operand.base
        if isinstance(base, Register):
            stored = self.storage(base.name)
            values = stored if len(lanes) == self.n else stored[lanes]
            return values.astype(np.int64) + operand.offset
        value = base.bits if isinstance(base, Immediate) else self._address_of(base)
        return np.full(len(lanes), value + operand.offset, np.int64)

    def locate(self, space, operand, width, lanes, instruction, offsets=0):
        """Yields (space, byte positions in it, lanes), checked for alignment and bounds."""
        addresses = self.addresses(operand, lanes) + offsets
        if space != "generic":
            yield self._check(space, addresses, width, lanes, instruction)
            return
        window = addresses & ~WINDOW_MASK
        for space, start in ("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW), ("global", None):
            if start is None:
                chosen = (window != SHARED_WINDOW) & (window != LOCAL_WINDOW)
            else:
                chosen = window == start
            if chosen.any():
                inside = addresses[chosen] - (start or 0)
                yield self._check(space, inside, width, lanes[chosen], instruction)

    def _check(self, name, addresses, width, lanes, instruction):
        if width > 1 and (wrong := addresses & (width - 1)).any():
            i = np.flatnonzero(wrong)[0]
            what = f"misaligned access of {width} bytes at {name} address {addresses[i]:#x}"
            raise self.fault(what, lanes[i], instruction)
        if name == "shared":
            space, stride = self.shared, self.launch.shared_layout.stride
            positions = addresses + self.block[lanes] * stride
        elif name == "local":
            space, stride = self.local, self.launch.local_layout.stride
            positions = addresses + lanes * stride
        else:
            space, stride = self.launch.memory.space, None
            positions = addresses - Memory.BASE
        good = all_flags(space.valid, positions, width)
        if stride is not None:
            good &= (addresses >= 0) & (addresses < stride)  # not in the next block's memory
        if not good.all():
            i = np.flatnonzero(~good)[0]
            what = f"out of bounds: {width} bytes at {name} address {addresses[i]:#x}"
            raise self.fault(what, lanes[i], instruction)
        if name == "global" and self.launch.traffic is not None:
            warps = (self.identity[lanes].astype(np.int64) - 1) // 32
            self.launch.traffic.record(instruction, warps, positions, width)
        return space, positions, lanes

    def check_written(self, space, positions, width, lanes, instruction):
        if space.written is not None:
            good = all_flags(space.written, positions, width)
            if not good.all():
                i = np.flatnonzero(~good)[0]
                what = f"load of {space.name} memory that was never written"
                raise self.fault(what, lanes[i], instruction)

    def forbid_pending(self, positions, width, lanes, instruction):
        """Faults if any thread, the issuing one included, touches bytes that a pending copy will
        write."""
        for owners, _, targets, _, _, size in self.copies:
            order = np.argsort(targets)
            starts, ends = targets[order], targets[order] + size
            nearest = np.searchsorted(starts, positions + width, side="left") - 1
            hit = (nearest >= 0) & (ends[nearest] > positions)
            if hit.any():
                i = np.flatnonzero(hit)[0]
                owner = self.describe(owners[order[nearest[i]]])
                what = f"shared memory under a cp.async by {owner} that no wait has covered"
                raise self.fault(what, lanes[i], instruction)

    # Races

    def ordered(self, others, times, threads):
        """Whether a barrier separates what `others` did at `times` from what `threads` do now."""
        lanes = np.searchsorted(self.identity, threads)
        others = others - 1
        same_block = others // self.padded == (threads - 1) // self.padded
        same_warp = others >> 5 == (threads - 1) >> 5
        return (same_block & (self.barrier_time[self.block[lanes]] > times)) | (
            same_warp & (self.met[lanes, others & 31] > times)
        )

    def check_race(self, kind, space, positions, width, lanes, instruction):
        """`kind`: load, load_constant, store or update."""
        shadow = space.shadow
        if shadow is None:
            return
        threads = self.identity if len(lanes) == self.n else self.identity[lanes]
        conflict = getattr(shadow, kind)(positions, width, threads, self.launch.now)
        if conflict:
            lane = lanes[conflict.access // max(width // shadow.granule, 1)]
            before = self.entry.instructions[self.launch.history[conflict.time]]
            what = (
                f"race on {space.name} memory with {self.launch.describe(conflict.other - 1)}, "
                f"which {conflict.what} at {before}"
            )
            raise self.fault(what, lane, instruction)

    def describe(self, lane):
        return self.launch.describe(int(self.identity[lane]) - 1)

    def fault(self, what, lane, instruction):
        return Fault(f"{self.describe(lane)} at {instruction}: {what}")
