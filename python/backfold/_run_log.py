# SPDX-License-Identifier: Apache-2.0
"""What the callbacks of training frameworks log and write."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import warnings
from types import ModuleType
from typing import Any

import torch

from backfold._attach import Fold, attached

_MIB = 2**20


def require(library: str, extra: str) -> ModuleType:
    """The library; ImportError with the name of the extra that brings it if it is missing."""
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name is None or not library.startswith(error.name):
            raise
        raise ImportError(
            f"backfold.{extra} needs {library.split('.')[0]}, which is not installed: "
            f"pip install --no-build-isolation 'backfold[{extra}]'"
        ) from error


def attached_with_its_own(model: torch.nn.Module, options: dict[str, Any]) -> Fold | None:
    """The fold of a model that is attached already; its options are not those of a callback."""
    found = attached(model)
    if found is not None and options:
        raise ValueError(
            f"FoldCallback was given {', '.join(options)}, but the model is attached already: give "
            "them to attach(), or detach() first"
        )
    return found


class RunLog:
    """The figures of a training run with a fold."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._told_idle = False

    def metrics(self) -> dict[str, float]:
        """Figures of the last folded call, to be logged beside the loss.

        - ``fold_held_mib``: what is held for backward
        - ``fold_saved_mib``: what autograd alone would keep
        - ``fold_peak_mib``: the most at a moment of the step, what is held and what is decoded or
          made again for the operation that runs; not where graphs of torch.compile keep a part
        - ``fold_allocated_mib``: the most that torch has allocated on the GPU, if there is one,
          since the program last reset that count
        - ``fold_noise``: error that folding adds / the gradient's own variance, every 100 steps
        """
        if self._fold.steps == 0:
            self._tell_idle()
            return {}
        report = self._fold.report().to_dict()
        found = {
            "fold_held_mib": report["held_bytes"] / _MIB,
            "fold_saved_mib": report["unique_bytes"] / _MIB,
        }
        timeline = report["timeline"]
        if timeline is not None and timeline["peak"]["folded"]["bytes"] >= report["held_bytes"]:
            found["fold_peak_mib"] = timeline["peak"]["folded"]["bytes"] / _MIB
        if report["device_peak_bytes"] is not None:
            found["fold_allocated_mib"] = report["device_peak_bytes"] / _MIB
        if report["noise"] is not None:
            found["fold_noise"] = report["noise"]
        return found

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes the report of the last step: backfold-report.txt, .json and, if it can, .html."""
        report = self._fold.report()
        path = pathlib.Path(folder) / "backfold-report.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.text(rows=0))
        path.with_suffix(".json").write_text(report.to_json() + "\n")
        with contextlib.suppress(ImportError):  # the page has an extra of its own
            report.html(path.with_suffix(".html"))

    def _tell_idle(self) -> None:
        if self._told_idle:
            return
        self._told_idle = True
        warnings.warn(
            "backfold: no call of the attached model was folded yet. Is it the module that the "
            "training loop calls, with gradients enabled?",
            stacklevel=3,
        )
