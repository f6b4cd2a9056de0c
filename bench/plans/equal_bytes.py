#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Error of gradients at equal bytes: every saved tensor stored / cheap ones derived.

    bench/plans/equal_bytes.py --data DIR                         every model, three seeds
    bench/plans/equal_bytes.py --data DIR --models GPT --seeds 1  one of them, one seed
    bench/plans/equal_bytes.py --data DIR --markdown              the same table as Markdown

A plan with derive=False is made for 4, 3 and 2 bits on average. Another, with derived tensors, gets
the bytes that the first one holds as its budget. Errors are those of quality.py.
"""

import contextlib
import pathlib
import statistics
import sys
import typing

from quality import (
    CASES,
    WIDTHS,
    MissingData,
    Source,
    energy,
    gradient,
    held,
    in_processes,
    parsed,
    planned,
    short,
    table,
    true_error,
)


class Row(typing.NamedTuple):
    model: str
    bits: int
    stored: float  # energies of errors / energy of the gradient
    derived: float
    bytes: float  # held with derived tensors / held with all stored
    mean_bits: float  # of what is still stored


def measure(model: str, seed: int, source: Source) -> list[Row]:
    case = CASES[model](source, seed)
    plain = gradient(case, contextlib.nullcontext())
    rows = []
    for bits in WIDTHS:
        stored, _ = planned(case, seed, bits=bits, derive=False)
        derived, mean = planned(case, seed, budget=held(stored), offload=False)
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
    arguments = parsed(__doc__)
    source = Source(pathlib.Path(arguments.data or "."), arguments.device, arguments.model)
    work = [(model, seed) for model in arguments.models for seed in range(arguments.seeds)]
    try:
        found = dict(in_processes(measure, work, source, arguments.jobs))
    except MissingData as error:
        sys.exit(f"bench/plans/equal_bytes.py: {error}")
    print("Squared error, stored / derived, median (least) over seeds; bytes, mean bits derived\n")
    print(summary([row for one in work for row in found[one]], arguments.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
