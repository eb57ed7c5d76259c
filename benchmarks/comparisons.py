"""The comparisons of the overview: which peers count for each operation, and a line for each."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from benchmarks.peers import (
    attention,
    dlmc,
    dlmc_sddmm,
    dlmc_softmax,
    edges,
    gradient,
    messages,
    sddmm,
    softmax,
    spmm,
)
from benchmarks.ratios import Row, fresh, mean, numbers, short, table

# Operation, title, module of the peers, and the peers of which the fastest counts in each case.
COMPARISONS = (
    ("spmm", "SpMM", spmm, spmm.GOAL),
    ("sddmm", "SDDMM", sddmm, sddmm.GOAL),
    ("gradient", "value and gradient, against torch", gradient, gradient.GOAL),
    ("gradient", "value and gradient, against JAX BCSR", gradient, ("jax_bcsr",)),
    ("softmax", "sparse softmax", softmax, softmax.GOAL),
    ("dlmc", "SpMM with column vectors", dlmc, dlmc.GOAL),
    ("dlmc", "SpMM with column vectors, against dense", dlmc, ("jax_dense",)),
    ("dlmc_sddmm", "SDDMM with column vectors", dlmc_sddmm, dlmc_sddmm.GOAL),
    (
        "dlmc_sddmm",
        "SDDMM with column vectors, against dense and gather",
        dlmc_sddmm,
        ("jax_dense",),
    ),
    ("dlmc_softmax", "sparse softmax with column vectors", dlmc_softmax, dlmc_softmax.GOAL),
    (
        "dlmc_softmax",
        "sparse softmax with column vectors, against dense",
        dlmc_softmax,
        ("jax_dense",),
    ),
    ("attention", "attention, against jax.nn", attention, ("jax_nn",)),
    ("attention", "attention, against torch", attention, ("torch_sdpa", "flex_attention")),
    ("messages_max", "message passing, maximum", messages, messages.GOAL),
    ("messages_mean", "message passing, mean", messages, messages.GOAL),
    ("messages_edges", "vectors of edges, against plain JAX", edges, ("jax_segments",)),
    ("messages_edges", "vectors of edges, against PyG and DGL", edges, edges.LIBRARIES),
)
# Comparisons in the README's table; its picture shows all.
IN_README = ("SpMM", "value and gradient, against torch", "attention, against torch")
WITHOUT_COLUMNS = ("softmax", "dlmc_softmax")
FOUND = ["operation", "cases", "x best peer (mean)", "cases at least as fast", "worst case"]


@dataclasses.dataclass
class Comparison:
    """The cases in which one of the counted peers ran, and its time over ours in each."""

    op: str
    title: str
    peers: Iterable[str]  # all peers, counted or not
    rows: list[Row]
    ratios: list[float]

    def found(self) -> list[str]:
        """The cells of the columns FOUND."""
        worst = self.rows[self.ratios.index(min(self.ratios))]
        columns = f", n = {worst['n']}" if self.op not in WITHOUT_COLUMNS else ""
        share = sum(x >= 1 for x in self.ratios) / len(self.ratios)
        return [
            self.title,
            str(len(self.ratios)),
            f"**{short(mean(self.ratios))}**",
            f"{100 * share:.0f}%",
            f"{short(min(self.ratios))} ({worst['problem']}{columns})",
        ]


def best(row: Row, peers: tuple[str, ...]) -> float:
    """The time of the fastest of these peers over ours; infinite if none of them ran."""
    return min((float(row[x]) for name in peers if row.get(x := f"x_{name}")), default=math.inf)


def comparisons(results: dict[str, list[Row]]) -> Iterator[Comparison]:
    for op, title, module, peers in COMPARISONS:
        rows = [row for row in fresh(results.get(op, [])) if best(row, peers) < math.inf]
        if rows:
            yield Comparison(op, title, module.PEERS, rows, [best(row, peers) for row in rows])


def overview(results: dict[str, list[Row]]) -> list[str]:
    """One line for each comparison."""
    head = [*FOUND, "x best of all measured (mean)", "of the machine's bound (mean)"]
    body = []
    for one in comparisons(results):
        fraction = mean(numbers(fresh(results[one.op]), "fraction_of_bound"))
        everyone = mean([best(row, tuple(one.peers)) for row in one.rows])
        body.append([*one.found(), short(everyone), f"{100 * fraction:.0f}%"])
    return table(head, body)


def in_short(results: dict[str, list[Row]]) -> list[str]:
    """The lines that the README shows."""
    return table(FOUND, [one.found() for one in comparisons(results) if one.title in IN_README])
