"""Reads rows of the CSV files; means of their ratios, and tables."""

import math
import statistics

Row = dict[str, str]


def numbers(rows: list[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row.get(column)]


def mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else math.nan


def fresh(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row["schedule"].endswith("donated")]


def short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def table(head: list[str], body: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]
