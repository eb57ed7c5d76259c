"""Named sparse matrices, and where each comes from.

A problem builds a SciPy CSR matrix: float32 values drawn from N(0, 1) (patterns are measured;
varying magnitudes would only hide errors), int32 indices sorted in each row, no duplicates. Every
generator is seeded, so a name means the same matrix everywhere.

Tags: `default` (the published table), `quick` (a few of them), `ci` (small; also run by the tests),
`gpu` (large; in addition to the default ones), `balance` (does one heavy row hold up the other
cores?), `vectors` and `vectors_quick` (each entry of a pattern is a column vector),
`vectors_weights` (the same with patterns of generated weights), `octets` (the same for a GPU),
`attention`, `attention_quick` and `attention_gpu` (masks), `pieces` (with rows so long that kernels
of a GPU cut them).
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable

import numpy as np
import scipy.sparse as sp

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA_DIR = pathlib.Path(os.environ.get("SGAP_DATA_DIR", ROOT.parent / "shared" / "data"))


VECTOR_LENGTHS = (2, 4, 8, 16)


class Unavailable(Exception):
    """A problem or a peer that cannot run here; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class BenchmarkProblem:
    """A named matrix. `make()` gives any SciPy sparse matrix, `build()` the CSR described above."""

    name: str
    family: str
    source: str
    make: Callable[[], sp.spmatrix]
    tags: frozenset[str] = frozenset({"default"})

    def build(self) -> sp.csr_matrix:
        """Builds the matrix; raises Unavailable if the data set is absent."""
        matrix = sp.csr_matrix(self.make())
        matrix.sum_duplicates()
        values = np.random.default_rng(1).standard_normal(matrix.nnz, dtype=np.float32)
        indices, offsets = matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32)
        return sp.csr_matrix((values, indices, offsets), shape=matrix.shape)


def pattern(m: int, k: int, flat: np.ndarray) -> sp.csr_matrix:
    """CSR pattern from flat positions row * k + column."""
    rows, columns = np.divmod(flat, k)
    return sp.csr_matrix((np.ones(flat.size, np.float32), (rows, columns)), shape=(m, k))


def uniform(m: int, k: int, density: float, seed: int = 0) -> sp.csr_matrix:
    """round(m k density) distinct positions, all equally likely."""
    rng = np.random.default_rng(seed)
    nnz = round(m * k * density)
    flat = np.unique(rng.integers(0, m * k, int(nnz * 1.2) + 16))
    while flat.size < nnz:
        flat = np.unique(np.concatenate([flat, rng.integers(0, m * k, nnz)]))
    return pattern(m, k, rng.permutation(flat)[:nnz])


def rmat(scale: int, edge_factor: int, seed: int = 0) -> sp.csr_matrix:
    """R-MAT graph (Chakrabarti, Zhan, Faloutsos 2004) with the parameters of Graph500.

    2^scale vertices and edge_factor 2^scale directed edges before duplicates are merged. Each edge
    descends `scale` levels of the adjacency matrix and picks a quadrant at each: (a, b, c, d) =
    (0.57, 0.19, 0.19, 0.05). Vertices are renamed at random, so that degree says nothing about
    position.
    """
    a, b, c = 0.57, 0.19, 0.19
    rng = np.random.default_rng(seed)
    vertices, edges = 1 << scale, edge_factor << scale
    rows = np.zeros(edges, np.int64)
    columns = np.zeros(edges, np.int64)
    for _ in range(scale):
        draw = rng.random(edges, dtype=np.float32)
        rows = 2 * rows + (draw >= a + b)
        columns = 2 * columns + (((draw >= a) & (draw < a + b)) | (draw >= a + b + c))
    rename = rng.permutation(vertices)
    return pattern(vertices, vertices, np.unique(rename[rows] * vertices + rename[columns]))


