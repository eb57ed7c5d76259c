"""Pictures of masks."""

from typing import Any

import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.masks.sets import entries

_PIXELS = 512


def plot(pattern: SparseArray, ax: Any = None, *, title: str | None = None) -> Any:
    """A picture of a mask: queries down, keys across; dark where entries are stored.

    A mask with more than 512 rows or columns is drawn in 512 cells; a cell is as dark as the share
    of its entries that are stored, relative to the darkest cell.

    Args:
      pattern: a concrete matrix of any format.
      ax: Matplotlib axes; None makes a new figure.
      title: None shows the shape and the sparsity.

    Returns:
      The axes. Raises ImportError without Matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("masks.plot needs Matplotlib: pip install matplotlib") from error
    rows, columns = entries("plot", pattern)
    m, k = pattern.shape
    cells = min(m, _PIXELS), min(k, _PIXELS)
    image, _, _ = np.histogram2d(
        rows, columns, bins=[max(c, 1) for c in cells], range=[[0, max(m, 1)], [0, max(k, 1)]]
    )
    ax = Figure(figsize=(4, 4), layout="constrained").subplots() if ax is None else ax
    extent = (0, max(k, 1), max(m, 1), 0)
    ax.imshow(image, cmap="Greys", vmin=0, extent=extent, interpolation="nearest")
    if title is None:
        title = f"{m} x {k}, {1 - len(rows) / max(m * k, 1):.1%} sparse"
    ax.set(xlabel="key", ylabel="query", title=title)
    return ax
