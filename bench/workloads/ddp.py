# SPDX-License-Identifier: Apache-2.0
"""What planning together costs the processes of DistributedDataParallel.

    bench/run ddp                       two GPUs with NCCL if there are, or else the CPU with gloo
    bench/run ddp --processes 4 --steps 400
    bench/run ddp --tiny                a few steps of a tiny model, to check that it all still runs

Each process trains a transformer for 200 steps, probes at steps 2 and 100, on batches of its own.
`planning` is the time in which processes exchange what they measured and plan, which includes
waiting for the slowest of them; `probes` is the time in which the model is run again, which a
single process takes as well. Both are shares of the time of all steps, the largest of any process.
"""

import argparse
import datetime
import os
import pathlib
import sys
import tempfile
import time

import backfold
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

MOST_SHARE = 0.005  # of the time of all steps, for planning
PLANNING = ("resolve_turn", "begin_turn", "finish_turn")


class Timed:
    """A controller's core whose calls are timed, by name."""

    def __init__(self, core: object) -> None:
        self._core = core
        self.seconds: dict[str, float] = {}

    def __getattr__(self, name: str) -> object:
        found = getattr(self._core, name)
        if name not in (*PLANNING, "calibrate"):
            return found

        def timed(*args: object) -> object:
            start = time.perf_counter()
            try:
                return found(*args)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return timed


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(words)))


def process(rank: int, arguments: argparse.Namespace, store: str, results: object) -> None:
    on_gpus = torch.cuda.device_count() >= arguments.processes
    if not on_gpus:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.processes))
    distributed.init_process_group(
        "nccl" if on_gpus else "gloo",
        store=distributed.FileStore(store, arguments.processes),
        rank=rank,
        world_size=arguments.processes,
        timeout=datetime.timedelta(minutes=5),
    )
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    width, layers, words = (64, 2, 128) if arguments.tiny else (256, 4, 512)
    rows, length = (4, 16) if arguments.tiny else (8, 128)
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer(width, layers, words).to(device))
    fold = backfold.Controller(model, bits=4, min_bytes=0 if arguments.tiny else 16384)
    timed = fold._probes._core = Timed(fold._core)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank + 1)
    start = 0.0
    for step in range(arguments.steps + 1):
        if step == 1:  # the first one warms up
            timed.seconds.clear()
            start = time.perf_counter()
        batch = torch.randint(words, (rows, length), device=device)
        with fold:
            loss = functional.cross_entropy(
                model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if on_gpus:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    results.put(
        {
            "seconds": seconds,
            "planning": sum(timed.seconds.get(name, 0.0) for name in PLANNING),
            "probes": timed.seconds.get("calibrate", 0.0),
            "sites": len(fold.plan()["sites"]),
            "device": "GPU, NCCL" if on_gpus else "CPU, gloo",
        }
    )
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.processes < 2 or arguments.steps < 4:
        parser.error("--processes must be at least 2, and --steps at least 4")
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        torch.multiprocessing.spawn(
            process, (arguments, store, results), nprocs=arguments.processes
        )
    found = [results.get() for _ in range(arguments.processes)]
    share = max(one["planning"] / one["seconds"] for one in found)
    probes = max(one["probes"] / one["seconds"] for one in found)
    seconds = max(one["seconds"] for one in found)
    print(
        f"{arguments.processes} processes, {found[0]['device']}: {arguments.steps} steps of "
        f"{1e3 * seconds / arguments.steps:.1f} ms, {found[0]['sites']} places planned"
    )
    print(f"  planning {100 * share:.3f}% of the time (the target is {100 * MOST_SHARE}%)")
    print(f"  probes   {100 * probes:.2f}%")
    sys.exit(share > MOST_SHARE and not arguments.tiny)


if __name__ == "__main__":
    main()
