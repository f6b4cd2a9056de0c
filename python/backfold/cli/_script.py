# SPDX-License-Identifier: Apache-2.0
"""Runs a user's program as Python would, up to the point where something stops it."""

from __future__ import annotations

import os
import pathlib
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


def run_script(path: pathlib.Path, arguments: tuple[str, ...]) -> None:
    """``python path arguments``: siblings of the file can be imported."""
    with _as_started(str(path), arguments, str(path.resolve().parent)):
        runpy.run_path(str(path), run_name="__main__")


def run_module(name: str, arguments: tuple[str, ...]) -> None:
    """``python -m name arguments``"""
    with _as_started(name, arguments, os.getcwd()):
        runpy.run_module(name, run_name="__main__", alter_sys=True)


@contextmanager
def _as_started(name: str, arguments: tuple[str, ...], folder: str) -> Iterator[None]:
    argv, path = sys.argv, sys.path[:]
    sys.argv = [name, *arguments]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path


def traceback_of(error: BaseException) -> str:
    """The traceback without the frames of what started the program."""
    trace = error.__traceback__
    ours = (os.path.dirname(__file__), runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
