# SPDX-License-Identifier: Apache-2.0
"""A report of any forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backfold import _C
from backfold._attach import nothing_folded
from backfold._listing import named_tensors
from backfold._module_hooks import cuda_device, module_hooks
from backfold._report import Report


class Observer:
    """A block whose saved tensors are counted and left as they are.

    >>> observer = Observer()
    >>> with observer:
    ...     loss = torch.randn(8, 8, requires_grad=True).exp().sum()
    >>> observer.report().to_dict()["saved_bytes"]
    256
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._core = _C.Controller({"bits": None, "min_bytes": 0}, observe_only=True)
        if model is not None:
            self.name(model)

    def name(self, model: torch.nn.Module) -> None:
        """From the next block on, the paths of this model name places."""
        modules = [(module, path, False, 0) for path, module in model.named_modules()]
        self._core.list_model(modules, named_tensors(model))

    def __enter__(self) -> Observer:
        self._core.enter(cuda_device())
        module_hooks.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self._core.exit()
        module_hooks.close()

    def report(self) -> Report:
        """Of the last block. What stays alive anyway is known once its backward has run."""
        return Report(self._core.report())


def inspect(fn: Callable[[], Any], model: torch.nn.Module | None = None) -> Report:
    """What is using my memory? Runs `fn` and reports what autograd keeps for backward.

    Nothing is packed. `fn` is any callable that runs a forward pass; `model`, if given, provides
    the paths of modules. What `fn` returns stays alive until the report is made.

    >>> layer = torch.nn.Linear(64, 64)
    >>> x = torch.randn(8, 64)
    >>> inspect(lambda: layer(x).tanh().sum()).to_dict()["sites"][0]["op"]
    'aten::tanh'
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")
    observer = Observer(model)
    with observer, nothing_folded():
        result = fn()
    report = observer.report()
    del result
    return report
