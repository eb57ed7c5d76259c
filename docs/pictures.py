"""The pictures of formats and schedules: python docs/pictures.py"""

from pathlib import Path

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.figure import Figure

from sgap_jax import BCSR, CSR, CVS, SparseArray

FOLDER = Path(__file__).parent / "img"
rcParams["svg.hashsalt"] = "sgap_jax"


def show(axes, image, title):
    axes.imshow(np.ma.masked_less(image, 0), cmap=colormaps["tab10"], vmin=0, vmax=9)
    axes.set_title(title, fontsize=10)
    axes.set(xticks=np.arange(image.shape[1] + 1) - 0.5, yticks=np.arange(image.shape[0] + 1) - 0.5)
    axes.tick_params(length=0, labelbottom=False, labelleft=False)
    axes.grid(color="0.88", linewidth=0.4)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color("0.5")


def formats() -> None:
    """Stored entries, and the zeros that vectors and blocks add."""
    rng = np.random.default_rng(3)
    dense = (rng.random((16, 24)) < 0.06).astype(np.float32)
    dense[4:8, 5] = dense[8:12, 15] = dense[0:4, 18] = dense[12:15, 9:12] = 1
    A = SparseArray.from_dense(dense, format=CSR)
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    for axes, format in zip(figure.subplots(1, 3), (CSR, CVS(4), BCSR(4, 4)), strict=True):
        B = A.asformat(format)
        stored = np.asarray(B.with_values(np.ones_like(B.values)).todense()) > 0
        image = np.full(dense.shape + (3,), 1.0)
        image[stored] = colormaps["tab10"](0)[:3]
        image[stored & (dense == 0)] = (0.72, 0.83, 0.92)
        show(axes, image, f"{format}: {B.column_indices.size} indices, {B.values.size} numbers")
    figure.savefig(FOLDER / "formats.svg", metadata={"Date": None})


def schedules() -> None:
    """The task of each entry, by rows and by positions."""
    rng = np.random.default_rng(1)
    m, k, tasks = 16, 32, 8
    lengths = np.r_[2, 1, 14, 3, 1, 2, 26, 8, 2, 1, 3, 1, 4, 18, 1, 1]
    dense = np.zeros((m, k), bool)
    for row, length in zip(dense, lengths, strict=True):
        row[rng.permutation(k)[:length]] = True
    rows, columns = np.nonzero(dense)
    each = -(-len(rows) // tasks)
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    by = {
        f"split(i, i0, i1, {m // tasks}): tasks of {m // tasks} rows": rows // (m // tasks),
        f"fuse, pos, split(p, p0, p1, {each}): tasks of {each} entries": np.arange(len(rows))
        // each,
    }
    for axes, (title, task) in zip(figure.subplots(1, 2), by.items(), strict=True):
        image = np.full((m, k), -1.0)
        image[rows, columns] = task
        counts = np.bincount(task)
        show(axes, image, f"{title}\nthe largest has {counts.max()} of {len(rows)} entries")
    figure.savefig(FOLDER / "schedules.svg", metadata={"Date": None})


if __name__ == "__main__":
    formats()
    schedules()
