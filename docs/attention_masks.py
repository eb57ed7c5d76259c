"""The picture of docs/attention.md: python docs/attention_masks.py"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from sgap_jax import CVS, masks

L = 128


def main() -> None:
    segments = np.repeat([0, 1, 2, 3], [40, 24, 48, 16])
    drawn = {
        "band(L, 33)": masks.band(L, 33),
        "band_and_random, 8 x 1": masks.band_and_random(L, 16, 0.8),
        "strided(L, 12)": masks.strided(L, 12),
        "fixed(L, 16, 3)": masks.fixed(L, 16, 3),
        "longformer, tokens 0 and 60": masks.longformer(L, 16, [0, 60]),
        "bigbird, blocks of 8": masks.bigbird(L, 8, global_blocks=1),
        "block_diagonal": masks.block_diagonal(segments),
        "causal(band), CVS(8)": masks.causal(masks.band(L, 65), format=CVS(8)),
    }
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(2, 4).flat, drawn.items(), strict=True):
        masks.plot(mask, axes, title=title)
        axes.set(xticks=[], yticks=[])
        axes.title.set_fontsize(9)
    figure.savefig(Path(__file__).parent / "img" / "attention_masks.png", dpi=80)


if __name__ == "__main__":
    main()
