"""Peak memory of attention in a process: python -m benchmarks.attention_memory WAY PROBLEM

The peak growth of a fresh process's resident set during one call, minus the call's results. This
includes what libraries allocate outside of XLA or torch, such as copies of K and V. Before it the
programs are compiled, a small call loads code and starts threads, and memory that compiling left in
the heap is returned. Prints MB of forward, and of forward and backward, as JSON. Linux only: /proc
reports and resets the peak.
"""

import argparse
import ctypes
import gc
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

from benchmarks import problems
from benchmarks.problems import Unavailable

WAYS = ("ours", "jax_nn", "torch_sdpa")
SMALL = 256  # sequence length of the warm-up call
PROCESS = pathlib.Path("/proc/self")


def plan(way: str, A, backward: bool) -> Callable[[], object]:
    """A call whose compilation and conversions are done."""
    import jax
    import jax.numpy as jnp

    from benchmarks.peers import attention as peers
    from sgap_jax import sparse_attention

    x = peers.operands(A.shape[0])
    if way == "torch_sdpa":
        return peers.with_torch_sdpa(A, x, backward)
    if way == "ours":
        mask, attention = peers.vectors(A), lambda *x: sparse_attention(*x)
    else:
        mask, attention = jnp.asarray(A.toarray() != 0)[None, None], peers.dot_product
    compiled = peers.step(attention, backward).lower(*x, mask).compile()
    return lambda: jax.block_until_ready(compiled(*x, mask))


def resident(field: str) -> int:
    """Bytes of a field: VmRSS is the current resident set, VmHWM its peak since `growth` last reset
    it."""
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def resident_is_known() -> bool:
    return (PROCESS / "clear_refs").exists()


def growth(call: Callable[[], object]) -> int:
    """The peak growth of the resident set in bytes during a call, results included."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    (PROCESS / "clear_refs").write_text("5")
    result = call()
    most = resident("VmHWM")
    del result
    return most - before


def peaks(way: str, problem: str) -> dict[str, float]:
    """Peak MB of both passes. Forward runs first: the workspace that it leaves is too small for
    both."""
    from benchmarks.peers.attention import HEADS, WIDTH

    if not resident_is_known():
        raise Unavailable("the greatest resident set is known on Linux only")
    A, found = problems.select(names=[problem])[0].build(), {}
    for backward in (False, True):
        plan(way, problems.attention(SMALL, 0.9), backward)()
        call, results = plan(way, A, backward), 4 if backward else 1
        returned = 4 * A.shape[0] * HEADS * WIDTH * results
        found[str(backward)] = (growth(call) - returned) / 1e6
    return found


def measure(way: str, problem: str) -> dict[bool, object]:
    """Runs `peaks` in a process of its own; raises Unavailable if that fails."""
    command = [sys.executable, "-m", "benchmarks.attention_memory", way, problem]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{way}: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {backward: found[str(backward)] for backward in (False, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("problem")
    args = parser.parse_args()
    print(json.dumps(peaks(args.way, args.problem)))


if __name__ == "__main__":
    main()
