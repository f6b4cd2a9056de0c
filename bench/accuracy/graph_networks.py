# SPDX-License-Identifier: Apache-2.0
"""Graph networks in plain torch operators: attention, convolution, and deep convolution (GCNII)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def largest_arriving(scores: Tensor, target: Tensor, nodes: int) -> Tensor:
    """The largest score per node and head, over the edges that end there."""
    places = target[:, None].expand_as(scores)
    largest = scores.new_zeros(nodes, scores.shape[1])
    return largest.scatter_reduce(0, places, scores, "amax", include_self=False)


class GraphAttention(nn.Module):
    """One layer of attention from nodes to their neighbours."""

    def __init__(self, before: int, after: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project = nn.Linear(before, heads * after, bias=False)
        self.score_from = nn.Parameter(torch.empty(heads, after))
        self.score_to = nn.Parameter(torch.empty(heads, after))
        self.bias = nn.Parameter(torch.zeros(heads * after))
        for parameter in (self.project.weight, self.score_from, self.score_to):
            nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        x = functional.dropout(x, self.dropout, self.training)
        values = self.project(x).unflatten(1, (self.heads, -1))
        score_from = (values * self.score_from).sum(dim=-1)
        score_to = (values * self.score_to).sum(dim=-1)
        scores = functional.leaky_relu(score_from[source] + score_to[target], 0.2)
        weights = torch.exp(scores - largest_arriving(scores.detach(), target, len(x))[target])
        sums = torch.zeros_like(score_to).index_add(0, target, weights)
        shares = functional.dropout(weights / sums[target], self.dropout, self.training)
        messages = values[source] * shares.unsqueeze(-1)
        return torch.zeros_like(values).index_add(0, target, messages).flatten(1) + self.bias


class GraphAttentionNetwork(nn.Module):
    """Two layers, the first with eight heads of eight channels each."""

    def __init__(self, features: int, classes: int, dropout: float = 0.6):
        super().__init__()
        self.first = GraphAttention(features, 8, heads=8, dropout=dropout)
        self.second = GraphAttention(64, classes, heads=1, dropout=dropout)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(functional.elu(self.first(x, edges)), edges)


def mean_of_neighbours(values: Tensor, edges: Tensor) -> Tensor:
    """Means over neighbours, weighted by both degrees."""
    source, target = edges
    degrees = values.new_zeros(len(values)).index_add(0, target, values.new_ones(len(target)))
    weights = (degrees[source] * degrees[target]).rsqrt()
    messages = values[source] * weights.unsqueeze(-1)
    return torch.zeros_like(values).index_add(0, target, messages)


class GraphConvolution(nn.Module):
    """A linear layer, then means over neighbours."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.linear = nn.Linear(before, after, bias=False)
        self.bias = nn.Parameter(torch.zeros(after))
        nn.init.xavier_uniform_(self.linear.weight)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return mean_of_neighbours(self.linear(x), edges) + self.bias


class GraphConvolutionNetwork(nn.Module):
    """Two layers. Their backward reads the inputs of their linear layers."""

    def __init__(self, features: int, hidden: int, classes: int, dropout: float = 0.5):
        super().__init__()
        self.dropout = dropout
        self.first = GraphConvolution(features, hidden)
        self.second = GraphConvolution(hidden, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = functional.dropout(x, self.dropout, self.training)
        x = functional.relu(self.first(x, edges))
        return self.second(functional.dropout(x, self.dropout, self.training), edges)


class DeepGraphConvolutionNetwork(nn.Module):
    """GCNII: in each layer a share of the first features, and a product close to the identity.

    Layer l of `layers` computes relu((1 - b) h + b h W) with b = log(1 + strength / l) and h =
    (1 - alpha) mean_of_neighbours(x) + alpha first.
    """

    def __init__(self, features: int, hidden: int, classes: int, layers: int, dropout: float = 0.6):
        super().__init__()
        self.dropout, self.alpha, self.strength = dropout, 0.1, 0.5
        self.enter = nn.Linear(features, hidden)
        self.products = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.leave = nn.Linear(hidden, classes)

    def dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = first = functional.relu(self.enter(self.dropped(x)))
        for place, product in enumerate(self.products, start=1):
            share = math.log(1 + self.strength / place)
            mixed = (1 - self.alpha) * mean_of_neighbours(self.dropped(x), edges)
            mixed = mixed + self.alpha * first
            x = functional.relu((1 - share) * mixed + share * product(mixed))
        return self.leave(self.dropped(x))
