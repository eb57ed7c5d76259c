"""Real-world tensors: their files, their products by torch, and the check of a product."""

import dataclasses
import math

import numpy as np
import scipy.sparse as sp

from benchmarks import harness, problems
from benchmarks.peers import common
from benchmarks.problems import Unavailable
from sgap_jax import COO, SparseArray, read

FILES = {"fb15k237": "kg_fb15k237", "jf17k": "kg_jf17k_3", "parti": "parti_3D_12031"}


def rows_of(coordinates: np.ndarray, shape) -> np.ndarray:
    """The flat row of the result that each entry adds to."""
    return np.ravel_multi_index(tuple(coordinates[: len(shape) - 1]), shape[:-1])


def gathered_by_torch(coordinates, values, dense, rows, shape, reuse: bool):
    torch = common.torch_module()
    rows = torch.from_numpy(rows)
    at = [torch.from_numpy(x.astype(np.int64)) for x in coordinates[-len(dense) :]]
    factors, weights = [torch.from_numpy(x) for x in dense], torch.from_numpy(values.copy())
    flat = math.prod(shape[:-1]), shape[-1]
    kept = torch.zeros(flat) if reuse else None

    def call():
        product = weights[:, None]
        for factor, index in zip(factors, at, strict=True):
            product = product * factor[index]
        out = torch.zeros(flat) if kept is None else kept.zero_()
        return out.index_add_(0, rows, product).reshape(shape)

    return call


def checker(coordinates, values, dense, rows, shape):
    def sums(values, dense):
        product = values[:, None].astype(np.float64)
        for factor, index in zip(dense, coordinates[-len(dense) :], strict=True):
            product = product * factor[index]
        matrix = sp.csr_array(
            (np.ones(rows.size), (rows, np.arange(rows.size))), (math.prod(shape[:-1]), rows.size)
        )
        return (matrix @ product).reshape(shape)

    expected, magnitude = sums(values, dense), sums(np.abs(values), [np.abs(x) for x in dense])
    terms = np.bincount(rows, minlength=math.prod(shape[:-1])).reshape(shape[:-1])[..., None]
    return lambda found: harness.excess(found, expected, terms + 2 * len(dense), magnitude)


@dataclasses.dataclass(frozen=True)
class TensorProblem:
    """A real tensor, its values drawn from N(0, 1)."""

    name: str
    family: str = "tensors"

    def build(self) -> SparseArray:
        path = problems.DATA_DIR / "tensors" / f"{FILES[self.name]}.tns.gz"
        if not path.exists():
            raise Unavailable(f"no {path.name} in SGAP_DATA_DIR")
        A = read(path, format=COO)
        values = np.random.default_rng(1).standard_normal(A.nnz, dtype=np.float32)
        return A.with_values(values)


def select(tag: str, names: list[str] | None) -> list[TensorProblem]:
    chosen = [name for name in FILES if not names or name in names]
    return [TensorProblem(name) for name in (chosen[-1:] if tag == "quick" else chosen)]
