# SPDX-License-Identifier: Apache-2.0
"""Records the model's call in the steps of the schedule, and runs it again to measure it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from backfold import _C
from backfold._listing import is_sharded
from backfold._replay import ModelCall, Recorder, record_whole, records_whole


def _can_run_again(model: torch.nn.Module) -> bool:
    """False if parameters are of classes of their own."""
    return all(type(p) in (torch.Tensor, torch.nn.Parameter) for p in model.parameters())


class Probes:
    """The recorded calls of one controller, whose core keeps the schedule.

    A step whose turn has come runs like any other, but the call of the model is recorded. When the
    next step begins, the call is run again with the gradients that arrived, and the plan is made.
    Tensors saved outside of the model's call (by the loss) are measured in the user's own backward,
    with the tangents of the model's outputs from the second run. If no call can be run again, the
    energies of the gradients there are used instead.
    """

    def __init__(self, core: _C.Controller, model: torch.nn.Module | None, replay: bool) -> None:
        self._core = core
        self._model = model if replay and model is not None and _can_run_again(model) else None
        if replay and is_sharded(model):
            self._model = model  # to say so when the first turn comes
        self._told_changed: set[str] = set()
        self._told_graphs = False
        self._recorder: Recorder | None = None
        self._call: ModelCall | None = None
        self._handles: list[Any] = []

    def record(self, module: torch.nn.Module) -> None:
        """From now on, calls of this part of the model are recorded instead."""
        if self._model is not None and _can_run_again(module):
            self._model = module

    def before_step(self) -> None:
        """Measures what the last step recorded, and records the next step if it is due."""
        measure, replay, obstacle = self._core.resolve_turn(self._recorded())
        if obstacle:
            self._give_up(obstacle)
        if measure:
            self._measure(replay)
        elif not self._core.turn_waits:
            self._call = None  # another process could not be measured
        if self._model is not None and self._core.sharded:  # perhaps since the last step
            self._give_up("its parameters are shards, which other processes hold as well")
        runs_again = self._model is not None and not self._core.is_mostly_compiled
        if self._core.begin_turn(runs_again) and runs_again:
            part = self._core.part_to_run_again()
            self._recorder = ModelCall.watch(self._model, *part, self._core.model_returned)
            self._call = self._recorder.__enter__()
            self._handles = [
                self._model.register_forward_pre_hook(self._model_begins, prepend=True),
                self._model.register_forward_hook(self._model_ends, always_call=True),
            ]

    def cancel(self) -> None:
        """Undoes before_step() for a block that is not entered after all."""
        if self._recorder is not None:
            self._call = None
        self.after_block()
        self._core.cancel_turn()

    def after_block(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__()
            self._recorder = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget(self) -> None:
        """Drops a step that waits for its backward: a better measurement follows."""
        self._call = None
        self._core.forget_turn()

    def settle(self) -> None:
        """Ensures that nothing waits, so that the state is complete."""
        if self._core.settle_turn(self._recorded()):
            self._measure(self._call is not None and self._call.ready)
        else:
            self._call = None

    def before_state(self) -> None:
        model = self._model
        self._core.set_replay(model is not None, model is not None and records_whole(model))

    def after_load(self) -> None:
        self._call = None
        replays, whole = self._core.replay
        if not replays:
            self._model = None
        elif whole and self._model is not None:
            record_whole(self._model)

    def _recorded(self) -> tuple[str, str]:
        """What is known of the recorded call, and why it cannot be run again."""
        if self._call is None:
            return "nothing", ""
        if self._call.waits:
            return "waiting", ""
        return ("complete", "") if self._call.ready else ("broken", self._call.reason)

    def _model_begins(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._core.inside_model(True)

    def _model_ends(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._core.inside_model(False)

    @torch.inference_mode(False)  # state_dict() may be called in it
    def _measure(self, replay: bool) -> None:
        call, self._call = self._call, None
        gain = 0.0
        energy: tuple[float, float, float | None] | None = None  # of part, its share, of whole
        moved: list[torch.Tensor | None] = []
        measured = 0
        failure = "", False, False
        if replay:
            try:
                with call.untouched():
                    scale = 1 / call.share if call.sliced_gradients else call.share
                    measured = self._core.calibrate(call.step(), call.own_leaves, scale)
                    gain, moved = call.gain, call.moved
                    energy = scale * call.gradient_energy, call.share, call.whole_energy
            except torch.OutOfMemoryError as error:
                failure = f"running it again took too much memory: {error}", False, True
            except Exception as error:  # training goes on with the estimate of its own step
                failure = f"running it again failed: {error}", call.share < 1, False
            self._tell_changed(call.left_changed)
        if runs := self._core.graph_runs():
            of_graphs = self._measure_graphs(runs)
            if of_graphs is not None and energy is None:
                energy = of_graphs, 1.0, None
        obstacle, whole = self._core.finish_turn(measured, gain, moved, energy, failure)
        if whole and self._model is not None:
            record_whole(self._model)
        if obstacle:
            self._give_up(obstacle)

    def _measure_graphs(self, runs: list[_C.GraphRun]) -> float | None:
        """The energy of the gradient, if all could be measured."""
        from backfold._graph_measured import measure_graphs

        energy, failure = measure_graphs(runs, self._core.leaf_weights(), self._core.steps)
        if failure and not self._told_graphs:
            self._told_graphs = True
            warnings.warn(
                "backfold: a graph of torch.compile could not be measured, and what it saves has "
                f"one width: {failure}",
                stacklevel=5,
            )
        return None if failure else energy

    def _tell_changed(self, names: Iterable[str]) -> None:
        new = [name for name in names if name not in self._told_changed]
        self._told_changed.update(new)
        if new:
            warnings.warn(
                f"backfold: running the model again changed {', '.join(new)}, which cannot be "
                "undone; use Controller(replay=False) if it must not run twice",
                stacklevel=4,
            )

    def _give_up(self, reason: str) -> None:
        """From now on only the user's own steps are measured."""
        self._model = None
        warnings.warn(
            f"backfold: the model's call cannot be run again to measure it ({reason}); plans will "
            "rely on a coarser estimate from the training steps themselves",
            stacklevel=4,
        )
