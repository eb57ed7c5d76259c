"""The schedules of attention: `AttentionTile`, for its fused CUDA kernels, and `Unfused`, for three
separate operations."""

from __future__ import annotations

import dataclasses

from sgap_jax.schedules.point import LANES_UNDER_WAY, WARPS_UNDER_WAY, check_chunk, chunk_of
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule, ScheduleError

_LANES = (8, 16, 32)
_SHARES = (1, 2, 4, 8, 16)
_COLUMNS = 4  # features that a lane loads together
_MOST_STEPS = 4  # packs of _COLUMNS features that a lane can have
_LENGTHS = (1, 2, 4, 8, 16, 32)
# The most features of a head for gradients in octet tiles: a lane has registers for gathered
# features, for its own and for sums.
_MOST_OCTET_BACKWARD = 128
_MOST_UNALIGNED = 96  # the same for features that are not aligned and loaded one by one
BLOCK = 128  # threads


@dataclasses.dataclass(frozen=True, repr=False)
class AttentionTile(Schedule):
    """Computes scores, softmax and product of a row in one pass, in the registers of a group of
    lanes.

    Attributes:
      lanes: lanes of a group, 8, 16 or 32, which divide the features of a row among them, 4 side by
        side. A group works on up to 8 rows of a column vector, for which it gathers keys and values
        once.
      share: groups that share the same rows, 1 to 16: each takes every share-th key, and their
        partial results are merged by their log-sum-exp, in a fixed order.
      octet: use tensor cores, in octet tiles of 16 vectors by 8 rows, for float16 and bfloat16 and
        vectors of 8, 16 or 32 rows. A warp takes up to 32 rows of vectors and of heads that share
        keys, and each of `share` warps takes every share-th step. Probabilities are rounded to the
        operands' dtype before they are multiplied by v, and gradients of scores too. The kernel of
        the gradients by rows works the same way, with up to 8 warps that share rows. In the kernel
        by keys a warp takes 8 or 16 keys, and up to 8 warps share them, each with a range of block
        rows. Gradients of heads with more than 128 features (96, if not a multiple of 8) are
        computed on CUDA cores, as without `octet`.
      chunk: cut rows of more than so many vectors (keys, for CSR) into pieces of so many, for
        groups of their own; a second launch merges the results of a row's pieces by their
        log-sum-exp, in their order. Gradients are cut likewise. By keys in octets the keys of a
        warp are a row, with as many vectors as the one that has most, and a piece has down to a
        sixteenth of `chunk`: the fewest that exceed a mean row by a quarter, and that make no more
        pieces than `chunk` could. None walks each row whole.

    Raises:
      ScheduleError: a field is out of its range.

    Source: vectorSparse, sections 6.1 (subwarps that share features), 5.3 and 6.3 (octets), 7.4;
    the one-pass softmax: Milakov and Gimelshein, 2018.
    """

    lanes: int = 16
    share: int = 1
    octet: bool = False
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("lanes", _LANES), ("share", _SHARES)):
            value = getattr(self, name)
            if type(value) is not int or value not in allowed:
                raise ScheduleError(
                    f"AttentionTile: {name} must be one of {allowed}, got {value!r}"
                )
        if type(self.octet) is not bool:
            raise ScheduleError(f"AttentionTile: octet must be a bool, got {self.octet!r}")
        if self.lanes * self.share > BLOCK:
            raise ScheduleError(
                f"AttentionTile: {self.share} groups of {self.lanes} lanes are more than the "
                f"{BLOCK} threads of a block"
            )
        check_chunk("AttentionTile", self.chunk)

    @property
    def deterministic(self) -> bool:
        """Whether the result has the same bits at each call."""
        return True

    def steps(self, depth: int) -> int:
        """How many packs of 4 features a lane has, for heads of `depth` features."""
        return max(-(-depth // (self.lanes * _COLUMNS)), 1)

    def rows(self, length: int, numbers: int) -> int:
        """How many of the `length` rows of a vector a group works on at once, if each takes
        `numbers` 32-bit registers of a lane: up to 8 rows and 72 registers."""
        return max(r for r in (1, 2, 4, 8) if length % r == 0 and (r == 1 or r * numbers <= 72))

    def check(self, problem: Problem) -> None:
        if problem.op != "attention":
            raise ScheduleError(f"{self} is for sparse_attention, not for {problem.op}")
        self.check_sizes(problem)
        length = problem.vector_length or 1
        if length not in _LENGTHS:
            raise NotImplementedError(
                f"attention: no kernel of {self} for vectors of {length} rows; there are those for "
                f"{', '.join(map(str, _LENGTHS))}, and Unfused() takes all"
            )
        if self.octet and (length < 8 or problem.dtype not in ("float16", "bfloat16")):
            raise NotImplementedError(
                f"attention: {self} is for float16 and bfloat16 in vectors of 8, 16 or 32 rows, "
                f"got {problem.dtype} in {problem.format}"
            )
        self.check_kernel(problem, "cuda")
        if self.chunk is not None and problem.nnz // length // self.chunk >= 2**30:
            raise ScheduleError(f"{self}: more partial results than 2^31; give a larger chunk")
        if self.octet:
            self._check_tensor_cores(problem)
        self.check_depth(problem.n)

    @property
    def most_features(self) -> int:
        """The most features of a head that the kernels take."""
        return self.lanes * _COLUMNS * _MOST_STEPS

    def check_depth(self, depth: int) -> None:
        """Raises NotImplementedError if a head has more than `most_features` features."""
        if depth > self.most_features:
            raise NotImplementedError(
                f"attention: {self} takes heads of up to {self.most_features} features, "
                f"got {depth}; more lanes take more, and Unfused() all"
            )

    def octet_backward(self, depth: int, value_depth: int) -> bool:
        """Whether gradients of heads with these numbers of features run on tensor cores."""
        most = _MOST_OCTET_BACKWARD if depth % 8 == value_depth % 8 == 0 else _MOST_UNALIGNED
        return self.octet and max(depth, value_depth) <= most

    def explain(self, problem: Problem) -> str:
        if self.octet:
            return self._explain_octet(problem)
        length = problem.vector_length or 1
        steps = self.steps(problem.n)
        rows = self.rows(length, 2 * steps * _COLUMNS)
        shared = f", with {self.share - 1} others" if self.share > 1 else ""
        return (
            f"{self}: attention over {problem.nnz} entries of {list(problem.shape)}\n"
            f"group: {self.lanes} lanes, {rows} rows of a block row of {length}{shared}\n"
            f"lane:  {_COLUMNS} features of every {self.lanes * _COLUMNS}, in {steps} steps\n"
            "for p in vectors of the block row:        # one gather for all rows of the group\n"
            "  s = scale * (q . K[column_indices[p]]) + bias[p]   # summed over the lanes\n"
            "  raise the peak, rescale acc and total\n"
            "  acc += exp(s - peak) * V[column_indices[p]];  total += exp(s - peak)\n"
            "out = acc / total;  lse = peak + log(total)" + self._explain_pieces(problem)
        )

    def _explain_pieces(self, problem: Problem) -> str:
        if self.chunk is None:
            return ""
        text = f"\npieces: of up to {self.chunk} vectors of a row, each as a row above"
        if (rows := problem.rows) is not None:
            text += f"; the longest row, of {rows.longest}, has {-(-rows.longest // self.chunk)}"
        return text + "\n  a second launch merges acc, total and peak of a row's pieces, in order"

    def _explain_octet(self, problem: Problem) -> str:
        gradients = f"gradients: on CUDA cores, for heads of {problem.n} features"
        if self.octet_backward(problem.n, 8):  # the width of values is not part of a problem
            gradients = (
                "gradients: dQ by rows likewise; dK and dV by 8 or 16 keys of a warp,\n"
                f"  over the block rows that any of them stores; where both widths are up to "
                f"{_MOST_OCTET_BACKWARD}\n"
                f"  ({_MOST_UNALIGNED}, if no multiples of 8), else on CUDA cores"
            )
        warps = "one warp has" if self.share == 1 else f"{self.share} warps share"
        return (
            f"{self}: attention over {problem.nnz} entries of {list(problem.shape)}\n"
            f"warp: rows of a block row, in tiles of 8; {warps} them\n"
            "for 16 vectors of the block row:\n"
            "  S^T[16, 8] = K[column_indices, :] Q^T    # mma m16n8k16, gathered rows as A\n"
            "  raise the peaks; P^T = exp(scale S^T + bias - peak), turned by movmatrix\n"
            "  O^T[:, 8] += V[column_indices, :]^T P^T    # mma, P stays in registers\n"
            f"merge the warps; out = O / total;  lse = peak + log(total)\n{gradients}"
        ) + self._explain_pieces(problem)

    def __repr__(self) -> str:
        return self._repr_without("chunk")

    def __str__(self) -> str:
        share = f", share={self.share}" if self.share > 1 else ""
        octet = ", octet=True" if self.octet else ""
        chunk = "" if self.chunk is None else f", chunk={self.chunk}"
        return f"AttentionTile(lanes={self.lanes}{share}{octet}{chunk})"


def default_tile(problem: Problem) -> AttentionTile | None:
    """What `choose_schedule` picks for attention on CUDA, or None if there is no kernel.

    Not measured here yet.

    - The fewest lanes that hold a row's features, 4 each, so that more rows are under way.
    - Several groups share the rows if these are long and few, so that every multiprocessor has work
      (2^16 lanes are a quarter of what an H200 runs at once).
    - Tensor cores if vectors fill an octet: a gathered row then serves 8 rows with a tenth of the
      instructions (vectorSparse, Figure 17).
    - Long rows of a skewed pattern are cut into pieces (`chunk_of`).
    """
    lanes = next((n for n in _LANES if n * _COLUMNS >= problem.n), _LANES[-1])
    length = problem.vector_length or 1
    blocks = max(-(-problem.shape[0] // length), 1)
    keys, share = problem.nnz // length // blocks, 1
    while share < BLOCK // lanes and keys >= 64 * share:
        if blocks * problem.batch * lanes * share >= 1 << 16:
            break
        share *= 2
    octet = length >= 8 and problem.dtype in ("float16", "bfloat16") and problem.n <= 256
    octet = octet and length in _LENGTHS and problem.has_tensor_cores
    share, chunk = min(share, _SHARES[-1]), None
    if problem.rows is not None and octet:
        # A warp has up to 32 rows, and registers for a quarter of those that run at once. What a
        # piece leaves is V rows, so it has twice as many vectors.
        steps = problem.nnz // length * problem.batch / WARPS_UNDER_WAY
        chunk = chunk_of(steps / 2, 2 * share, problem.rows.longest, least=64)
    elif problem.rows is not None:
        sets = max(length // 8, 1)  # of rows of a vector, which groups have
        steps = problem.nnz // length * problem.batch * lanes * sets / LANES_UNDER_WAY
        # A key takes more instructions than an entry of a product. Counted for a row that sees
        # 16,384 keys (test_critical_path.py): one piece and the merge take 0.16 of the time of
        # windows of 64 keys beside it; with pieces of 128, 0.27.
        chunk = chunk_of(steps, share, problem.rows.longest, least=64, most=64)
    tile = AttentionTile(lanes, share, octet, chunk)
    try:
        tile.check(problem)
    except NotImplementedError:
        return None
    return tile


@dataclasses.dataclass(frozen=True)
class Unfused(Schedule):
    """Attention as sddmm, sparse_softmax and spmm, each with its default schedule.

    Runs on every platform, and stores a score and a probability for every entry and head. It serves
    platforms without a fused kernel, and the fused kernels are compared with it.
    """

    def check(self, problem: Problem) -> None:
        if problem.op != "attention":
            raise ScheduleError(
                f"Unfused: {problem.op} is one operation; only attention is several"
            )

    def explain(self, problem: Problem) -> str:
        self.check(problem)
        return (
            "S = sddmm(pattern, Q, K, scale)       # a number for each stored entry\n"
            "P = sparse_softmax(S + bias)          # another\n"
            "O = spmm(P, V)"
        )

    def __str__(self) -> str:
        return "Unfused()"
