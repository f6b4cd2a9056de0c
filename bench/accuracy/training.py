# SPDX-License-Identifier: Apache-2.0
"""What all training tasks have in common."""

import contextlib
import typing
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Size(typing.NamedTuple):
    """Size of a training run where it differs from the task's own."""

    steps: int | None = None
    epochs: int | None = None  # of images
    width: int | None = None  # of cifar and gpt
    examples: int | None = None  # to train on, and at most to test on; of images and sentences


class Training(typing.NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler


class Scale(typing.NamedTuple):
    """What a task's score is."""

    name: str
    decimals: int


ACCURACY = Scale("accuracy, %", 2)


def with_adamw(model: nn.Module, rate: float, steps: int) -> Training:
    """The rate rises for a tenth of the steps, then falls in a line."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    warm_up = max(steps // 10, 1)

    def factor(step: int) -> float:
        return min((step + 1) / warm_up, (steps - step) / (steps - warm_up + 1))

    return Training(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


def moved_to(device: str, indices: Tensor) -> Tensor:
    """A small tensor of the host on the device. The host does not wait for the device's work, which
    several processes on one GPU would pay for by a turn of each of the others."""
    return indices.to(device, non_blocking=True)


def step(
    task: "Task", training: Training, fold: contextlib.AbstractContextManager, batch: typing.Any
) -> Tensor:
    """One step of training, with its forward in `fold`. Returns the loss."""
    with fold:
        loss = task.loss(training.model, batch)
    loss.backward()
    training.optimizer.step()
    training.schedule.step()
    training.optimizer.zero_grad()
    return loss.detach()


class Task(typing.Protocol):
    title: str
    scale: Scale
    seeds: int  # how many, by default
    steps: int  # of one training
    min_bytes: int  # of a tensor that is folded

    def training(self) -> Training: ...
    def batches(self, seed: int) -> Iterator[typing.Any]: ...
    def loss(self, model: nn.Module, batch: typing.Any) -> Tensor: ...
    def score(self, model: nn.Module) -> float: ...  # on held-out data
