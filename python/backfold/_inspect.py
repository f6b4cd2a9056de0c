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
    core = _C.Controller({"bits": None, "min_bytes": 0}, observe_only=True)
    if model is not None:
        modules = [(module, path, False, 0) for path, module in model.named_modules()]
        core.list_model(modules, named_tensors(model))
    core.enter(cuda_device())
    module_hooks.open()
    try:
        with nothing_folded():
            result = fn()
    finally:
        core.exit()
        module_hooks.close()
    report = Report(core.report())
    del result
    return report
