# SPDX-License-Identifier: Apache-2.0
"""A model as the core lists it: named tensors, and the modules that ``keep=`` names."""

from __future__ import annotations

import fnmatch
import sys

import torch

from backfold import _C
from backfold._policy import paths_within


def require_kernels(tensors: list[tuple[str, torch.Tensor, bool]]) -> None:
    for name, tensor, _ in tensors:
        if tensor.is_cuda and not _C.built_with_cuda():
            raise RuntimeError(
                f"this build of Backfold has no CUDA kernels, but {name} is on {tensor.device}. "
                "Build it on a machine with a CUDA toolkit (nvcc): pip install "
                "--no-build-isolation ."
            )


def is_sharded(model: torch.nn.Module | None) -> bool:
    """Whether parameters are parts of tensors that several processes hold (FSDP2)."""
    tensor = sys.modules.get("torch.distributed.tensor")  # there are none before it is imported
    if model is None or tensor is None:
        return False
    return any(isinstance(parameter, tensor.DTensor) for parameter in model.parameters())


def named_tensors(model: torch.nn.Module | None) -> list[tuple[str, torch.Tensor, bool]]:
    """Parameters and buffers, as (name, tensor, whether it is a buffer)."""
    if model is None:
        return []
    parameters = [(name, tensor, False) for name, tensor in model.named_parameters()]
    return parameters + [(name, tensor, True) for name, tensor in model.named_buffers()]


def kept_paths(
    modules: dict[str, torch.nn.Module], keep: tuple[str | torch.nn.Module, ...]
) -> set[str]:
    """Paths of the modules that `keep` names, and of all modules inside them."""
    roots: set[str] = set()
    for entry in keep:
        if isinstance(entry, torch.nn.Module):
            found = [path for path, module in modules.items() if module is entry]
            what = f"module {type(entry).__name__}"
        elif isinstance(entry, str):
            found = fnmatch.filter(modules, entry)
            what = f"pattern {entry!r}"
        else:
            raise TypeError(
                f"keep must hold patterns or modules, got an entry of type {type(entry).__name__}"
            )
        if not found:
            where = "no module of the model" if modules else "nothing, since no model was given"
            raise ValueError(f"keep: the {what} matches {where}")
        roots.update(found)
    return paths_within(modules, roots)
