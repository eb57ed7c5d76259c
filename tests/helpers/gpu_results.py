"""Reads the result files of the GPU benchmarks."""

import csv
import importlib.util


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def timed(rows):
    """The contenders that have a time; a row that says torch is missing is left out only if it
    is."""
    installed = importlib.util.find_spec("torch") is not None

    def missing(row):
        return not installed and row.get("notes") == "No module named 'torch'"

    return {row["contender"] for row in rows if row["us"] or missing(row)}
