#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cost of a random projection relative to the matrix multiply that it needs.

    bench/codecs/projection.py                a GPU
    bench/codecs/projection.py --device cpu   small tensors on a CPU

Packing is x P followed by the group quantizer, unpacking the reverse; each is compared with the
same product on a matrix that already exists.

On a GPU a round queues 20 calls between two events, as a training step does, so that host time only
counts where the GPU has to wait for it: a 20th of the median of 7 rounds, after one warm-up round.
The host's own time to queue a call is printed beside it. On a CPU: medians of 20 calls.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import backfold
import torch
from backfold import codecs

RATIO, BITS = 8, 2
REPEATS, ROUNDS = 20, 7


def queued(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds per call on the GPU and on the host."""
    device, host = [], []
    for _ in range(1 + ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        start = time.perf_counter()
        for _ in range(REPEATS):
            work()
        host.append((time.perf_counter() - start) / REPEATS)
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end) / 1e3 / REPEATS)
    return statistics.median(device[1:]), statistics.median(host[1:])


def called(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3 + REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def beside(name: str, work: Callable[[], object], product: Callable[[], object], cuda: bool) -> str:
    own, host = queued(work) if cuda else (called(work), None)
    alone = queued(product)[0] if cuda else called(product)
    on_host = "" if host is None else f" (host {host * 1e6:.0f} us)"
    return f"{name} {own * 1e6:8.1f} us, {own / alone:.2f} of the product{on_host}"


def measure(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(rows, columns, device=device, dtype=dtype)
    matrix = torch.randn(columns, columns // RATIO, device=device, dtype=dtype)
    projected = x @ matrix
    codec = codecs.Project(RATIO, BITS)
    packet = backfold.pack(x, codec=codec)
    cuda = device.type == "cuda"
    pack = beside("pack", lambda: backfold.pack(x, codec=codec), lambda: x @ matrix, cuda)
    unpack = beside("unpack", packet.unpack, lambda: projected @ matrix.t(), cuda)
    name = str(dtype).removeprefix("torch.")
    print(f"{rows} x {columns} {name:>8}: {pack}; {unpack}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default="cuda")
    device = parser.parse_args().device
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("bench/codecs/projection.py: torch sees no GPU here; --device cpu runs on the CPU")
    sizes = [(1 << 20, 256), (1 << 17, 1024), (1 << 16, 4096)]
    if device.type == "cpu":
        sizes = [(1 << 13, 256), (1 << 11, 1024)]
    for dtype in (torch.float32, torch.bfloat16):
        for rows, columns in sizes:
            measure(rows, columns, dtype, device)


if __name__ == "__main__":
    main()
