"""Neighbours of seeds, sampled into blocks: python -m benchmarks.bench_sampling

A million edges or so of each minibatch, against the samplers of PyG (torch_sparse) and DGL.
"""

import functools

import jax
import numpy as np

from benchmarks import harness, machine
from benchmarks.peers import common, edges
from sgap_jax import SparseArray, graphs

FANOUTS = (15, 10, 5)
SEEDS = 1024
GRAPHS = ("rmat_131k_2m", "ego_twitter")


def with_torch_sparse(A, seeds):
    """The sampler of PyG's NeighborLoader where pyg-lib is not installed."""
    import torch_sparse  # noqa: F401

    torch = common.torch_module()
    offsets, columns = (torch.from_numpy(x.astype(np.int64)) for x in (A.indptr, A.indices))
    seeds, sample = torch.from_numpy(seeds), torch.ops.torch_sparse.neighbor_sample
    return lambda: sample(offsets, columns, seeds, list(FANOUTS), False, True)


def with_dgl(A, seeds):
    """A sample and a block for each hop, as DGL's NeighborSampler makes them."""
    dgl, torch = edges.dgl_module(), common.torch_module()
    ends = (torch.from_numpy(x.astype(np.int64)) for x in (A.indices, common.rows_of(A)))
    graph = dgl.graph(tuple(ends), num_nodes=A.shape[0])
    graph.create_formats_()
    seeds = torch.from_numpy(seeds)

    def call():
        blocks, found = [], seeds
        for fanout in FANOUTS:
            hop = dgl.sampling.sample_neighbors(graph, found, fanout)
            blocks.append(dgl.transforms.to_block(hop, found))
            found = blocks[-1].srcdata[dgl.NID]
        return blocks

    return call


PEERS = {"torch_sparse": with_torch_sparse, "dgl": with_dgl}


def counted(A, seeds, result) -> float:
    """0 where the last layer's block has as many edges as it must have, of any of the samplers."""
    expected = np.minimum(np.diff(A.indptr)[seeds], FANOUTS[0]).sum()
    if isinstance(result, graphs.NeighborSample):
        found = int(result.blocks[-1].row_offsets[-1])
    elif isinstance(result, list):
        found = result[0].num_edges()
    else:  # (nodes, rows, columns, edges) with the seeds first
        found = int((result[2] < seeds.size).sum())
    return 0 if found == expected else np.inf


def cases(A, n: int):
    seeds = np.random.default_rng(0).choice(A.shape[0], n, replace=False)
    sampler = graphs.NeighborSampler(SparseArray.from_scipy(A), FANOUTS, n)
    edges_of = sum(int(block.row_offsets[-1]) for block in sampler.sample(seeds).blocks)
    yield harness.Case(
        n=n,
        schedule=f"fanouts {', '.join(map(str, FANOUTS))}",
        ours=lambda: jax.block_until_ready(sampler.sample(seeds)),
        peers={name: functools.partial(plan, A, seeds) for name, plan in PEERS.items()},
        wrong=functools.partial(counted, A, seeds),
        flops=0,
        moved=4 * edges_of,
        bound=machine.probe().bound(0, 4 * edges_of),
        more={"edges": edges_of},
    )


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__, (SEEDS,)).parse_args(argv)
    args.problems = args.problems or list(GRAPHS)
    harness.run("sampling", cases, tuple(PEERS), args, (SEEDS,))


if __name__ == "__main__":
    main()
