# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a piece of work."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Adds up the time of its blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wait_for(self._device)
        start = time.perf_counter()
        yield
        wait_for(self._device)
        self.seconds += time.perf_counter() - start


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that torch had allocated at any point of the work, beyond those before it.

    On the CPU torch keeps no such count, but its profiler sees every allocation and release.
    """
    if device.type == "cuda":
        wait_for(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        wait_for(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler writes to the terminal
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in changes), initial=0))
