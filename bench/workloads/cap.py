# SPDX-License-Identifier: Apache-2.0
"""Largest batches in memory that is nearly full, and how fast they train.

    bench/run cap                       ResNet-50, Swin-T and BERT-large (128 tokens), 16 GB
    bench/run cap --expandable          folded modes also with defragment=True
    bench/run cap resnet50 --gb 24      one of them, with more memory
    bench/run cap --modes plain exact fold
    bench/run cap bert --modes offload checkpoint checkpoint_fold
    bench/run cap --tiny                tiny sizes on the CPU, to check that it all still runs

The cap is torch's own (set_per_process_memory_fraction); the optimizer is Adam. Each mode runs in a
process of its own, so that none inherits the memory of another, and finds its largest batch whose
steady steps retry no allocation, by backfold.max_batch; the last column says what the next larger
one that was tried came to.

`checkpoint_fold` is the level paper-CB2: every block checkpointed, and what its checkpoints keep
folded. `peak / cap` is what is allocated; `reserved / peak` is 1 if nothing is lost to fragments;
`first / steady` compares the first four steps (measurement and first plan among them) with those
after them. Plain's best speed, of all its batches, is what `/ plain's` divides samples per second
by.
"""

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import pathlib
import time
import typing

import backfold
import measure
import torch
from models import CAPPED, checkpointed
from modes import FOLDED
from results import Results, aligned

FOLDED = {**FOLDED, "checkpoint_fold": {"level": "paper-CB2"}}
CHECKPOINTED = ("checkpoint", "checkpoint_fold")
MODES = ["plain", "checkpoint", *FOLDED]
# Batches that fit into 16 GB, plain and folded: the search goes on from there.
START = {"resnet50": (96, 256), "swin_t": (72, 224), "bert": (24, 128)}
IMPORTED = ["torch", "backfold", "torchvision", "transformers.models.bert.modeling_bert", "h200"]


class Task(typing.NamedTuple):
    workload: str
    mode: str
    expandable: bool
    gb: float
    trials: int
    tiny: bool

    @property
    def title(self) -> str:
        return self.mode + (", expandable" if self.expandable else "")


def largest(task: Task) -> backfold.MaxBatch:
    """Tries batches of one mode in this process."""
    device = "cpu" if task.tiny else "cuda"
    limit = int(task.gb * 1e9)
    if not task.tiny:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    if task.expandable:
        backfold.Controller(defragment=True)  # before anything is allocated

    def make_step(batch: int):
        torch.manual_seed(7)
        with torch.device(device):
            workload = CAPPED[task.workload](task.tiny, batch)
        optimizer = torch.optim.Adam(workload.model.parameters(), lr=measure.LEARNING_RATE)
        scope = contextlib.nullcontext()
        if task.mode in FOLDED:
            scope = backfold.Controller(workload.model, **FOLDED[task.mode])

        def step() -> None:
            again = task.mode in CHECKPOINTED
            with checkpointed(workload) if again else contextlib.nullcontext():
                with scope:
                    loss = workload.loss()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return backfold.max_batch(
        make_step,
        limit,
        start=2 if task.tiny else START[task.workload][task.mode != "plain"],
        multiple=1 if task.tiny else 8,
        trials=2 if task.tiny else task.trials,
        retries=False,
        device=device,
    )


HEAD = ["", "batch", "batch / plain's", "samples/s", "/ plain's best", "peak / cap"]
HEAD += ["reserved / peak", "first / steady", "next"]


def outcome(found: backfold.MaxBatch) -> str:
    """What became of the smallest batch above the largest that fits."""
    above = [one for one in found.candidates if one.batch > found.batch]
    if not above:
        return "-"
    one = min(above, key=lambda one: one.batch)
    if one.peak_bytes is None:
        return f"{one.batch}: out of memory"
    if one.retries:
        return f"{one.batch}: {one.retries} retries, {one.samples_per_second:,.0f}/s"
    return f"{one.batch}: above the cap"


def row(title: str, found: backfold.MaxBatch, plain: backfold.MaxBatch, cap: float) -> list[str]:
    best = next(one for one in found.candidates if one.batch == found.batch)
    speed = max(one.samples_per_second for one in plain.candidates if one.fits)
    reserved = best.reserved_bytes
    return [
        title,
        str(best.batch),
        f"{best.batch / plain.batch:.2f}",
        f"{best.samples_per_second:,.0f}",
        f"{best.samples_per_second / speed:.2f}",
        f"{best.peak_bytes / cap:.3f}",
        "-" if reserved is None else f"{reserved / best.peak_bytes:.3f}",
        f"{best.peak_bytes / best.steady_bytes:.3f}",
        outcome(found),
    ]


def in_a_process(context: multiprocessing.context.BaseContext, task: Task) -> backfold.MaxBatch:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(largest, task).result()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", choices=[[], *CAPPED], default=[])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["plain", "fold"])
    parser.add_argument(
        "--expandable", action="store_true", help="folded modes also with defragment=True"
    )
    parser.add_argument("--gb", type=float, default=16, help="of memory, 10^9 bytes each")
    parser.add_argument("--trials", type=int, default=8, help="batches to try for each mode")
    parser.add_argument("--json", type=pathlib.Path, help="also write all figures here")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --tiny runs on the CPU")
    # Its children start with these modules imported, and without a CUDA context.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    modes = ["plain", *(mode for mode in arguments.modes if mode != "plain")]
    ways = [(mode, False) for mode in modes]
    if arguments.expandable:
        ways += [(mode, True) for mode in modes if mode in FOLDED]
    results = Results("bench/run cap", arguments.json)
    for name in arguments.workloads or CAPPED:
        start = time.perf_counter()
        found: dict[str, backfold.MaxBatch] = {}
        for mode, expandable in ways:
            task = Task(name, mode, expandable, arguments.gb, arguments.trials, tiny=arguments.tiny)
            print(f"{name}, {task.title}, {arguments.gb:g} GB", flush=True)
            found[task.title] = in_a_process(context, task)
            rows = [row(*one, found["plain"], arguments.gb * 1e9) for one in found.items()]
            tried = {
                title: [candidate._asdict() for candidate in one.candidates]
                for title, one in found.items()
            }
            results.add(name, HEAD, rows, candidates=tried)
        print(f"{name}, {arguments.gb:g} GB, Adam", aligned(HEAD, rows), sep="\n")
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
