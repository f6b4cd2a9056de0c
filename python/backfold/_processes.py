# SPDX-License-Identifier: Apache-2.0
"""The processes of torch.distributed that train one model, and how they exchange bytes."""

from __future__ import annotations

import ctypes
import datetime
import warnings
from typing import Any

import torch
from torch import distributed


def is_distributed() -> bool:
    """Whether this process is one of several."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def is_group(value: object) -> bool:
    return distributed.is_available() and isinstance(value, distributed.ProcessGroup)


def group_of(model: torch.nn.Module | None, sync: Any) -> Any:
    """The group whose processes plan together; None stands for all of them."""
    if sync is not True:
        return sync
    is_parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return model.process_group if is_parallel else None


def is_uneven(model: torch.nn.Module | None) -> bool:
    """Whether processes may run out of batches (torch's Join): they cannot meet then."""
    is_parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    if not is_parallel or not model._join_config.enable:
        return False
    global _told_uneven
    if not _told_uneven:
        _told_uneven = True
        warnings.warn(
            "backfold: processes that may run out of batches (Join) cannot plan together: nothing "
            "is measured, and widths stay as they are",
            stacklevel=3,
        )
    return True


_told_uneven = False


class Processes:
    """The members of a process group.

    They talk through a group of their own: a process that is out of step then waits for the others
    until torch's timeout ends it, and never takes a gradient for a message or the other way round.
    """

    def __init__(self, parent: Any) -> None:
        self._parent = distributed.group.WORLD if parent is None else parent
        self._group: Any = None
        self.rank = distributed.get_rank(self._parent)
        self.size = distributed.get_world_size(self._parent)

    def gather(self, message: bytes) -> list[bytes]:
        """Sends a message to all members and waits for theirs, which come in the order of ranks."""
        if self._group is None:
            self._group, self._device = self._new_group()
        size = torch.tensor([len(message)], device=self._device)
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        distributed.all_gather(sizes, size, group=self._group)
        counts = [int(one) for one in sizes]
        sent = torch.zeros(max(counts), dtype=torch.uint8)
        sent[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        sent = sent.to(self._device)
        heard = [torch.empty_like(sent) for _ in range(self.size)]
        distributed.all_gather(heard, sent, group=self._group)
        return [_bytes_of(one[:count].cpu()) for one, count in zip(heard, counts, strict=True)]

    def _new_group(self) -> tuple[Any, torch.device]:
        """With gloo if torch has it, so that no GPU is waited for."""
        has_gloo = distributed.is_gloo_available()
        group = distributed.new_group(
            distributed.get_process_group_ranks(self._parent),
            timeout=_timeout_of(self._parent),
            backend="gloo" if has_gloo else None,
            use_local_synchronization=True,
            group_desc="backfold",
        )
        if has_gloo:
            return group, torch.device("cpu")
        return group, torch.device("cuda", torch.cuda.current_device())


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())  # NumPy may not be there


def _timeout_of(group: Any) -> datetime.timedelta | None:
    """The timeout that the user chose for a group; None stands for torch's own default."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            return options._timeout
    return None
