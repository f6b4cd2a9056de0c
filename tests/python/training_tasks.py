# SPDX-License-Identifier: Apache-2.0
"""Small models of many kinds, each with batches to train on."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

WORDS, CLASSES = 30, 5


class Graph(nn.Module):
    """Attention over edges: gather, scatter softmax, index_add."""

    def __init__(self):
        super().__init__()
        self.project, self.score = nn.Linear(16, 32), nn.Linear(64, 1)
        self.read = nn.Linear(32, CLASSES)

    def forward(self, nodes, edges):
        h = functional.elu(self.project(nodes))
        source, target = edges
        ends = torch.cat([h[source], h.index_select(0, target)], dim=1)
        score = functional.leaky_relu(self.score(ends)).squeeze(1)
        zeros = score.new_zeros(len(nodes))
        highest = zeros.scatter_reduce(0, target, score, "amax", include_self=False)
        weight = (score - highest.gather(0, target)).exp()
        weight = weight / zeros.scatter_add(0, target, weight)[target]
        message = weight.unsqueeze(1) * h[source]
        return self.read(torch.zeros_like(h).index_add(0, target, message.to(h.dtype)))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 64)
        self.norm, self.read = nn.BatchNorm1d(64), nn.Linear(64, CLASSES)

    def forward(self, x):
        h = self.first(x).relu_()
        h = self.norm(self.second(h)).add_(1.0).mul_(0.5)
        h = functional.dropout(functional.hardtanh_(h), 0.2, training=True, inplace=True)
        return self.read(h.clamp_(-0.5, 0.9))


class Swish(torch.autograd.Function):
    """Saves an input and a result, and can be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        gate = x.sigmoid()
        ctx.save_for_backward(x, gate)
        ctx.scale = 1.0
        return x * gate

    @staticmethod
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        gate = x.sigmoid()
        return ctx.scale * gradient * gate * (1 + x * (1 - gate))


class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.read = nn.Linear(16, 64), nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.read(Swish.apply(Swish.apply(self.first(x))))


class Adapted(nn.Module):
    """Frozen weights with low-rank adapters."""

    def __init__(self):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(16, 4, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, 16, bias=False) for _ in range(3))
        self.read = nn.Linear(16, CLASSES)

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = functional.gelu(base(x) + up(down(x)))
        return self.read(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, num_layers=2, dropout=0.1, batch_first=True)
        self.gru, self.read = nn.GRU(24, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, words):
        return self.read(self.gru(self.lstm(self.words(words))[0])[0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 16)
        self.read = nn.Linear(16, WORDS, bias=False)
        self.read.weight = self.words.weight

    def forward(self, words):
        return self.read(functional.silu(self.mix(self.norm(self.words(words)))))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.LeakyReLU(),
        nn.AvgPool2d(2),
        nn.ReLU6(),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16 * 9, CLASSES),
    )


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 5))


def images(rng):
    return (torch.randn(6, 3, 12, 12, generator=rng),)


def rows(rng):
    return (torch.randn(12, 16, generator=rng),)


def words(rng):
    return (torch.randint(WORDS, (4, 11), generator=rng),)


def graph(rng):
    return torch.randn(20, 16, generator=rng), torch.randint(20, (2, 70), generator=rng)


@dataclasses.dataclass
class Task:
    model: Callable[[], nn.Module]
    batch: Callable
    kinds: set[str]  # some of what exact folding must have found after the last step
    toggled: str | None = None  # child whose requires_grad changes midway, twice


TASKS = {
    "cnn": Task(cnn, images, {"predicate", "geometry", "indices"}),
    "transformer": Task(transformer, words, {"indices"}),
    "rnn": Task(Recurrent, words, {"indices"}),
    "graph": Task(Graph, graph, {"geometry"}),
    "in-place": Task(InPlace, rows, {"predicate"}),
    "custom function": Task(CustomFunction, rows, set()),
    "adapters": Task(Adapted, rows, set()),
    "tied weights": Task(Tied, words, {"indices"}),
    "toggled": Task(CustomFunction, rows, set(), toggled="first"),
}
