# SPDX-License-Identifier: Apache-2.0
"""The training tasks: two graph networks on Cora, a small ResNet on CIFAR-10, MiniLM on SST-2.

A task holds its whole data set on the device. Batches depend on the seed alone, so all variants
of one seed start from the same weights, see the same batches and draw the same dropout masks.
"""

import pathlib
import typing
from collections.abc import Iterator

import torch
from datasets import cifar10, cora, normalised, sst2
from networks import GraphAttentionNetwork, GraphConvolutionNetwork, ResNet18, minilm
from torch import Tensor, nn
from torch.nn import functional


class Size(typing.NamedTuple):
    """Size of a training run where it differs from the task's own. The last three are for cifar."""

    steps: int | None = None
    epochs: int | None = None
    width: int | None = None
    images: int | None = None


class Training(typing.NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler


class Task(typing.Protocol):
    title: str
    seeds: int  # how many, by default
    steps: int  # of one training
    min_bytes: int  # of a tensor that is folded

    def training(self) -> Training: ...
    def batches(self, seed: int) -> Iterator[typing.Any]: ...
    def loss(self, model: nn.Module, batch: typing.Any) -> Tensor: ...
    def accuracy(self, model: nn.Module) -> float: ...


class CoraTask:
    """Full batches: a step is an epoch. Everything is small, so the smallest tensors count too."""

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

    def accuracy(self, model: nn.Module) -> float:
        test = self.graph.test
        found = model(self.graph.features, self.graph.edges)[test].argmax(dim=1)
        return (found == self.graph.labels[test]).float().mean().item()


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

    def accuracy(self, model: nn.Module) -> float:
        right = 0
        for images, labels in zip(*(part.split(500) for part in self.test), strict=True):
            right += (model(images).argmax(dim=1) == labels).sum().item()
        return right / len(self.test[1])


class Tokens(typing.NamedTuple):
    ids: Tensor  # [sentences, longest], on the device
    lengths: Tensor  # on the host, so that cutting a batch does not wait for the device
    labels: Tensor


class Sst2Task:
    seeds = 3
    min_bytes = 16384
    BATCH, LONGEST = 128, 64

    def __init__(
        self, data: pathlib.Path, device: str, steps: int | None, weights: pathlib.Path | None
    ):
        self.steps = steps or 400
        self.title = f"MiniLM-L6 on SST-2, {self.steps} steps of {self.BATCH} sentences"
        self.device, self.weights = device, weights
        tokenizer = minilm(weights).tokenizer
        self.train, self.dev = (self.tokens(data, split, tokenizer) for split in ("train", "dev"))

    def tokens(self, data: pathlib.Path, split: str, tokenizer: typing.Any) -> Tokens:
        sentences = sst2(data, split)
        encoded = tokenizer(sentences.texts, truncation=True, max_length=self.LONGEST)["input_ids"]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in encoded], batch_first=True)
        lengths = torch.tensor([len(row) for row in encoded])
        return Tokens(ids.to(self.device), lengths, torch.tensor(sentences.labels).to(self.device))

    def training(self) -> Training:
        model = minilm(self.weights).model.to(self.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
        warm_up = max(self.steps // 10, 1)

        def rate(step: int) -> float:
            return min((step + 1) / warm_up, (self.steps - step) / (self.steps - warm_up + 1))

        return Training(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate))

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Indices of sentences."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(self.steps):
            if len(order) < self.BATCH:
                order = torch.randperm(len(self.train.lengths), generator=generator)
            yield order[: self.BATCH]
            order = order[self.BATCH :]

    def logits(self, model: nn.Module, tokens: Tokens, chosen: Tensor) -> Tensor:
        lengths = tokens.lengths[chosen]
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths[:, None]
        ids = tokens.ids[chosen.to(self.device), :longest]
        return model(input_ids=ids, attention_mask=mask.long().to(self.device)).logits

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        labels = self.train.labels[batch.to(self.device)]
        return functional.cross_entropy(self.logits(model, self.train, batch), labels)

    def accuracy(self, model: nn.Module) -> float:
        right = 0
        for chosen in self.dev.lengths.argsort().split(256):  # similar lengths, little padding
            found = self.logits(model, self.dev, chosen).argmax(dim=1)
            right += (found == self.dev.labels[chosen.to(self.device)]).sum().item()
        return right / len(self.dev.lengths)


def build(name: str, data: pathlib.Path, device: str, size: Size, weights) -> Task:
    if name == "cifar":
        return CifarTask(data, device, size)
    if size != Size(steps=size.steps):
        raise ValueError(f"--epochs, --width and --images are for cifar, not for {name}")
    if name == "sst2":
        return Sst2Task(data, device, size.steps, weights)
    return (GcnTask if name == "gcn" else CoraTask)(data, device, size.steps)


NAMES = ["cora", "gcn", "cifar", "sst2"]
