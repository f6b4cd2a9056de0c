# SPDX-License-Identifier: Apache-2.0
"""Runs a recorded pass of training again with each remedy, and measures what it saves and costs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from backfold._call_state import energy_of
from backfold._controller import Controller
from backfold._inspect import Observer
from backfold.cli import _checkpoints
from backfold.cli._measure import Stopwatch, peak_bytes
from backfold.cli._watch import Pass

# A controller learns in its first step what is alive. One that plans measures in its second and
# plans when its third begins.
WARM_UP, WARM_UP_WITH_PLAN = 2, 4
# Rounds of timed steps over all remedies, as long as a plain step takes less than so many seconds.
ROUNDS = ((0.5, 5), (5.0, 2), (math.inf, 1))


@dataclass(frozen=True)
class Remedy:
    name: str
    how: str  # arguments of Controller(model, ...), or other words
    options: dict[str, Any] | None = None  # of a Controller; None for plain autograd
    checkpoints: bool = False


def _folding(name: str, **options: Any) -> Remedy:
    return Remedy(name, ", ".join(f"{key}={value!r}" for key, value in options.items()), options)


PLAIN = Remedy("plain", "")
REMEDIES = (
    PLAIN,
    _folding("exact", bits=None),
    _folding("exact, stored", bits=None, derive=False),
    _folding("8 bits", bits=8),
    _folding("4 bits", bits=4),
    _folding("4 bits, stored", bits=4, derive=False),
    _folding("2 bits", bits=2),
    _folding("offload", bits=None, offload=True),
    Remedy("checkpoint", "", checkpoints=True),
)


@dataclass
class Outcome:
    """What one remedy did. Sizes in bytes; None where it failed."""

    remedy: Remedy
    how: str
    held_bytes: int | None = None
    offloaded_bytes: int = 0
    peak_bytes: int | None = None
    seconds: float | None = None  # of forward and backward, the best of some
    gradient_error: float | None = None  # norm of the difference / norm of the plain gradient
    failed: str = ""
    notes: list[str] = field(default_factory=list)
    sites: list[dict[str, Any]] = field(default_factory=list)


Block = AbstractContextManager[Any]
Gradients = list[Sequence[torch.Tensor | None]]


class Trial:
    """A recorded pass with one remedy."""

    def __init__(self, remedy: Remedy, recorded: Pass, device: torch.device) -> None:
        self.remedy = remedy
        self._calls, self._model, self._device = recorded.calls, recorded.model, device
        self.outcome = Outcome(remedy, remedy.how)
        if remedy.options is None:
            self._block: Any = Observer(self._model)
        else:
            self._block = Controller(self._model, sync=False, **remedy.options)

    def measure(self) -> Gradients:
        """Everything but the time. Returns the gradients of the last step."""
        plans = self.remedy.options is not None and self.remedy.options["bits"] is not None
        for _ in range(WARM_UP_WITH_PLAN if plans else WARM_UP):
            gradients = self._step(self._block)
        report = self._block.report().to_dict()
        self.outcome.held_bytes = report["held_bytes"]
        self.outcome.offloaded_bytes = report["offloaded_bytes"]
        self.outcome.sites = report["sites"]
        self.outcome.peak_bytes = peak_bytes(lambda: self._step(self._timed_block), self._device)
        return gradients

    def gradients(self) -> Gradients:
        return self._step(self._timed_block)

    def timed_step(self) -> float:
        watch = Stopwatch(self._device)
        self._step(self._timed_block, watch)
        return watch.seconds

    @property
    def _timed_block(self) -> Block:
        return nullcontext() if self.remedy.options is None else self._block

    def _applied(self) -> Block:
        return _checkpoints.checkpointed(self._model) if self.remedy.checkpoints else nullcontext()

    def _step(self, block: Block, watch: Stopwatch | None = None) -> Gradients:
        watch = watch or Stopwatch(self._device)
        with ExitStack() as runs:
            for call in self._calls:
                runs.enter_context(call.unwritten())
            outputs, batch = [], []
            with ExitStack() as inside:
                with watch.running():
                    inside.enter_context(block)
                for call in self._calls:
                    call.rewind()
                    with self._applied(), watch.running():
                        outputs.append(call.forward(batch))
            gradients: Gradients = []
            for call in reversed(self._calls):
                with watch.running():
                    gradients.append(call.backward(outputs.pop()))
        return gradients


def try_remedies(recorded: Pass, tell: Callable[[str], None]) -> list[Outcome]:
    """Each remedy on the same calls of modules, with the same numbers and random numbers.

    `tell` is called before each piece of work.
    """
    model = recorded.model
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    outcomes, trials = [], []
    plain: Gradients | None = None
    with ExitStack() as untouched:
        for call in recorded.calls:
            call.prepare()
            untouched.enter_context(call.untouched())
        for remedy in REMEDIES:
            tell(remedy.name)
            outcome, trial, gradients = _attempt(remedy, recorded, device)
            outcomes.append(outcome)
            if trial is not None:
                trials.append(trial)
                # That of plain autograd is not 0 where threads add up in any order.
                plain = plain or trial.gradients()
                outcome.gradient_error = _error(gradients, plain)
            elif remedy is PLAIN:
                return outcomes  # nothing to compare with
        seconds: dict[int, list[float]] = {id(trial): [] for trial in trials}
        once = trials[0].timed_step()
        rounds = next(count for limit, count in ROUNDS if once < limit)
        tell(f"times, {rounds} round{'s' if rounds > 1 else ''}")
        for _ in range(rounds):
            for trial in trials:
                seconds[id(trial)].append(trial.timed_step())
    for trial in trials:
        trial.outcome.seconds = min(seconds[id(trial)])
        _free_what_is_alive(trial.outcome, trials[0].outcome)
    return outcomes


def _place(site: dict[str, Any]) -> tuple[Any, ...]:
    return site["module"], site["op"], site["slot"], site["occurrence"]


def _free_what_is_alive(outcome: Outcome, plain: Outcome) -> None:
    """Takes out references to memory that plain autograd's run found alive anyway.

    With bits=None, a report counts them as held.
    """
    alive = {_place(site) for site in plain.sites if site["kind"] == "alive"}
    for site in outcome.sites:
        if site["kind"] == "raw" and _place(site) in alive:
            outcome.held_bytes -= site["held_bytes"]
            site["kind"], site["held_bytes"] = "alive", 0


def _attempt(
    remedy: Remedy, recorded: Pass, device: torch.device
) -> tuple[Outcome, Trial | None, Gradients]:
    how = remedy.how
    if remedy.checkpoints:
        found = _checkpoints.describe(recorded.model)
        if found is None:
            failed = Outcome(remedy, how, failed="the model has no repeated blocks to checkpoint")
            return failed, None, []
        how = found
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trial = Trial(remedy, recorded, device)
            gradients = trial.measure()
    except torch.OutOfMemoryError:
        return Outcome(remedy, how, failed="out of memory"), None, []
    except Exception as error:  # a model may refuse a remedy in any way
        lines = str(error).strip().splitlines() or [""]
        return Outcome(remedy, how, failed=f"{type(error).__name__}: {lines[0]}"), None, []
    trial.outcome.how = how
    messages = (str(one.message).partition(" (Triggered internally")[0] for one in warned)
    ours = [message for message in messages if message.startswith("backfold")]
    trial.outcome.notes = list(dict.fromkeys(ours))
    return trial.outcome, trial, gradients


def _error(found: Gradients, wanted: Gradients) -> float:
    apart, whole = [], []
    for some, others in zip(found, wanted, strict=True):
        for one, other in zip(some, others, strict=True):
            if one is not None and other is not None:
                apart.append(one.detach() - other.detach())
                whole.append(other)
    norm = float(energy_of(whole)) if whole else 0.0
    return (float(energy_of(apart)) / norm) ** 0.5 if norm > 0 else 0.0
