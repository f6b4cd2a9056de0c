# SPDX-License-Identifier: Apache-2.0
"""What only Python knows while a block is open: the running module, and the current GPU."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from backfold import _C


def _module_begins(module: torch.nn.Module, args: object) -> None:
    if not torch.compiler.is_compiling():  # a C function would break the graph
        _C.module_begins(module)


def _module_ends(module: torch.nn.Module, args: object, result: object) -> None:
    if not torch.compiler.is_compiling():
        _C.module_ends(module)


class _ModuleHooks:
    """Tells open blocks which module runs, through torch's global module hooks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._handles: list[Any] = []

    def open(self) -> None:
        with self._lock:
            if self._open == 0:
                self._handles = [
                    register_module_forward_pre_hook(_module_begins),
                    register_module_forward_hook(_module_ends),
                ]
            self._open += 1

    def close(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                for handle in self._handles:
                    handle.remove()


module_hooks = _ModuleHooks()


def cuda_device() -> int:
    """The current GPU, or -1 if none is in use."""
    if not torch.cuda.is_initialized():
        return -1
    return torch.cuda.current_device()
