# SPDX-License-Identifier: Apache-2.0
"""A small transformer that learns to continue sequences, trained plain and folded side by side."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backfold._controller import Controller
from backfold._inspect import Observer
from backfold.cli._measure import Stopwatch, peak_bytes

WORDS, LENGTH, BATCH, WIDTH = 32, 64, 16, 128
WARM_UP = 5  # steps that are not timed; the plan is made in them
LAST = 5  # steps whose mean loss is reported
LONGEST = 20.0  # seconds after which no further step begins
SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "exact": {"bits": None},
    "4 bits": {"bits": 4},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.size(1), device=words.device)
        x = self.layers(self.words(words) + self.places, mask, is_causal=True)
        return self.head(x)


def batch(step: int, device: torch.device) -> Tensor:
    """Arithmetic sequences modulo the number of words, each with a start and a stride."""
    generator = torch.Generator().manual_seed(step)
    start, stride = torch.randint(1, WORDS, (2, BATCH, 1), generator=generator)
    return ((start + stride * torch.arange(LENGTH + 1)) % WORDS).to(device)


class Run:
    """One model, and how it is trained. All runs begin equally and see the same batches."""

    def __init__(self, options: dict[str, Any] | None, device: torch.device) -> None:
        self._device = device
        torch.manual_seed(0)
        self.model = Model().to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self._fold = None if options is None else Controller(self.model, **options)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def forward(self, step: int) -> Tensor:
        torch.manual_seed(step)  # for the dropout masks
        words = batch(step, self._device)
        return functional.cross_entropy(self.model(words[:, :-1]).transpose(1, 2), words[:, 1:])

    def step(self) -> None:
        with self._fold or contextlib.nullcontext():
            loss = self.forward(len(self.losses))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())

    def timed_step(self) -> None:
        watch = Stopwatch(self._device)
        with watch.running():
            self.step()
        self.seconds.append(watch.seconds)

    def held_bytes(self) -> int:
        if self._fold is not None:
            return self._fold.report().to_dict()["held_bytes"]
        observer = Observer(self.model)
        for _ in range(2):  # what is alive anyway is known after the first backward
            with observer:
                loss = self.forward(0)
            loss.backward()
        self._optimizer.zero_grad()
        return observer.report().to_dict()["held_bytes"]


@dataclass
class Result:
    setting: str
    held_bytes: int
    peak_bytes: int
    step_seconds: float
    loss: float
    steps: int


def train(device: torch.device, steps: int, tell: Callable[[], None]) -> list[Result]:
    """Trains all settings in turn, step by step, so that what slows the machine slows all alike.

    A slow machine trains for fewer steps.
    """
    start = time.perf_counter()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        runs = {name: Run(options, device) for name, options in SETTINGS.items()}
        for step in range(steps):
            if step > WARM_UP + LAST and time.perf_counter() - start > LONGEST:
                break
            for run in runs.values():
                run.timed_step()
            tell()
        return [
            Result(
                setting=name,
                steps=len(run.losses),
                loss=statistics.mean(run.losses[-LAST:]),
                step_seconds=statistics.median(run.seconds[WARM_UP:]),
                held_bytes=run.held_bytes(),
                peak_bytes=peak_bytes(run.step, device),
            )
            for name, run in runs.items()
        ]
