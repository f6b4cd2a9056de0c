#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains to the end, plain and folded, and compares the scores on held-out data.

    bench/accuracy/train.py cora --data DIR
    bench/accuracy/train.py cifar --data DIR --device cuda --jobs 8 --json cifar.json
    bench/accuracy/train.py sst2 --data DIR --device cuda --model DIR --variants plain adaptive-2
    bench/accuracy/train.py sst2 --data DIR --resume a.json b.json --markdown
    bench/accuracy/train.py gcn --data DIR --variants plain project-8+2
    bench/accuracy/train.py cifar --data DIR --epochs 3 --width 8 --images 5000
    bench/accuracy/train.py gpt --data DIR --variants plain stored-fixed-2 stored-ratio-9.5

Seeds are 0, 1, 2, ... and determine weights, batches, dropout and rounding. Runs found in a file
given to --resume are shown, not repeated.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

try:
    import torch
    import variants
    from datasets import MissingData
    from tables import table
    from tasks import NAMES, build
    from tqdm import tqdm
    from training import Scale, Size, Task, step
except ImportError as error:
    sys.exit(
        f"bench/accuracy/train.py: {error}. Build the package with make test-python, then run "
        ".venv/bin/pip install --requirement scripts/requirements-models.txt"
    )


@dataclasses.dataclass
class Run:
    variant: str
    seed: int
    score: float  # on held-out data, see the task's scale
    loss: float  # mean over the last tenth of the steps
    seconds: float  # of the training
    kept: float  # bytes held / bytes that autograd alone would hold, in the last step


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True


def train(task: Task, name: str, seed: int) -> Run:
    torch.manual_seed(seed)
    training = task.training()
    model = training.model
    fold = variants.scope(name, model, task.min_bytes, seed)
    losses = []
    start = time.perf_counter()
    bar = tqdm(task.batches(seed), f"{name}, seed {seed}", task.steps, leave=False, disable=None)
    for batch in bar:
        losses.append(step(task, training, fold, batch))
    last = torch.stack(losses[-max(task.steps // 10, 1) :]).mean().item()
    seconds = time.perf_counter() - start
    kept = 1.0
    if name != "plain":
        report = fold.report().to_dict()
        kept = report["held_bytes"] / (report["unique_bytes"] - report["alive_bytes"])
    model.eval()
    with torch.no_grad():
        score = task.score(model)
    return Run(name, seed, score, last, seconds, kept)


class Trainer:
    """Runs in its own process, whose data set serves all of its runs."""

    task: Task

    @classmethod
    def start(cls, load: Callable[[], Task], threads: int) -> None:
        torch.set_num_threads(threads)
        allow_tf32()
        cls.task = load()

    @classmethod
    def run(cls, name: str, seed: int) -> Run:
        return train(cls.task, name, seed)


def trained(work: list[tuple[str, int]], load: Callable[[], Task], jobs: int) -> Iterator[Run]:
    """All runs, `jobs` at a time, in the order in which they finish."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        jobs, spawn, Trainer.start, (load, threads)
    ) as pool:
        running = [pool.submit(Trainer.run, *one) for one in work]
        for future in concurrent.futures.as_completed(running):
            yield future.result()


def mean_and_spread(values: list[float], decimals: int) -> str:
    spread = f" +- {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{decimals}f}{spread}"


def summary(runs: list[Run], scale: Scale, markdown: bool) -> str:
    """One line per variant; differences from plain are taken seed by seed."""
    plain = {run.seed: run.score for run in runs if run.variant == "plain"}
    head = ["variant", "seeds", scale.name, "from plain", "loss", "held / saved", "s / run"]
    rows = []
    for name in dict.fromkeys(run.variant for run in runs):
        found = [run for run in runs if run.variant == name]
        scores = [run.score for run in found]
        differences = [run.score - plain[run.seed] for run in found if run.seed in plain]
        row = [name, str(len(found)), mean_and_spread(scores, scale.decimals)]
        row.append(f"{statistics.mean(differences):+.{scale.decimals}f}" if differences else "-")
        row.append(f"{statistics.mean(run.loss for run in found):.4f}")
        row.append(f"{statistics.mean(run.kept for run in found):.3f}")
        row.append(f"{statistics.mean(run.seconds for run in found):.1f}")
        rows.append(row)
    return table(head, rows, markdown)


def earlier_runs(paths: list[pathlib.Path], title: str) -> list[Run]:
    """The runs in all files, each variant and seed once."""
    runs: dict[tuple[str, int], Run] = {}
    for path in paths:
        content = json.loads(path.read_text())
        if content.get("title") != title:
            raise ValueError(f"--resume: {path} holds {content.get('title')!r}, not {title!r}")
        for run in content["runs"]:
            runs.setdefault((run["variant"], run["seed"]), Run(**run))
    return list(runs.values())


def write(path: pathlib.Path, content: dict[str, object], runs: list[Run]) -> None:
    content["runs"] = [dataclasses.asdict(run) for run in runs]
    path.write_text(json.dumps(content, indent=1) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{variants.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = os.environ.get("BACKFOLD_DATA")
    parser.add_argument("task", choices=NAMES)
    parser.add_argument("--data", default=data, help="folder of data sets; default: $BACKFOLD_DATA")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", type=pathlib.Path, help="folder of MiniLM; default: the wheel's")
    parser.add_argument("--seeds", type=int, metavar="N", help="5 for cora, 3 for the others")
    parser.add_argument("--variants", nargs="+", type=variants.variant, default=variants.DEFAULT)
    parser.add_argument("--steps", type=int, help="fewer than a complete training, for a quick try")
    parser.add_argument("--epochs", type=int, help="of cifar; default: 10")
    parser.add_argument("--width", type=int, help="of cifar's first stage (32) or gpt (128)")
    parser.add_argument("--images", type=int, help="of cifar to train on; default: all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--resume", nargs="+", type=pathlib.Path, default=[], metavar="FILE")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write all runs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments = parser.parse_args()
    for name in ("seeds", "jobs", *Size._fields):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if arguments.steps and arguments.epochs:
        parser.error("--steps and --epochs cannot be given together")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch sees no GPU here")
    return arguments


def main() -> int:
    arguments = parsed()
    allow_tf32()
    folder = pathlib.Path(arguments.data or ".")
    size = Size(*(getattr(arguments, name) for name in Size._fields))
    load = functools.partial(build, arguments.task, folder, arguments.device, size, arguments.model)
    try:
        task = load()
        runs = earlier_runs(arguments.resume, task.title)
    except (MissingData, ValueError) as error:
        sys.exit(f"bench/accuracy/train.py: {error}")
    gpu = arguments.device.startswith("cuda")
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{task.title}; {device}, torch {torch.__version__}", flush=True)
    content = {"task": arguments.task, "title": task.title, "device": device}
    done = {(run.variant, run.seed) for run in runs}
    seeds = range(arguments.seeds or task.seeds)
    work = [(name, seed) for seed in seeds for name in arguments.variants]
    work = [one for one in work if one not in done]
    if arguments.jobs == 1:
        found = (train(task, *one) for one in work)
    else:
        found = trained(work, load, arguments.jobs)
    for run in found:
        runs.append(run)
        score = f"{task.scale.name} {run.score:.{task.scale.decimals}f}"
        print(f"{run.variant}, seed {run.seed}: {score}, {run.seconds:.1f} s", file=sys.stderr)
        if arguments.json:  # after each run, so that an interrupted one can be resumed
            write(arguments.json, content, runs)
    runs.sort(key=lambda run: run.seed)
    print("", summary(runs, task.scale, arguments.markdown), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
