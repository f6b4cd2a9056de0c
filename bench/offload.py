# SPDX-License-Identifier: Apache-2.0
"""Training steps on a CPU that offload to a file: time, and bytes in memory and in the file.

    bench/run offload                 a transformer of 6 layers, 8 x 256 tokens of 256 features
    bench/run offload --layers 12     a deeper one
    bench/run offload --steps 20      more steps
    bench/run offload --tiny          one layer and one step, to check that it still runs

Each row is the median of the steps after the first three, all modes taking turns, so that whatever
else the machine does hits all of them. `exact` is bits=None, `stored` is derive=False. Bytes are
those of the report at the end of a block. TMPDIR says where the file is.
"""

import argparse
import contextlib
import statistics
import tempfile
import time

import backfold
import torch
from torch import nn

MIB = 1 << 20
MODES: dict[str, dict] = {
    "exact": {"bits": None},
    "exact, offload": {"bits": None, "offload": True},
    "exact, stored, offload": {"bits": None, "derive": False, "offload": True},
    "4 bits": {},
    "4 bits, offload": {"offload": True},
    "4 bits, stored, offload": {"derive": False, "offload": True},
}
WARMUPS = 3


def transformer(layers: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return model, torch.randn(8, 256, 256)


class Mode:
    """One way to train, on a model of its own."""

    def __init__(self, layers: int, options: dict | None):
        self.model, self.x = transformer(layers)
        self.fold = None if options is None else backfold.Controller(self.model, **options)
        self.times: list[float] = []
        self.held: list[int] = []
        self.offloaded: list[int] = []

    def step(self) -> None:
        start = time.perf_counter()
        with self.fold or contextlib.nullcontext():
            loss = self.model(self.x).square().mean()
        between = time.perf_counter()
        if self.fold is not None:
            report = self.fold.report().to_dict()
            self.held.append(report["held_bytes"])
            self.offloaded.append(report["offloaded_bytes"])
        asked = time.perf_counter() - between
        loss.backward()
        self.times.append(time.perf_counter() - start - asked)
        self.model.zero_grad()

    def row(self, name: str, plain: float) -> str:
        milliseconds = 1e3 * statistics.median(self.times[WARMUPS:])
        line = f"{name:24}{milliseconds:9.0f}{milliseconds / plain:9.2f}"
        if self.fold is None:
            return line
        sizes = [statistics.median(of[WARMUPS:]) / MIB for of in (self.held, self.offloaded)]
        return line + "".join(f"{size:12.1f}" for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench/run offload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="one layer and one step")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.layers = arguments.steps = 1
    plain = Mode(arguments.layers, None)
    modes = {name: Mode(arguments.layers, options) for name, options in MODES.items()}
    for _ in range(WARMUPS + arguments.steps):
        for mode in (plain, *modes.values()):
            mode.step()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {tempfile.gettempdir()}")
    print(f"{'':24}{'step ms':>9}{'/ plain':>9}{'held MiB':>12}{'file MiB':>12}")
    base = 1e3 * statistics.median(plain.times[WARMUPS:])
    print(plain.row("plain", base))
    for name, mode in modes.items():
        print(mode.row(name, base))


if __name__ == "__main__":
    main()
