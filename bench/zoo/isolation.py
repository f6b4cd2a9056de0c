# SPDX-License-Identifier: Apache-2.0
"""Measures each architecture in its own process, so that a crash does not affect the others."""

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import time
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator

import torch
from errors import NotComparable, Task

MEASURED, NOT_BUILT, NOT_COMPARABLE, FAILED = "measured", "not built", "not comparable", "failed"


@dataclasses.dataclass
class Outcome:
    """Whether one architecture could be measured. What was found is added by those derived."""

    library: str
    name: str
    status: str = FAILED
    seconds: float = 0.0
    reason: str = ""


@dataclasses.dataclass
class Row(Outcome):
    """The errors of one architecture."""

    errors: list[float] = dataclasses.field(default_factory=list)  # by step
    bitwise: bool = False
    repeats: bool = False
    parameters: int = 0
    messages: list[str] = dataclasses.field(default_factory=list)

    @property
    def worst(self) -> float:
        return max(self.errors)


class Job(typing.NamedTuple):
    row: Outcome
    build: Callable[[str], Task]


# Its result's attributes become the row's.
Measure = Callable[[Task], object]


def shortened(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def seeded(job: Job) -> Task:
    torch.manual_seed(0)
    return job.build(job.row.name)


def in_child(job: Job, measure: Measure, gibibytes: float, quiet: bool, pipe: typing.Any) -> None:
    """Sends the row twice: before measuring, in case of a crash, and after."""
    torch.set_num_threads(1)
    limit = int(gibibytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    row = job.row
    try:
        row.status = NOT_BUILT
        task = seeded(job)
        row.status, row.reason = FAILED, "the process ended"
        pipe.send(row)
        row.reason = ""
        for name, value in vars(measure(task)).items():
            setattr(row, name, value)
        row.status = MEASURED
    except NotComparable as error:
        row.status, row.reason = NOT_COMPARABLE, shortened(error)
    except Exception as error:
        row.reason = shortened(error)
        if not quiet:
            traceback.print_exc()
    pipe.send(row)


class Child:
    def __init__(self, job: Job, arguments: tuple, timeout: float) -> None:
        context = multiprocessing.get_context("fork")  # the parent's imports are available at once
        self.row = dataclasses.replace(job.row, status=NOT_BUILT, reason="the process ended")
        self.pipe, other = context.Pipe(duplex=False)
        self.process = context.Process(target=in_child, args=(job, *arguments, other), daemon=True)
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self.process.start()
        other.close()

    def over(self) -> bool:
        """Whether there is nothing more to wait for; the row then has the outcome."""
        try:
            while self.pipe.poll():
                self.row = self.pipe.recv()
        except EOFError:
            self.process.join()
            if self.row.reason == "the process ended":
                self.row.reason += f" with {self.process.exitcode}"
        else:
            if time.monotonic() < self.deadline:
                return False
            self.process.kill()
            self.process.join()
            self.row.reason = f"no end after {self.deadline - self.began:.0f} s"
        self.row.seconds = time.monotonic() - self.began
        return True


def measured(
    jobs: Iterable[Job],
    measure: Measure,
    workers: int,
    timeout: float,
    gibibytes: float,
    quiet: bool = True,
) -> Iterator[typing.Any]:
    """Rows as they come, `workers` at a time."""
    waiting, running = list(jobs)[::-1], []
    sys.stdout.flush()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                arguments = (measure, gibibytes, quiet)
                running.append(Child(waiting.pop(), arguments, timeout))
            multiprocessing.connection.wait([child.pipe for child in running], timeout=1)
            for child in list(running):
                if child.over():
                    running.remove(child)
                    yield child.row
    finally:
        for child in running:
            child.process.kill()
