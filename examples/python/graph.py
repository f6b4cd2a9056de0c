# SPDX-License-Identifier: Apache-2.0
"""Trains a graph network of torch-geometric on one large graph, with folded activations.

    python examples/python/graph.py

The graph has communities, and the network finds them from noisy features and edges. A graph is not
a batch that could be cut, so that probes run the whole of it again.
"""

import argparse
import sys

import backfold
import torch
from torch.nn import functional

try:
    from torch_geometric.nn import GCN
    from torch_geometric.utils import erdos_renyi_graph
except ImportError:
    sys.exit("this example needs torch-geometric: pip install torch-geometric")

COMMUNITIES, FEATURES = 8, 64


def graph(nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, edges and communities: two edges in three stay inside a community."""
    community = torch.randint(COMMUNITIES, (nodes,))
    edges = erdos_renyi_graph(nodes, min(24 / nodes, 1.0))
    inside = community[edges[0]] == community[edges[1]]
    edges = edges[:, inside | (torch.rand(edges.shape[1]) < 1 / 14)]
    centres = torch.randn(COMMUNITIES, FEATURES)
    return centres[community] + 4 * torch.randn(nodes, FEATURES), edges, community


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=5000)
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x, edges, community = (one.to(device) for one in graph(chosen.nodes))
    model = GCN(FEATURES, 128, 3, COMMUNITIES, dropout=0.2, norm="layer_norm").to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    fold = backfold.attach(model, bits=4)

    for step in range(chosen.steps):
        loss = functional.cross_entropy(model(x, edges), community)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == chosen.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    report = fold.report().to_dict()
    print(f"held {report['held_bytes']:,} of {report['unique_bytes']:,} bytes")


if __name__ == "__main__":
    main()
