"""Which iteration touched which element of an array: detects races between parallel iterations."""

from __future__ import annotations

import numpy as np

NOBODY, MANY = -1, -2


class RaceError(Exception):
    def __init__(self, what: str, index: int):
        super().__init__(what)
        self.index = index


class Owners:
    """The iterations that loaded, stored and atomically updated each element of an array.

    Loads are compatible with loads, and atomic updates with atomic updates; any other two accesses
    to one element must belong to one iteration.
    """

    def __init__(self, size: int):
        self._loaded, self._stored, self._updated = np.full((3, size), NOBODY, np.int64)

    def forget(self) -> None:
        """Forgets all accesses at the end of the parallel loop: later code may see everything it
        did."""
        for owner in (self._loaded, self._stored, self._updated):
            owner.fill(NOBODY)

    def load(self, at: np.ndarray, ids: np.ndarray) -> None:
        self._forbid(self._stored, at, ids, "stored by one iteration, loaded by another")
        self._forbid(self._updated, at, ids, "updated by one iteration, loaded by another")
        self._note(self._loaded, at, ids)

    def store(self, at: np.ndarray, ids: np.ndarray) -> None:
        self._forbid(self._loaded, at, ids, "loaded by one iteration, stored by another")
        self._forbid(self._updated, at, ids, "updated by one iteration, stored by another")
        self._note(self._stored, at, ids)
        self._forbid(self._stored, at, ids, "stored by two iterations")

    def update(self, at: np.ndarray, ids: np.ndarray) -> None:
        self._forbid(self._loaded, at, ids, "loaded by one iteration, updated by another")
        self._forbid(self._stored, at, ids, "stored by one iteration, updated by another")
        self._note(self._updated, at, ids)

    def _forbid(self, owner: np.ndarray, at: np.ndarray, ids: np.ndarray, what: str) -> None:
        others = (owner[at] != NOBODY) & (owner[at] != ids)
        if others.any():
            raise RaceError(what, int(at[np.flatnonzero(others)[0]]))

    def _note(self, owner: np.ndarray, at: np.ndarray, ids: np.ndarray) -> None:
        before = owner[at]
        owner[at] = ids
        shared = (owner[at] != ids) | ((before != NOBODY) & (before != ids))
        owner[at[shared]] = MANY
