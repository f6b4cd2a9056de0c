# SPDX-License-Identifier: Apache-2.0
"""Complete training runs: one of them, many at a time, and the file that keeps their results."""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import time
import typing
from collections.abc import Callable, Iterator

import torch
import variants
from tqdm import tqdm
from training import Task, step


@dataclasses.dataclass
class Run:
    variant: str
    seed: int
    score: float  # on held-out data, see the task's scale
    loss: float  # mean over the last tenth of the steps
    seconds: float  # of the training
    kept: float  # bytes held / bytes that autograd alone would hold, in the last step


class Work(typing.NamedTuple):
    """A run that is still to be done."""

    load: Callable[[], Task]  # called once in each process that trains it
    task: str
    variant: str
    seed: int


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True


def train(task: Task, name: str, seed: int) -> Run:
    torch.manual_seed(seed)
    training = task.training()
    model = training.model
    fold = variants.scope(name, model, task.min_bytes, seed)
    losses = []
    start = time.perf_counter()
    bar = tqdm(task.batches(seed), f"{name}, seed {seed}", task.steps, leave=False, disable=None)
    for batch in bar:
        losses.append(step(task, training, fold, batch))
    last = torch.stack(losses[-max(task.steps // 10, 1) :]).mean().item()
    seconds = time.perf_counter() - start
    kept = 1.0
    if name != "plain":
        report = fold.report().to_dict()
        kept = report["held_bytes"] / (report["unique_bytes"] - report["alive_bytes"])
    model.eval()
    with torch.no_grad():
        score = task.score(model)
    return Run(name, seed, score, last, seconds, kept)


class Trainer:
    """Runs in a process of its own, in which a data set serves all runs of its task."""

    tasks: typing.ClassVar[dict[str, Task]] = {}

    @staticmethod
    def start(threads: int) -> None:
        torch.set_num_threads(threads)
        allow_tf32()
        os.environ["TQDM_DISABLE"] = "1"  # the bar over all runs is the parent's

    @classmethod
    def run(cls, work: Work) -> Run:
        if work.task not in cls.tasks:
            cls.tasks[work.task] = work.load()
        return train(cls.tasks[work.task], work.variant, work.seed)


def trained(todo: list[Work], jobs: int) -> Iterator[tuple[Work, Run | Exception]]:
    """All runs, `jobs` at a time, in the order in which they finish. A run may fail by itself."""
    threads = max(1, torch.get_num_threads() // jobs)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn, Trainer.start, (threads,)) as pool:
        running = {pool.submit(Trainer.run, work): work for work in todo}
        for future in concurrent.futures.as_completed(running):
            yield running[future], future.exception() or future.result()


def read(path: pathlib.Path, title: str) -> list[Run]:
    """The runs of an earlier call, if there was one."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if content.get("title") != title:
        raise ValueError(f"{path} holds {content.get('title')!r}, not {title!r}")
    return [Run(**run) for run in content["runs"]]


def write(path: pathlib.Path, content: dict[str, object], runs: list[Run]) -> None:
    """Replaces the file at once, so that an interrupted call leaves the old or the new one."""
    content["runs"] = [dataclasses.asdict(run) for run in runs]
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(path)
