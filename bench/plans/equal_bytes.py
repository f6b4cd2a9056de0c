#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Error of gradients at equal bytes: every saved tensor stored / cheap ones derived.

    bench/plans/equal_bytes.py --data DIR                         every model, three seeds
    bench/plans/equal_bytes.py --data DIR --models GPT --seeds 1  one of them, one seed
    bench/plans/equal_bytes.py --data DIR --markdown              the same table as Markdown

A plan with derive=False is made for 4, 3 and 2 bits on average. Another, with derived tensors, gets
the bytes that the first one holds as its budget. Errors are those of quality.py.
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import sys
import typing

import backfold
from cases import CASES, MIN_BYTES, Case
from errors import energy, gradient, true_error
from quality import MissingData, Source, held, settled, short, table
from tqdm import tqdm

WIDTHS = [4, 3, 2]


class Row(typing.NamedTuple):
    model: str
    bits: int
    stored: float  # energies of errors / energy of the gradient
    derived: float
    bytes: float  # held with derived tensors / held with all stored
    mean_bits: float  # of what is still stored


def planned(case: Case, seed: int, **options) -> tuple[backfold.Controller, float]:
    """A controller whose widths do not change, and their mean."""
    options = {"min_bytes": MIN_BYTES, "seed": seed, **options}
    planner = settled(case, backfold.Controller(case.model, probe_steps=(), **options))
    planner.calibrate(case.step)
    mean = planner.report().to_dict()["plan"]["mean_bits"]
    plan, derive = planner.plan(), options.get("derive", True)
    fixed = backfold.Controller(
        case.model, plan=plan, min_bytes=MIN_BYTES, seed=seed, derive=derive
    )
    return settled(case, fixed), mean


def measure(model: str, seed: int, source: Source) -> list[Row]:
    case = CASES[model](source, seed)
    plain = gradient(case, contextlib.nullcontext())
    rows = []
    for bits in WIDTHS:
        stored, _ = planned(case, seed, bits=bits, derive=False)
        derived, mean = planned(case, seed, budget=held(stored))
        errors = (true_error(case, fold, plain).energy for fold in (stored, derived))
        relative = [error / energy(plain) for error in errors]
        rows.append(Row(model, bits, *relative, held(derived) / held(stored), mean))
    return rows


def summary(rows: list[Row], markdown: bool) -> str:
    head = ["model", "bytes of", "stored / derived", "error, stored", "derived", "bytes", "bits"]
    lines = []
    for model, bits in dict.fromkeys((row.model, row.bits) for row in rows):
        found = [row for row in rows if (row.model, row.bits) == (model, bits)]
        ratios = [row.stored / row.derived for row in found]
        medians = [
            statistics.median(getattr(row, name) for row in found)
            for name in ("stored", "derived", "bytes", "mean_bits")
        ]
        lines.append(
            [
                model,
                f"{bits} bits",
                f"{short(statistics.median(ratios))} ({short(min(ratios))})",
                *(f"{value:.2g}" for value in medians[:2]),
                f"{medians[2]:.3f}",
                f"{medians[3]:.1f}",
            ]
        )
    return table(head, lines, markdown)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("BACKFOLD_DATA")
    parser.add_argument("--data", default=data, help="folder of data sets; default: $BACKFOLD_DATA")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", type=pathlib.Path, help="folder of MiniLM; default: its wheel")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments = parser.parse_args()
    source = Source(pathlib.Path(arguments.data or "."), arguments.device, arguments.model)
    work = [(model, seed) for model in arguments.models for seed in range(arguments.seeds)]
    rows = []
    try:
        for one in tqdm(work, disable=None):
            rows += measure(*one, source)
    except MissingData as error:
        sys.exit(f"bench/plans/equal_bytes.py: {error}")
    print("Squared error, stored / derived, median (least) over seeds; bytes, mean bits derived\n")
    print(summary(rows, arguments.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
