# SPDX-License-Identifier: Apache-2.0
"""Checkpointing of a model that was written without it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules made of modules that have siblings of their own class: layers of a transformer,
    blocks of a ResNet. Those inside another such block are left out."""
    found = []
    counts = Counter(type(child) for child in model.children())
    for child in model.children():
        is_list = isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential))
        composite = next(child.children(), None) is not None
        if counts[type(child)] > 1 and composite and not is_list:
            found.append(child)
        else:
            found += repeated_blocks(child)
    return found


def _own_switch(model: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
    """The part of the model that can switch its own checkpoints on, as transformers' can, and the
    beginning of the names of its methods for that."""
    for module in model.modules():
        if getattr(module, "supports_gradient_checkpointing", False):
            newer = hasattr(module, "activation_checkpointing_enable")
            return module, f"{'activation' if newer else 'gradient'}_checkpointing"
    return None


def describe(model: torch.nn.Module) -> str | None:
    """What checkpointed() does to this model; None if it finds nothing to do."""
    if (own := _own_switch(model)) is not None:
        return f"{type(own[0]).__name__}.{own[1]}_enable()"
    if not (blocks := repeated_blocks(model)):
        return None
    names = Counter(type(block).__name__ for block in blocks)
    listed = ", ".join(f"{count} {name}" for name, count in names.items())
    return f"torch.utils.checkpoint around each of {listed}"


@contextmanager
def checkpointed(model: torch.nn.Module) -> Iterator[None]:
    """A block in which calls of the model's blocks keep their inputs alone.

    Models that know checkpoints switch on their own, since those also know what must not happen
    twice, such as growing a cache.
    """
    if (own := _own_switch(model)) is not None:
        module, name = own
        getattr(module, f"{name}_enable")({"use_reentrant": False})
        try:
            yield
        finally:
            getattr(module, f"{name}_disable")()
        return
    blocks = repeated_blocks(model)
    hidden = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = functools.partial(_checkpoint, block.forward)
        yield
    finally:
        for block, forward in zip(blocks, hidden, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def _checkpoint(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
