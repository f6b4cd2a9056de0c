# SPDX-License-Identifier: Apache-2.0
"""Measures training steps: time, bytes held, peak, and the effect of folding on the gradient."""

import contextlib
import gc
import statistics
import time
import typing
from collections.abc import Callable

import torch
from figures import Cost
from models import Workload

MIB = 1 << 20
WARMUPS, STEPS = 3, 8
BUSY_CYCLES = 700_000_000  # a third of a second
LEARNING_RATE = 1e-4  # keeps the weights near their random start

Scope = Callable[[], contextlib.AbstractContextManager]  # what a forward runs in


def on_gpu(workload: Workload) -> bool:
    return next(workload.model.parameters()).is_cuda


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()  # what save_on_cpu has pinned
        torch.cuda.reset_peak_memory_stats()


def step(workload: Workload, optimizer: torch.optim.Optimizer, scope: Scope) -> Cost:
    """One step. On a CPU, bytes are not known and come back as NaN."""
    gpu = on_gpu(workload)
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    with scope():
        loss = workload.loss()
    held = (torch.cuda.memory_allocated() - before) / MIB if gpu else float("nan")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if gpu:
        torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - start) * 1e3
    peak = torch.cuda.max_memory_allocated() / MIB if gpu else float("nan")
    return Cost(milliseconds, held, peak)


def steps(workload: Workload, scope: Scope, warmups: int = WARMUPS, count: int = STEPS) -> Cost:
    """Median time, most held and highest peak of `count` steps after `warmups`."""
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=LEARNING_RATE)
    optimizer.zero_grad(set_to_none=True)
    costs = [step(workload, optimizer, scope) for _ in range(warmups + count)][warmups:]
    return Cost(
        statistics.median(cost.step_ms for cost in costs),
        max(cost.held_mib for cost in costs),
        max(cost.peak_mib for cost in costs),
    )


class Apart(typing.NamedTuple):
    """Milliseconds of one step: the GPU alone, and the host in a forward that waits for nothing."""

    host_forward: float
    gpu_forward: float
    gpu_backward: float


def apart(workload: Workload, scope: Scope, count: int = 4) -> Apart:
    """The best of `count` steps. The GPU is kept busy first, so that the host gets ahead of it."""
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=LEARNING_RATE)
    rows = []
    for _ in range(count):
        begin, forward, again, backward = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        start = time.perf_counter()
        with scope():
            loss = workload.loss()
        host = (time.perf_counter() - start) * 1e3
        forward.record()
        torch.cuda._sleep(BUSY_CYCLES)
        again.record()
        loss.backward()
        backward.record()
        torch.cuda.synchronize()
        rows.append((host, begin.elapsed_time(forward), again.elapsed_time(backward)))
        optimizer.zero_grad(set_to_none=True)
        del loss
    return Apart(*map(min, zip(*rows, strict=True)))


# ---- Against plain -----------------------------------------------------------------------------


class Faith(typing.NamedTuple):
    loss: float
    plain_loss: float
    loss_noise: float  # plain's loss against itself, relative
    gradient_error: float  # norm of the difference / norm of plain's, over all parameters
    gradient_noise: float  # the same for plain against itself: the effect of atomics


def gradients(workload: Workload, scope: Scope) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(11)
    with scope():
        loss = workload.loss()
    loss.backward()
    parameters = [p for p in workload.model.parameters() if p.grad is not None]
    result = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return loss.item(), result


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The distance of `a` from `b`, relative to the norm of `b`."""
    if len(a) != len(b):
        return float("inf")
    difference = sum((x.double() - y.double()).square().sum() for x, y in zip(a, b, strict=True))
    return (difference / sum(y.double().square().sum() for y in b)).sqrt().item()


def faith(workload: Workload, scope: Scope) -> Faith:
    """Compares a folded step with plain ones at the same weights, batch and random numbers."""
    plain_loss, plain = gradients(workload, contextlib.nullcontext)
    again_loss, again = gradients(workload, contextlib.nullcontext)
    noise = distance(again, plain)
    del again
    loss, folded = gradients(workload, scope)
    return Faith(
        loss,
        plain_loss,
        abs(again_loss / plain_loss - 1),
        distance(folded, plain),
        noise,
    )


def forward_is_exact(result: Faith) -> bool:
    """Whether the loss is plain's: bitwise, or closely where plain's own varies between runs."""
    return abs(result.loss / result.plain_loss - 1) <= (1e-5 if result.loss_noise else 0.0)


# ---- Where the time goes -----------------------------------------------------------------------


def kernels(workload: Workload, scope: Scope) -> list[tuple[str, int, float]]:
    """Name, calls and milliseconds of each GPU kernel of one step (CPU operators without a GPU)."""
    gpu = on_gpu(workload)
    activity = torch.profiler.ProfilerActivity
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=LEARNING_RATE)
    with torch.profiler.profile(activities=[activity.CUDA if gpu else activity.CPU]) as profile:
        step(workload, optimizer, scope)
    found = [
        (event.key, event.count, event.self_device_time_total if gpu else event.self_cpu_time_total)
        for event in profile.key_averages()
        if not getattr(event, "is_user_annotation", False)  # spans kernels that are also listed
    ]
    rows = [(name, count, time / 1e3) for name, count, time in found if time > 0]
    return sorted(rows, key=lambda row: -row[2])
