"""Rows of the CSV files, and means of their ratios."""

import math
import statistics

Row = dict[str, str]


def numbers(rows: list[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows if row.get(column)]


def mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else math.nan


def fresh(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row["schedule"].endswith("donated")]
