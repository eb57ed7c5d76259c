"""Runs stores of the loop IR on all lanes of the enclosing parallel loops (interp.py): by single
lanes, atomic, and reduced over a group of threads."""

from __future__ import annotations

import numpy as np

from loop_interpreter.evaluate import COMBINE, Evaluator, Lanes
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.loopir import Function


class Stores(Evaluator):
    def __init__(self, function: Function, seed: int):
        """`seed` determines the order in which atomic updates of one statement happen."""
        super().__init__(function)
        self.random = np.random.default_rng(seed)

    def store(self, store: loopir.Store, lanes: Lanes) -> None:
        index, value = self.integer(store.index, lanes), self.number(store.value, lanes)
        if store.atomic and store.op is None:
            raise self.fault("an atomic store without op")
        self.update(store.array, index, value, store.op, store.atomic, lanes)

    def update(
        self,
        array: str,
        index: np.ndarray,
        value: np.ndarray,
        op: str | None,
        atomic: bool,
        lanes: Lanes,
    ) -> None:
        place, at = self.locate(array, index, lanes)
        if place.owners is None:
            raise self.fault(f"a store to {array}, an input")
        self.owned(array, place.owners.update if atomic else place.owners.store, at, lanes)
        if op is None:
            place.data[at] = value.astype(place.data.dtype)
        else:
            if place.stored is not None:
                self.check_readable(array, place)
                if not place.stored[at].all():
                    raise self.fault(f"an update of an element of {array} that nobody stored")
            order = self.random.permutation(len(at)) if atomic else np.arange(len(at))
            rounded = value[order].astype(place.data.dtype)
            COMBINE[op].at(place.data, at[order], rounded)
        if place.stored is not None:
            place.stored[at] = True

    def collective(self, reduce: loopir.GroupReduce | loopir.SegReduce, lanes: Lanes) -> None:
        size, frame = reduce.size, self.frames[-1]
        if size not in (1, 2, 4, 8, 16, 32):
            raise self.fault(f"a group of {size} threads")
        if frame.unit != loopir.GPU_THREAD or frame.threads % size:
            raise self.fault(f"groups of {size} in a loop of {frame.threads} for {frame.unit}")
        groups = lanes[::size] // size
        if not np.array_equal(lanes, (groups[:, None] * size + np.arange(size)).reshape(-1)):
            raise self.fault("not all threads of a group are there")
        index = self.integer(reduce.index, lanes).reshape(-1, size)
        value = self.number(reduce.value, lanes).reshape(-1, size)
        if isinstance(reduce, loopir.GroupReduce):
            if (index != index[:, :1]).any():
                raise self.fault("a group with more than one index")
            while value.shape[1] > 1:  # in the order of shuffles
                half = value.shape[1] // 2
                value = COMBINE[reduce.op](value[:, :half], value[:, half:])
            first, atomic = lanes[::size], reduce.atomic
            self.update(reduce.array, index[:, 0], value[:, 0], reduce.op, atomic, first)
        else:
            heads, index, value = self.segments(reduce.op, index, value)
            self.update(reduce.array, index, value, reduce.op, True, lanes[heads])

    def segments(
        self, op: str, index: np.ndarray, value: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(lanes that begin a segment, the index of each, the sum of each)."""
        heads = np.ones(index.shape, bool)
        heads[:, 1:] = index[:, 1:] != index[:, :-1]
        starts = np.flatnonzero(heads)
        sums = COMBINE[op].reduceat(value.reshape(-1), starts)
        part = index.reshape(-1)[starts] >= 0
        starts, sums = starts[part], sums[part]
        runs, groups = index.reshape(-1)[starts], starts // index.shape[1]
        if ((groups[1:] == groups[:-1]) & (runs[1:] <= runs[:-1])).any():
            raise self.fault("indices that decrease, or meet again after another")
        return starts, runs, sums
