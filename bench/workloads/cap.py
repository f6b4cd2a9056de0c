# SPDX-License-Identifier: Apache-2.0
"""Largest batches in memory that is nearly full, and how fast they train.

    bench/run cap                       ResNet-50, Swin-T and BERT-large (128 tokens), 16 GB
    bench/run cap resnet50 --gb 24      one of them, with more memory
    bench/run cap --modes plain exact fold
    bench/run cap --tiny                tiny sizes on the CPU, to check that it all still runs

The cap is torch's own (set_per_process_memory_fraction); the optimizer is Adam. Each mode runs in a
process of its own, so that none inherits the memory of another, and finds its largest batch by
backfold.max_batch. Reserved is the most that torch took from the GPU; retries are allocations of
steady steps that had to wait until cached memory was given back. The last columns are the fastest
batch without retries.
"""

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import pathlib

import backfold
import measure
import torch
from h200 import FOLDED
from models import CAPPED, checkpointed

MODES = ["plain", "checkpoint", *FOLDED]
START = {"resnet50": 64, "swin_t": 64, "bert": 16}


def largest(name: str, mode: str, gb: float, trials: int, tiny: bool) -> backfold.MaxBatch:
    """Tries batches of one mode in this process."""
    device = "cpu" if tiny else "cuda"
    limit = int(gb * 1e9)
    if not tiny:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))

    def make_step(batch: int):
        torch.manual_seed(7)
        with torch.device(device):
            workload = CAPPED[name](tiny, batch)
        optimizer = torch.optim.Adam(workload.model.parameters(), lr=measure.LEARNING_RATE)
        scope = contextlib.nullcontext()
        if mode in FOLDED:
            scope = backfold.Controller(workload.model, **FOLDED[mode])

        def step() -> None:
            with checkpointed(workload) if mode == "checkpoint" else contextlib.nullcontext():
                with scope:
                    loss = workload.loss()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return backfold.max_batch(
        make_step,
        limit,
        start=2 if tiny else START[name],
        multiple=1 if tiny else 8,
        trials=2 if tiny else trials,
        device=device,
    )


def summary(mode: str, found: backfold.MaxBatch, plain: backfold.MaxBatch) -> str:
    """A row of the table: the largest batch, and the fastest without retries."""
    best = next(one for one in found.candidates if one.batch == found.batch)
    steady = [one for one in found.candidates if one.fits and not one.retries]
    fastest = max(steady or [best], key=lambda one: one.samples_per_second)
    reserved = "-" if best.reserved_bytes is None else f"{best.reserved_bytes / measure.MIB:,.0f}"
    return (
        f"  {mode:12}{best.batch:>7}{best.batch / plain.batch:>9.2f}"
        f"{best.samples_per_second:>11,.0f}{best.peak_bytes / measure.MIB:>11,.0f}{reserved:>11}"
        f"{best.retries:>9}{fastest.batch:>9}{fastest.samples_per_second:>11,.0f}"
    )


HEADING = (
    f"  {'':12}{'batch':>7}{'/ plain':>9}{'samples/s':>11}{'peak MiB':>11}{'reserved':>11}"
    f"{'retries':>9}{'fastest':>9}{'samples/s':>11}"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", choices=[[], *CAPPED], default=[])
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["plain", "checkpoint", "fold"]
    )
    parser.add_argument("--gb", type=float, default=16, help="of memory, 10^9 bytes each")
    parser.add_argument("--trials", type=int, default=12, help="batches to try for each mode")
    parser.add_argument("--json", type=pathlib.Path, help="also write all figures here")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --tiny runs on the CPU")
    modes = ["plain", *(mode for mode in arguments.modes if mode != "plain")]
    results: dict[str, dict[str, dict]] = {}
    for name in arguments.workloads or CAPPED:
        found: dict[str, backfold.MaxBatch] = {}
        for mode in modes:
            print(f"{name}, {mode}, {arguments.gb:g} GB", flush=True)
            with concurrent.futures.ProcessPoolExecutor(
                1, mp_context=multiprocessing.get_context("spawn")
            ) as pool:
                task = (name, mode, arguments.gb, arguments.trials, arguments.tiny)
                found[mode] = pool.submit(largest, *task).result()
        print(f"{name}, {arguments.gb:g} GB, Adam", HEADING, sep="\n")
        for mode, one in found.items():
            print(summary(mode, one, found["plain"]), flush=True)
        results[name] = {
            mode: {"batch": one.batch, "candidates": [c._asdict() for c in one.candidates]}
            for mode, one in found.items()
        }
        if arguments.json:  # after each workload, so that an interrupted run keeps its results
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
