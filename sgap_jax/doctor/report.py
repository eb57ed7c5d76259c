"""What the doctor found: layers, each with a sentence and what to do, as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

OK, FAILED, NOT_TESTED = "ok", "FAILED", "not tested"
OTHER_DEVICES = "other devices"


@dataclasses.dataclass
class Layer:
    """One layer of the way from a driver to a program of JAX.

    Attributes:
      name: what is tested.
      state: OK, FAILED or NOT_TESTED.
      found: a sentence: what works, what failed, or why it was not tested.
      do: what to do about it; empty where nothing is to be done.
    """

    name: str
    state: str
    found: str
    do: str = ""


@dataclasses.dataclass
class Report:
    """All layers in order, facts of the machine, and a row for each kernel that was launched."""

    layers: list[Layer] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def first_failed(self) -> Layer | None:
        return next((layer for layer in self.layers if layer.state == FAILED), None)

    @property
    def ok(self) -> bool:
        """Whether every layer works; other devices there need not be."""
        needed = [layer for layer in self.layers if layer.name != OTHER_DEVICES]
        return self.first_failed is None and all(layer.state == OK for layer in needed)

    def conclusion(self) -> str:
        """One sentence: the first layer that fails, or that none does."""
        if (failed := self.first_failed) is not None:
            do = f" To do: {failed.do}." if failed.do else ""
            return f"The first layer that fails is '{failed.name}': {failed.found}.{do}"
        skipped = [layer.name for layer in self.layers if layer.state == NOT_TESTED]
        if skipped == [OTHER_DEVICES]:
            return "All layers work; there is one device."
        if skipped:
            return f"No layer fails; not tested: {', '.join(skipped)}."
        return "All layers work."

    def as_dict(self) -> dict[str, Any]:
        failed = self.first_failed
        return {
            "ok": self.ok,
            "first_failed": None if failed is None else failed.name,
            "conclusion": self.conclusion(),
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "facts": self.facts,
            "kernels": self.kernels,
        }

    def text(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        if self.kernels:
            lines += ["", *_table(self.kernels)]
        lines.append("")
        width = max((len(layer.name) for layer in self.layers), default=0)
        for layer in self.layers:
            lines.append(f"{layer.state:<10}  {layer.name:<{width}}  {layer.found}")
            if layer.do and layer.state == FAILED:
                lines.append(f"{'':<10}  {'':<{width}}  -> {layer.do}")
        return "\n".join([*lines, "", self.conclusion()])


def _table(kernels: list[dict[str, Any]]) -> list[str]:
    """Rows of the kernels; the columns are family, call, kernel, registers, local bytes of a
    thread, architecture of the code, outcome."""
    heads = ("family", "call", "kernel", "registers", "local", "code", "")
    rows: list[tuple[str, ...]] = [heads]
    for one in kernels:
        numbers = [str(one.get(n, "-")) for n in ("registers", "local_bytes", "binary_version")]
        rows.append((one["family"], one["about"], one["kernel"], *numbers, one["why"] or "ok"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads) - 1)]
    padded = [[*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]
