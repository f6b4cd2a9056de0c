# SPDX-License-Identifier: Apache-2.0
"""The rows of one workload: printed as they are measured, kept for the file of results."""

import argparse
import math
import sys

import measure
import torch
from figures import FIGURES, Cost
from tqdm import tqdm


def say(*lines: str) -> None:
    """Prints lines above the bar that shows the progress."""
    for line in lines:
        tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


class Run:
    """The rows of one workload, printed as they are measured."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        self.name, self.arguments = name, arguments
        self.given = None if arguments.tiny else FIGURES.get(name)
        self.costs: dict[str, Cost] = {}  # by mode
        self.base: float | None = None  # MiB allocated after plain's steps
        self.result: dict = {"name": name, "modes": {}, "failed": []}

    def start(self, title: str) -> None:
        heading = f"{'step ms':>9}{'/ plain':>9}{'held MiB':>11}{'peak MiB':>11}"
        say(f"\n{self.name}: {title}", f"  {'':20}" + heading)
        for mode, cost in self.given_costs():
            self.row(mode, cost, self.given.plain.step_ms)

    def given_costs(self) -> list[tuple[str, Cost]]:
        if self.given is None:
            return []
        costs = [(mode, getattr(self.given, mode)) for mode in ("plain", "checkpoint", "gact")]
        return [(f"{mode}, given", cost) for mode, cost in costs if cost]

    def measured(self, mode: str, cost: Cost) -> None:
        self.costs[mode] = cost
        known = {key: value for key, value in cost._asdict().items() if not math.isnan(value)}
        self.result["modes"][mode] = known
        plain = self.costs.get("plain")
        self.row(mode, cost, plain.step_ms if plain else math.nan)

    def row(self, mode: str, cost: Cost, plain_ms: float) -> None:
        sizes = ["-" if math.isnan(mib) else f"{mib:,.1f}" for mib in cost[1:]]
        line = f"  {mode:20}{cost.step_ms:9.1f}{cost.step_ms / plain_ms:9.2f}"
        say(line + "".join(f"{size:>11}" for size in sizes))

    def fail(self, what: str, details: str) -> None:
        self.result["failed"].append(what)
        self.result.setdefault("errors", {})[what] = details.strip().splitlines()[-1]
        say(f"  {self.name}: {what} FAILED", details)

    def left(self, when: str) -> None:
        """Reports what is allocated beyond what plain left."""
        if not self.arguments.tiny:
            allocated = torch.cuda.memory_allocated() / measure.MIB
            if self.base is None:
                self.base = allocated
            elif allocated > self.base + 1:
                say(f"  {allocated - self.base:,.1f} MiB more allocated {when} than after plain")

    def over_floor(self) -> str:
        """Peaks above what a step needs when nothing is held on the GPU."""
        floor = self.given.floor if self.given else None
        if "save_on_cpu" in self.costs:
            floor = self.costs["save_on_cpu"].peak_mib
        if floor is None or math.isnan(floor):
            return ""
        costs = [*self.given_costs(), *self.costs.items()]
        over = [f"{mode} {cost.peak_mib - floor:,.0f}" for mode, cost in costs]
        return f"  peak above that of save_on_cpu, {floor:,.0f} MiB: {'; '.join(over)}"

    def verdicts(self) -> list[str]:
        """Which targets the folded step met."""
        fold, plain, given = self.costs.get("fold"), self.costs.get("plain"), self.given
        if fold is None or plain is None or given is None or self.arguments.bits != 4:
            return []
        checks = []
        if given.held_target:
            checks.append(("held", fold.held_mib, given.held_target, "MiB"))
        if given.ratio_target:
            checks.append(("step", fold.step_ms / plain.step_ms, given.ratio_target, "of plain"))
        if given.peak_target:
            others = [other.peak_mib for other in (given.checkpoint, given.gact) if other]
            checks.append(("peak", fold.peak_mib, min(others), "MiB"))
        return [
            f"{what} {value:,.{2 if limit < 10 else 0}f} {unit}, target {limit:,}: "
            + ("met" if value <= limit else "MISSED")
            for what, value, limit, unit in checks
        ]
