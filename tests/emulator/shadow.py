"""Race detection: which thread last stored to, loaded or atomically updated each granule of memory.

Two accesses by different threads, one of them a plain store, race unless a barrier lies between
them: `bar.sync` of their block, or a `bar.warp.sync` that names both. Fences, volatile accesses and
shuffles do not count as ordering here. Atomic and relaxed accesses do not race with each other, nor
with plain loads (the load that opens a compare-and-swap loop). Not recognized as correct: an order
established through a third lane or through flags in memory, and stores of the same value by several
threads. Such kernels fault here although they are correct on a GPU.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Conflict:
    access: int  # index among the queried granules
    other: int  # the other thread
    time: int  # when the other thread accessed it
    what: str  # its kind of access


class Record:
    """The thread that last accessed each granule, and when. 0 is none: threads are numbered from
    1."""

    def __init__(self, size, what):
        # np.zeros commits no memory until it is touched.
        self.who, self.when = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.what, self.used = what, False

    def write(self, granules, threads, now):
        if granules.size:
            self.who[granules], self.when[granules], self.used = threads, now, True

    def conflict(self, granules, threads, ordered):
        """The first access by another thread that no barrier separates from this one, or None."""
        if not self.used:
            return None
        who = self.who[granules]
        clash = np.flatnonzero((who != 0) & (who != threads))
        if clash.size:
            when = self.when[granules[clash]]
            clash = clash[~ordered(who[clash], when, threads[clash])]
        return self.report(granules, clash)

    def anybody(self, granules):
        return self.report(granules, np.flatnonzero(self.who[granules])) if self.used else None

    def report(self, granules, found):
        if not found.size:
            return None
        i = found[0]
        who, when = self.who[granules[i]], self.when[granules[i]]
        return Conflict(int(i), int(who), int(when), self.what)


class Shadow:
    """The access records of a space. `ordered(others, times, threads)` says which accesses by
    others a barrier separates; the running blocks set it."""

    def __init__(self, nbytes, granule):
        size = nbytes // granule + 1
        self.granule, self.shift, self.ordered = granule, granule.bit_length() - 1, None
        self.stores = Record(size, "stored to it")
        self.updates = Record(size, "updated it atomically")
        self.constants = Record(size, "loaded it as read-only data")
        # Three readers: the last one, the last one of another warp, and another one of the last
        # one's warp. A writer thus always finds another thread if there was one.
        self.loads = Record(size, "loaded it")
        self.far_loads = Record(size, "loaded it")
        self.near_loads = Record(size, "loaded it")

    def spread(self, positions, width, threads):
        """Expands accesses to one element for each granule."""
        count = width // self.granule
        first = positions >> self.shift
        if count == 1:
            return first, threads
        return (first[:, None] + np.arange(count)).reshape(-1), np.repeat(threads, count)

    def load(self, positions, width, threads, now):
        granules, threads = self.spread(positions, width, threads)
        conflict = self.stores.conflict(granules, threads, self.ordered)
        if conflict is None:
            before, when = self.loads.who[granules], self.loads.when[granules]
            moved = np.flatnonzero((before != 0) & (before != threads))
            self._keep(granules[moved], before[moved], when[moved], threads[moved])
            self.loads.write(granules, threads, now)
            last = self.loads.who[granules]
            lost = np.flatnonzero(last != threads)  # several lanes read one granule
            self._keep(granules[lost], threads[lost], np.full(lost.size, now), last[lost])
        return conflict

    def _keep(self, granules, readers, when, last):
        far = (readers - 1) >> 5 != (last - 1) >> 5
        for record, chosen in ((self.far_loads, far), (self.near_loads, ~far)):
            record.write(granules[chosen], readers[chosen], when[chosen])

    def load_constant(self, positions, width, threads, now):
        """`ld.global.nc`: no thread may change the data during the launch, ordered by a barrier or
        not."""
        granules, threads = self.spread(positions, width, threads)
        conflict = self.stores.anybody(granules) or self.updates.anybody(granules)
        if conflict is None:
            self.constants.write(granules, threads, now)
        return conflict

    def store(self, positions, width, threads, now):
        granules, threads = self.spread(positions, width, threads)
        conflict = self.constants.anybody(granules)
        for record in (self.stores, self.loads, self.far_loads, self.near_loads, self.updates):
            conflict = conflict or record.conflict(granules, threads, self.ordered)
        if conflict is None:
            self.stores.write(granules, threads, now)
            lost = np.flatnonzero(self.stores.who[granules] != threads)
            conflict = self.stores.report(granules, lost)
        return conflict

    def update(self, positions, width, threads, now):
        granules, threads = self.spread(positions, width, threads)
        conflict = self.constants.anybody(granules)
        conflict = conflict or self.stores.conflict(granules, threads, self.ordered)
        if conflict is None:
            self.updates.write(granules, threads, now)
        return conflict
