# SPDX-License-Identifier: Apache-2.0
"""Backfold for Lightning's Trainer.

    from backfold.lightning import FoldCallback

    trainer = Trainer(callbacks=[FoldCallback(bits=4)])
    trainer.fit(model, loader)

Needs ``backfold[lightning]``; ``pytorch_lightning`` will do as well.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from backfold._attach import Fold
from backfold._outermost import OutermostCalls
from backfold._run_log import RunLog, attached_with_its_own, require

_unified = importlib.util.find_spec("lightning") or not importlib.util.find_spec(
    "pytorch_lightning"
)
_lightning = require("lightning.pytorch" if _unified else "pytorch_lightning", "lightning")

__all__ = ["FoldCallback"]


class _StepFold(Fold):
    """Folds training_step(), with the loss, and measures the module that the step calls.

    That is the LightningModule itself or a network inside of it; the first step shows.
    """

    called: str | None = None  # the path of that module
    _calls: OutermostCalls | None = None

    def measure(self, path: str) -> None:
        self.called = path
        if self._probes is not None:
            self._probes.record(self._model.get_submodule(path))

    def __enter__(self) -> Fold:
        super().__enter__()
        if self.called is None and torch.is_grad_enabled():
            self._calls = OutermostCalls(self._model)
        return self

    def __exit__(self, *exception: object) -> None:
        calls, self._calls = self._calls, None
        super().__exit__(*exception)
        path = calls.stop() if calls is not None else None
        if path is not None and not exception[0]:
            self.measure(path)


class FoldCallback(_lightning.Callback):
    """Folds the training steps of a LightningModule, and keeps the books.

    - Logs ``fold_held_mib``, ``fold_saved_mib``, ``fold_peak_mib``, ``fold_allocated_mib`` (on a
      GPU) and ``fold_noise`` as often as the Trainer logs.
    - Saves the fold's state with each checkpoint; a run that resumes from it makes the same packets
      as one that was not interrupted.
    - Writes ``backfold-report.txt``, ``.json`` and, with ``backfold[page]``, ``.html`` into the
      Trainer's ``log_dir`` at the end.

    Args:
        options: those of `backfold.attach`. A module that is attached already keeps its own, and
            then only its calls are folded, not the loss.

    Attributes:
        fold: from the beginning of the training on, the `backfold.Fold` of the module.
    """

    def __init__(self, **options: Any) -> None:
        self.fold: Fold | None = None
        self._options = options
        self._is_ours = False
        self._log: RunLog | None = None
        self._saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        found = attached_with_its_own(pl_module, self._options)
        self._is_ours = found is None
        self.fold = self._attach(pl_module) if found is None else found
        self._log = RunLog(self.fold)
        saved, self._saved = self._saved, None
        if saved is not None and saved.get("fold") is not None:
            if saved["called"] is not None and isinstance(self.fold, _StepFold):
                self.fold.measure(saved["called"])
            self.fold.load_state_dict(saved["fold"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            found = self._log.metrics()
            if found:
                pl_module.log_dict(found, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # asks all processes
        if trainer.is_global_zero:
            self._log.write(folder)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """What Lightning writes into a checkpoint."""
        if self.fold is None:
            return self._saved or {}
        called = self.fold.called if isinstance(self.fold, _StepFold) else None
        return {"fold": self.fold.state_dict(), "called": called}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)

    def _attach(self, module: Any) -> Fold:
        if "training_step" in vars(module):
            raise ValueError(
                "the training_step of this LightningModule was replaced (torch.compile does that) "
                "and cannot be folded: compile the networks inside of it instead, as in "
                "self.net.compile()"
            )
        fold = _StepFold(module, **self._options)
        fold.attach(methods=("training_step",))
        return fold

    def _detach(self) -> None:
        if self.fold is not None and self._is_ours:
            self.fold.detach()
