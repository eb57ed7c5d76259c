"""A classification task as arrays, and the batches of its steps."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Tokens are integers [examples, length], zeros after the end; labels integers [examples]."""

    name: str
    tokens: np.ndarray
    labels: np.ndarray
    held_out_tokens: np.ndarray
    held_out_labels: np.ndarray
    vocabulary: int
    classes: tuple[str, ...]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def summary(self) -> str:
        """A description of the task, in two lines."""
        return (
            f"{self.name}: {len(self.labels)} examples to train on, {len(self.held_out_labels)} "
            f"held out; sequences of {self.length}.\nThe most frequent of {len(self.classes)} "
            f"classes makes up {self.majority:.1%} of the held-out."
        )

    @property
    def majority(self) -> float:
        """The score of always answering the most frequent class of the held-out set itself."""
        counts = np.bincount(self.held_out_labels, minlength=1)
        return float(counts.max() / max(counts.sum(), 1))


def batch_indices(examples: int, batch: int, step: int, seed: int) -> np.ndarray:
    """The examples of one step, determined by the arguments: a resumed run sees the same
    batches."""
    per_epoch = examples // batch
    if not per_epoch:
        raise ValueError(f"data: {examples} training examples do not fill one batch of {batch}")
    epoch, position = divmod(step, per_epoch)
    return _permutation(examples, seed, epoch)[position * batch : (position + 1) * batch]


@functools.lru_cache(maxsize=2)
def _permutation(examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(examples)


def padded(rows: list[bytes], length: int) -> np.ndarray:
    """Bytes as tokens [rows, length]: byte + 1, cut at length, zeros after the end."""
    tokens = np.zeros((len(rows), length), np.int16)
    for number, row in enumerate(rows):
        cut = np.frombuffer(row[:length], np.uint8)
        tokens[number, : cut.size] = cut.astype(np.int16) + 1
    return tokens
