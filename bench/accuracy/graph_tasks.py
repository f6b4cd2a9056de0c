# SPDX-License-Identifier: Apache-2.0
"""Training tasks on the citation graph Cora: attention, convolution, and deep convolution."""

import pathlib
from collections.abc import Iterator

import torch
from datasets import cora
from graph_networks import (
    DeepGraphConvolutionNetwork,
    GraphAttentionNetwork,
    GraphConvolutionNetwork,
)
from torch import Tensor, nn
from torch.nn import functional
from training import ACCURACY, Training


class CoraTask:
    """Full batches: a step is an epoch. Everything is small, so the smallest tensors count too."""

    scale = ACCURACY
    seeds = 5
    min_bytes = 0

    def __init__(self, data: pathlib.Path, device: str, steps: int | None):
        self.steps = steps or 150
        self.title = f"two-layer graph attention, 8 heads, on Cora, {self.steps} epochs"
        self.device = device
        graph = cora(data)
        self.graph = type(graph)(*(tensor.to(device) for tensor in graph))

    def training(self) -> Training:
        model = GraphAttentionNetwork(self.graph.features.shape[1], 7).to(self.device)
        return self.optimized(model)

    def optimized(self, model: nn.Module) -> Training:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        return Training(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))

    def batches(self, seed: int) -> Iterator[Tensor]:
        return iter([self.graph.train] * self.steps)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(self.graph.features, self.graph.edges)
        return functional.cross_entropy(logits[batch], self.graph.labels[batch])

    def score(self, model: nn.Module) -> float:
        test = self.graph.test
        found = model(self.graph.features, self.graph.edges)[test].argmax(dim=1)
        return 100 * (found == self.graph.labels[test]).float().mean().item()


class GcnTask(CoraTask):
    seeds = 3
    HIDDEN = 64

    def __init__(self, data: pathlib.Path, device: str, steps: int | None):
        super().__init__(data, device, steps)
        self.title = f"two-layer GCN, {self.HIDDEN} hidden, on Cora, {self.steps} epochs"

    def training(self) -> Training:
        features = self.graph.features.shape[1]
        return self.optimized(GraphConvolutionNetwork(features, self.HIDDEN, 7).to(self.device))


class GcniiTask(CoraTask):
    HIDDEN, LAYERS = 64, 16

    def __init__(self, data: pathlib.Path, device: str, steps: int | None):
        super().__init__(data, device, steps)
        self.title = (
            f"GCNII of {self.LAYERS} layers, {self.HIDDEN} hidden, on Cora, {self.steps} epochs"
        )

    def training(self) -> Training:
        features = self.graph.features.shape[1]
        model = DeepGraphConvolutionNetwork(features, self.HIDDEN, 7, self.LAYERS)
        return self.optimized(model.to(self.device))