def pruned(m: int, k: int, sparsity: float, seed: int = 0) -> sp.csr_matrix:
    """Magnitude pruning of a random layer: the round(m k (1 - sparsity)) largest |w| are kept.

    w[i, j] = s_i g_ij with g ~ N(0, 1) and s_i log-normal(0, 0.1): rows then differ in length
    about as much as in the magnitude-pruned layers of DLMC (coefficient of variation 0.2-0.4).
    """
    rng = np.random.default_rng(seed)
    weights = rng.lognormal(0, 0.1, (m, 1)) * rng.standard_normal((m, k))
    kept = round(m * k * (1 - sparsity))
    return pattern(m, k, np.argpartition(-np.abs(weights), kept, axis=None)[:kept])


def heavy_row(m: int, nnz: int, heavy: int, seed: int = 0) -> sp.csr_matrix:
    """nnz entries in m rows of nnz columns, `heavy` of them in the middle row, the rest uniform."""
    rng = np.random.default_rng(seed)
    light = np.unique(rng.integers(0, m * nnz, 2 * (nnz - heavy)))
    light = light[light // nnz != m // 2] if heavy else light
    row = m // 2 * nnz + rng.permutation(nnz)[:heavy]
    return pattern(m, nnz, np.concatenate([rng.permutation(light)[: nnz - heavy], row]))


def stored(path: str) -> sp.csr_matrix:
    """A file of the data set (SGAP_DATA_DIR), read by the package's own reader."""
    from sgap_jax import read

    file = DATA_DIR / path
    if not file.exists():
        raise Unavailable(f"no {path} in SGAP_DATA_DIR")
    return sp.csr_matrix(read(file).to_scipy())


def vectors(make: Callable[[], sp.spmatrix], length: int) -> sp.csr_matrix:
    """The pattern with every row repeated `length` times: [length m, k]."""
    return sp.csr_matrix(sp.kron(make(), np.ones((length, 1), np.float32)))


def attention(length: int, sparsity: float) -> sp.csr_matrix:
    """The mask of the sparse transformer (vectorSparse, section 7.4) in 8 x 1 vectors: a band of a
    sixteenth of the length (or of half of the stored keys, if that is less) and random keys."""
    from sgap_jax import CSR, masks

    band = max(min(length // 16, round(length * (1 - sparsity) / 2)) // 8 * 8, 8)
    return sp.csr_matrix(masks.band_and_random(length, band, sparsity, 8, format=CSR).to_scipy())


def global_and_band(length: int, seeing: int, window: int) -> sp.csr_matrix:
    """A mask in which the first `seeing` tokens see all and are seen by all, and the others, in
    sets of 8, see a window of keys around them (BigBird, Longformer)."""
    at, keys = np.arange(length), np.arange(-(window // 2), window // 2 + 1)
    rows, all_of = np.repeat(at, len(keys)), np.arange(seeing)
    near = (at[:, None] // 8 * 8 + 4 + keys).reshape(-1)
    rows = np.concatenate([rows, np.repeat(all_of, length), np.tile(at, seeing)])
    columns = np.concatenate([near, np.tile(at, seeing), np.repeat(all_of, length)])
    inside = (columns >= 0) & (columns < length)
    shape = (length, length)
    found = sp.csr_matrix((np.ones(inside.sum()), (rows[inside], columns[inside])), shape)
    found.data = np.ones_like(found.data, np.float32)
    return found


def block_band(length: int, block: int = 128) -> sp.csr_matrix:
    """A band of 128 x 128 blocks, each with its two neighbours: FlexAttention's best case."""
    blocks = sp.diags_array(np.ones((3, 1)), offsets=(-1, 0, 1), shape=(length // block,) * 2)
    return sp.csr_matrix(sp.kron(blocks, np.ones((block, block), np.float32)))


def _all() -> tuple[BenchmarkProblem, ...]:
    found = []

    def add(name, family, source, make, *arguments, tags="default"):
        make = functools.partial(make, *arguments)
        found.append(BenchmarkProblem(name, family, source, make, frozenset(tags.split())))

    synthetic = "generated: benchmarks/problems.py"
    tags = "default quick"
    add("uniform_10k_0.1pct", "uniform", synthetic, uniform, 10_000, 10_000, 0.001, tags=tags)
    add("uniform_10k_1pct", "uniform", synthetic, uniform, 10_000, 10_000, 0.01)
    graphs = "default graphs"
    add("rmat_131k_1m", "R-MAT", synthetic, rmat, 17, 8, tags=graphs)
    add("rmat_131k_2m", "R-MAT", synthetic, rmat, 17, 16, tags=graphs)
    # Of a size that an H100's second-level cache has room for, with rows that are cut into pieces.
    add("rmat_32k_500k", "R-MAT", synthetic, rmat, 15, 16, tags="pieces")
    skewed = functools.partial(rmat, 12, 32)
    add("rmat_32kx4k_v8", "R-MAT, V=8", synthetic, vectors, skewed, 8, tags="pieces")
    add("attention_4096_global", "masks", synthetic, global_and_band, 4096, 8, 64, tags="pieces")
    for percent in (70, 80, 90, 95, 98):
        tags = "default quick" if percent == 90 else "default"
        name = f"weights_2048x1024_{percent}pct"
        add(name, "weights", synthetic, pruned, 2048, 1024, percent / 100, tags=tags)

    dlmc = "DLMC (Gale et al., SC20): "
    for name, path, tags in (
        ("rn50_2048x512_80pct", "rn50/magnitude_pruning/0.8/bottleneck_3_block_group4_1_1", ""),
        ("rn50_512x4608_90pct", "rn50/magnitude_pruning/0.9/bottleneck_2_block_group4_1_1", ""),
        ("rn50_1000x2048_95pct", "rn50/magnitude_pruning/0.95/final_dense", ""),
        (
            "transformer_2048x512_70pct",
            "transformer/magnitude_pruning/0.7/body_encoder_layer_0_ffn_conv1_fully_connected",
            "",
        ),
        (
            "transformer_512x2048_90pct",
            "transformer/magnitude_pruning/0.9/body_encoder_layer_1_ffn_conv2_fully_connected",
            "quick",
        ),
        (  # 1750 of 2048 rows are empty
            "transformer_2048x512_98pct_vd",
            "transformer/variational_dropout/0.9/body_encoder_layer_2_ffn_conv1",
            "",
        ),
        (
            "transformer_33288x512_98pct",
            "transformer/random_pruning/0.98/symbol_modality_33288_512_shared_",
            "",
        ),
    ):
        file = f"dlmc/{path}.smtx.gz"
        add(name, "DLMC", dlmc + path, stored, file, tags=f"default {tags}")

    layers = {
        "rn50": "bottleneck_1_block_group3_1_1",
        "transformer": "body_encoder_layer_0_self_attention_multihead_attention_q_fully_connected",
    }
    for percent in (50, 70, 80, 90, 95, 98):
        for length in VECTOR_LENGTHS:
            for network, layer in layers.items():
                path = f"{network}/magnitude_pruning/{percent / 100:g}/{layer}"
                pruned_layer = functools.partial(stored, f"dlmc/{path}.smtx.gz")
                name, family = f"{network}_{percent}pct_v{length}", f"V={length} {percent}%"
                quick = network == "transformer" and length in (2, 8) and percent in (70, 90)
                tags = "vectors vectors_quick" if quick else "vectors"
                add(name, family, dlmc + path, vectors, pruned_layer, length, tags=tags)

    # Column vectors of pruned weights: for V = 8 the paper's profiled layer, and a large square
    # one.
    for percent in (70, 80, 90, 95, 98):
        for length in (2, 4, 8):
            layer = functools.partial(pruned, 2048 // length, 1024, percent / 100)
            name, family = f"weights_2048x1024_{percent}pct_v{length}", f"V={length} {percent}%"
            profiled = length == 8 and percent < 98
            tags = "vectors_weights octets" if profiled else "vectors_weights"
            add(name, family, synthetic, vectors, layer, length, tags=tags)
        if 70 < percent < 98:
            name, family = f"weights_4096_{percent}pct_v8", f"V=8 {percent}%"
            square = functools.partial(pruned, 512, 4096, percent / 100)
            add(name, family, synthetic, vectors, square, 8, tags="octets")
    # Goals of octet tiles: faster than dense products for V = 8 from 85% on, for V = 16 from 80%
    # on.
    for m, k, percent, length in ((2048, 1024, 85, 8), (2048, 1024, 80, 16), (4096, 4096, 80, 16)):
        size = str(m) if m == k else f"{m}x{k}"
        name, family = f"weights_{size}_{percent}pct_v{length}", f"V={length} {percent}%"
        layer = functools.partial(pruned, m // length, k, percent / 100)
        add(name, family, synthetic, vectors, layer, length, tags="octets")
    lengths = {1024: "attention_quick", 2048: "attention", 4096: "attention attention_gpu"}
    for length, tags in (lengths | dict.fromkeys((8192, 16384), "attention_gpu")).items():
        for percent in (90, 95):
            name, make = f"attention_{length}_{percent}pct", functools.partial(attention, length)
            add(name, f"masks {percent}%", synthetic, make, percent / 100, tags=tags)
        if length in (2048, 4096):
            name = f"attention_{length}_blocks"
            add(name, "masks of blocks", synthetic, block_band, length, tags=tags)

    for name, file, tags in (
        ("bcsstk16", "bcsstk16.mtx.gz", ""),
        ("lp_pilot87", "lp_pilot87.npz", ""),
        ("memplus", "memplus.mtx.gz", ""),
        ("p2p-Gnutella31", "p2p-Gnutella31.mtx.gz", ""),
    ):
        source = "SuiteSparse or SNAP (see MANIFEST.md of the data set): " + file
        add(name, "matrices", source, stored, f"matrices/{file}", tags=f"default {tags}")
    for name, tags in (
        ("ego_twitter", ""),
        ("wiki_squirrel", "quick"),
        ("email_enron", ""),
        ("delaunay_n15", ""),
        ("pubmed", ""),
        ("coauthor_cs", ""),
        ("cora", "loops"),  # ten thousand nonzeros
    ):
        source = f"graph collections (see MANIFEST.md of the data set): {name}"
        tags = tags if tags == "loops" else f"{graphs} {tags}"
        add(name, "graphs", source, stored, f"graphs/{name}.npz", tags=tags)

    # Millions of nonzeros: where a GPU's memory, not its launch, sets the time.
    add("uniform_200k_3m", "uniform", synthetic, uniform, 200_000, 200_000, 8e-5, tags="gpu")
    add("rmat_1m_8m", "R-MAT", synthetic, rmat, 20, 8, tags="gpu")

    # The same work with and without one row that holds three quarters of it.
    add("balanced", "balance", synthetic, heavy_row, 5000, 200_000, 0, tags="balance")
    add("heavy_row", "balance", synthetic, heavy_row, 5000, 200_000, 150_000, tags="balance")

    add("small_uniform", "uniform", synthetic, uniform, 300, 200, 0.05, tags="ci")
    add("small_rmat", "R-MAT", synthetic, rmat, 9, 8, tags="ci")
    add("small_weights", "weights", synthetic, pruned, 128, 96, 0.9, tags="ci")
    small = functools.partial(pruned, 40, 96, 0.9)
    add("small_vectors", "weights", synthetic, vectors, small, 4, tags="ci vectors_ci")
    path = "dlmc/rn50/magnitude_pruning/0.8/initial_conv.smtx.gz"
    add("rn50_64x147_80pct", "DLMC", dlmc + path, stored, path, tags="ci")
    add("karate", "graphs", "Zachary 1977", stored, "graphs/karate.npz", tags="ci")
    add("lp_e226", "matrices", "LPnetlib", stored, "matrices/lp_e226.mtx.gz", tags="ci")
    return tuple(found)


PROBLEMS = _all()


def select(tag: str = "default", names: list[str] | None = None) -> list[BenchmarkProblem]:
    """Problems with a tag, or those named; ValueError for a name or tag that does not exist."""
    if names:
        known = {problem.name: problem for problem in PROBLEMS}
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(f"unknown problems {unknown}; known: {', '.join(known)}")
        return [known[name] for name in names]
    found = [problem for problem in PROBLEMS if tag in problem.tags]
    if not found:
        tags = sorted(set().union(*(problem.tags for problem in PROBLEMS)))
        raise ValueError(f"unknown tag {tag!r}; known: {', '.join(tags)}")
    return found
