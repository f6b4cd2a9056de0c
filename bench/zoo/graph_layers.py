# SPDX-License-Identifier: Apache-2.0
"""Every layer of torch_geometric.nn.conv, and its basic models, between two linear layers.

Arguments are chosen by the names of required parameters, of the class and of `forward`.
"""

import inspect
import typing

import torch
from errors import Task
from torch import Tensor, nn

NODES, EDGES, WIDTH, RELATIONS = 128, 512, 32, 3
BASIC = ["GAT", "GCN", "GIN", "GraphSAGE", "PNA", "EdgeCNN"]


def perceptron(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Linear(before, WIDTH), nn.ReLU(), nn.Linear(WIDTH, after))


def degrees(edges: Tensor) -> Tensor:
    """Histogram of node degrees."""
    return torch.bincount(torch.bincount(edges[1], minlength=NODES))


def data() -> dict[str, typing.Any]:
    """What `forward` may ask for, by parameter name."""
    edges = torch.randint(0, NODES, (2, EDGES))
    positions = torch.randn(NODES, 3)
    return {
        "edge_index": edges,
        "hyperedge_index": edges,
        "pos": positions,
        "normal": nn.functional.normalize(torch.randn(NODES, 3), dim=1),
        "edge_attr": torch.rand(EDGES, 2),
        "edge_weight": torch.rand(EDGES),
        "edge_type": torch.randint(0, RELATIONS, (EDGES,)),
        "pos_edge_index": edges,
        "neg_edge_index": torch.randint(0, NODES, (2, EDGES)),
        "batch": torch.arange(NODES) // (NODES // 2),
        "x_0": torch.randn(NODES, WIDTH),
        "node_type": torch.randint(0, RELATIONS, (NODES,)),
    }


def arguments(edges: Tensor) -> dict[str, typing.Any]:
    """What a layer may ask for, by parameter name."""
    import torch_geometric.nn

    return {
        "in_channels": WIDTH,
        "out_channels": WIDTH,
        "channels": WIDTH,
        "hidden_channels": WIDTH,
        "dim": 2,
        "edge_dim": 2,
        "heads": 2,
        "kernel_size": 3,
        "K": 2,
        "k": 4,
        "num_layers": 2,
        "num_relations": RELATIONS,
        "num_node_types": RELATIONS,
        "num_edge_types": RELATIONS,
        "edge_type_emb_dim": 4,
        "edge_attr_emb_dim": 4,
        "filter_size": 2,
        "aggregators": ["mean", "max", "std"],
        "scalers": ["identity", "amplification"],
        "deg": degrees(edges),
        "first_aggr": True,
        "space_dimensions": 4,
        "propagate_dimensions": 8,
        "alpha": 0.1,
        "conv": torch_geometric.nn.GCNConv(WIDTH, WIDTH),
        "mlp_h": perceptron(WIDTH, 3),
        "mlp_f": perceptron(WIDTH + 3, WIDTH),
        "mlp_g": perceptron(WIDTH, WIDTH),
    }


# The network that a layer takes, by layer name: input width, output width.
NETWORKS = {
    "DynamicEdgeConv": (2 * WIDTH, WIDTH),
    "EdgeConv": (2 * WIDTH, WIDTH),
    "GINConv": (WIDTH, WIDTH),
    "GINEConv": (WIDTH, WIDTH),
    "NNConv": (2, WIDTH * WIDTH),
}
# Optional arguments that some layers are given.
OPTIONS: dict[str, dict[str, typing.Any]] = {
    "GINEConv": {"edge_dim": 2},
    "PPFConv": {"local_nn": perceptron(WIDTH + 4, WIDTH)},
}
READ_TYPES = {"RGCNConv", "FastRGCNConv", "RGATConv"}
READ_EDGES = {"GINEConv", "GMMConv", "NNConv", "PDNConv", "SplineConv", "HEATConv"}


def names() -> list[str]:
    from torch_geometric.nn import conv

    # Without parameters, or with integer inputs, or CUDA only.
    others = {"MessagePassing", "SimpleConv", "HeteroConv", "FusedGATConv", "WLConv"}
    layers = [n for n in conv.__all__ if n not in others and not n.startswith("CuGraph")]
    return [*layers, *BASIC]


def required(call: typing.Callable[..., object]) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


class Between(nn.Module):
    """Makes the layer's input an activation, and normalises and uses its output."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.before = nn.Linear(16, WIDTH)
        self.layer = layer
        self.after = nn.LazyLinear(8)
        self.norm = nn.LazyBatchNorm1d()

    def forward(self, x: Tensor, given: dict[str, typing.Any]) -> Tensor:
        y = self.layer(self.before(x).tanh(), **given)
        y = y[0] if isinstance(y, tuple) else y
        return self.after(self.norm(y.flatten(1)).relu())


def build(name: str) -> Task:
    import torch_geometric.nn

    offered = data()
    known = arguments(offered["edge_index"])
    if name in NETWORKS:
        known["nn"] = perceptron(*NETWORKS[name])
    kind = getattr(torch_geometric.nn, name)
    wanted = [n for n in required(kind.__init__) if n != "self"]
    asked = {n: known[n] for n in wanted if n in known}
    if name == "PNA":
        asked |= {n: known[n] for n in ("aggregators", "scalers", "deg")}
    layer = kind(**asked, **OPTIONS.get(name, {}))
    given = {n: offered[n] for n in required(layer.forward) if n in offered}
    given |= {"edge_type": offered["edge_type"]} if name in READ_TYPES else {}
    given |= {"edge_attr": offered["edge_attr"]} if name in READ_EDGES else {}
    model = Between(layer).train()
    x = torch.randn(NODES, 16)
    model(x, given)  # initialises lazy layers
    return Task(model, lambda: model(x, given))
