# SPDX-License-Identifier: Apache-2.0
"""Trains a CNN and a character GPT, each plain and folded, and compares the figures.

    make demo
    make demo ARGS="--steps 500 --seed 1"

Memory reports and a plot of the losses go to build/demo.
"""

import argparse
import pathlib

import torch
from char_gpt import Topics
from digits import Digits
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from side_by_side import Result, Task, train

BITS = 4
QUICK_STEPS = 4

HEADER = ("", "", "unseen data", "held", "peak", "step")
WIDTHS = ("<24", "<8", ">16", ">12", ">12", ">12")
NOTES = """\
unseen   one run each with one seed; another seed changes these figures too
held     bytes that autograd keeps between forward and backward, excluding parameters
peak     the most bytes that torch has allocated at any point in a step, beyond those at its start
step     median time of forward, backward and optimizer, including packing and unpacking"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="of each training run; default: about a minute")
    parser.add_argument(
        "--quick",
        dest="steps",
        action="store_const",
        const=QUICK_STEPS,
        help=f"{QUICK_STEPS} steps: enough to see that it works, too few to learn anything",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/demo"))
    chosen = parser.parse_args()
    if chosen.steps is not None and chosen.steps < 1:
        parser.error(f"--steps must be at least 1, got {chosen.steps}")
    return chosen


def line(*cells: str) -> str:
    return "".join(f"{cell:{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def rows(task: Task, plain: Result, folded: Result) -> list[str]:
    """The table lines of one task: plain, folded, folded / plain."""

    def figures(result: Result) -> list[str]:
        return [
            task.show(result.score),
            f"{result.held_bytes / 2**20:.1f} MiB",
            f"{result.peak_bytes / 2**20:.1f} MiB",
            f"{result.step_seconds * 1e3:.1f} ms",
        ]

    parts = [
        folded.held_bytes / plain.held_bytes,
        folded.peak_bytes / plain.peak_bytes,
        folded.step_seconds / plain.step_seconds,
    ]
    return [
        line(task.title, "plain", *figures(plain)),
        line("", f"{BITS} bits", *figures(folded)),
        line("", "", "", *[f"x {part:.2f}" for part in parts]),
    ]


def draw(compared: list[tuple[Task, Result, Result]], path: pathlib.Path) -> None:
    """Plots the loss of each task; folded is a thin line over plain's broad one."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, len(compared))
    for axis, (task, plain, folded) in zip(axes, compared, strict=True):
        axis.plot(plain.losses, color="#9ecae1", linewidth=4, label="plain")
        axis.plot(folded.losses, color="#b3200e", linewidth=1, label=f"folded, {BITS} bits")
        axis.set(title=task.title, xlabel="step", ylabel="training loss", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    chosen = arguments()
    chosen.output.mkdir(parents=True, exist_ok=True)
    if chosen.device == "cpu":
        print(f"CPU, {torch.get_num_threads()} threads: packing takes part of the step time")
    else:
        print(torch.cuda.get_device_name())

    compared = []
    reports = []
    for task in (Digits(chosen.device, chosen.seed), Topics(chosen.device, chosen.seed)):
        plain, folded = train(task, BITS, chosen.steps or task.steps)
        compared.append((task, plain, folded))
        report = chosen.output / f"{task.name}.txt"
        report.write_text(folded.report.text(rows=0))  # str(report) has only the largest lines
        report.with_suffix(".json").write_text(folded.report.to_json() + "\n")
        reports.append(report)
    picture = chosen.output / "loss.png"
    draw(compared, picture)

    print("", line(*HEADER), sep="\n")
    for results in compared:
        print(*rows(*results), "", sep="\n")
    print(NOTES)
    for report in reports:
        print(f"report   {report}, and as .json: what each module and operator held, and why")
    print(f"losses   {picture}")


if __name__ == "__main__":
    main()
