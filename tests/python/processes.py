# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several processes of one torch.distributed group."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pathlib
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

# Its children start with torch and Backfold already imported.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "backfold"])


class Raised:
    """What a process raised instead of returning."""

    def __init__(self, error: BaseException) -> None:
        self.type = type(error).__name__
        self.text = str(error)
        self.trace = "".join(traceback.format_exception(error))

    def __repr__(self) -> str:
        return self.trace


def _main(
    function: Callable[..., Any],
    rank: int,
    size: int,
    backend: str,
    store: str,
    timeout: float,
    args: Any,
    pipe,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # needs no name server for this machine
    torch.set_num_threads(1)
    distributed.init_process_group(
        backend,
        store=distributed.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        result = function(rank, *args)
    except BaseException as error:
        result = Raised(error)
    pipe.send_bytes(pickle.dumps(result))  # tensors by value: this process does not wait
    pipe.close()
    os._exit(0)  # the others may be dead, and destroying the group would wait for them


def run(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
) -> list[Any]:
    """`function(rank, *args)` in `size` processes: their results, or what they raised, by rank.

    A process that was killed gives None. Fails if one is still running long after `timeout`,
    torch's own limit for a collective.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        started, pipes = [], []
        for rank in range(size):
            here, there = _context.Pipe(duplex=False)
            given = (function, rank, size, backend, store, timeout, args, there)
            process = _context.Process(target=_main, args=given, daemon=True)
            process.start()
            there.close()
            started.append(process)
            pipes.append(here)
        try:
            results = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(2 * timeout + 60), f"rank {rank} hangs"
                try:
                    results.append(pickle.loads(pipe.recv_bytes()))
                except EOFError:
                    results.append(None)
            return results
        finally:
            for process in started:
                process.kill()
                process.join()


def returned(results: list[Any]) -> list[Any]:
    """The results of processes of which none raised."""
    for result in results:
        assert not isinstance(result, Raised), result
    return results
