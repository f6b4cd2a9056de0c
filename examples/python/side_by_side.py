# SPDX-License-Identifier: Apache-2.0
"""Trains the same model twice, plain and folded, and measures both.

The two runs start from the same parameters and see the same batches and dropout masks. They
alternate steps, so that whatever else the machine does slows both alike.
"""

import contextlib
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import backfold
import torch
from torch import Tensor, nn
from tqdm import tqdm

WARM_UP = 5  # steps excluded from the step time


class Task(Protocol):
    """A training task, fully determined by its seed."""

    name: str
    title: str
    steps: int
    device: str
    seed: int

    def model(self) -> nn.Module: ...
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...
    def batch(self, step: int) -> Any: ...
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...
    def score(self, model: nn.Module) -> float: ...
    def show(self, score: float) -> str: ...


@dataclass
class Result:
    """The outcome of one run."""

    losses: list[float]
    score: float
    held_bytes: int
    peak_bytes: int
    step_seconds: float
    report: Any  # backfold's, on the last step


class Run:
    """One model and its training, in torch alone."""

    def __init__(self, task: Task):
        self.task = task
        self.model = task.model()
        self.optimizer = task.optimizer(self.model)
        self.fold = contextlib.nullcontext()
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def forward(self, step: int) -> Tensor:
        torch.manual_seed(self.task.seed + step)  # for the dropout masks
        return self.task.loss(self.model, self.task.batch(step))

    def step(self, step: int) -> float:
        with self.fold:
            loss = self.forward(step)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def timed_step(self, step: int) -> None:
        start = time.perf_counter()
        self.losses.append(self.step(step))
        wait_for(self.task.device)
        self.seconds.append(time.perf_counter() - start)

    def held(self) -> tuple[Any, int]:
        """A report, and the bytes that autograd keeps between forward and backward."""
        report = backfold.inspect(lambda: self.forward(len(self.losses)), self.model)
        return report, report.to_dict()["unique_bytes"]

    def result(self) -> Result:
        """Scores the model, then measures its memory, which changes the model."""
        score = self.task.score(self.model)
        report, held_bytes = self.held()
        return Result(
            losses=self.losses,
            score=score,
            held_bytes=held_bytes,
            peak_bytes=peak_bytes(lambda: self.step(len(self.losses)), self.task.device),
            step_seconds=statistics.median(self.seconds[WARM_UP:] or self.seconds),
            report=report,
        )


class FoldedRun(Run):
    """The same, with what autograd saves folded to `bits` bits."""

    def __init__(self, task: Task, bits: int):
        super().__init__(task)
        self.fold = backfold.Controller(self.model, bits=bits, seed=task.seed)

    def held(self) -> tuple[Any, int]:
        report = self.fold.report()
        return report, report.to_dict()["held_bytes"]


def wait_for(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """The most bytes that torch had allocated at any point in a step, beyond those at its start.

    On the CPU torch keeps no such count, but its profiler sees every allocation and release.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler writes to the terminal
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate(event["args"]["Bytes"] for event in changes))


def train(task: Task, bits: int, steps: int) -> tuple[Result, Result]:
    """Trains plain and folded; returns the results in that order."""
    plain, folded = Run(task), FoldedRun(task, bits)
    with tqdm(range(steps), desc=task.title, unit="step", disable=None) as progress:
        for step in progress:
            plain.timed_step(step)
            folded.timed_step(step)
            losses = {"plain": plain.losses[-1], "folded": folded.losses[-1]}
            progress.set_postfix({name: f"{loss:.3f}" for name, loss in losses.items()})
    return plain.result(), folded.result()
