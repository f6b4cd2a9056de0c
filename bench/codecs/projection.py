#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a random projection costs beside the matrix multiply that it needs.

    bench/codecs/projection.py                a GPU
    bench/codecs/projection.py --device cpu   small tensors on a CPU

Packing is x P and the group quantizer on the result, unpacking the way back; each is compared with
the same product on a matrix that is already there. Medians of 20 calls.
"""

import argparse
import statistics
import sys
import time

import backfold
import torch
from backfold import codecs

RATIO, BITS = 8, 2
REPEATS = 20


def seconds(work, device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def measure(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(rows, columns, device=device, dtype=dtype)
    matrix = torch.randn(columns, columns // RATIO, device=device, dtype=dtype)
    projected = x @ matrix
    codec = codecs.Project(RATIO, BITS)
    packet = backfold.pack(x, codec=codec)
    forward = seconds(lambda: x @ matrix, device)
    back = seconds(lambda: projected @ matrix.t(), device)
    pack = seconds(lambda: backfold.pack(x, codec=codec), device)
    unpack = seconds(packet.unpack, device)
    print(
        f"{rows} x {columns} {str(dtype).removeprefix('torch.'):>8}: pack {pack * 1e6:8.0f} us, "
        f"{pack / forward:.2f} of the product; unpack {unpack * 1e6:8.0f} us, {unpack / back:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default="cuda")
    device = parser.parse_args().device
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("bench/codecs/projection.py: there is no GPU; --device cpu runs on the CPU")
    sizes = [(1 << 20, 256), (1 << 17, 1024), (1 << 16, 4096)]
    if device.type == "cpu":
        sizes = [(1 << 13, 256), (1 << 11, 1024)]
    for dtype in (torch.float32, torch.bfloat16):
        for rows, columns in sizes:
            measure(rows, columns, dtype, device)


if __name__ == "__main__":
    main()
