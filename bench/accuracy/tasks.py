# SPDX-License-Identifier: Apache-2.0
"""The training tasks: two graph networks on Cora, a small ResNet on CIFAR-10, MiniLM on SST-2, a
character GPT on Shakespeare (the last two in text_tasks.py).

A task holds its whole data set on the device. Batches depend on the seed alone, so all variants
of one seed start from the same weights, see the same batches and draw the same dropout masks.
"""

import pathlib
from collections.abc import Iterator

import torch
from datasets import cifar10, cora, normalised
from networks import GraphAttentionNetwork, GraphConvolutionNetwork, ResNet18
from text_tasks import GptTask, Sst2Task
from torch import Tensor, nn
from torch.nn import functional
from training import ACCURACY, Size, Task, Training


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


class CifarTask:
    scale = ACCURACY
    seeds = 3
    min_bytes = 16384
    BATCH, EPOCHS, WIDTH = 128, 10, 32

    def __init__(self, data: pathlib.Path, device: str, size: Size):
        train, test = cifar10(data, "train"), cifar10(data, "test")
        count = min(size.images or len(train.labels), len(train.labels))
        if count < self.BATCH:
            raise ValueError(f"--images must be at least {self.BATCH}, a batch, got {count}")
        chosen = torch.arange(count) * len(train.labels) // count  # evenly over the classes
        self.pixels, self.labels = train.pixels[chosen].to(device), train.labels[chosen].to(device)
        self.test = normalised(test.pixels.to(device)), test.labels.to(device)
        self.width = size.width or self.WIDTH
        self.steps = size.steps or (size.epochs or self.EPOCHS) * (count // self.BATCH)
        self.title = (
            f"ResNet-18 of {self.width} channels on {count:,} images of CIFAR-10, "
            f"{self.steps * self.BATCH / count:.1f} epochs"
        )
        self.device = device

    def training(self) -> Training:
        model = ResNet18(self.width).to(self.device)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=self.steps)
        return Training(model, optimizer, schedule)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(self.steps):
            if len(order) < self.BATCH:  # the rest of an epoch is dropped
                order = torch.randperm(len(self.labels), generator=generator)
            chosen, order = order[: self.BATCH].to(self.device), order[self.BATCH :]
            yield normalised(self.moved(self.pixels[chosen], generator)), self.labels[chosen]

    def moved(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Each image shifted by up to four pixels, and mirrored or not."""
        count, _, _, size = pixels.shape
        draw = torch.randint(0, 9, (count, 2), generator=generator)
        mirror = torch.randint(0, 2, (count, 1), generator=generator).bool()
        line = torch.arange(size)
        rows = draw[:, :1] + line
        columns = draw[:, 1:] + torch.where(mirror, line.flip(0), line)
        padded = functional.pad(pixels, (4, 4, 4, 4))
        image = torch.arange(count, device=self.device)[:, None, None]
        rows, columns = rows.to(self.device), columns.to(self.device)
        moved = padded[image, :, rows[:, :, None], columns[:, None, :]]  # channels come last
        return moved.permute(0, 3, 1, 2).contiguous()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def score(self, model: nn.Module) -> float:
        right = 0
        for images, labels in zip(*(part.split(500) for part in self.test), strict=True):
            right += (model(images).argmax(dim=1) == labels).sum().item()
        return 100 * right / len(self.test[1])


def build(name: str, data: pathlib.Path, device: str, size: Size, weights) -> Task:
    if name == "cifar":
        return CifarTask(data, device, size)
    if size != Size(size.steps, width=size.width if name == "gpt" else None):
        raise ValueError(f"--epochs, --width and --images are not for {name}")
    if name == "gpt":
        return GptTask(data, device, size)
    if name == "sst2":
        return Sst2Task(data, device, size.steps, weights)
    return (GcnTask if name == "gcn" else CoraTask)(data, device, size.steps)


NAMES = ["cora", "gcn", "cifar", "sst2", "gpt"]
