"""Operands of fused attention on matrices of the battery, a float64 oracle in loops, and runs of
the kernels on the emulator."""

import dataclasses

import numpy as np
from battery import BATTERY, cast, rounded
from emulated_launch import emulate
from vector_cases import encoded

from sgap_jax import CVS, Problem
from sgap_jax.launch.attention import forward_plan, keys_backward_plan, rows_backward_plan
from sgap_jax.launch.attention_shapes import AttentionShapes

ROUGH = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 3e-2, "float16": 4e-3}
KERNELS = ("forward", "rows", "keys")
GRADIENTS = ("dq", "dk", "dv", "dbias")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One attention call: sizes, and which of bias, sinks and lengths it has; the mask comes from a
    case."""

    length: int = 1
    depth: int = 8
    value_depth: int = 8
    heads: int = 2
    key_heads: int = 1
    batch: int = 2
    dtype: str = "float32"
    bias: str | None = None
    sinks: bool = False
    lengths: bool = False
    is_causal: bool = False
    shared: tuple = ()  # operands with a batch of 1


class Attention:
    """The operands of a setting on a case of the battery."""

    def __init__(self, case, setting):
        self.of, rng = setting, np.random.default_rng(3)
        offsets, indices, values = encoded(case, setting.length)[0]
        self.offsets, self.indices = offsets, indices
        (self.m, self.keys), self.vectors = case.shape, len(indices)
        self.blocks = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        of = setting

        def draw(name, *shape):
            lead = 1 if name in of.shared else of.batch
            return rounded(rng.standard_normal((lead, *shape)), of.dtype)

        self.q = draw("q", self.m, of.heads, of.depth)
        self.k = draw("k", self.keys, of.key_heads, of.depth)
        self.v = draw("v", self.keys, of.key_heads, of.value_depth)
        self.dout = draw("dout", self.m, of.heads, of.value_depth)
        heads = of.heads if of.bias == "heads" else 1
        self.bias = draw("bias", heads, self.vectors, of.length) if of.bias else np.zeros((1, 0))
        self.bias[..., ::5, :] = -np.inf if of.bias else 0
        self.sinks = draw("sinks", of.heads) if of.sinks else np.zeros((1, 0))
        lead = 1 if "lengths" in of.shared else of.batch
        ends = rng.integers(0, self.keys + 1, (lead, 1)).astype(np.int32)
        ends[1::2] += self.keys + 1  # past the last key
        self.lengths = ends if of.lengths else np.zeros((1, 0), np.int32)
        self.scale = 0.4
        self.transpose()

    def transpose(self):
        """Computes the structure by keys from that by rows."""
        order = np.lexsort((self.blocks, self.indices[: len(self.blocks)]))
        self.column_offsets = np.concatenate(
            [[0], np.cumsum(np.bincount(self.indices[: len(order)], minlength=self.keys))]
        ).astype(np.int32)
        padding = self.vectors - len(order)
        self.permutation = np.pad(order, (0, padding)).astype(np.int32)
        self.row_indices = np.pad(self.blocks[order], (0, padding)).astype(np.int32)

    def oracle(self):
        """out, lse, delta, dq, dk, dv, dbias; row by row in float64."""
        of, group = self.of, self.of.heads // self.of.key_heads
        at = lambda x, b: x[b % len(x)]
        out = np.zeros((of.batch, self.m, of.heads, of.value_depth))
        lse = np.full((of.batch, self.m, of.heads), -np.inf)
        delta = np.zeros(lse.shape)
        dq, dk, dv = (np.zeros((of.batch, *x.shape[1:])) for x in (self.q, self.k, self.v))
        dbias = np.zeros((of.batch, of.heads, self.vectors, of.length))
        for b, h, i in np.ndindex(of.batch, of.heads, self.m):
            p = np.arange(self.offsets[i // of.length], self.offsets[i // of.length + 1])
            j = self.indices[p]
            kept = (j <= i) if of.is_causal else np.ones(len(j), bool)
            kept &= (j < at(self.lengths, b)[0]) if of.lengths else True
            q, k, v = at(self.q, b)[i, h], *(at(x, b)[j, h // group] for x in (self.k, self.v))
            s = self.scale * k @ q
            if of.bias:
                s = s + at(self.bias, b)[h if of.bias == "heads" else 0, p, i % of.length]
            s = np.where(kept, s, -np.inf)
            terms = np.append(s, at(self.sinks, b)[h]) if of.sinks else s
            if not np.isfinite(terms).any():
                continue
            lse[b, i, h] = np.logaddexp.reduce(terms)
            weights = np.exp(s - lse[b, i, h])
            out[b, i, h] = weights @ v
            g = at(self.dout, b)[i, h]
            delta[b, i, h] = g @ out[b, i, h] - 0.3
            ds = weights * (v @ g - delta[b, i, h])
            dbias[b, h, p, i % of.length] = ds
            dq[b, i, h] = self.scale * ds @ k
            np.add.at(dk[b, :, h // group], j, self.scale * ds[:, None] * q)
            np.add.at(dv[b, :, h // group], j, weights[:, None] * g)
        return out, lse, delta, dq, dk, dv, dbias

    def run(self, tile, kernels=KERNELS, **where):
        """Runs the kernels on the emulator; returns {name: array} of their results."""
        of, wide = self.of, "float64" if self.of.dtype == "float64" else "float32"
        problem = Problem(
            "attention",
            (self.m, self.keys),
            self.vectors * of.length,
            n=of.depth,
            batch=of.batch * of.heads,
            dtype=of.dtype,
            format="CSR" if of.length == 1 else str(CVS(of.length)),
            platform="cuda",
        )
        names = ("q", "k", "v", "bias", "sinks", "lengths", "dout", "delta", "lse")
        shapes = AttentionShapes(
            of.heads,
            of.key_heads,
            of.value_depth,
            of.batch,
            frozenset(set(names) - set(of.shared)) if of.batch > 1 else frozenset(),
            of.bias,
            of.sinks,
            of.lengths,
            of.is_causal,
        )
        q, k, v, dout = (cast(x, of.dtype) for x in (self.q, self.k, self.v, self.dout))
        bias, sinks = self.bias.astype(wide), self.sinks.astype(wide)
        _, lse, delta, *_ = self.oracle()
        structure, results = (self.offsets, self.indices), {}

        def launch(call, given, **outputs):
            found = emulate(call, given, list(outputs.values()), **where)
            results.update(zip(outputs, found, strict=True))

        rows = (of.batch, self.m, of.heads)
        if "forward" in kernels:
            call = forward_plan(problem, tile, shapes, self.scale)
            given = (q, k, v, bias, sinks, self.lengths, *structure)
            launch(call, given, out=((*rows, of.value_depth), q.dtype), lse=(rows, wide))
        given = (dout, delta.astype(wide), q, k, v, bias, self.lengths, lse.astype(wide))
        if "rows" in kernels:
            call = rows_backward_plan(problem, tile, shapes, self.scale, of.bias is not None)
            stored = (of.batch, of.heads, self.vectors, of.length) if of.bias else (1, 0)
            dq = (of.batch, *q.shape[1:]), q.dtype
            launch(call, (*given, *structure), dq=dq, dbias=(stored, wide))
        if "keys" in kernels:
            call = keys_backward_plan(problem, tile, shapes, self.scale)
            transposed = (self.column_offsets, self.row_indices, self.permutation)
            dk, dv = (((of.batch, *x.shape[1:]), q.dtype) for x in (k, v))
            launch(call, (*given, *transposed), dk=dk, dv=dv)
        return results

    def check(self, tile, kernels=KERNELS, **where):
        """Compares the kernels with the oracle, within the rounding of the operands' dtype."""
        expected = dict(zip(("out", "lse", "delta", *GRADIENTS), self.oracle(), strict=True))
        if not self.of.bias:
            expected["dbias"] = np.zeros((1, 0))
        for name, a in self.run(tile, kernels, **where).items():
            a, b, rough = np.asarray(a).astype(np.float64), expected[name], ROUGH[self.of.dtype]
            size = max(1.0, np.abs(np.where(np.isfinite(b), b, 0)).max(initial=0))
            np.testing.assert_allclose(a, b, rtol=rough, atol=rough * size, err_msg=name)


def check(name, setting, tile, kernels=KERNELS, **where):
    Attention(BATTERY[name], setting).check(tile, kernels, **where)
