# SPDX-License-Identifier: Apache-2.0
"""Training tasks on CIFAR-10: a small ResNet from scratch, the pretrained EfficientNet-Lite0."""

import pathlib
from collections.abc import Iterator

import torch
from datasets import Images, cifar10, normalised
from networks import ResNet18, efficientnet
from torch import Tensor, nn
from torch.nn import functional
from training import ACCURACY, Size, Training, moved_to, with_adamw


def evenly(images: Images, count: int) -> Images:
    """At most `count` of the images, evenly over the classes, by which they are ordered."""
    count = min(count, len(images.labels))
    chosen = torch.arange(count) * len(images.labels) // count
    return Images(images.pixels[chosen], images.labels[chosen])


class CifarTask:
    scale = ACCURACY
    seeds = 3
    min_bytes = 16384
    BATCH, EPOCHS, WIDTH = 128, 10, 32

    def __init__(self, data: pathlib.Path, device: str, size: Size):
        train, test = cifar10(data, "train"), cifar10(data, "test")
        count = min(size.examples or len(train.labels), len(train.labels))
        if count < self.BATCH:
            raise ValueError(f"--examples must be at least {self.BATCH}, a batch, got {count}")
        train, test = evenly(train, count), evenly(test, count)
        self.pixels, self.labels = train.pixels.to(device), train.labels.to(device)
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
            chosen, order = moved_to(self.device, order[: self.BATCH]), order[self.BATCH :]
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
        rows, columns = moved_to(self.device, rows), moved_to(self.device, columns)
        moved = padded[image, :, rows[:, :, None], columns[:, None, :]]  # channels come last
        return moved.permute(0, 3, 1, 2).contiguous()

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        return model(images)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self.logits(model, images), labels)

    def score(self, model: nn.Module) -> float:
        right = 0
        for images, labels in zip(*(part.split(500) for part in self.test), strict=True):
            right += (self.logits(model, images).argmax(dim=1) == labels).sum().item()
        return 100 * right / len(self.test[1])


class EfficientNetTask(CifarTask):
    """Images are enlarged: the network was trained on larger ones."""

    EPOCHS, PIXELS = 1, 64

    def __init__(self, data: pathlib.Path, device: str, size: Size):
        efficientnet()  # says at once what is missing
        super().__init__(data, device, size)
        self.title = (
            f"EfficientNet-Lite0, pretrained, on {len(self.labels):,} images of CIFAR-10 at "
            f"{self.PIXELS} pixels, {self.steps} steps of {self.BATCH}"
        )

    def training(self) -> Training:
        return with_adamw(efficientnet().to(self.device).train(), 1e-3, self.steps)

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        larger = functional.interpolate(images, size=self.PIXELS, mode="bilinear")
        return model(larger)
