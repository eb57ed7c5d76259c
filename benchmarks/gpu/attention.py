"""Fused attention, forward and backward: python -m benchmarks.gpu.attention [--results DIR] ...

One sequence, 8 heads of 64 and 128 features (the column n), bfloat16 (and float16 at 64), 8 x 1
vectors. For each pass (one launch) the default tile, on tensor cores, and the same on CUDA cores.
Then JAX programs of all passes: both of ours, and `jax.nn.dot_product_attention` with the mask, by
XLA and by cuDNN. With --dry-run on the emulator.

SGAP_GPU_SECONDS: no case starts after that many seconds; cases that did not start are listed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, problems
from benchmarks.gpu import bench, ours, peers
from benchmarks.gpu.session import Session, about_case, heading, said
from benchmarks.peers import attention as programs
from benchmarks.peers import common
from benchmarks.summary import table
from sgap_jax import AttentionTile, Problem, choose_schedule, sparse_attention
from sgap_jax.schedules.emulated import Emulated

CASES = ((64, "bfloat16"), (128, "bfloat16"), (64, "float16"))
# By a substring of the kernel's name: its pass, the number of matrix products that it computes, and
# the number of its operands and results of size L x H x D.
PASSES = {
    "RowsBackward": ("dq", 3, 5),
    "KeysBackward": ("dk and dv", 4, 6),
    "Attention": ("forward", 2, 4),
}
RESULTS = {"forward": (0, 4), "dq": (1,), "dk and dv": (2, 3)}  # in (out, dq, dk, dv, lse)
ALL = "all"
KEY = ("problem", "n", "dtype", "pass")  # identifies a line of the summary
DENSE = ("xla", "cudnn")  # implementations of jax.nn.dot_product_attention
# Tolerance relative to the largest element: probabilities and score gradients are rounded.
_ROUGH = {"bfloat16": 3e-2, "float16": 4e-3}


class Case(bench.Case):
    """All passes with one mask A, which is made of vectors."""

    def __init__(self, A, n: int, dtype: str, hardware, bandwidth: float, arch: str) -> None:
        self.dtype = jnp.dtype(dtype)
        self.n, self.device, self.arch, self.bandwidth = n, hardware, arch, bandwidth
        self.A, self.pattern, self.heads = A, programs.vectors(A), 2 if hardware.dry else 8
        shape = (1, A.shape[0], self.heads, n)
        self.x = [harness.dense(*shape, seed=seed).astype(self.dtype) for seed in range(4)]
        self.expected = self._exact()
        problem = Problem(
            "attention",
            A.shape,
            A.nnz,
            n=n,
            batch=self.heads,
            dtype=dtype,
            format=self.pattern.format,
            platform="cuda",
        )
        default = choose_schedule(problem)
        assert isinstance(default, AttentionTile)
        self.tiles = {"ours": default, "cuda_cores": dataclasses.replace(default, octet=False)}

    def rows(self) -> Iterator[bench.Row]:
        for contender, tile in self.tiles.items():
            for kernel, launch in self._launches(tile).items():
                self._is(*PASSES[kernel])
                plan = functools.partial(self._kernel, launch)
                yield {"pass": PASSES[kernel][0]} | self._row(contender, plan, str(tile))
        self._is(ALL, 7, 8)
        named = {"ours_jax": None, "cuda_cores_jax": self.tiles["cuda_cores"]}
        for name, schedule in named.items():
            function = functools.partial(sparse_attention, schedule=schedule)
            plan = functools.partial(self._program, function, self.pattern)
            yield {"pass": ALL} | self._row(name, plan, str(schedule or ""), program=True)
        for name in DENSE:
            plan = functools.partial(self._dense, name)
            yield {"pass": ALL} | self._row(f"jax_nn_{name}", plan, program=True)

    def _is(self, name: str, products: int, arrays: int) -> None:
        """Sets what `_row` needs of a pass: its name, flops and bytes."""
        L, V = self.A.shape[0], programs.V
        self.flops = 2 * products * self.heads * self.n * self.A.nnz
        self.moved = 2 * arrays * self.heads * L * self.n + 4 * (self.A.nnz + L) // V
        self.bound = self.moved / self.bandwidth
        self.sets = peers.Sets(self.A, (), self.device.sets(self.moved))
        expected = self.expected if name == ALL else [self.expected[i] for i in RESULTS[name]]
        self.wrong = checker(expected, _ROUGH[self.dtype.name])

    def _exact(self) -> list[np.ndarray]:
        """out, dq, dk, dv and lse by the CPU's kernels in float32."""
        with jax.default_device(jax.devices("cpu")[0]):
            x = [jnp.asarray(a, jnp.float32) for a in self.x]
            step = programs.step(lambda *x: sparse_attention(*x), True)
            _, lse = sparse_attention(*x[:3], self.pattern, return_lse=True)
            return [np.asarray(a) for a in (*step(*x, self.pattern), lse)]

    def _launches(self, tile: AttentionTile) -> dict[str, ours.Launch]:
        """The launches of a step with a tile, recorded in place of the emulator."""
        found: dict[str, ours.Launch] = {}

        def record(call, inputs, outputs):
            kernel = next(name for name in PASSES if name in call.kernel)
            names = [(tuple(shape), np.dtype(dtype).name) for shape, dtype in outputs]
            found[kernel] = ours.Launch(call, [np.asarray(x) for x in inputs], names)
            if kernel == "Attention":  # its results are operands of the others
                return [self.expected[0].astype(self.dtype), self.expected[4]]
            return [np.zeros(shape, dtype) for shape, dtype in outputs]

        schedule = Emulated(record, tile)
        with jax.default_device(jax.devices("cpu")[0]):
            step = programs.step(lambda *x: sparse_attention(*x, schedule=schedule), True)
            jax.block_until_ready(step(*map(jnp.asarray, self.x), self.pattern))
        return {name: found[name] for name in reversed(PASSES)}

    def _kernel(self, launch: ours.Launch) -> peers.Plan:
        rotating = ours.Rotating(self.device, launch, self.sets.count)
        run = rotating.run(launch.call, ours.compiled(launch.call, self.arch))
        return run, lambda: [self.device.get(x) for x in rotating.outputs[0]]

    def _dense(self, implementation: str) -> peers.Plan:
        function = functools.partial(programs.dot_product, implementation=implementation)
        return self._program(function, common.dense_of(self.A)[None, None] != 0)

    def _program(self, attention: Callable, mask) -> peers.Plan:
        step = programs.step(attention, True)
        data = [[jnp.array(x, copy=True) for x in self.x] for _ in range(self.sets.count)]
        call = lambda i: step(*data[i % len(data)], mask)  # noqa: E731
        return call, lambda: [np.asarray(x) for x in call(0)]


