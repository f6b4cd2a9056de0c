#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds the operators whose saved tensors cause the error of an architecture.

    bench/zoo/causes.py beit vit_msn              until each error is below 1
    bench/zoo/causes.py --below 0.3 timm/resnet18

Operators are left unfolded one after another, each time the one that improves the worst step most.
Each line names it, the modules and arguments it saves for, and the remaining errors.
"""

import argparse
import collections
import os
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import backfold
import run
import torch
from errors import MIN_BYTES, RandomWeights, Task, gradient, measure
from isolation import Job, seeded
from tables import figure
from vision_libraries import find_vision_libraries

MOST = 5  # operators


def lossy_operators(task: Task, bits: float) -> dict[str, list[str]]:
    """Maps each to the places where it saves: module and argument."""
    fold = backfold.Controller(task.model, bits=bits, min_bytes=MIN_BYTES)
    gradient(task, RandomWeights(), fold)
    found = collections.defaultdict(list)
    for site in fold.report().to_dict()["sites"]:
        if site["kind"] == "lossy":
            found[site["op"]].append(f"{site['module']}:{site['slot']}")
    return found


def errors_without(job: Job, bits: float, steps: int, kept: list[str]) -> list[float]:
    codec = {op: backfold.codecs.Keep() for op in kept} or None
    return measure(seeded(job), bits, steps, codec=codec).errors


def explain(job: Job, bits: float, steps: int, below: float) -> None:
    operators = lossy_operators(seeded(job), bits)
    errors = errors_without(job, bits, steps, [])
    print(f"{job.row.library}/{job.row.name}: {' '.join(map(figure, errors))}", flush=True)
    kept: list[str] = []
    while max(errors) >= below and len(kept) < min(MOST, len(operators)):
        trials = {
            op: errors_without(job, bits, steps, [*kept, op]) for op in operators if op not in kept
        }
        best = min(trials, key=lambda op: max(trials[op]))
        kept.append(best)
        errors = trials[best]
        places = operators[best]
        where = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        print(f"  without {best} ({where}): {' '.join(map(figure, errors))}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="or library/name")
    parser.add_argument("--bits", type=float, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--below", type=float, default=1.0, help="stop below this error")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    find_vision_libraries()
    for name in arguments.names:
        library, _, _ = name.rpartition("/")
        jobs = run.all_jobs([library] if library else list(run.LIBRARIES), name, demanded=False)
        if not jobs:
            print(f"bench/zoo/causes.py: no architecture is called {name}", file=sys.stderr)
        for job in jobs:
            try:
                explain(job, arguments.bits, arguments.steps, arguments.below)
            except Exception as error:
                print(f"{job.row.library}/{job.row.name}: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
