# SPDX-License-Identifier: Apache-2.0
"""The interface of GACT, for programs written for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backfold._controller import Controller


class GactController:
    """A Controller under GACT's method names.

    The block of `fold` is open from install_hook() to uninstall_hook(); each iterate() ends one
    step and begins the next.
    """

    def __init__(self, fold: Controller) -> None:
        self.fold = fold
        self._installed = False

    def __getstate__(self) -> dict[str, Any]:
        return {"fold": self.fold, "_installed": False}  # hooks belong to the original

    def install_hook(self) -> None:
        """From now on, what autograd saves is folded."""
        if self._installed:
            raise RuntimeError("the hook is already installed: call uninstall_hook() first")
        self._enter()

    def uninstall_hook(self) -> None:
        """From now on, what autograd saves is no longer folded."""
        self._require_installed("uninstall_hook()")
        self._leave()

    def iterate(self, fwdbwdprop: Callable[[], Any]) -> None:
        """Ends a step. `fwdbwdprop`, called only when a probe is due, runs forward and backward."""
        self._require_installed("iterate()")
        if not callable(fwdbwdprop):
            raise TypeError(f"fwdbwdprop must be callable, got {type(fwdbwdprop).__name__}")
        self._leave()
        try:
            if self.fold._probe_due():
                self.fold.calibrate(fwdbwdprop)
        finally:
            self._enter()

    def _enter(self) -> None:
        self.fold.__enter__()
        self._installed = True

    def _leave(self) -> None:
        self._installed = False
        self.fold.__exit__(None, None, None)

    def _require_installed(self, caller: str) -> None:
        if not self._installed:
            raise RuntimeError(f"{caller} needs the hook: call install_hook() first")


def controller(
    model: torch.nn.Module | None = None, opt_level: str = "L1", **options: Any
) -> GactController:
    """A Controller with the interface of GACT's.

    `opt_level` is one of GACT's levels; other options are those of `Controller`. Sensitivities are
    measured with the function given to iterate(), so no call of the model is recorded.
    """
    return GactController(Controller(model, level=opt_level, replay=False, **options))