def checker(expected: list[np.ndarray], rough: float) -> Callable[[list], float]:
    """A function from results to their error over its bound; results beyond the expected ones are
    ignored."""

    def wrong(found: list) -> float:
        errors = [
            np.abs(np.asarray(got, np.float64) - want).max(initial=0)
            / (rough * max(1.0, float(np.abs(want).max(initial=0))))
            for got, want in zip(found, expected, strict=False)
        ]
        return float(np.max(errors))

    return wrong


def summary(rows: list[bench.Row], about: dict) -> str:
    """Useful TFLOP/s by problem, pass and contender; the recomputed scores count once for each
    gradient."""
    lines = heading(about, "Vectors of 8, useful TFLOP/s.")
    names = [
        ("ours", "cuda_cores"),
        ("ours_jax", "cuda_cores_jax", *(f"jax_nn_{x}" for x in DENSE)),
    ]
    for contenders in names:
        body = []
        found = [row for row in rows if row["contender"] in contenders]
        for key in dict.fromkeys(tuple(row[name] for name in KEY) for row in found):
            speed = {
                row["contender"]: f"{1e-3 * float(str(row['gflops'])):.1f}"
                for row in found
                if tuple(row[name] for name in KEY) == key and "us" in row
            }
            body.append([*map(str, key), *(speed.get(name, "not measured") for name in contenders)])
        lines += table([*KEY, *contenders], body)
    return "\n".join(lines)


def chosen(session: Session) -> list[problems.BenchmarkProblem]:
    if session.dry:
        make = functools.partial(problems.attention, 32, 0.5)
        return [problems.BenchmarkProblem("small_mask", "masks", "generated", make, frozenset())]
    return problems.select("attention_gpu", session.names)


def main(argv: list[str] | None = None) -> None:
    session = Session(__doc__, "masks of 4096 to 16384", argv)
    rows: list[bench.Row] = []
    for problem, A in session.matrices(chosen(session)):
        for n, dtype in ((16, "bfloat16"),) if session.dry else CASES:
            if session.starts(f"{problem.name} n={n} {dtype}"):
                about = about_case(problem, A) | {"dtype": dtype}
                case = Case(A, n, dtype, *session.where)
                rows += [said(about | row, str(row["pass"])) for row in case.rows()]
                session.write({"attention": rows})
    (session.folder / "attention.md").write_text(summary(rows, session.record("attention")))
    session.end([row for row in rows if "jax_nn" not in str(row["contender"])])


if __name__ == "__main__":
    main()
