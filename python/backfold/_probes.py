# SPDX-License-Identifier: Apache-2.0
"""When sensitivities are measured, and on what: the user's own steps, recorded and run again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from backfold import _C
from backfold._options import ProbeSchedule
from backfold._replay import ModelCall, Recorder, record_whole, records_whole

# Places that the plan does not know ask for a probe, but not at every step: a model that differs
# from step to step would be measured all the time.
_STEPS_BETWEEN = 10
# Steps after which a backward that has not come will not come: gradients may be accumulated over
# several blocks before the first of them is run backward.
_PATIENCE = 64
# A look waits for the GPU; a warning is not repeated at each.
_STEPS_BETWEEN_LOOKS = 100
_STEPS_BETWEEN_WARNINGS = 1000


def _can_run_again(model: torch.nn.Module) -> bool:
    """Not where parameters are pieces of tensors that several processes put together."""
    return all(type(p) in (torch.Tensor, torch.nn.Parameter) for p in model.parameters())


class Probes:
    """The probes of one controller.

    A probe step goes as any other, but the call of the model is recorded. When the next step
    begins, the call is run again with the gradients that arrived, and the plan is made. What is
    saved outside of the model's call (the loss) is measured in the user's own backward, with the
    tangents that the second run gives of what the model returns; where there is no call to run
    again, by the energies of the gradients there.
    """

    def __init__(
        self,
        core: _C.Controller,
        model: torch.nn.Module | None,
        kind: str,
        schedule: ProbeSchedule,
        fraction: float,
        replay: bool,
        on_noise: Callable[[float], None] | None,
    ) -> None:
        self._core = core
        self._model = model if replay and model is not None and _can_run_again(model) else None
        self._kind = kind  # of the target: "bits", "ratio" or "budget"
        self._schedule = schedule
        self._fraction = fraction
        self._on_noise = on_noise
        self._told_changed: set[str] = set()
        self._warned = -_STEPS_BETWEEN_WARNINGS
        self._recorder: Recorder | None = None
        self._call: ModelCall | None = None
        self._watches = False  # the block that is open
        self._waits = False  # for the backward of a step that was watched
        self._handles: list[Any] = []
        self._last = 0  # step that was watched
        self._again = False  # the last one failed and is worth another try

    def due(self, step: int) -> bool:
        """Whether sensitivities should be measured at this step."""
        if self._again or self._schedule.due(step):
            return True
        return self._core.has_unknown_sites and step - self._last >= _STEPS_BETWEEN

    def before_step(self) -> None:
        """Measures what the last step recorded, and records the next one where it is time."""
        if torch.is_inference_mode_enabled():
            return  # no step: nothing is saved there, and nothing can be run again
        if self._waits and self._core.steps - self._last < _PATIENCE and self._comes_later():
            return
        if self._waits:
            self._measure()
        if self._core.planned and self._core.steps % _STEPS_BETWEEN_LOOKS == 0:
            self._look_at_noise()
        if not self.due(self._core.steps + 1):
            return
        self._last = self._core.steps + 1
        self._again = False
        self._watches = True
        self._core.begin_own_probe(self._model is not None)
        if self._model is not None:
            self._recorder = ModelCall.watch(self._model, self._fraction, self._core.model_returned)
            self._call = self._recorder.__enter__()
            self._handles = [
                self._model.register_forward_pre_hook(self._model_begins, prepend=True),
                self._model.register_forward_hook(self._model_ends, always_call=True),
            ]

    def cancel(self) -> None:
        """The block for which before_step() was called is not entered after all."""
        self._stop_recording()
        if self._watches:
            self._watches, self._again, self._call = False, True, None
            self._core.cancel_own_probe()

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__()
            self._recorder = None
        self._core.inside_model(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def after_block(self) -> None:
        self._stop_recording()
        self._waits |= self._watches and self._last == self._core.steps
        self._watches = False

    def forget(self) -> None:
        """A step that waits for its backward is not measured: something better is at hand."""
        self._watches = self._waits = False
        self._call = None
        self._core.forget_own_probe()

    def settle(self) -> None:
        """Nothing waits afterwards, so that state() says all.

        What waits is measured now. If its backward has not come yet, nobody can take that up: the
        next step is watched in its place, in this run as in one that loads the state.
        """
        if self._watches or (self._waits and self._comes_later()):
            self.forget()
            self._again = True
        elif self._waits:
            self._measure()

    def state(self) -> dict[str, Any]:
        model = self._model
        return {
            "last": self._last,
            "again": self._again or self._watches or self._waits,
            "replays": model is not None,
            "whole": model is not None and records_whole(model),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.forget()
        self._last, self._again = state["last"], state["again"]
        if not state["replays"]:
            self._model = None
        elif state["whole"] and self._model is not None:
            record_whole(self._model)

    def _comes_later(self) -> bool:
        return self._call.waits if self._call is not None else not self._core.own_probe_ran

    def _model_begins(self, *_: object) -> None:
        self._core.inside_model(True)

    def _model_ends(self, *_: object) -> None:
        self._core.inside_model(False)

    @torch.inference_mode(False)  # where state_dict() is called in it
    def _measure(self) -> None:
        call, self._call, self._waits = self._call, None, False
        gain = 0.0
        energy: float | None = None  # of the gradient
        moved: list[torch.Tensor | None] = []
        measured = 0
        if call is not None and call.ready:
            try:
                with call.untouched():
                    scale = 1 / call.share if call.sliced_gradients else call.share
                    measured = self._core.calibrate(call.step(), call.input_leaves, scale, False)
                    gain, moved = call.gain, call.moved
                    energy = scale * call.gradient_energy
            except Exception as error:  # training goes on with what the own step tells
                if call.share == 1:
                    self._give_up(f"running it again failed: {error}")
                else:
                    self._again = True  # with the whole batch
            self._tell_changed(call.left_changed)
        elif call is not None:
            self._give_up(call.reason)
        if measured + self._core.finish_own_probe(gain, moved) > 0:
            self._core.replan(energy)

    def _look_at_noise(self) -> None:
        """Weighs the error that the plan expects against the gradient's own variance."""
        noise = self._core.noise()
        if noise is None:
            return
        ratio, sites, needed = noise
        if self._on_noise is not None:
            self._on_noise(ratio)
        if not sites or self._core.steps - self._warned < _STEPS_BETWEEN_WARNINGS:
            return
        self._warned = self._core.steps
        enough = "no width would do" if needed is None else f"{self._kind}={needed:.4g} would do"
        warnings.warn(
            f"backfold: folding adds {100 * ratio:.1f}% of the gradient's own variance, more than "
            f"the 10% that training does not notice; most of it at {', '.join(sites)}; {enough}",
            stacklevel=4,
        )

    def _tell_changed(self, names: Iterable[str]) -> None:
        new = [name for name in names if name not in self._told_changed]
        self._told_changed.update(new)
        if new:
            warnings.warn(
                f"backfold: running the model again changed {', '.join(new)}, which cannot be "
                "undone; Controller(replay=False) never runs it again",
                stacklevel=4,
            )

    def _give_up(self, reason: str) -> None:
        """From now on the user's own steps are all there is."""
        self._model = None
        warnings.warn(
            f"backfold: the model's call cannot be measured by running it again ({reason}); "
            "signal gains of the own steps are used, which plan less well",
            stacklevel=4,
        )
