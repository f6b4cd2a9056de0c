# SPDX-License-Identifier: Apache-2.0
"""How long codecs take, compared with a copy of the same tensor: all into new memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backfold import codecs
from backfold._packing import pack
from backfold.cli._measure import Stopwatch

# On a CPU, from 32 MiB on each new tensor is fresh memory of the system, which takes longer than
# filling it.
MEBIBYTES = {"cpu": (1, 4, 16), "cuda": (8, 64, 512)}
SHORTEST = 0.02  # seconds that one timing takes at least
TIMINGS = 3  # of which the best is reported

CODECS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "8 bits": (torch.float32, {"bits": 8}),
    "4 bits": (torch.float32, {"bits": 4}),
    "4 bits, bf16": (torch.bfloat16, {"bits": 4}),
    "4 bits, strided": (torch.float32, {"bits": 4, "layout": "strided"}),
    "4 bits, rotated": (torch.float32, {"bits": 4, "layout": "rotated"}),
    "2 bits": (torch.float32, {"bits": 2}),
    "4 bits per sample": (torch.float32, {"codec": codecs.Quantize(4, per_sample=True)}),
    "pool and residual": (torch.float32, {"codec": codecs.PoolResidual(8, 2)}),
    "running range": (torch.float32, {"codec": codecs.RunningRange(8)}),
    "GELU in 3 bits": (torch.float32, {"codec": codecs.FewBit(3), "op": "aten::gelu"}),
}


@dataclass
class Speed:
    codec: str
    source_bytes: int
    ratio: float  # bytes of the tensor / bytes of the packet
    copy_seconds: float
    pack_seconds: float
    unpack_seconds: float


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The best of a few timings, each of enough calls."""
    work()
    calls, best = 1, float("inf")
    timings = 0
    while timings < TIMINGS:
        watch = Stopwatch(device)
        with watch.running():
            for _ in range(calls):
                work()
        if watch.seconds < SHORTEST and calls < 1 << 16:
            calls *= 2
            continue
        best = min(best, watch.seconds / calls)
        timings += 1
    return best


def measure(name: str, mebibytes: int, device: torch.device) -> Speed:
    dtype, options = CODECS[name]
    elements = (mebibytes << 20) // dtype.itemsize
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(
        16, elements // (16 * 64 * 32), 64, 32, device=device, generator=generator
    ).to(dtype)
    packet = pack(source, **options)
    return Speed(
        codec=name,
        source_bytes=packet.source_nbytes,
        ratio=packet.source_nbytes / packet.nbytes,
        copy_seconds=seconds_of(source.clone, device),
        pack_seconds=seconds_of(lambda: pack(source, **options), device),
        unpack_seconds=seconds_of(packet.unpack, device),
    )
