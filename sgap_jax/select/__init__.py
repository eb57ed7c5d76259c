"""Patterns that the model computes: structures made of scores inside `jit`, with a static capacity.

The pattern is chosen while the program runs, as in top-k sparse attention (the indexer of
DeepSeek-V3.2, the selection of blocks of MoBA and NSA); how much it can store is known beforehand.
Static patterns are in `sgap_jax.masks`.
"""

from sgap_jax.select.routing import Routing as Routing
from sgap_jax.select.routing import route as route
from sgap_jax.select.rows import top_k as top_k
from sgap_jax.select.rows import top_p as top_p
from sgap_jax.select.threshold import threshold as threshold
