# SPDX-License-Identifier: Apache-2.0
"""Backfold for the Trainer of Hugging Face, and of libraries built on it.

    from backfold.transformers import FoldCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[FoldCallback(bits=4)])
    trainer.train()

Needs ``backfold[transformers]``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from backfold._attach import Fold, attach
from backfold._run_log import RunLog, attached_with_its_own, require

_callbacks = require("transformers", "transformers").trainer_callback

__all__ = ["FoldCallback"]


class FoldCallback(_callbacks.TrainerCallback, _callbacks.ExportableState):
    """Attaches the model for the time of the training, and keeps the books.

    - Logs ``fold_held_mib``, ``fold_saved_mib``, ``fold_peak_mib``, ``fold_allocated_mib`` (on a
      GPU) and ``fold_noise`` beside the loss, where trackers see them.
    - Saves the fold's state in the checkpoint's ``trainer_state.json``; a run that resumes from it
      makes the same packets as one that was not interrupted.
    - Writes ``backfold-report.txt``, ``.json`` and, with ``backfold[page]``, ``.html`` into
      ``output_dir`` at the end.

    Args:
        options: those of `backfold.attach`. A model that is attached already keeps its own.

    Attributes:
        fold: from the beginning of the training on, the `backfold.Fold` of the model.
    """

    def __init__(self, **options: Any) -> None:
        self.fold: Fold | None = None
        self._options = options
        self._is_ours = False
        self._log: RunLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any):
        # The model is where it will be trained now, inside of all its wrappers. If an earlier
        # training ended with an exception, or with a batch that was too large, it begins anew.
        self._detach()
        self._go_first()
        found = attached_with_its_own(model, self._options)
        self._is_ours = found is None
        self.fold = attach(model, **self._options) if found is None else found
        self._log = RunLog(self.fold)
        # A checkpoint of a run without this callback has no place for its state.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if isinstance(saved, list):
            saved = saved[-1]
        fold = saved.get("attributes", {}).get("saved")
        if state.global_step > 0 and fold is not None:
            self.fold.load_state_dict(fold)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._log is None or not logs or "loss" not in logs:
            return
        found = self._log.metrics()
        logs.update(found)  # for callbacks that come later: all of them
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.fold is None:
            return
        if state.is_world_process_zero:
            self._log.write(args.output_dir)
        self._detach()

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into a checkpoint."""
        saved = None if self.fold is None else self.fold.state_dict()
        # A Trainer that restores callbacks makes this one again from values that fit into JSON.
        plain = {name: value for name, value in self._options.items() if _is_plain(value)}
        return {"args": plain, "attributes": {"saved": saved}}

    def _detach(self) -> None:
        if self.fold is not None and self._is_ours:
            self.fold.detach()

    def _go_first(self) -> None:
        """Moves before the Trainer's trackers, which log what earlier callbacks leave in `logs`."""
        callbacks = _callbacks_that_run()
        if self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)


def _callbacks_that_run() -> list[Any]:
    """The list that the Trainer goes through now, which it does not hand to its callbacks."""
    frame = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, _callbacks.CallbackHandler):
            return handler.callbacks
        frame = frame.f_back
    return []


def _is_plain(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value)) is not None or value is None
    except TypeError:
        return False
