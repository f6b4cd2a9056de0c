#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains from start to end, plain and folded, and compares the accuracy.

    bench/accuracy/train.py cora --data DIR
    bench/accuracy/train.py cifar --data DIR --device cuda --json cifar.json
    bench/accuracy/train.py sst2 --data DIR --device cuda --model DIR --variants plain adaptive-2
    bench/accuracy/train.py sst2 --data DIR --resume a.json b.json --markdown
    bench/accuracy/train.py gcn --data DIR --variants plain project-8+2
    bench/accuracy/train.py cifar --data DIR --epochs 3 --width 8 --images 5000

Seeds are 0, 1, 2, ...: of the weights, the batches, dropout and the rounding. Runs that a file of
--resume holds are shown and not run again.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time

try:
    import torch
    import variants
    from datasets import MissingData
    from tables import table
    from tasks import NAMES, Size, Task, build
    from tqdm import tqdm
except ImportError as error:
    sys.exit(
        f"bench/accuracy/train.py: {error}. Build the package with make test-python, then run "
        ".venv/bin/pip install --requirement scripts/requirements-models.txt"
    )


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
    fold = variants.scope(name, model, task.min_bytes, seed)
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


def earlier_runs(paths: list[pathlib.Path], title: str) -> list[Run]:
    """Of all files, each variant and seed once."""
    runs: dict[tuple[str, int], Run] = {}
    for path in paths:
        content = json.loads(path.read_text())
        if content.get("title") != title:
            raise ValueError(f"--resume: {path} holds {content.get('title')!r}, not {title!r}")
        for run in content["runs"]:
            runs.setdefault((run["variant"], run["seed"]), Run(**run))
    return list(runs.values())


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{variants.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = os.environ.get("BACKFOLD_DATA")
    parser.add_argument("task", choices=NAMES)
    parser.add_argument("--data", default=data, help="folder of data sets; else $BACKFOLD_DATA")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", type=pathlib.Path, help="folder of MiniLM; else the wheel's")
    parser.add_argument("--seeds", type=int, metavar="N", help="5 for cora, 3 for the others")
    parser.add_argument("--variants", nargs="+", type=variants.variant, default=variants.DEFAULT)
    parser.add_argument("--steps", type=int, help="fewer than the whole training, for a try")
    parser.add_argument("--epochs", type=int, help="of cifar; 10 unless told")
    parser.add_argument("--width", type=int, help="channels of cifar's first stage; 32 unless told")
    parser.add_argument("--images", type=int, help="of cifar to train on; all unless told")
    parser.add_argument("--resume", nargs="+", type=pathlib.Path, default=[], metavar="FILE")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write all runs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments = parser.parse_args()
    for name in ("seeds", *Size._fields):
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
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    folder = pathlib.Path(arguments.data or ".")
    try:
        size = Size(*(getattr(arguments, name) for name in Size._fields))
        task = build(arguments.task, folder, arguments.device, size, arguments.model)
        runs = earlier_runs(arguments.resume, task.title)
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
            content = {"task": arguments.task, "title": task.title, "device": device}
            content["runs"] = [dataclasses.asdict(run) for run in runs]
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    print("", summary(runs, arguments.markdown), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
