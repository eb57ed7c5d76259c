"""A training run on disk: its configuration, its metrics and its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import orbax.checkpoint as ocp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run depends on; written to config.json, so that --resume needs only the
    folder."""

    task: str = "listops"
    data: tuple[str, ...] = ()
    min_length: int = 16  # listops: tokens of an expression lie strictly between these two
    max_length: int = 257
    length: int = 1000  # text: bytes of a window
    train_examples: int = 48000
    held_out_examples: int = 1000
    width: int = 64
    heads: int = 4
    layers: int = 2
    mlp: int = 128
    density: float = 0.1
    band: int | None = None  # width in columns; None: a sixteenth of the length
    attention: str = "sparse"
    batch: int = 32
    steps: int = 1500
    learning_rate: float = 2e-3
    seed: int = 0


class Run:
    """A folder with config.json, metrics.jsonl and checkpoints/."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        self.metrics_path = self.folder / "metrics.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.checkpoints = ocp.CheckpointManager(self.folder / "checkpoints", options=options)

    @staticmethod
    def clear(folder: str | Path) -> None:
        """Removes the files of an earlier run from the folder, and nothing else."""
        for name in ("config.json", "metrics.jsonl"):
            (Path(folder) / name).unlink(missing_ok=True)
        for name in ("checkpoints", "evaluation"):
            shutil.rmtree(Path(folder) / name, ignore_errors=True)

    @staticmethod
    def read_config(folder: str | Path) -> Config:
        """The configuration of the run in the folder; ValueError where there is none."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder}: nothing to resume or evaluate: there is no config.json")
        fields = json.loads(path.read_text())
        return Config(**{**fields, "data": tuple(fields["data"])})

    def write_config(self, config: Config) -> None:
        (self.folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        if not self.metrics_path.is_file():
            return []
        return [json.loads(line) for line in self.metrics_path.read_text().splitlines()]

    def save(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        """Writes weights, mask and optimizer, in the background; the newest two are kept."""
        state = nnx.to_pure_dict(nnx.state((model, optimizer)))
        self.checkpoints.save(step, args=ocp.args.StandardSave(state))

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer) -> int:
        """Loads the newest checkpoint into model and optimizer; returns its step, 0 if there is
        none."""
        step = self.checkpoints.latest_step()
        if step is None:
            return 0
        state = nnx.state((model, optimizer))
        target = ocp.args.StandardRestore(nnx.to_pure_dict(state))
        nnx.replace_by_pure_dict(state, self.checkpoints.restore(step, args=target))
        nnx.update((model, optimizer), state)
        return step

    def forget_after(self, step: int) -> None:
        """Drops the lines of metrics.jsonl that a resumed run will write again."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        self.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def close(self) -> None:
        """Waits until all checkpoints are written."""
        self.checkpoints.wait_until_finished()
        self.checkpoints.close()
