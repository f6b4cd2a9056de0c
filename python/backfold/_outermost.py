# SPDX-License-Identifier: Apache-2.0
"""Which modules a training step calls, seen from the step itself."""

from __future__ import annotations

from typing import Any

import torch


class OutermostCalls:
    """Notes the modules of a model that are called by none of its other modules.

    >>> model = torch.nn.ModuleDict({"net": torch.nn.Sequential(torch.nn.Linear(4, 2))})
    >>> calls = OutermostCalls(model)
    >>> model["net"](torch.ones(1, 4)).shape
    torch.Size([1, 2])
    >>> calls.stop()
    'net'
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._running = 0
        self._found: set[torch.nn.Module] = set()
        self._handles: list[Any] = []
        for module in self._paths:
            self._handles += [
                module.register_forward_pre_hook(self._begins),
                module.register_forward_hook(self._ends, always_call=True),
            ]

    def stop(self) -> str | None:
        """The path of the one with most parameters, "" for the model; None if there was none."""
        while self._handles:
            self._handles.pop().remove()
        sizes = {module: sum(p.numel() for p in module.parameters()) for module in self._found}
        return self._paths[max(sizes, key=sizes.get)] if sizes else None

    def _begins(self, module: torch.nn.Module, args: object) -> None:
        if self._running == 0 and torch.is_grad_enabled():
            self._found.add(module)
        self._running += 1

    def _ends(self, module: torch.nn.Module, args: object, result: object) -> None:
        self._running = max(self._running - 1, 0)
