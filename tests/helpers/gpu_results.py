"""Reading what the GPU benchmarks leave."""

import csv
import importlib.util


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def timed(rows):
    """The contenders with a time, and those that say that torch is missing where it is."""
    installed = importlib.util.find_spec("torch") is not None

    def missing(row):
        return not installed and row.get("notes") == "No module named 'torch'"

    return {row["contender"] for row in rows if row["us"] or missing(row)}
