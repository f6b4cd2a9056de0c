#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains to the end, plain and folded, and compares the scores on held-out data.

    bench/accuracy/train.py cora --data DIR
    bench/accuracy/train.py cifar --data DIR --device cuda --jobs 8 --json cifar.json
    bench/accuracy/train.py sst2 --data DIR --device cuda --model DIR --variants plain adaptive-2
    bench/accuracy/train.py sst2 --data DIR --resume a.json b.json --markdown
    bench/accuracy/train.py gcn --data DIR --variants plain project-8+2
    bench/accuracy/train.py cifar --data DIR --epochs 3 --width 8 --examples 5000
    bench/accuracy/train.py gpt --data DIR --variants plain stored-fixed-2 stored-ratio-9.5

Seeds are 0, 1, 2, ... and determine weights, batches, dropout and rounding. Runs found in a file
given to --resume or --json are shown, not repeated. `bench/run evidence` runs all tasks.
"""

import argparse
import functools
import os
import pathlib
import statistics
import sys

try:
    import torch
    import variants
    from datasets import MissingData
    from runs import Run, Work, allow_tf32, read, train, trained, write
    from tables import table
    from tasks import NAMES, build
    from training import Scale, Size
except ImportError as error:
    sys.exit(
        f"bench/accuracy/train.py: {error}. Build the package with make test-python, then run "
        ".venv/bin/pip install --requirement scripts/requirements-models.txt"
    )


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
        for run in read(path, title):
            runs.setdefault((run.variant, run.seed), run)
    return list(runs.values())


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
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="5 for graph attention and GCNII, 3 for the others"
    )
    parser.add_argument("--variants", nargs="+", type=variants.variant, default=variants.DEFAULT)
    parser.add_argument("--steps", type=int, help="fewer than a complete training, for a quick try")
    parser.add_argument("--epochs", type=int, help="of cifar (10) and efficientnet (1)")
    parser.add_argument("--width", type=int, help="of cifar's first stage (32) or gpt (128)")
    parser.add_argument(
        "--examples", type=int, help="to train on, and at most to test on; default: all"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--resume", nargs="+", type=pathlib.Path, default=[], metavar="FILE")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="keeps all runs")
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
        written = [arguments.json] if arguments.json else []
        runs = earlier_runs([*written, *arguments.resume], task.title)
    except (MissingData, ValueError) as error:
        sys.exit(f"bench/accuracy/train.py: {error}")
    gpu = arguments.device.startswith("cuda")
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{task.title}; {device}, torch {torch.__version__}", flush=True)
    scale = task.scale._asdict()
    content = {"task": arguments.task, "title": task.title, "device": device, "scale": scale}
    done = {(run.variant, run.seed) for run in runs}
    seeds = range(arguments.seeds or task.seeds)
    todo = [
        Work(load, arguments.task, name, seed)
        for seed in seeds
        for name in arguments.variants
        if (name, seed) not in done
    ]
    if arguments.jobs == 1:
        found = ((work, train(task, work.variant, work.seed)) for work in todo)
    else:
        found = trained(todo, arguments.jobs)
    for _, run in found:
        if isinstance(run, Exception):
            raise run
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
