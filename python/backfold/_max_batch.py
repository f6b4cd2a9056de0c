# SPDX-License-Identifier: Apache-2.0
"""The largest batch whose training step fits into memory."""

from __future__ import annotations

import gc
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from backfold import _C
from backfold._options import byte_count

# A controller measures at step 2, runs part of it again when step 3 begins, and has its first plan
# then: all of that has to fit, too.
WARMUPS, TIMED = 4, 4
MIB = 1 << 20

# What libraries call it that have no error of torch's for it.
OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class Candidate(NamedTuple):
    """A batch that was tried."""

    batch: int
    fits: bool
    peak_bytes: int | None  # None if memory ran out
    samples_per_second: float | None
    retries: int  # allocations of the timed steps that waited until cached memory was given back
    reserved_bytes: int | None  # the most that torch took from the GPU; None on a CPU
    steady_bytes: int | None  # peak of the timed steps alone, without measurement and first plan


class MaxBatch(NamedTuple):
    """The largest batch that fits, and all that were tried, in that order."""

    batch: int
    candidates: list[Candidate]

    def __str__(self) -> str:
        rows = [HEADING, *(row(candidate) for candidate in self.candidates)]
        return "\n".join([*rows, f"largest batch: {self.batch}"])


HEADING = f"{'batch':>9}{'peak, MiB':>12}{'samples/s':>12}"


def row(candidate: Candidate) -> str:
    line = f"{candidate.batch:>9,}"
    if candidate.peak_bytes is None:
        return line + f"{'out of memory':>14}"
    line += f"{candidate.peak_bytes / MIB:>12,.0f}{candidate.samples_per_second:>12,.1f}"
    if candidate.retries:
        line += f"  {candidate.retries} allocation retries"
    elif not candidate.fits:
        line += "  above the limit"
    return line


def max_batch(
    make_step: Callable[[int], Callable[[], Any]],
    peak: int | str | None = None,
    *,
    start: int = 8,
    multiple: int = 1,
    trials: int = 12,
    retries: bool = True,
    device: torch.device | str | None = None,
    quiet: bool = False,
) -> MaxBatch:
    """Finds the largest batch whose training step fits, and prints the speed of each that it tried.

    ``make_step(batch)`` returns a function that runs one whole step, from forward to the optimizer,
    on a batch of that size. Each trial runs eight such steps, which is enough for a controller's
    first measurement and plan, and then drops the function; whatever `make_step` built for it
    should go with it. Parameters that it shares between trials are trained.

    Args:
        make_step: called with a number of samples.
        peak: the most bytes that a step may take, as a number or a string like ``"14GiB"``: what
            torch allocates at any point on a GPU, resident memory of the whole process on a CPU.
            On a GPU it may be left out; then memory itself is the limit.
        start: the first batch to try.
        multiple: batches are multiples of this.
        trials: at most this many batches are tried.
        retries: False takes a batch for too large if torch's allocator runs out of memory in a
            steady step and gives back what it had cached: such steps work, but are slow.
        device: where steps run; the current GPU, or the CPU if there is none.
        quiet: True prints nothing.

    Raises ValueError if not even a batch of 1 fits.
    """
    if not callable(make_step):
        raise TypeError(f"make_step must be callable, got {type(make_step).__name__}")
    for name, value in (("start", start), ("multiple", multiple), ("trials", trials)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    if not isinstance(retries, bool):
        raise TypeError(f"retries must be True or False, got {retries!r}")
    limit = 0 if peak is None else byte_count("peak", peak)
    meter = _meter(device)
    if peak is None and not isinstance(meter, _Gpu):
        raise ValueError(
            "peak must be given for steps on a CPU: a process that takes all memory there is ended "
            "by the system"
        )
    search = _C.BatchSearch(start, multiple, limit, trials)
    candidates: list[Candidate] = []
    if not quiet:
        print(HEADING, flush=True)
    while (batch := search.next()) is not None:
        candidate = _try(make_step, batch, limit, meter)
        if candidate.retries and not retries:
            candidate = candidate._replace(fits=False)
        candidates.append(candidate)
        search.tried(batch, candidate.fits, candidate.peak_bytes or 0)
        if not quiet:
            print(row(candidate), flush=True)
    if search.largest is None:
        raise ValueError(_why_none(candidates[-1], peak))
    result = MaxBatch(search.largest, candidates)
    if not quiet:
        print(f"largest batch: {result.batch}", flush=True)
    return result


def _why_none(least: Candidate, peak: int | str | None) -> str:
    tried = f"a step with a batch of {least.batch}"
    if least.peak_bytes is None:
        return f"no batch fits: {tried} ran out of memory"
    if least.retries:
        return f"no batch fits: {tried} had to retry {least.retries} allocations"
    needed = f"{least.peak_bytes / MIB:,.0f} MiB"
    return f"no batch fits into peak={peak!r}: {tried} takes {needed}"


class _Gpu:
    """What torch allocates on a GPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def reset(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self.restart_peak()

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def retries(self) -> int:
        return torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)


class _Process:
    """Resident memory of this process, as Linux counts it."""

    STATUS, RESET = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")

    def reset(self) -> None:
        try:
            self.restart_peak()
            self.peak()
        except (OSError, StopIteration) as error:
            raise ValueError(
                f"peak cannot be measured on this system's CPU: {self.RESET} and VmHWM of "
                f"{self.STATUS} are needed ({error})"
            ) from error

    def restart_peak(self) -> None:
        self.RESET.write_text("5")  # of all that it can clear, the peak alone

    def wait(self) -> None:
        pass

    def peak(self) -> int:
        lines = self.STATUS.read_text().splitlines()
        kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
        return int(kibibytes) * 1024

    def reserved(self) -> None:
        return None

    def retries(self) -> int:
        return 0


def _meter(device: torch.device | str | None) -> _Gpu | _Process:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA GPU, got {str(device)!r}")
    return _Gpu(device) if device.type == "cuda" else _Process()


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def _try(
    make_step: Callable[[int], Callable[[], Any]], batch: int, limit: int, meter: _Gpu | _Process
) -> Candidate:
    gc.collect()
    meter.reset()
    try:
        timed = _run(make_step, batch, meter)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        # The frames of the traceback hold the step's tensors; they go when this block is left.
        timed = None
    if timed is None:
        gc.collect()
        return Candidate(batch, False, None, None, 0, None, None)
    peak = max(timed.first_peak, timed.steady_peak)
    fits = not limit or peak <= limit
    speed = batch * TIMED / timed.seconds
    return Candidate(batch, fits, peak, speed, timed.retries, timed.reserved, timed.steady_peak)


class _Timed(NamedTuple):
    seconds: float
    retries: int  # allocations that had to be tried again
    first_peak: int  # of the steps before them
    steady_peak: int
    reserved: int | None


def _run(
    make_step: Callable[[int], Callable[[], Any]], batch: int, meter: _Gpu | _Process
) -> _Timed:
    step = make_step(batch)
    if not callable(step):
        raise TypeError(f"make_step must return a function that runs a step, got {step!r}")
    for _ in range(WARMUPS):
        step()
    meter.wait()
    first, reserved = meter.peak(), meter.reserved()
    meter.restart_peak()
    retries, start = meter.retries(), time.perf_counter()
    for _ in range(TIMED):
        step()
    meter.wait()
    seconds = time.perf_counter() - start
    if reserved is not None:
        reserved = max(reserved, meter.reserved())
    return _Timed(seconds, meter.retries() - retries, first, meter.peak(), reserved)
