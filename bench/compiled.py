#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step whose model is compiled, plain and folded, on a CPU.

Prints the most memory that forward allocates at any time, what it leaves allocated, and the most
that backward has, in MiB. Takes a few minutes, most of them to compile.

    bench/compiled.py [--backend inductor] [--bits 4]
"""

import argparse
import contextlib

import backfold
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function


class Block(nn.Module):
    """A block of a transformer, with fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


def measured(step) -> list[float]:
    """Peak of forward, held after it, peak of backward, in MiB."""
    for _ in range(2):
        step().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = step()
        with record_function("backward"):
            loss.backward()
    events = profiled.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == "backward")
    now, peaks, held = 0, [0, 0], 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() != "[memory]":
            continue
        now += event.nbytes()
        phase = event.start_ns() >= begin
        peaks[phase] = max(peaks[phase], now)
        held = held if phase else now
    return [bytes_ / 2**20 for bytes_ in (peaks[0], held, peaks[1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--bits", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(128, 4) for _ in range(6)])
    x = torch.randn(8, 128, 128)
    forward = torch.compile(lambda x: model(x).square().mean(), backend=options.backend)
    fold = backfold.Controller(model, bits=options.bits, adaptive=False)
    for name, block in (("plain", contextlib.nullcontext()), (f"{options.bits} bits", fold)):

        def step(block=block) -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            with block:
                return forward(x)

        found = " ".join(f"{value:8.1f}" for value in measured(step))
        print(f"{name:8} peak of forward, held, peak of backward, MiB: {found}", flush=True)


if __name__ == "__main__":
    main()
