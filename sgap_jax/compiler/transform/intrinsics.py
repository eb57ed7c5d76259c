"""Declarations of the loop nests that an intrinsic computes, which `Schedule.bind` may replace."""

from __future__ import annotations

from collections.abc import Callable

from sgap_jax.compiler.notation.cin import Assignment, Forall, Split
from sgap_jax.compiler.notation.expr import Attained, Factor
from sgap_jax.compiler.notation.nest import chain
from sgap_jax.compiler.notation.provenance import Provenance

OCTET_MMA = "octet_mma"
_VECTORS = (2, 4, 8)
_COLUMNS = 64  # columns of C that a warp computes

_DECLARED = {
    OCTET_MMA: (
        "the tile of column vectors of vectorSparse (sections 5.3 and 6.3). With A in CVS(V), V "
        f"one of {_VECTORS}, and t a multiple of 16 up to 128:\n"
        "  spmm:  forall(i1, forall(kt, forall(jn, C(i,k) += A(i,j) * B(j,k)))) with\n"
        f"         split(i, i0, i1, V), split(k, kb, kt, {_COLUMNS}), pos(j, jp, A), "
        "split(jp, jt, jn, t)\n"
        "  sddmm: forall(i1, forall(kn, forall(jn, D(i,k) += A(i,k) * B(i,j) * C(j,k)))), or "
        "C(k,j), with D stored as A,\n"
        "         split(i, i0, i1, V), pos(k, kp, A), split(kp, kt, kn, t), split(j, jt, jn, t)"
    )
}


def check_nest(graph: Provenance, loop: Forall, name: str) -> None:
    """Raises NotImplementedError unless the nest at `loop` is the one that the intrinsic `name`
    declares."""
    if name not in INTRINSICS:
        raise NotImplementedError(
            f"no intrinsic {name!r}; there are {', '.join(INTRINSICS)}: "
            + "; ".join(_DECLARED.values())
        )
    differs = INTRINSICS[name](graph, loop)
    if differs:
        raise NotImplementedError(f"{differs}; {name} computes {_DECLARED[name]}")


def _octet(graph: Provenance, loop: Forall) -> str | None:
    """How a nest differs from the declared one, as text; None if it does not."""
    loops, leaf = chain(loop)
    if not isinstance(leaf, Assignment) or len(loops) != 3:
        return f"the nest from {loop.var} inwards is not of three loops around an assignment"
    if busy := [inner for inner in loops if inner.unit is not None or inner.unroll]:
        return f"the loop of {busy[0].var} is {busy[0].unit or 'unrolled'}"
    sparse = leaf.factors[0]
    vector = None if sparse.format is None else sparse.format.vector_length
    if vector not in _VECTORS or sparse.format is None or sparse.format.order is not None:
        return f"the first factor, {sparse}, is not in CVS(V) with V one of {_VECTORS}"
    roles = _roles(leaf, sparse)
    if roles is None:
        return f"{leaf} is neither a product nor a sampled one"
    for inner, (root, size, stored) in zip(loops, roles, strict=True):
        made = graph.origin(inner.var)
        tile = isinstance(made, Split) and made.inner == inner.var
        extent = made.size if isinstance(made, Split) else 0
        fits = extent == size if size else extent % 16 == 0 and 16 <= extent <= 128
        stands = (graph.position(inner.var) is not None) == stored
        direct = isinstance(made, Split) and len(graph.lineage(made.parent)) == int(stored)
        if not (tile and fits and stands and direct) or graph.roots(inner.var) != (root,):
            wanted = f"{vector if size == vector else size or 't'}"
            kind = "the positions of " if stored else ""
            return (
                f"the loop of {inner.var} is not the inner part of {kind}{root} split by {wanted}"
            )
    return None


def _roles(leaf: Assignment, sparse: Factor) -> list[tuple] | None:
    """For each of the three loops (index, extent or 0 for the step t, whether in position space);
    None if the assignment is neither an SpMM nor an SDDMM."""
    vector = sparse.format.vector_length if sparse.format is not None else None
    row, column = sparse.indices
    if leaf.op != "+" or len(leaf.target.indices) != 2:
        return None
    if any(isinstance(factor, Attained) for factor in leaf.factors):
        return None
    if len(leaf.factors) == 2 and leaf.target.format is None and not sparse.pattern:
        dense = leaf.factors[1].indices
        if len(dense) == 2 and dense[0] == column and leaf.target.indices == (row, dense[1]):
            return [(row, vector, False), (dense[1], _COLUMNS, False), (column, 0, True)]
    if len(leaf.factors) == 3 and leaf.target.format == sparse.format:
        x, y = leaf.factors[1].indices, leaf.factors[2].indices
        if len(x) == 2 and x[0] == row and x[1] not in (row, column):
            if y not in ((x[1], column), (column, x[1])):
                return None
            return [(row, vector, False), (column, 0, True), (x[1], 0, False)]
    return None


INTRINSICS: dict[str, Callable[[Provenance, Forall], str | None]] = {OCTET_MMA: _octet}
