"""Draws the provenance graph as text and as SVG (as figures 10 and 13 of Senanayake et al.)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from sgap_jax.compiler.notation.cin import Pos, Relation, children, parents
from sgap_jax.compiler.notation.expr import IndexVar

_WIDTH, _HEIGHT, _GAP = 96, 34, 56  # width and height of a box, gap between rows, in pixels
_BLUE = "#cfe2ff"


def word(relation: Relation) -> str:
    """The label of a relation, without its variables: split 16, pos A(i,j), fuse."""
    name = type(relation).__name__.lower()
    number = next((getattr(relation, f) for f in ("size", "parts") if hasattr(relation, f)), None)
    what = relation.access if isinstance(relation, Pos) else number
    return name if what is None else f"{name} {what}"


def text(
    originals: Sequence[IndexVar], relations: Sequence[Relation], positions: Collection[IndexVar]
) -> str:
    """The variables of the expression, then a line for each relation; (pos) marks variables in
    position space."""

    def marked(variables: Sequence[IndexVar]) -> str:
        return ", ".join(f"{var} (pos)" if var in positions else str(var) for var in variables)

    lines = [", ".join(map(str, originals))]
    for relation in relations:
        left, right = marked(parents(relation)), marked(children(relation))
        lines.append(f"  {left} --[{word(relation)}]--> {right}")
    return "\n".join(lines)


def svg(
    originals: Sequence[IndexVar], relations: Sequence[Relation], positions: Collection[IndexVar]
) -> str:
    """A box for each variable, below all that it derives from; arrows labelled with relations."""
    place = _places(originals, relations)
    columns = max((x for x, _ in place.values()), default=0.0) + 1
    rows = max((y for _, y in place.values()), default=0) + 1
    width, height = int(columns * (_WIDTH + 20)) + 20, rows * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    for relation in relations:
        made = [_centre(place[var]) for var in children(relation)]
        for var in parents(relation):
            x, y = _centre(place[var])
            parts += [
                f'<path d="M{x:.0f} {y + _HEIGHT / 2:.0f}L{u:.0f} {v - _HEIGHT / 2:.0f}" '
                'stroke="black" fill="none" marker-end="url(#tip)"/>'
                for u, v in made
            ]
        x = sum(u for u, _ in made) / len(made)
        y = made[0][1] - _HEIGHT / 2 - _GAP * 0.35
        parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" font-style="italic" stroke="white" stroke-width="4" '
            f'paint-order="stroke">{escape(word(relation))}</text>'
        )
    derived = [child for relation in relations for child in children(relation)]
    for var in (*originals, *derived):
        x, y = _centre(place[var])
        fill = _BLUE if var in positions else "white"
        parts.append(
            f'<rect x="{x - _WIDTH / 2:.0f}" y="{y - _HEIGHT / 2:.0f}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" rx="8" fill="{fill}" stroke="black"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}">{escape(str(var))}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _centre(place: tuple[float, int]) -> tuple[float, float]:
    x, y = place
    return 20 + (x + 0.5) * (_WIDTH + 20) - 10, y * (_HEIGHT + _GAP) + _HEIGHT / 2 + 8


def _places(
    originals: Sequence[IndexVar], relations: Sequence[Relation]
) -> dict[IndexVar, tuple[float, int]]:
    """(column, row) of each variable. The row is the longest path from the expression's variables;
    in a row the children of one relation stay together, below their parents if there is room."""
    used = [var for relation in relations for var in parents(relation)]
    first = sorted(originals, key=lambda var: [*used, var].index(var))
    place: dict[IndexVar, tuple[float, int]] = {var: (float(n), 0) for n, var in enumerate(first)}
    depth = dict.fromkeys(originals, 0)
    rows: dict[int, list[Relation]] = {}
    for relation in relations:
        row = 1 + max(depth[var] for var in parents(relation))
        depth |= dict.fromkeys(children(relation), row)
        rows.setdefault(row, []).append(relation)

    def centre(relation: Relation) -> float:
        above = [place[var][0] for var in parents(relation)]
        return sum(above) / len(above)

    for row, made in sorted(rows.items()):
        free = 0.0
        for relation in sorted(made, key=centre):
            start = max(free, centre(relation) - (len(children(relation)) - 1) / 2)
            for n, var in enumerate(children(relation)):
                place[var] = (start + n, row)
            free = start + len(children(relation))
    return place
