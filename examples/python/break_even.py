# SPDX-License-Identifier: Apache-2.0
"""From which sizes on does folding pay on this machine? Single tensors, then whole training steps.

    python examples/python/break_even.py
    python examples/python/break_even.py --json FILE    also both tables, for the documents

The first table saves tensors of one size after the other and says what each costs plain and folded
to 4 bits. The second trains a transformer of four layers with Adam, at several widths and numbers
of tokens; its memory counts weights, gradients, the optimizer's state and the peak of a step.

Times on a CPU are processor time, which other programs disturb less; use OMP_NUM_THREADS=1.
"""

import argparse
import contextlib
import pathlib
import sys
import time
from collections.abc import Callable
from functools import partial

import backfold
import torch
from side_by_side import peak_bytes, wait_for
from torch import Tensor, nn

MIB = 1 << 20
PLAIN = contextlib.nullcontext()
SETTINGS = {"bits=None": {"bits": None}, "default": {}}
TENSORS = ["values", "bytes", "packet, bytes", "operation plain, us", "folded to 4 bits, us"]
TENSORS += ["folded / plain"]
STEPS = ["width", "tokens", "plain, MiB", "plain, ms", "memory, `bits=None`", "time, `bits=None`"]
STEPS += ["memory, default", "time, default"]


def chain(x: Tensor, length: int, block: contextlib.AbstractContextManager) -> None:
    """Forward and backward of operations that save one tensor each."""
    with block:
        y = x
        for _ in range(length):
            y = y.tanh()
    y.backward(x.detach())
    x.grad = None


def best_seconds(
    steps: dict[str, Callable[[], object]], repeats: int, device: str
) -> dict[str, float]:
    """The best time of each, measured in turn, so that other work on the machine slows all."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(repeats):
        for name, step in steps.items():
            start = clock()
            step()
            wait_for(device)
            best[name] = min(best[name], clock() - start)
    return best


def show_tensors(sizes: list[int], repeats: int, device: str) -> list[list[str]]:
    rows = []
    print("one saved tensor in fp32, forward and backward of its operation")
    print(f"{'elements':>12}{'bytes':>12}{'packet':>12}{'plain, us':>12}{'4 bits, us':>12}")
    for size in sizes:
        x = torch.randn(size, device=device, requires_grad=True)
        # Stored and at one width, so that each tensor is packed and unpacked.
        fold = backfold.Controller(bits=4, adaptive=False, derive=False, min_bytes=0)
        length = max(10, min(200, (1 << 22) // size))  # entering the block is shared by all
        blocks = {"plain": PLAIN, "fold": fold}
        steps = {name: partial(chain, x, length, block) for name, block in blocks.items()}
        times = best_seconds(steps, repeats, device)
        packet = backfold.pack(x.detach(), bits=4).nbytes
        plain_us, fold_us = (times[name] * 1e6 / length for name in blocks)
        cells = [f"{size:,}", f"{4 * size:,}", f"{packet:,}", f"{plain_us:,.1f}", f"{fold_us:,.1f}"]
        print("".join(f"{cell:>12}" for cell in cells))
        rows.append([*cells, f"{fold_us / plain_us:.2f}"])
    return rows


class Training:
    """A step of training, whose memory and time can be measured."""

    def __init__(self, width: int, tokens: int, device: str, options: dict | None) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, device=device)
        self.model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x = torch.randn(tokens // 128, 128, width, device=device)
        self.device = device
        self.fold = PLAIN if options is None else backfold.Controller(self.model, **options)

    def step(self) -> None:
        with self.fold:
            loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bytes(self) -> int:
        """Weights, the two moments of Adam, and the most that a step takes beside them."""
        weights = sum(p.nbytes for p in self.model.parameters())
        return 3 * weights + peak_bytes(self.step, self.device)


def show_steps(shapes: list[tuple[int, int]], repeats: int, device: str) -> list[list[str]]:
    rows = []
    print("\na step of a transformer, weights and optimizer included; memory and time / plain")
    print(f"{'':>32}{'bits=None':>18}{'default':>18}")
    print(f"{'width':>8}{'tokens':>8}{'MiB':>8}{'ms':>8}" + f"{'memory':>10}{'time':>8}" * 2)
    for width, tokens in shapes:
        settings = {"plain": None, **SETTINGS}
        runs = {
            name: Training(width, tokens, device, options) for name, options in settings.items()
        }
        for run in runs.values():
            for _ in range(4):  # the first plan is made in the third
                run.step()
        best = best_seconds({name: run.step for name, run in runs.items()}, repeats, device)
        size = {name: run.bytes() for name, run in runs.items()}
        cells = [f"{width:,}", f"{tokens:,}", f"{size['plain'] / MIB:,.1f}"]
        cells.append(f"{best['plain'] * 1e3:,.1f}")
        for name in SETTINGS:
            cells += [f"{size[name] / size['plain']:.2f}", f"{best[name] / best['plain']:.2f}"]
        widths = (8, 8, 8, 8, *(10, 8) * len(SETTINGS))
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
        rows.append(cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="two sizes of each, to try it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    chosen = parser.parse_args()
    sizes = [32, 128, 1024, 4096, 16384, 65536, 262144, 1048576]
    shapes = [(32, 1024), (64, 1024), (128, 1024), (256, 1024), (512, 1024)]
    shapes += [(256, tokens) for tokens in (128, 256, 512, 2048)]
    if chosen.tiny:
        sizes, shapes = [32, 4096], [(32, 128), (64, 256)]
    tensors = show_tensors(sizes, 10 * chosen.repeats, chosen.device)
    steps = show_steps(shapes, chosen.repeats, chosen.device)
    if chosen.json:
        benchmarks = pathlib.Path(__file__).resolve().parents[2] / "bench" / "workloads"
        sys.path.append(str(benchmarks))
        from results import Results

        results = Results("examples/python/break_even.py", chosen.json)
        results.add("tensors", TENSORS, tensors)
        results.add("steps", STEPS, steps)


if __name__ == "__main__":
    main()
