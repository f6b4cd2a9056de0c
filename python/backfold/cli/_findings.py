# SPDX-License-Identifier: Apache-2.0
"""What an inspection found, as tables and as a dict."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from rich.console import Console

from backfold.cli._output import console, mebibytes, milliseconds, table
from backfold.cli._places import OUTSIDE, SHOWN, Place, places
from backfold.cli._trials import Outcome
from backfold.cli._watch import Watch


def why_nothing(watch: Watch, script: str) -> str:
    if watch.hidden_calls:
        return (
            f"nothing could be observed: {script} calls its modules under saved-tensor hooks of "
            "its own (a Controller, save_on_cpu, a checkpoint around the whole model)"
        )
    if watch.passes:
        return f"nothing could be observed: {script} runs backward, but calls no torch.nn.Module"
    return (
        f"{script} trains nothing: it ended without a backward pass in this process. A script that "
        "starts processes which train can be inspected if it trains in its own, with one process"
    )


def as_dict(watch: Watch, outcomes: list[Outcome]) -> dict[str, Any]:
    recorded = watch.largest
    return {
        "steps": watch.steps,
        "steps_are": "optimizer steps" if watch.by_optimizer else "backward passes",
        "step_seconds": watch.step_seconds,
        "outside_bytes": _outside(places(recorded.report, [])),
        "calls_run_again": len(recorded.calls),
        "obstacles": recorded.obstacles,
        "remedies": [_outcome_as_dict(outcome) for outcome in outcomes],
        "places": [vars(place) for place in places(recorded.report, outcomes)],
        "report": recorded.report,
    }


def _outcome_as_dict(outcome: Outcome) -> dict[str, Any]:
    found = dataclasses.asdict(outcome)
    del found["sites"]
    return {**found, "remedy": outcome.remedy.name}


def _outside(found: list[Place]) -> int:
    return sum(place.kept_bytes for place in found if place.module == OUTSIDE)


def show(watch: Watch, outcomes: list[Outcome], rows: int, tried: bool) -> None:
    out = console()
    recorded = watch.largest
    what = "steps" if watch.by_optimizer else "backward passes (no optimizer was seen)"
    line = f"{watch.steps} {what}"
    if watch.step_seconds:
        line += f", {milliseconds(statistics.median(watch.step_seconds))} ms each while watched"
    kept, alive = (mebibytes(recorded.report[f"{name}_bytes"]) for name in ("held", "alive"))
    line += f". {kept} MiB are kept for backward, beside {alive} MiB that stay alive anyway."
    out.print(line, soft_wrap=True)
    _show_places(out, places(recorded.report, outcomes), outcomes, rows)
    if outcomes:
        _show_remedies(out, outcomes)
    elif tried:
        reasons = recorded.obstacles or ["the script ended before a second step could be recorded"]
        out.print(f"No remedy could be tried: {'; '.join(reasons)}.", soft_wrap=True)


def _show_places(out: Console, found: list[Place], outcomes: list[Outcome], rows: int) -> None:
    shown = [
        outcome.remedy.name
        for outcome in outcomes
        if outcome.remedy.name in SHOWN and not outcome.failed
    ]
    how = ["how, at 4 bits"] if "4 bits" in shown else []
    listed = table(
        "kept for backward, MiB",
        *("module", "operator", "saves", "plain", *shown, *how),
        right=("saves", "plain", *shown),
    )
    found = [place for place in found if place.kept_bytes or any(place.held_bytes.values())]

    def cells(some: list[Place]) -> list[str]:
        kept = mebibytes(sum(place.kept_bytes for place in some))
        held = [
            mebibytes(sum(place.held_bytes.get(name, 0) for place in some))
            if any(place.held_bytes for place in some)
            else "-"
            for name in shown
        ]
        return [f"{sum(place.saves for place in some):,}", kept, *held]

    for place in found[:rows]:
        listed.add_row(place.module, place.op, *cells([place]), *([place.how] if how else []))
    if rest := found[rows:]:
        listed.add_row(f"{len(rest)} other places", "", *cells(rest))
    listed.add_section()
    listed.add_row("all", "", *cells(found))
    out.print(listed)
    outside = _outside(found)
    if outside and shown:
        out.print(
            f"{mebibytes(outside)} MiB are kept outside of modules, by a loss for example. The "
            "runs below do not include them; a Controller's block around the loss folds them, too.",
            soft_wrap=True,
        )


def _show_remedies(out: Console, outcomes: list[Outcome]) -> None:
    plain = outcomes[0]
    numbers = ("held, MiB", "/ plain", "peak, MiB", "ms", "/ plain ms", "gradient error")
    listed = table(
        "what remedies save and cost, in forward and backward of the modules that were called",
        *("remedy", *numbers, "Controller(model, ...)"),
        right=numbers,
    )
    for outcome in outcomes:
        if outcome.failed:
            listed.add_row(outcome.remedy.name, *["-"] * len(numbers), outcome.failed)
            continue
        how = outcome.how
        if outcome.offloaded_bytes:
            how += f": {mebibytes(outcome.offloaded_bytes)} MiB away"
        listed.add_row(
            outcome.remedy.name,
            mebibytes(outcome.held_bytes),
            f"{outcome.held_bytes / plain.held_bytes:.2f}" if plain.held_bytes else "-",
            mebibytes(outcome.peak_bytes),
            milliseconds(outcome.seconds),
            f"{outcome.seconds / plain.seconds:.2f}",
            "exact" if outcome.gradient_error == 0 else f"{outcome.gradient_error:.2g}",
            how,
        )
    out.print(listed)
    out.print(
        "held: between forward and backward, without what is alive anyway. peak: the most "
        "allocated at any point, beyond what was before. ms: the best of some. gradient "
        "error: norm of the difference from the plain gradient / its norm, in one step.",
        soft_wrap=True,
    )
    for note in dict.fromkeys(note for outcome in outcomes for note in outcome.notes):
        names = [outcome.remedy.name for outcome in outcomes if note in outcome.notes]
        out.print(f"{'; '.join(names)}: {note}", soft_wrap=True)
