"""Tables of docs/dynamic_patterns.md: structures made inside jit, with a column for each CPU."""

import dataclasses
import re

from benchmarks.every_cpu import Results, device
from benchmarks.ratios import Row, short, table


@dataclasses.dataclass(frozen=True)
class Shown:
    """What one table shows of a CSV file of each CPU.

    Its rows are those whose problem begins with the regular expression `problems`, and what that
    matches is cut off the name. `numbers` maps a column of the file to its text in a cell, with {}
    for the number; a column that a CPU has no number in is left out.
    """

    file: str
    problems: str
    numbers: dict[str, str]
    ours_over: tuple[str, ...] = ()  # columns of the other's time over ours, shown the other way


SHOWN = {  # by the mark in the page
    "top-k": Shown(
        "select",
        "top_k: ",
        {
            "x_jax_top_k_sort": "`jax.lax` {}",
            "x_torch_topk_sort": "torch {}",
            "x_numpy_argpartition_sort": "NumPy {}",
            "x_reading": "readings {}",
        },
        ours_over=("x_reading",),
    ),
    "conditions": Shown(
        "select",
        "(?=threshold: |from_dense: )",
        {"x_jax": "JAX {}", "x_reading": "readings {}"},
        ours_over=("x_reading",),
    ),
    "structures": Shown(
        "select",
        "(?=transpose: |gradient: |own_patterns)",
        {"x_jax_argsort": "{}", "x_passed_in": "{}", "x_shared": "{}"},
        ours_over=("x_passed_in", "x_shared"),
    ),
    "selected-attention": Shown(
        "dynamic_attention",
        "(?=256 tokens|16 blocks)",
        {
            "x_jax_nn": "`jax.nn` {}",
            "x_torch_sdpa": "torch {}",
            "x_flex_attention": "FlexAttention {}",
            "x_torch_causal": "causal {}",
            "x_selection": "selecting {}",
        },
    ),
    "indexer": Shown(
        "dynamic_attention",
        "select (?=256 tokens)",
        {
            "x_attention": "attention {}",
            "x_equal_product": "product {}",
            "x_bfloat16": "bfloat16 {}",
        },
    ),
    "decoding": Shown(
        "dynamic_attention", "decode: ", {"x_jax_nn": "`jax.nn` {}", "x_torch_sdpa": "torch {}"}
    ),
    "experts": Shown("moe", "", {"x_masked_loop": "loop {}", "x_ragged": "`ragged_dot` {}"}),
    "moved-entries": Shown(
        "rigl",
        "",
        {"x_masked_dense": "masked {}", "x_fixed": "fixed {}", "x_update": "update {}"},
    ),
}
FILES = tuple(dict.fromkeys(shown.file for shown in SHOWN.values()))


def cell(row: Row, shown: Shown) -> str:
    """The numbers of a row, as text: "torch 43, NumPy 72"."""
    found = []
    for column, text in shown.numbers.items():
        if row.get(column):
            number = float(row[column])
            found.append(text.format(short(1 / number if column in shown.ours_over else number)))
    return ", ".join(found)


def by_numbers(name: str) -> list:
    """A key that sorts names by the numbers in them."""
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


def side_by_side(found: Results, shown: Shown) -> list[str]:
    """The lines of a table: a problem each, with a column for every CPU that has one of them."""
    cells: dict[str, dict] = {}
    for folder, results in found.items():
        for row in results.get(shown.file, []):
            match = re.match(shown.problems, row["problem"])
            if match and (text := cell(row, shown)):
                cells.setdefault(row["problem"][match.end() :], {})[folder] = text
    folders = [folder for folder in found if any(folder in of for of in cells.values())]
    names = sorted(cells, key=by_numbers)
    body = [[name, *(cells[name].get(x, "-") for x in folders)] for name in names]
    return table(["", *map(device, folders)], body)
