"""Time and memory of compiled steps, and files of results."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import sgap_jax

# The load by others, before our own work counts: if it is high, figures are not valid.
LOAD_AT_START = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def device() -> str:
    """JAX's default device, and for a CPU the instruction set and threads that our kernels use."""
    first = jax.devices()[0]
    if first.platform != "cpu":
        return first.device_kind
    info = sgap_jax.info()
    return f"CPU, {info['cpu_isa']} kernels, {info['cpu_threads']} threads"


def compile_step(function, *arguments):
    """(compiled, arguments) of a function, as the measurements below take them."""
    return jax.jit(function).lower(*arguments).compile(), arguments


def forward(model: nnx.Module, tokens):
    """(compiled, arguments): the logits of a batch; the weights and the mask are arguments."""
    definition, state = nnx.split(model)

    def run(state, tokens):
        return nnx.merge(definition, state)(tokens)

    return compile_step(run, state, tokens)


def megabytes(compiled) -> float:
    """Arguments + results + temporaries of a compiled step, by XLA's account."""
    sizes = compiled.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return (held + sizes.temp_size_in_bytes) / 1e6


def interleaved_ms(steps: dict, seconds: float, turns: int = 3) -> dict[str, float]:
    """Median time of each step, run in turn at least `turns` times and until `seconds` are over."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    began = time.perf_counter()
    done = 0
    while done < turns or time.perf_counter() - began < seconds:
        for name, (compiled, arguments) in steps.items():
            before = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times[name].append(1e3 * (time.perf_counter() - before))
        done += 1
    return {name: float(np.median(values)) for name, values in times.items()}


def difference(a, b) -> float:
    """The largest difference relative to the largest magnitude, over the worst pair of arrays."""
    pairs = [
        (np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in zip(a, b, strict=True)
    ]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def grown_megabytes(compiled, arguments) -> float | None:
    """The growth of this process's peak memory in the first run of a step; None where unknown."""
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not forget.exists():
        return None
    forget.write_text("5")  # resets the peak that compilation left
    before = int(status.read_text().split("VmRSS:")[1].split()[0])
    jax.block_until_ready(compiled(*arguments))
    return (int(status.read_text().split("VmHWM:")[1].split()[0]) - before) * 1024 / 1e6


def in_fresh_process(script: str, *options) -> float | None:
    """What `script options` prints as JSON: for numbers that need a fresh process."""
    command = [sys.executable, script, *map(str, options)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


class Results:
    """A file of JSON lines: rows are appended once measured, and found again later."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        self.rows = [json.loads(line) for line in lines]

    def find(self, key: dict) -> dict | None:
        """The latest row measured on this device that contains all items of `key`."""
        wanted = key | {"device": device()}
        return next((row for row in reversed(self.rows) if wanted.items() <= row.items()), None)

    def add(self, row: dict) -> dict:
        """Appends the row with the device, the version of JAX, the date and the load."""
        stamp = {"jax": jax.__version__, "date": datetime.date.today().isoformat()}
        row = {**row, "device": device(), **stamp, "load": LOAD_AT_START}
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row
